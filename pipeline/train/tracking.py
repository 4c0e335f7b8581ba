"""Weights & Biases (wandb) as an option: nothing else in the pipeline knows it, and training runs without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from pipeline.config import TrackingConfig
from pipeline.errors import PipelineError


class Tracker(Protocol):
    run_id: str | None
    """to go on with the same run after a resume"""

    def log(self, values: dict[str, Any], step: int) -> None: ...

    def finish(self, exit_code: int) -> None: ...


class NoTracker:
    """Keeps nothing: `tracking=none`, the ranks other than 0, or wandb not installed."""

    run_id = None

    def log(self, values: dict[str, Any], step: int) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        pass


class WandbTracker:
    """One wandb run. Lists of numbers become one curve per TTT step: `accuracy` → `accuracy/0`, `accuracy/1`, …

    Steps that are done again after a resume are logged again with the same numbers; wandb keeps the first ones.
    """

    def __init__(self, run: Any):
        self._run, self.run_id = run, run.id

    def log(self, values: dict[str, Any], step: int) -> None:
        flat = {}
        for name, value in values.items():
            flat |= {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
        self._run.log({name: v for name, v in flat.items() if isinstance(v, int | float)}, step=step)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code)


def start_tracking(tracking: TrackingConfig, folder: Path, *, name: str, config: dict, run_id: str | None) -> Tracker:
    """Start or go on with a run.

    Args:
        folder: where offline files go (`<folder>/wandb`); `wandb sync <folder>/wandb/offline-run-*` uploads them later.
        config: what to keep with the run: configuration and manifest.
        run_id: of the run to go on with, None for a new one.

    Raises:
        PipelineError: `tracking=online` was asked for and wandb is missing or refuses.
    """
    if tracking.mode == "none":
        return NoTracker()
    fix = "pip install wandb and wandb login, or: make train ARGS=\"tracking=offline\" (or tracking=none)"
    try:
        import wandb
    except ImportError as e:
        if tracking.mode == "online":
            raise PipelineError("tracking=online needs wandb, which is not installed", field="tracking.mode",
                                value="online", fix=fix) from e
        print("train: wandb is not installed, so nothing is tracked; metrics.jsonl holds the same numbers", flush=True)
        return NoTracker()
    try:
        run = wandb.init(mode=tracking.mode, project=tracking.project, entity=tracking.entity, name=name, dir=folder,
                         config=config, id=run_id, resume="allow" if run_id else None,
                         settings=wandb.Settings(silent=True, console="off"))
    except Exception as e:  # network, login, quota: wandb has many error types
        if tracking.mode == "online":
            raise PipelineError(f"wandb refused to start: {e}", field="tracking.mode", value="online", fix=fix) from e
        print(f"train: wandb cannot start ({e}); nothing is tracked, metrics.jsonl holds the same numbers", flush=True)
        return NoTracker()
    return WandbTracker(run)
