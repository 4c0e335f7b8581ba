"""Samples: token ids of a conversation and which of them the target generated. What stage 1 hands to later stages.

`prompts/samples.parquet` has one row for each sample:

    id, split, category, finish_reason    string (the last two may be null)
    messages                              string, JSON
    input_ids                             large_list<int32> [T]
    loss_mask                             large_list<bool> [T]

in row groups of about 16 MiB, which is all that reading or writing keeps in memory. Pages carry checksums. Its bytes
depend on the samples and pyarrow's version alone. `make show-sample` shows some, anything that reads Parquet shows all.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from pipeline.errors import PipelineError
from pipeline.files import atomic_path

SCHEMA = pa.schema([
    pa.field("id", pa.string(), nullable=False), pa.field("split", pa.string(), nullable=False),
    pa.field("category", pa.string()), pa.field("finish_reason", pa.string()),
    pa.field("messages", pa.large_string(), nullable=False),
    pa.field("input_ids", pa.large_list(pa.field("element", pa.int32(), nullable=False)), nullable=False),
    pa.field("loss_mask", pa.large_list(pa.field("element", pa.bool_(), nullable=False)), nullable=False)])
_GROUP_BYTES = 16 << 20
_ROWS = 64  # turned into Python objects at once
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
        ids = self.input_ids
        if not _integers(ids) or min(ids, default=0) < 0 or max(ids, default=0) >= 1 << 31:
            return "input_ids is not a list of token ids"
        if not _integers(self.loss_mask) or not {0, 1}.issuperset(self.loss_mask):
            return "loss_mask is not a list of zeros and ones"
        if len(self.input_ids) != len(self.loss_mask):
            return f"{len(self.input_ids)} input_ids but {len(self.loss_mask)} loss_mask entries"
        if not any(self.loss_mask):
            return "loss_mask sums to 0: no token to train on"
        if self.finish_reason not in ("stop", "length", None):
            return f"finish_reason is {self.finish_reason!r}, not stop, length or null"
        return None


def _integers(values: object) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {int}


def samples_file(run_dir: Path) -> Path:
    """Where the samples of a run lie."""
    return Path(run_dir) / "prompts" / "samples.parquet"


def read_samples(path: Path) -> Iterator[Sample]:
    """Read samples one by one, checking each.

    Raises:
        PipelineError: naming file and row, for a missing or damaged file, other columns, lengths that differ, an id
            that occurs twice, or a mask without a one.
    """
    with _opened(path) as file:
        _check_ids(file, path)
        number = 0
        for batch in _batches(file, path):
            for row in _rows(batch):
                number += 1
                yield _checked(lambda: row | {"messages": json.loads(row["messages"])}, f"{path}: row {number}", _FIX)


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The same as record batches of `SCHEMA`, to be written again; only file, columns and checksums are checked."""
    with _opened(path) as file:
        yield from _batches(file, path)


