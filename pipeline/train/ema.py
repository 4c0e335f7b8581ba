"""Averaged weights: an exponential moving average (EMA) of the weights after each step, validated and exported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Ema:
    """ē ← d·ē + (1-d)·w after every step, in fp32, on the device of the weights (and sharded as they are).

    d is min(decay, (1 + n) / (10 + n)) at step n, counted from 0: the first steps, far from where training ends, are
    soon forgotten, so that a short run has an average worth validating too.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.parameters = decay, dict(model.named_parameters())
        self.average: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After optimizer step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, p in self.parameters.items():
            self.average[name].lerp_(p, 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the averaged weights; its own come back as they were."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, p in self.parameters.items():
            own = p.detach().clone()
            p.copy_(self.average[name])
            self.average[name].copy_(own)
