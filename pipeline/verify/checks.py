"""What the checks of stage 6 share: what is verified, and what a check says about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.manifest import Manifest
from pipeline.target import Target


@dataclass(frozen=True)
class Subject:
    """An export directory, and the run whose manifest says what it should be."""

    config: Config
    target: Target
    manifest: Manifest
    run_dir: Path
    folder: Path
    """of this stage, for what a check writes"""
    draft: Path
    """the exported drafter in SGLang's form; not necessarily the run's own"""


@dataclass
class CheckResult:
    """What a check found. It holds if there are no problems."""

    measured: dict[str, Any]
    """plain JSON values, for verify.json, verify.html and the manifest"""
    summary: str
    """one line for the table on the terminal"""
    problems: list[str] = field(default_factory=list)
    """one sentence each, with what was found and what was expected"""
    notes: list[str] = field(default_factory=list)
    """what the check could not tell, and which other check can"""

    @property
    def holds(self) -> bool:
        return not self.problems
