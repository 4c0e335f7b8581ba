"""Every answer of the target, on disk before the next question depends on it: an interrupted run asks nothing twice."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.errors import PipelineError
from pipeline.files import clear_disk_errors, make_dir, sha256_json
from pipeline.precision import respond_dtype

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.target import Target

RESPONSES = "responses"
"""folder of the journals in the run's folder"""


@dataclass(frozen=True)
class Request:
    """A prompt that waits for its answer: id of the (first) conversation that asks, and token ids."""

    id: str
    prompt_ids: list[int]

    @property
    def key(self) -> str:
        """Hash of the prompt's tokens: an answer holds for this prompt only, even if the source was edited."""
        return sha256_json(self.prompt_ids)[:32]

    def seed(self, seed: int) -> int:
        """Seed of this answer's random numbers: the same in any batch and after any interruption."""
        return int(sha256_json([seed, self.key])[:15], 16)


@dataclass(frozen=True)
class Answer:
    """What the target generated after a prompt.

    Attributes:
        ids: generated token ids, with the end-of-turn token if it was generated.
        finish_reason: "stop" (the last id ends the turn) or "length" (cut at max_new_tokens).
        retokenised: a server gave its text alone, so that these need not be the very tokens it generated.
    """

    ids: list[int]
    finish_reason: Literal["stop", "length"]
    retokenised: bool = False


def journal_path(run_dir: Path, config: Config, target: Target, engine: str) -> Path:
    """The journal of a run for one way to answer: everything an answer depends on beside its prompt is in the name.

    It lies outside the stage's folder, so that another source, limit or held-out share asks only what is new. Which
    server answers is not in it: a server may move, and what it serves is the target.

    Args:
        engine: what answers, see `respond.engine_name`.
    """
    prompts = config.prompts
    sampling = {"temperature": prompts.temperature, "top_p": prompts.top_p, "seed": config.seed}
    way = sha256_json({
        "target": target.record.model_dump(exclude={"path"}), "eos_token_ids": target.eos_token_ids,
        "engine": engine, "dtype": respond_dtype(config, engine), "max_new_tokens": prompts.max_new_tokens,
        "sampling": sampling if prompts.temperature > 0 else "greedy"})
    return Path(run_dir) / RESPONSES / f"{way[:16]}.jsonl"


class Journal:
    """Answers in the order they came, one JSON line each.

    Opening it drops a last line that a killed process left unfinished. In memory is only where each answer lies.

    Raises:
        PipelineError: a line before the last one is damaged, or the disk refuses.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._starts: dict[str, int] = {}
        """`Request.key` → byte at which the line begins"""
        self._end = self._load() if self.path.exists() else 0
        make_dir(self.path.parent)
        with clear_disk_errors(self.path):
            self._file = open(self.path, "ab", buffering=0)  # a full disk must not leave bytes for close() to try again
            self._file.truncate(self._end)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __contains__(self, request: Request) -> bool:
        return request.key in self._starts

    def __len__(self) -> int:
        return len(self._starts)

    def get(self, request: Request) -> Answer | None:
        """Read an answer; None if there is none."""
        if (start := self._starts.get(request.key)) is None:
            return None
        with open(self.path, "rb") as f:  # reading goes on when writing is over
            f.seek(start)
            return _parsed(f.readline())[1]

    def add(self, answers: list[tuple[Request, Answer]]) -> None:
        """Store answers durably."""
        lines = [_line(request, answer) for request, answer in answers]
        rest = memoryview(b"".join(lines))
        with clear_disk_errors(self.path):
            while rest:
                rest = rest[self._file.write(rest):]
            os.fsync(self._file.fileno())
        for (request, _), line in zip(answers, lines):
            self._starts[request.key] = self._end
            self._end += len(line)

    def _load(self) -> int:
        """Find the answers; returns the length in bytes of the whole lines."""
        whole = 0
        with open(self.path, "rb") as f:
            for number, line in enumerate(f, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._starts[_parsed(line)[0]] = whole
                except (ValueError, KeyError, TypeError) as e:
                    where = f"{self.path}:{number}"
                    raise PipelineError(f"{where} is damaged: {e}", field=where,
                                        fix=f"remove that line, or {self.path} to ask for all answers again") from e
                whole += len(line)
        return whole


def _line(request: Request, answer: Answer) -> bytes:
    line = {"id": request.id, "prompt": request.key, "ids": answer.ids, "finish_reason": answer.finish_reason}
    if answer.retokenised:
        line["retokenised"] = True
    return json.dumps(line).encode() + b"\n"


def _parsed(line: bytes) -> tuple[str, Answer]:
    raw = json.loads(line)
    return raw["prompt"], Answer(raw["ids"], raw["finish_reason"], raw.get("retokenised", False))
