"""How training starts: the scale at which fc reads its slots, and the first weights.

A residual stream grows with depth: SmolLM2's layer outputs 1, 14 and 26 have rows of rms 3, 6 and 23. AdamW moves every
weight by about the learning rate whatever its gradient, so one step moves fc's output 23 times as far as that of a
layer whose input is normed, and fc's gradient alone decides how all are clipped. While it trains, fc therefore reads
every slot divided by its rms. The weights that are written take the factor in, so what is served is plain fc over raw
layer outputs. Factors are powers of two: neither the products nor the weights are rounded by them.

Held-out τ_row@3 of the demo after one epoch (704 samples, fp32, seed 0, no dropout), from raw to scaled slots: 1.312
to 1.302 with a random fc, 1.352 to 1.390 with one that starts as below. Twice the rate: 1.342; 0.6 times: 1.375.
`regression.py` goes on from these weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.train.batches import pack
from pipeline.train.drafter import Drafter
from pipeline.train.drafter_config import DrafterConfig

# At most so many rows of training samples, the first ones, say how large a slot is.
_SCALE_ROWS = 2048
# Of the random weights that fc starts with beside the identity, relative to `Drafter.init_weights`.
_FC_NOISE = 0.1


def scale_samples(lengths: list[int]) -> tuple[int, ...]:
    """The training samples (indices) to measure the slots on; `lengths`: tokens of each."""
    return tuple(first_samples(lengths, _SCALE_ROWS))


def first_samples(lengths: list[int], tokens: int) -> list[int]:
    """The first samples (indices) that have at most so many tokens together, and one in any case."""
    few = range(min(len(lengths), tokens))  # a sample has a token at least
    return pack(lengths, list(few), tokens)[0]


def slot_scale(config: DrafterConfig, features: Tensor) -> list[float]:
    """The factor of every slot while fc trains: the power of two next to 1 / rms of its rows.

    The rms is the median row's: first tokens can be a hundred times as large as others (attention sinks). Where fc's
    input is normed (`fc_norm`, `norm_before_fc`) there is nothing to do, and the factors are 1.

    Args:
        features: [R, n·H] raw rows of `scale_samples`.
    """
    if config.fc_norm or config.norm_before_fc:
        return [1.0] * config.num_fc_inputs
    rows = features[:_SCALE_ROWS].float().unflatten(-1, (config.num_fc_inputs, -1))  # [R, n, H]
    rms = rows.square().mean(-1).sqrt().nanmedian(0).values  # a bad sample is named when it is trained on
    return torch.exp2(-rms.clamp(min=torch.finfo(torch.float32).tiny).log2().round()).tolist()


def of_columns(scale: list[float], config: DrafterConfig) -> Tensor:
    """[n] → [n·H], a factor for every column of fc."""
    return torch.tensor(scale).repeat_interleave(config.hidden_size)


@torch.no_grad()
def start_weights(drafter: Drafter, seed: int, lm_head_rows: Tensor | None) -> None:
    """The first weights of a drafter whose fc reads scaled slots.

    fc starts as the identity of the last slot, the highest layer, and a little noise on all: a residual stream in the
    basis that the target's output head reads. The final norm starts so that the first logits are near unit size: an
    untrained layer feeds the head noise, and with rows of norm 3 (SmolLM2) the first loss is then 14.1 nats a row
    instead of 9.5 (a uniform guess: 9.0).

    Args:
        lm_head_rows: as in `Drafter.init_weights`.
    """
    drafter.init_weights(seed, lm_head_rows)
    hidden = drafter.config.hidden_size
    drafter.fc.weight.mul_(_FC_NOISE)[:, -hidden:] += torch.eye(hidden)
    drafter.norm.weight.fill_(min(1.0, 1.0 / float(drafter.lm_head.weight.norm(dim=1).mean())))


def serving_weights(weights: dict[str, Tensor], scale: Tensor) -> dict[str, Tensor]:
    """Weights as trained → as served, where fc reads raw slots. `scale`: [n·H]."""
    return weights | {"fc.weight": weights["fc.weight"] * scale}
