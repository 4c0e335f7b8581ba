"""What a validation found: every problem with its field, value and mend, and what else is worth knowing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import PipelineError

REEXPORT = "make export"


@dataclass(frozen=True)
class Problem:
    """One thing an engine would get wrong."""

    field: str
    value: object
    what: str
    mend: str = REEXPORT

    def __str__(self) -> str:
        return f"{self.field} = {self.value}: {self.what}\n      mend: {self.mend}"


@dataclass
class Report:
    """What the validator found: `problems` make a drafter unfit to serve, `notes` are worth knowing."""

    folder: Path
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def problem(self, where: str, value: object, what: str, mend: str = REEXPORT) -> None:
        self.problems.append(Problem(where, value, what, mend))

    def require(self, holds: bool, where: str, value: object, what: str, mend: str = REEXPORT) -> bool:
        if not holds:
            self.problem(where, value, what, mend)
        return holds

    def raise_if_bad(self) -> None:
        """Raises: PipelineError: listing every problem."""
        if self.problems:
            lines = "\n".join(f"  - {p}" for p in self.problems)
            raise PipelineError(
                f"{self.folder} is not fit to serve: {len(self.problems)} problem(s)\n{lines}",
                field=self.problems[0].field,
                value=self.problems[0].value,
                fix=self.problems[0].mend,
            )
