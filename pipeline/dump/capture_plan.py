"""What stage, plugin and writer of stage 2 say to each other: the plan, the request ids, and a forward's states."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.store import FINAL_HIDDEN, layer_output

if TYPE_CHECKING:
    import torch

PLAN_ENV = "EAGLE3_CAPTURE_PLAN"
SAMPLE, PROBE, CHECK = "sample", "probe", "check"
"""Kinds of requests: to be stored in shards; to be kept with every layer; only to make the engine report its wiring."""


@dataclasses.dataclass(frozen=True)
class CapturePlan:
    """What the stage tells the plugin."""

    attempt: str
    """names this start of the stage; a scheduler left over from another one may not write"""
    folder: str
    """the stage's folder, where shards go"""
    layers: list[int]
    """layer outputs the engine captures, ascending"""
    num_layers: int
    dtype: str
    """torch dtype the states are stored in"""
    shard_tokens: int

    @property
    def control(self) -> Path:
        """Folder of the files through which plugin and stage talk. One per attempt, so that attempts cannot mix."""
        return capture_folder(self.folder) / self.attempt

    @property
    def states(self) -> list[str]:
        return [layer_output(layer) for layer in self.layers] + [FINAL_HIDDEN]


def capture_folder(folder: str | Path) -> Path:
    return Path(folder) / ".capture"


def digest_ids(input_ids: Sequence[int]) -> str:
    """Short hash of token ids, for comparing what was asked with what was computed."""
    return hashlib.sha256(",".join(map(str, input_ids)).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class RequestTag:
    """What a request id says: `attempt/kind/length/digest/sample id`."""

    attempt: str
    kind: str
    length: int
    """tokens"""
    digest: str
    """`digest_ids` of the tokens"""
    sample_id: str

    def __str__(self) -> str:
        return f"{self.attempt}/{self.kind}/{self.length}/{self.digest}/{self.sample_id}"

    @classmethod
    def of(cls, attempt: str, kind: str, sample_id: str, input_ids: Sequence[int]) -> RequestTag:
        return cls(attempt, kind, len(input_ids), digest_ids(input_ids), sample_id)

    @classmethod
    def parse(cls, rid: str, attempt: str) -> RequestTag | None:
        """None for a request that is not of this attempt, such as the engine's own warm-up."""
        parts = rid.split("/", 4)
        if len(parts) != 5 or parts[0] != attempt:
            return None
        return cls(attempt, parts[1], int(parts[2]), parts[3], parts[4])


@dataclasses.dataclass(frozen=True)
class Span:
    """Rows of one forward that belong to one request."""

    tag: RequestTag
    row: int
    """first row in the forward's tensors"""
    start: int
    """position of that row in the request"""
    length: int


@dataclasses.dataclass
class Captured:
    """One forward, copied (or being copied) to host memory."""

    spans: list[Span]
    input_ids: torch.Tensor
    """[tokens]"""
    states: dict[str, torch.Tensor]
    """tensor name → [tokens, H]"""
    ready: Callable[[], None]
    """waits until the copies have arrived"""
