"""What training says: metrics.jsonl, wandb, and the progress line. Rank 0 writes, the other ranks' calls do nothing."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from pipeline.config import Config
from pipeline.files import clear_disk_errors, write_text
from pipeline.manifest import Manifest
from pipeline.train.metrics import TAU, TAU_STEPS
from pipeline.train.tracking import NoTracker, Tracker, start_tracking


class TrainingLog:
    """The log of one run.

    Args:
        folder: where metrics.jsonl lies, and wandb's offline files.
        main: whether this is rank 0.
    """

    def __init__(self, config: Config, manifest: Manifest, folder: Path, *, main: bool):
        self._config, self._manifest, self._folder, self._main = config, manifest, folder, main
        self._path = folder / "metrics.jsonl"
        self.tracker: Tracker = NoTracker()

    def start(self, step: int, total: int, tracking_id: str | None) -> str | None:
        """Go on after optimizer step `step` of `total`; returns the id of the wandb run to go on with next time."""
        from tqdm import tqdm

        if self._main:
            self._rewind(step)
            self.tracker = start_tracking(
                self._config.tracking, self._folder, name=self._config.run.name, run_id=tracking_id,
                config={**self._config.model_dump(mode="json"),
                        "manifest": self._manifest.model_dump(mode="json", exclude={"stages"})})
        self.bar = tqdm(total=total, initial=step, disable=not self._main, unit="step", dynamic_ncols=True,
                        mininterval=1.0)
        return self.tracker.run_id

    def _rewind(self, step: int) -> None:
        """Drop the lines that an interrupted run wrote after its last checkpoint: those steps are done again."""
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if self._path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        write_text(self._path, "".join(line for line in whole if json.loads(line)["step"] <= step))

    def record(self, step: int, values: dict) -> None:
        """One line of metrics.jsonl, and its numbers to wandb."""
        if self._main:
            with clear_disk_errors(self._path), open(self._path, "a", encoding="utf-8") as f:
                f.write(json.dumps({"step": step, **values}) + "\n")
            self.tracker.log(values, step)

    def progress(self, values: dict) -> None:
        """What the progress line shows of a logged step."""
        accuracy = "/".join(f"{a:.2f}" for a in values["accuracy"])
        parts = [f"epoch {values['epoch']} loss={values['mean_loss']:.3f} acc={accuracy}"]
        parts += [f"τ_row@{TAU_STEPS}={values[TAU]:.2f}"] if TAU in values else []
        parts += [f"{values['tokens_per_second']:.0f} tok/s"]
        parts += [f"mfu={values['mfu']:.0%}"] if values["mfu"] else []
        parts += [f"{values['memory_gib']:.1f} GiB wait={values['data_wait']:.0%}"]
        self.bar.set_postfix_str(" ".join(parts), refresh=False)

    def say(self, message: str) -> None:
        """A line above the progress line."""
        if self._main:
            from tqdm import tqdm

            tqdm.write(message)

    def finish(self) -> None:
        self.bar.close()
        self.tracker.finish(0)

    def failed(self) -> None:
        """Training ends with an error: wandb writes what it holds now, since a rank may not live to its interpreter's end."""
        self.bar.close()
        with contextlib.suppress(Exception):  # the error is what is to be read
            self.tracker.finish(1)
