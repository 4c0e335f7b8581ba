"""What the dump stage and its two backends (`dump_sglang`, `dump_transformers`) say to each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import Config
from pipeline.dump.capture_plan import CapturePlan
from pipeline.samples import Sample, read_samples
from pipeline.target import Target


@dataclass
class Backend:
    """What a backend (`dump_sglang`, `dump_transformers`) tells the stage about itself."""

    engine: str
    engine_version: str
    model_class: str
    requested_ids: list[int]
    capture_points: list[int]
    deviation: str | None = None
    """what is known to arrive at the capture points instead of the residual stream (`proven_classes`)"""


@dataclass
class Survey:
    """The samples of stage 1, counted."""

    tokens: dict[str, int] = field(default_factory=dict)
    """sample id → tokens, in file order"""
    too_long: dict[str, int] = field(default_factory=dict)
    heldout: list[str] = field(default_factory=list)


@dataclass
class Job:
    """All a backend needs: it stores the samples of `todo()`, then the probes, and reports what it refused."""

    config: Config
    target: Target
    plan: CapturePlan
    todo_tokens: int
    samples_file: Path
    done: set[str]
    skip: set[str]
    probes: list[str]

    def todo(self) -> Iterator[Sample]:
        """Samples that lie in no shard yet, one by one: a million of them need not fit into memory."""
        return (s for s in read_samples(self.samples_file) if s.id not in self.done and s.id not in self.skip)

    def any_sample(self) -> Sample:
        return next(s for s in read_samples(self.samples_file) if s.id not in self.skip)

    def probe_samples(self) -> list[Sample]:
        wanted = set(self.probes)
        return [s for s in read_samples(self.samples_file) if s.id in wanted]
