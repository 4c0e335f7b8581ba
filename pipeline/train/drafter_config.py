"""Shape of a drafter: what its weights, its config.json and the engines agree on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.target import Target
from pipeline.train.drafter_rope import drafter_rope


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter. Names are those of the exported config.json where it has them."""

    hidden_size: int
    """H, equal to the target's: SGLang skips fc when its input already has this width, and shares the embedding."""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Explicit: it need not be hidden_size / heads (Kimi-K2.5: 64 heads × 128 over a hidden of 7168)."""
    vocab_size: int
    """The target's vocabulary."""
    draft_vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """transformers' `rope_parameters`; see `drafter_rope`."""
    rms_norm_eps: float = 1e-5
    num_fc_inputs: int = 3
    """n, the number of fc slots."""
    fc_norm: bool = False
    """One RMSNorm per slot before fc (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """One RMSNorm over all slots before fc."""
    norm_output: bool = False
    """Feed the next step the hidden after the final norm instead of before it."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            self._require(getattr(self, name) > 0, name, "must be positive")
        self._require(self.num_fc_inputs >= 2, "num_fc_inputs", "must be at least 2: with one slot SGLang skips fc")
        self._require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"must divide num_attention_heads = {self.num_attention_heads}",
        )
        self._require(self.head_dim % 2 == 0, "head_dim", "must be even for RoPE")
        self._require(
            0 < self.draft_vocab_size <= self.vocab_size,
            "draft_vocab_size",
            f"must lie in 1 … vocab_size = {self.vocab_size}",
        )

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise PipelineError(
                f"{name} {rule}", field=f"drafter.{name}", value=getattr(self, name), fix=f"set drafter.{name}"
            )


def drafter_config(config: Config, target: Target, *, num_fc_inputs: int, draft_vocab_size: int) -> DrafterConfig:
    """The drafter's shape: sizes from the configuration; width, vocabulary and RoPE from the target."""
    text, shape = target.text, config.drafter
    return DrafterConfig(
        hidden_size=target.hidden_size, intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads, num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim, vocab_size=target.vocab_size, draft_vocab_size=draft_vocab_size,
        max_position_embeddings=shape.max_position_embeddings or text.max_position_embeddings,
        rope_parameters=drafter_rope(target_rope(target)),
        rms_norm_eps=text.rms_norm_eps, num_fc_inputs=num_fc_inputs, fc_norm=shape.fc_norm,
        norm_before_fc=shape.norm_before_fc, norm_output=shape.norm_output)


def target_rope(target: Target) -> dict[str, Any]:
    """transformers' `rope_parameters` of the target's layers with full attention, which the drafter's layer has too."""
    text = target.text
    rope = getattr(text, "rope_parameters", None) or {"rope_type": "default", "rope_theta": text.rope_theta}
    return dict(rope if "rope_theta" in rope else rope["full_attention"])  # Gemma 3 has one entry per kind of layer