def read_sample_lines(path: Path) -> Iterator[Sample]:
    """Samples that somebody wrote as JSON lines with the fields of `Sample`, checked in the same way.

    Raises:
        PipelineError: naming file and line.
    """
    first_line: dict[str, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where, fix = f"{path}:{number}", "repair or remove that line"
            sample = _checked(lambda: json.loads(line), where, fix)
            if first_line.setdefault(sample.id, number) != number:
                raise PipelineError(f"{where} is not a valid sample: id {sample.id!r} already occurs in line "
                                    f"{first_line[sample.id]}", field=where, fix=fix)
            yield sample


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples; the file appears whole or not at all.

    Raises:
        PipelineError: a sample is malformed or its id occurs twice.
    """
    write_batches(path, to_batches(samples))


def to_batches(samples: Iterable[Sample]) -> Iterator[pa.RecordBatch]:
    """Samples as record batches of `SCHEMA`, some at a time; raises as `to_batch` does."""
    samples = iter(samples)
    while some := list(islice(samples, _ROWS)):
        yield to_batch(some)


def to_batch(samples: list[Sample]) -> pa.RecordBatch:
    """Samples as rows of `SCHEMA`.

    Raises:
        PipelineError: one is malformed.
    """
    for sample in samples:
        if (problem := sample.problem()) is not None:
            raise PipelineError(f"sample {sample.id!r} cannot be written: {problem}", field=f"sample {sample.id}")
    columns = {name: [getattr(sample, name) for sample in samples] for name in SCHEMA.names}
    columns["messages"] = [json.dumps(said, ensure_ascii=False) for said in columns["messages"]]
    for name, code, kind in (("input_ids", "i", np.int32), ("loss_mask", "b", np.bool_)):
        flat = array(code)
        for of_one in columns[name]:
            flat.fromlist(of_one)
        ends = np.cumsum([0, *map(len, columns[name])], dtype=np.int64)
        values = pa.array(np.frombuffer(flat, kind))
        columns[name] = pa.LargeListArray.from_arrays(ends, values, type=SCHEMA.field(name).type)
    return pa.RecordBatch.from_pydict(columns, SCHEMA)


def write_batches(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    """Write rows of `SCHEMA`, such as `to_batch` makes; how they are divided into batches does not change the file.

    Raises:
        PipelineError: an id occurs twice.
    """
    with atomic_path(path) as tmp:
        with open(tmp, "wb") as sink, pa.parquet.ParquetWriter(
                sink, SCHEMA, compression="zstd", write_page_checksum=True,
                use_dictionary=["split", "category", "finish_reason", "input_ids.list.element"]) as writer:
            for group in _row_groups(batches):
                writer.write_table(group, row_group_size=len(group))
        with _opened(tmp) as file:
            _check_ids(file, path)


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Tables of as many whole rows as reach `_GROUP_BYTES`."""
    parts: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        begin = 0
        tokens = pa.compute.list_value_length(batch["input_ids"]).to_numpy()
        sizes = 5 * tokens + pa.compute.binary_length(batch["messages"]).to_numpy()
        for row, of_row in enumerate(sizes.tolist(), 1):
            size += of_row
            if size >= _GROUP_BYTES:
                yield _joined([*parts, batch.slice(begin, row - begin)])
                parts, size, begin = [], 0, row
        if begin < len(batch):
            parts.append(batch.slice(begin))
    if parts:
        yield _joined(parts)


def _joined(parts: list[pa.RecordBatch]) -> pa.Table:
    """As one piece: where the pages of a file end depends on the pieces."""
    return pa.Table.from_batches(parts, SCHEMA).combine_chunks()


def _opened(path: Path) -> pa.parquet.ParquetFile:
    try:
        file = pa.parquet.ParquetFile(path, pre_buffer=False, page_checksum_verification=True)
    except FileNotFoundError as e:
        raise PipelineError(f"{path} does not exist", field=str(path), fix="make prompts") from e
    except (pa.ArrowException, OSError) as e:
        raise _damaged(path, 0, e) from e
    if (found := file.schema_arrow) != SCHEMA:
        file.close()
        raise PipelineError(f"{path} is not a file of samples: its columns are {_columns(found)}; they must be "
                            f"{_columns(SCHEMA)}", field=str(path), fix=_FIX)
    return file


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)


def _damaged(path: Path, rows: int, error: Exception) -> PipelineError:
    return PipelineError(f"{path} is damaged behind row {rows}: {error}", field=str(path), fix=_FIX)


def _batches(file: pa.parquet.ParquetFile, path: Path) -> Iterator[pa.RecordBatch]:
    rows = 0
    for group in range(file.num_row_groups):
        try:
            for batch in file.iter_batches(_ROWS, row_groups=[group], use_threads=False):
                rows += len(batch)
                yield batch
        except (pa.ArrowException, OSError) as e:
            raise _damaged(path, rows, e) from e


def _check_ids(file: pa.parquet.ParquetFile, path: Path) -> None:
    """Every id occurs once. The column is read alone, before anything else."""
    try:
        ids = file.read(["id"], use_threads=False)["id"]
    except (pa.ArrowException, OSError) as e:
        raise _damaged(path, 0, e) from e
    if pa.compute.count_distinct(ids).as_py() == len(ids):
        return
    first_row: dict[str, int] = {}
    for number, id in enumerate(ids.to_pylist(), 1):
        if first_row.setdefault(id, number) != number:
            where = f"{path}: row {number}"
            raise PipelineError(f"{where} is not a valid sample: id {id!r} already occurs in row {first_row[id]}",
                                field=where, fix=_FIX)


def _rows(batch: pa.RecordBatch) -> Iterator[dict]:
    columns = {name: batch[name].to_pylist() for name in ("id", "split", "category", "finish_reason", "messages")}
    for name in ("input_ids", "loss_mask"):
        ends = batch[name].offsets.to_numpy()
        flat = batch[name].values.to_numpy(zero_copy_only=False)
        columns[name] = [flat[a:b].astype(np.int32).tolist() for a, b in zip(ends, ends[1:])]
    for row in zip(*columns.values()):
        yield dict(zip(columns, row))


def _checked(fields: Callable[[], dict], where: str, fix: str) -> Sample:
    try:
        sample = Sample(**fields())
    except (ValueError, TypeError) as e:  # ValueError: broken JSON or UTF-8; TypeError: other fields
        raise PipelineError(f"{where} is not a sample: {e}", field=where, fix=fix) from e
    if (problem := sample.problem()) is not None:
        raise PipelineError(f"{where} is not a valid sample: {problem}", field=where, fix=fix)
    return sample
