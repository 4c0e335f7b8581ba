"""Records on disk while it is decided which are used; in memory is only where each lies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.files import clear_disk_errors, make_dir
from pipeline.prompts.records import Record


class Spool:
    """A file of records, read by their places. Use `open_spool`; its space is needed for the duration of the stage."""

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "w+b", buffering=1 << 20)
        self._end = 0

    def add(self, record: Record) -> int:
        """Store a record; returns its place, a byte of the file."""
        start, line = self._end, record.to_line()
        with clear_disk_errors(self.path):
            self._file.write(line)
        self._end += len(line)
        return start

    def get(self, start: int) -> Record:
        return next(self.read([start]))

    def read(self, starts: Iterable[int]) -> Iterator[Record]:
        """The records at these places."""
        self.flush()
        return read_records(self.path, starts)

    def flush(self) -> None:
        """Make what was added readable, also to other processes."""
        with clear_disk_errors(self.path):
            self._file.flush()

    def close(self) -> None:
        # What is left in the buffer is not wanted, and a full disk must not keep the file from being closed.
        with contextlib.suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)


def read_records(path: Path, starts: Iterable[int]) -> Iterator[Record]:
    """The records at these places of a spool's file."""
    with open(path, "rb", buffering=1 << 20) as file:
        for start in starts:
            if start != file.tell():
                file.seek(start)
            yield Record.from_line(file.readline())


@contextlib.contextmanager
def open_spool(folder: Path) -> Iterator[Spool]:
    """A spool in `folder` that is removed at the end, or by the next run if this process is killed."""
    make_dir(folder)
    path = folder / ".tmp-records.jsonl"
    with clear_disk_errors(path):
        spool = Spool(path)
    try:
        yield spool
    finally:
        spool.close()
