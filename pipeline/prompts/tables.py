"""Records from Parquet and Arrow files, some rows at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow
import pyarrow.parquet

from pipeline.prompts.refused import BadRecord

_ROWS = 64  # turned into Python objects at once


def read_parquet(stream: BinaryIO, path: str) -> Iterator[tuple[str, object]]:
    with _seekable(stream) as file, pyarrow.parquet.ParquetFile(file, pre_buffer=False) as table:
        yield from _rows(table.iter_batches(batch_size=_ROWS), path)


def read_arrow(stream: BinaryIO, path: str) -> Iterator[tuple[str, object]]:
    with _seekable(stream) as file:
        if file.read(6) == b"ARROW1":
            table = pyarrow.ipc.open_file(file)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        else:  # the streaming format, which `datasets` writes
            file.seek(0)
            batches = iter(pyarrow.ipc.open_stream(file))
        yield from _rows((batch.slice(i, _ROWS) for batch in batches for i in range(0, len(batch), _ROWS)), path)


def _rows(batches: Iterator[pyarrow.RecordBatch], path: str) -> Iterator[tuple[str, object]]:
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:
            rows = [_row(batch, i) for i in range(len(batch))]
        for row in rows:
            number += 1
            yield f"{path}: row {number}", row if isinstance(row, BadRecord) else without_nulls(row)


def _row(batch: pyarrow.RecordBatch, i: int) -> object:
    try:
        return batch.slice(i, 1).to_pylist()[0]
    except UnicodeDecodeError as e:
        return BadRecord("encoding", f"holds text that is not UTF-8: {e.reason}", e.object)


def without_nulls(value: object) -> object:
    """A row without null fields: in a table all rows have the same fields, and a null stands for one that is absent."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [without_nulls(v) for v in value]
    return value


def _seekable(stream: BinaryIO) -> BinaryIO:
    """Tables are read from their end: one that is compressed as a whole is unpacked into a temporary file first."""
    if not isinstance(stream.raw, pyarrow.NativeFile):
        return stream
    file = tempfile.TemporaryFile()
    shutil.copyfileobj(stream, file, 1 << 20)
    file.seek(0)
    return file
