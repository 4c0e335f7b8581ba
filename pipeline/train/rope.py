"""Rotary position embedding (RoPE), with the frequencies that transformers computes for the target's scaling.

Su et al. 2021 (arXiv 2104.09864). The scaled variants are transformers' own `ROPE_INIT_FUNCTIONS`, so a target that
transformers reads right is drafted right.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import PipelineError

# The frequencies of these depend on the length of the sequence, not only on the position.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class Rope:
    """cos/sin tables for one head size.

    Args:
        head_dim: size of an attention head.
        rope_parameters: transformers' `rope_parameters`: `rope_type`, `rope_theta`, and what the type needs.
        max_position_embeddings: context length of the target.
    """

    def __init__(self, head_dim: int, rope_parameters: dict[str, Any], max_position_embeddings: int):
        self.head_dim, self.parameters, self.max_positions = head_dim, dict(rope_parameters), max_position_embeddings
        self.type = self.parameters.setdefault("rope_type", "default")
        self._frequencies = functools.cache(self._frequencies)
        self._frequencies(1)  # an unknown type or a missing key is reported now, not in the first step

    def cos_sin(self, position: Tensor, length: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tables for rows of packed samples.

        Args:
            position: [..., N] position of each row in its sample.
            length: [N] tokens in that row's sample; only length-dependent types look at it, so that a sample's
                loss does not depend on what it is packed with.

        Returns:
            cos, sin: [..., N, rotary_dim] float32 on `device`, the two halves equal; rotary_dim is
            head_dim · partial_rotary_factor.
        """
        lengths, which = (length if self.type in _LENGTH_DEPENDENT else torch.ones_like(length)).unique(
            return_inverse=True
        )
        if not len(lengths):
            lengths = torch.ones(1, dtype=torch.long)
        inverse, scale = zip(*(self._frequencies(n) for n in lengths.tolist()), strict=True)
        inverse, scale = torch.stack(inverse).to(device), torch.tensor(scale)[:, None].to(device)
        if len(lengths) > 1:
            which = which.to(device)
            inverse, scale = inverse[which], scale[which]  # per row
        angle = position.to(device)[..., None].float() * inverse
        return tuple(torch.cat([table, table], -1) for table in (angle.cos() * scale, angle.sin() * scale))

    def _frequencies(self, length: int) -> tuple[Tensor, float]:
        """Inverse frequencies [rotary_dim / 2] and the factor on cos and sin, for a sequence of `length` tokens."""
        if self.type == "default":
            rotary_dim = int(self.head_dim * self.parameters.get("partial_rotary_factor", 1.0))
            exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
            return 1.0 / self.parameters["rope_theta"] ** exponent, 1.0
        from transformers.configuration_utils import PreTrainedConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        # attn_factor is the engines' (`drafter_rope`); transformers would warn about it.
        parameters = {name: value for name, value in self.parameters.items() if name != "attn_factor"}
        try:
            config = PreTrainedConfig(
                hidden_size=self.head_dim,
                num_attention_heads=1,
                head_dim=self.head_dim,
                max_position_embeddings=self.max_positions,
                rope_parameters=parameters,
            )
            return ROPE_INIT_FUNCTIONS[self.type](config, torch.device("cpu"), seq_len=torch.tensor(length))
        except KeyError as e:
            raise PipelineError(
                f"RoPE type {self.type!r} is unknown to transformers or lacks {e}",
                field="rope_parameters",
                value=self.parameters,
                fix="take rope_parameters unchanged from the target's config.json",
            ) from e


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rotary_dim entries of every head. x: [N, heads, head_dim]; cos, sin: [N, rotary_dim]."""
    rotary_dim = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
