"""Where training is, as every checkpoint records it, and what follows from the validations so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.train.metrics import TAU


@dataclass
class Position:
    step: int = 0
    """optimizer steps done"""
    epoch: int = 0
    batch: int = 0
    """optimizer steps done in this epoch"""
    history: list[dict] = field(default_factory=list)
    """one entry per validation: epoch, step and `metrics.ratios`"""
    window: list[list[float]] | None = None
    """sums since the last logged step, so that logged numbers do not depend on interruptions either"""
    losses: list[float] = field(default_factory=list)
    """of the last batches, as `spikes.find_spikes` wants them"""
    tracking_id: str | None = None
    slot_scale: list[float] | None = None
    """per slot, what fc's input is multiplied by while it trains (`start.slot_scale`)"""

    def best(self) -> dict | None:
        """The first of the validations with the highest τ_row."""
        return max(self.history, key=lambda h: h[TAU], default=None)

    def stopped_early(self, patience: int | None) -> bool:
        """Whether the last `patience` validations were all no better than one before them."""
        if patience is None or not self.history:
            return False
        return len(self.history) - 1 - self.history.index(self.best()) >= patience
