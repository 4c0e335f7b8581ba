"""The learning rate of every optimizer step, worked out from its number alone, so that a resume needs no state."""

from __future__ import annotations

import math

from pipeline.config import TrainConfig


def learning_rate(step: int, total: int, *, lr: float, warmup_ratio: float, min_lr_ratio: float,
                  schedule: str = "cosine", decay_ratio: float = 0.2) -> float:
    """Learning rate of step `step` (from 0) of `total`.

    A linear warm-up over `warmup_ratio` of the steps up to `lr`; then by `schedule`, with `floor = lr · min_lr_ratio`:
    constant: `lr` | linear, cosine: from `lr` down to `floor` at the last step | wsd (warm-up, stable, decay; Hu et al.
    2024, arXiv 2404.06395): `lr`, and over the last `decay_ratio` of the steps linearly down to `floor`.
    """
    warmup = max(1, round(total * warmup_ratio))
    if step < warmup:
        return lr * (step + 1) / warmup
    start = max(warmup, total - round(total * decay_ratio)) if schedule == "wsd" else warmup
    last = total - 1
    done = max(0.0, (step - start) / (last - start)) if start < last else float(step >= start)  # a decay of one step
    left = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * done))}.get(schedule, 1 - done)
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * left)


def configured_rate(step: int, total: int, c: TrainConfig) -> float:
    """`learning_rate` as the configuration says."""
    return learning_rate(step, total, lr=c.lr, warmup_ratio=c.warmup_ratio, min_lr_ratio=c.min_lr_ratio,
                         schedule=c.schedule, decay_ratio=c.decay_ratio)
