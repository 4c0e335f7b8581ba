"""What became of every record: counts that add up, and files that list what was not used and why."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.files import atomic_path
from pipeline.prompts.refused import BadRecord

SKIPPED, QUARANTINE = "skipped.jsonl", "quarantine.jsonl"


class Account:
    """Counts per source: read = kept + duplicates + the sum of all `skipped_<reason>`.

    A damaged record is read and skipped (`skipped_bad_<kind>`); a file that cannot be read any further counts as one.
    Use `open_account`.

    Attributes:
        by_source: of each source in order, its counts.
        examples: of each reason, the first record: place and detail.
    """

    def __init__(self, sources: int, skipped, quarantine):
        self.by_source = [Counter() for _ in range(sources)]
        self.examples: dict[str, tuple[str, str]] = {}
        self._skipped, self._quarantine = skipped, quarantine

    @property
    def total(self) -> Counter[str]:
        return sum(self.by_source, Counter())

    @property
    def reasons(self) -> Counter[str]:
        """Reason → number of records skipped for it."""
        return Counter({key.removeprefix("skipped_"): n for key, n in self.total.items() if key.startswith("skipped_")})

    def count(self, source: int, what: str, by: int = 1) -> None:
        self.by_source[source][what] += by

    def skip(self, source: int, where: str, reason: str, detail: str, id: str | None = None) -> None:
        """Count a record that is not used, and list it in skipped.jsonl."""
        self.count(source, f"skipped_{reason}")
        self.examples.setdefault(reason, (where, detail))
        self._write(self._skipped, {"id": id, "where": where, "reason": reason, "detail": detail})

    def bad(self, source: int, where: str, bad: BadRecord) -> None:
        """Count a damaged record, and keep what was found there in quarantine.jsonl."""
        self.count(source, f"skipped_{bad.reason}")
        self.examples.setdefault(bad.reason, (where, bad.detail))
        self._write(self._quarantine, {"where": where, "reason": bad.reason, "detail": bad.detail, "raw": bad.raw})

    @staticmethod
    def _write(file, line: dict) -> None:
        file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


@contextlib.contextmanager
def open_account(folder: Path, sources: int) -> Iterator[Account]:
    """An account whose files appear in `folder` when the work is done.

    After an error there is no skipped.jsonl, but quarantine.jsonl stays if it lists anything: it is what one looks at.
    """
    with atomic_path(folder / QUARANTINE) as quarantine, open(quarantine, "wb") as bad:
        failure = None
        try:
            with atomic_path(folder / SKIPPED) as skipped, open(skipped, "wb") as file:
                yield Account(sources, file, bad)
        except PipelineError as e:
            failure = e
        if failure and not bad.tell():
            raise failure
    if failure:
        raise failure
