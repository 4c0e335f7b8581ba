"""Samples: token ids of a conversation and which of them the target generated. What stage 1 hands to later stages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import PipelineError
from pipeline.files import atomic_path

_FIX = "make prompts ARGS=\"force=true\""


@dataclass(frozen=True)
class Sample:
    """One conversation as the target sees it.

    Attributes:
        id: unique in a file of samples.
        split: "train" or "heldout".
        category: of the prompt, for reports; None if the source has none.
        messages: the conversation as text, for people.
        input_ids: T token ids.
        loss_mask: T zeros and ones; 1 marks a token that the target generated.
        finish_reason: of the response the target wrote: "stop" or "length"; None for a response the source gave.
    """

    id: str
    split: Literal["train", "heldout"]
    category: str | None
    messages: list[dict]
    input_ids: list[int]
    loss_mask: list[int]
    finish_reason: Literal["stop", "length"] | None

    def problem(self) -> str | None:
        """None if the sample is well formed, else what is wrong with it."""
        if not isinstance(self.id, str) or not self.id:
            return f"id is {self.id!r}, not a string"
        if self.split not in ("train", "heldout"):
            return f"split is {self.split!r}, not train or heldout"
        if not isinstance(self.input_ids, list) or not all(type(t) is int and t >= 0 for t in self.input_ids):
            return "input_ids is not a list of token ids"
        if not isinstance(self.loss_mask, list) or not all(type(m) is int and m in (0, 1) for m in self.loss_mask):
            return "loss_mask is not a list of zeros and ones"
        if len(self.input_ids) != len(self.loss_mask):
            return f"{len(self.input_ids)} input_ids but {len(self.loss_mask)} loss_mask entries"
        if not any(self.loss_mask):
            return "loss_mask sums to 0: no token to train on"
        if self.finish_reason not in ("stop", "length", None):
            return f"finish_reason is {self.finish_reason!r}, not stop, length or null"
        return None


def read_samples(path: Path) -> Iterator[Sample]:
    """Read samples one by one, checking each.

    Raises:
        PipelineError: naming file and line, for a missing file, broken JSON, a missing or unknown field, lengths that
            differ, an id that occurred before, or a mask without a one.
    """
    first_line: dict[str, int] = {}
    try:
        file = open(path, "rb")
    except FileNotFoundError as e:
        raise PipelineError(f"{path} does not exist", field=str(path), fix="make prompts") from e
    with file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                sample = Sample(**json.loads(line))
            except (ValueError, TypeError) as e:  # ValueError: broken JSON or UTF-8; TypeError: other fields
                raise PipelineError(f"{where} is not a sample: {e}", field=where, fix=_FIX) from e
            problem = sample.problem()
            if problem is None and sample.id in first_line:
                problem = f"id {sample.id!r} already occurs in line {first_line[sample.id]}"
            if problem is not None:
                raise PipelineError(f"{where} is not a valid sample: {problem}", field=where, fix=_FIX)
            first_line[sample.id] = number
            yield sample


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines; the file appears whole or not at all.

    Raises:
        PipelineError: a sample is malformed or its id occurs twice.
    """
    seen: set[str] = set()
    with atomic_path(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
        for sample in samples:
            problem = sample.problem() or ("its id occurs twice" if sample.id in seen else None)
            if problem is not None:
                raise PipelineError(f"sample {sample.id!r} cannot be written: {problem}", field=str(path))
            seen.add(sample.id)
            f.write(json.dumps(asdict(sample), ensure_ascii=False) + "\n")
