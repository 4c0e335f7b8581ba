"""Loss spikes: batches whose loss stands far above what the batches before them had, named with their samples."""

from __future__ import annotations

from statistics import median

WINDOW = 64  # batches that say what is usual
ENOUGH = 16  # below so many nothing is usual yet
_SIGMAS = 1.4826  # median absolute deviation → standard deviation, of normally distributed values


def usual(losses: list[float]) -> tuple[float, float] | None:
    """Median and scaled median absolute deviation of the last batches' losses; None while there are too few.

    The deviation is at least 1 % of the median, so that a loss that hardly varies does not make a spike of everything.
    """
    if len(losses) < ENOUGH:
        return None
    middle = median(losses)
    return middle, max(_SIGMAS * median(abs(x - middle) for x in losses), 0.01 * abs(middle))


def find_spikes(losses: list[float], history: list[float], factor: float) -> list[tuple[int, float]]:
    """Which of a step's batches are spikes, and the usual loss beside each.

    Args:
        losses: nats per row of every batch of the step; NaN for one without rows.
        history: losses of the batches before, at most `WINDOW`; the step's are appended, a spike as well, since what
            goes on for more than half a window is no spike.
        factor: how many deviations above the median a loss must lie.
    """
    now, found = usual(history), []
    for i, loss in enumerate(losses):
        if loss != loss:
            continue
        if now is not None and loss > now[0] + factor * now[1]:
            found.append((i, now[0]))
        history.append(loss)
    del history[:-WINDOW]
    return found
