"""Does the installed SGLang rotate the drafter as the trainer does?

Both compute the scaled variants of RoPE on their own, and a drafter trained with other rotations than it is served with
is quietly worse. `drafter_rope` chooses what both compute alike; that they do is proven here by comparing tables:
before anything is dumped (`check_rope_of_target`), and once more with the exported file as the engine reads it
(`check_rope`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.target import Target
from pipeline.train.drafter_config import DrafterConfig, drafter_config, target_rope
from pipeline.train.drafter_rope import COMPUTED_ALIKE
from pipeline.train.rope import Rope

_POSITIONS = 4096


def check_rope_of_target(config: Config, target: Target) -> None:
    """`check_rope` for the drafter that this configuration trains; imports SGLang.

    Says so where the drafter does not rotate as its target does.

    Raises:
        PipelineError: SGLang would rotate it otherwise than the trainer, or cannot.
    """
    drafter = drafter_config(config, target, num_fc_inputs=2, draft_vocab_size=target.vocab_size)
    theirs = target_rope(target).get("rope_type", "default")
    if theirs not in COMPUTED_ALIKE:
        print(
            f"dump: the target's RoPE is {theirs!r}, which engines compute otherwise than transformers; its drafter is "
            f"trained and served with {drafter.rope_parameters}",
            flush=True,
        )
    check_rope(drafter)


def check_rope(drafter: DrafterConfig, folder: Path | None = None) -> None:
    """Compare cos/sin of the installed SGLang with the trainer's, over the first positions.

    Args:
        folder: an exported drafter, whose config is read as the engine reads it; None: as the export will write it.

    Raises:
        PipelineError: they differ, so that every draft would be rotated otherwise than in training.
    """
    theta, scaling, positions = drafter.rope_parameters["rope_theta"], drafter.rope_parameters, None
    if folder is not None:
        from sglang.srt.utils.hf_transformers.common import get_rope_config
        from sglang.srt.utils.hf_transformers_utils import get_config

        exported = get_config(str(folder), trust_remote_code=False)
        (theta, scaling), positions = get_rope_config(exported), exported.max_position_embeddings
    count = min(_POSITIONS, drafter.max_position_embeddings)
    engine = _engine_table(drafter.head_dim, positions or drafter.max_position_embeddings, theta, scaling, count)
    # Of the longest sequence that has these positions, and of a long one: an engine has one table for both.
    trainer = [_trainer_table(drafter, count, length) for length in {count, drafter.max_position_embeddings}]
    if any(engine is None or engine.shape != t.shape or not torch.allclose(engine, t, atol=1e-4) for t in trainer):
        raise PipelineError(
            "the installed SGLang rotates this drafter otherwise than the trainer does",
            field="rope_parameters",
            value=drafter.rope_parameters,
            fix="train the drafter anew: make train takes a RoPE that both compute alike (pipeline/train/drafter_rope.py)",
        )


def _engine_table(
    head_dim: int, positions: int, theta: float, scaling: dict | None, count: int
) -> torch.Tensor | None:
    """SGLang's cos and sin side by side, [count, head_dim]; None where it has no such table."""
    from sglang.srt.layers.rotary_embedding import get_rope

    try:
        rope = get_rope(
            head_dim, head_dim, positions, theta, True, dict(scaling) if scaling else None, torch.float32
        )
    except (KeyError, ValueError):  # a type it does not know, or one that lacks what it wants
        return None
    table = getattr(rope, "cos_sin_cache", None)  # longrope: two, chosen by what else is in the batch
    return None if table is None else table[:count].cpu().float()


def _trainer_table(drafter: DrafterConfig, count: int, length: int) -> torch.Tensor:
    position = torch.arange(count)
    rope = Rope(drafter.head_dim, drafter.rope_parameters, drafter.max_position_embeddings)
    cos, sin = rope.cos_sin(position, torch.full_like(position, length), torch.device("cpu"))
    half = cos.shape[1] // 2
    return torch.cat([cos[:, :half], sin[:, :half]], -1)
