"""Which state of the target a slot receives: its rows held against every state that they could be.

Pure functions on tensors. A state is named by its key (`pipeline.verify.states`). Errors are means over rows of
|received - state| / |state| (`dump_checks.relative_error`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline.dump.dump_checks import relative_error
from pipeline.verify.states import describe

_ALIKE = 1.05  # two errors of which neither is the smaller one


# ---------------------------------------------------------------- scores


@dataclass
class Norms:
    """Row norms, added up over pieces."""

    rows: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, x: Tensor) -> None:
        norms = x.float().norm(dim=-1).double()
        self.rows += len(norms)
        self.total += norms.sum().item()
        self.squares += norms.square().sum().item()

    @property
    def mean(self) -> float:
        return self.total / max(self.rows, 1)

    @property
    def std(self) -> float:
        return math.sqrt(max(self.squares / max(self.rows, 1) - self.mean**2, 0.0))

    def as_json(self) -> dict[str, float]:
        return {"mean": self.mean, "std": self.std}


@dataclass
class Score:
    """One slot against one state, added up over pieces of rows."""

    norms: Norms = field(default_factory=Norms)
    """of the state"""
    _error: float = 0.0
    _cosine: float = 0.0

    def add(self, received: Tensor, state: Tensor) -> None:
        """Both [R, H]."""
        self.norms.add(state)
        self._error += relative_error(received, state) * len(state)
        self._cosine += torch.cosine_similarity(received.double(), state.double(), dim=-1).sum().item()

    @property
    def error(self) -> float:
        return self._error / max(self.norms.rows, 1)

    @property
    def cosine(self) -> float:
        return self._cosine / max(self.norms.rows, 1)


@dataclass
class SlotScores:
    """What one slot received in one phase."""

    received: Norms = field(default_factory=Norms)
    states: dict[str, Score] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.received.rows

    def nearest(self) -> str:
        return min(self.states, key=lambda key: self.states[key].error)


Piece = tuple[Tensor, Callable[[str], Tensor]]
"""Received rows [R, slots·H], and key → the state [R, H] at the same tokens."""


def score_slots(pieces: Iterable[Piece], keys: Sequence[str], hidden_size: int) -> list[SlotScores]:
    """Hold every slot against every state. One state of one piece lies in memory at a time.

    Args:
        pieces: of equal width, which is a multiple of `hidden_size`.
    """
    slots: list[SlotScores] = []
    for received, state_of in pieces:
        parts = received.split(hidden_size, dim=-1)
        slots = slots or [SlotScores(states={key: Score() for key in keys}) for _ in parts]
        for slot, part in zip(slots, parts, strict=True):
            slot.received.add(part)
        for key in keys:
            state = state_of(key)
            for slot, part in zip(slots, parts):
                slot.states[key].add(part, state)
    return slots


# ---------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Verdict:
    """What a slot receives, against what it was declared to receive."""

    declared: str
    found: str | None
    """key of the state it is; None: none of them within rounding"""
    nearest: str
    alike: tuple[str, ...]
    """other states that are as near as the one found"""
    direction_only: bool = False
    """nothing matches, but the nearest by cosine does at another length"""

    @property
    def right(self) -> bool:
        return self.found == self.declared


def judge_slot(scores: SlotScores, declared: str, bound: float) -> Verdict:
    """Name what arrived.

    Rounding alone does not decide: in 16 bits two neighbouring layers of a deep target may both lie within the bound,
    and then the nearer one is what arrived. The declared state wins a tie.

    Args:
        bound: largest relative error that is rounding.
    """
    error = {key: score.error for key, score in scores.states.items()}
    nearest = scores.nearest()
    near = [key for key in error if error[key] <= bound and error[key] <= _ALIKE * error[nearest]]
    if near:
        found = declared if declared in near else nearest
        return Verdict(declared, found, nearest, tuple(key for key in near if key != found))
    straight = max(scores.states, key=lambda key: scores.states[key].cosine)
    if math.sqrt(max(2 - 2 * scores.states[straight].cosine, 0)) <= bound:
        return Verdict(declared, None, straight, (), direction_only=True)
    return Verdict(declared, None, nearest, ())


def sentence(slot: str, verdict: Verdict, scores: SlotScores, num_layers: int) -> str | None:
    """What is wrong with a slot, None if nothing is."""
    if verdict.right:
        return None

    def error(key: str) -> str:
        return f"relative error {two_digits(scores.states[key].error)}"

    def words(key: str) -> str:
        return describe(key, num_layers)

    wanted, nearest = words(verdict.declared), scores.states[verdict.nearest]
    short = wanted.removeprefix("layer output ")
    says = f"; the manifest says {wanted} ({error(verdict.declared)})"
    if verdict.found is not None:
        if verdict.found.startswith("layer_output."):
            says = f"; the manifest says {short} ({error(verdict.declared)})"
        return f"slot {slot} receives {words(verdict.found)} ({error(verdict.found)}){says}"
    if verdict.direction_only:
        return (f"slot {slot} receives {words(verdict.nearest)} at another length (cosine {nearest.cosine:.6f}, row norms "
                f"{two_digits(scores.received.mean)} instead of {two_digits(nearest.norms.mean)}){says}")
    return (f"slot {slot} receives none of the target's states; the nearest is {words(verdict.nearest)} "
            f"({error(verdict.nearest)}, cosine {nearest.cosine:.3f}){says}")


def two_digits(x: float) -> str:
    """Two significant digits: 0.21, 2e-7."""
    return f"{x:.2g}".replace("e-0", "e-").replace("e+0", "e")


def as_json(scores: SlotScores, verdict: Verdict, num_layers: int) -> dict[str, Any]:
    """Scores and verdict as JSON values."""
    declared = scores.states[verdict.declared]
    return {
        "rows": scores.rows,
        "relative_error": declared.error,
        "cosine": declared.cosine,
        "found": None if verdict.found is None else describe(verdict.found, num_layers),
        "nearest": describe(verdict.nearest, num_layers),
        "holds": verdict.right,
        "norm_received": scores.received.as_json(),
        "norm_declared": declared.norms.as_json(),
        "candidates": [{"key": key, "name": describe(key, num_layers), "relative_error": s.error, "cosine": s.cosine}
                       for key, s in scores.states.items()],
    }


# ---------------------------------------------------------------- norms before fc


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def normed_inputs(received: Tensor, weights: Mapping[str, Tensor], hidden_size: int,
                  eps: float) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """What fc would read under every combination of the norms that SGLang knows → [R, slots·H].

    Args:
        weights: tensors of the drafter by exported name. A norm that has none counts with weights of one, which is what
            SGLang makes of a norm that is switched on but missing in the file.
    """
    slots = received.shape[-1] // hidden_size

    def weight(name: str, width: int) -> Tensor:
        return weights.get(f"{name}.weight", torch.ones(width))

    for over_all in (False, True):
        x = rms_norm(received, weight("input_norm", received.shape[-1]), eps) if over_all else received
        for per_slot in (False, True):
            names = ("input_norm",) * over_all + ("fc_norm",) * per_slot
            parts = [rms_norm(part, weight(f"fc_norm.{i}", hidden_size), eps)
                     for i, part in enumerate(x.split(hidden_size, dim=-1))] if per_slot and slots else [x]
            yield names, torch.cat(parts, -1)


def applied_norms(pieces: Iterable[tuple[Tensor, Tensor]], weights: Mapping[str, Tensor], hidden_size: int,
                  eps: float) -> dict[tuple[str, ...], float]:
    """Relative error of fc's real input under every combination of norms.

    Args:
        pieces: what the drafter received and what fc then read, both [R, slots·H].
    """
    errors: dict[tuple[str, ...], float] = {}
    count = 0
    for received, fc_input in pieces:
        count += len(received)
        for names, expected in normed_inputs(received, weights, hidden_size, eps):
            errors[names] = errors.get(names, 0.0) + relative_error(fc_input, expected) * len(received)
    return {names: error / count for names, error in errors.items()}
