"""From summed counts to the numbers people read: accuracy per TTT step, conditional accuracy, τ_row.

Counts are added over batches, accumulation and ranks first; ratios are taken once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.train.drafter import TTTOutput

NAMES = ("loss_sum", "loss_rows", "gated", "reached", "hits", "prefix_hits")
TAU_STEPS = 3  # K of τ_row@K everywhere unless said otherwise
TAU = f"tau_row@{TAU_STEPS}"


def stack(output: TTTOutput) -> Tensor:
    """The sums of one forward as [6, T] float64 in the order of `NAMES`, ready to be added up."""
    return torch.stack([output.metrics[name].detach().double() for name in NAMES])


def ratios(sums: Tensor) -> dict[str, float | list[float]]:
    """Ratios of `sums` [6, T].

    Returns:
        loss: the objective per TTT step, over rows whose teacher argmax is in the draft vocabulary. Of validation it is
            cross entropy in nats, whatever is trained, so that runs can be compared.
        accuracy: per step, over all gated rows; an argmax outside the draft vocabulary is a miss.
        conditional_accuracy: accuracy of step j over the rows gated there that were right at every earlier step, i.e.
            how often the engine accepts draft j once it has accepted the drafts before it.
        tau_row@3: 1 + Σ_{j<3} (rows right at steps 0 … j) / (rows gated at step j); absent with fewer steps.
    """
    loss_sum, loss_rows, gated, reached, hits, prefix_hits = sums.cpu()
    joint = prefix_hits / gated.clamp(min=1)
    result: dict[str, float | list[float]] = {
        "loss": (loss_sum / loss_rows.clamp(min=1)).tolist(),
        "accuracy": (hits / gated.clamp(min=1)).tolist(),
        "conditional_accuracy": (prefix_hits / reached.clamp(min=1)).tolist(),
    }
    if len(joint) >= TAU_STEPS:
        result[TAU] = 1.0 + float(joint[:TAU_STEPS].sum())
    return result
