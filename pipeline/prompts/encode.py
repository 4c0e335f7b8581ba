"""Records that keep the source's answers → rows of the samples file, some at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pipeline.prompts.chat import ChatEncoder
from pipeline.prompts.fit import Part, Truncate, fit_batch, fit_row
from pipeline.prompts.records import Record
from pipeline.prompts.refused import Refused
from pipeline.prompts.spool import read_records
from pipeline.samples import Sample, to_batch


class Skipped(NamedTuple):
    """A record that gave no sample: what `Account.skip` is told."""

    source: int
    where: str
    reason: str
    detail: str
    id: str


class Outcome(NamedTuple):
    """What became of some records, in their order.

    Attributes:
        kept: of each record that gave samples its source.
        skipped: the others.
        counts: of the samples: `train_samples`, `heldout_samples`, `tokens`, `trained_tokens`.
        rows: the samples, as `pipeline.samples.SCHEMA`.
    """

    kept: list[int]
    skipped: list[Skipped]
    counts: dict[str, int]
    rows: pa.RecordBatch


class RowEncoder:
    """Encodes records of a spool.

    Args:
        spool: the file in which they lie.
        max_length: most tokens of a sample.
        truncate: what becomes of longer conversations (fit.py).
        vocab_size: of the target; rows of token ids beyond it are refused.
    """

    def __init__(self, encoder: ChatEncoder, *, spool: str, max_length: int, truncate: Truncate, vocab_size: int):
        self._encoder, self._spool, self._vocab_size = encoder, Path(spool), vocab_size
        self._limits = {"max_length": max_length, "truncate": truncate}

    def encode(self, places: Sequence[int]) -> Outcome:
        """The records at these places of the spool."""
        records = list(read_records(self._spool, places))
        said = [(record.messages, record.tools) for record in records if record.input_ids is None]
        fitted = iter(fit_batch(self._encoder, said, **self._limits))
        kept: list[int] = []
        skipped: list[Skipped] = []
        samples: list[Sample] = []
        for record in records:
            parts = next(fitted) if record.input_ids is None else self._row(record)
            if isinstance(parts, Refused):
                skipped.append(Skipped(record.source, record.where, parts.reason, parts.detail, record.id))
                continue
            kept.append(record.source)
            samples += [
                Sample(id=record.id if len(parts) == 1 else f"{record.id}#{k}", split=record.split,
                       category=record.category, messages=part.messages, input_ids=part.input_ids,
                       loss_mask=part.loss_mask, finish_reason=None) for k, part in enumerate(parts)]
        return Outcome(kept, skipped, count(samples), to_batch(samples))

    def _row(self, record: Record) -> list[Part] | Refused:
        if (largest := max(record.input_ids, default=0)) >= self._vocab_size:
            return Refused("not_in_vocabulary", f"token {largest} is not one of the target's {self._vocab_size}")
        return fit_row(record.input_ids, record.loss_mask, **self._limits)


def count(samples: Sequence[Sample]) -> Counter[str]:
    """What the manifest says of samples."""
    counts = Counter(f"{sample.split}_samples" for sample in samples)
    counts["tokens"] = sum(len(sample.input_ids) for sample in samples)
    counts["trained_tokens"] = sum(sum(sample.loss_mask) for sample in samples)
    return counts
