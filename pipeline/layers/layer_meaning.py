"""What layer ids mean to a class of SGLang, in words, found by asking it.

Nothing here is known beforehand about any class: a few dozen lists of ids are given to it, and the words are those that
describe every answer. Where no words do, the answers themselves are listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from pipeline.layers import layer_stubs, plain_config, sglang_models

_SHALLOWEST = 12  # of fewer layers the lists below would not be different ones
_DEPTHS = (24, 32, 61)  # for the formula of what no ids mean: even, odd, and one half that is odd
_SHIFTS = {1: "layer outputs", 0: "capture points"}
_WHEN: dict[str, Callable[[Sequence[int], int], bool]] = {
    "the first id is 1": lambda ids, n: ids[0] == 1,
    "the first id is 0": lambda ids, n: ids[0] == 0,
    "the first id is the smallest": lambda ids, n: ids[0] == min(ids),
    "the last id is N": lambda ids, n: ids[-1] == n,
    "max(ids) == N": lambda ids, n: max(ids) == n,
    "max(ids) >= N-1": lambda ids, n: max(ids) >= n - 1,
    "1 is among the ids": lambda ids, n: 1 in ids,
    "0 is among the ids": lambda ids, n: 0 in ids,
    "the ids ascend": lambda ids, n: list(ids) == sorted(ids),
    "there are three ids": lambda ids, n: len(ids) == 3,
}
"""Conditions a rule may depend on, tried in this order."""


@dataclasses.dataclass(frozen=True)
class Meaning:
    """The answers of one class, in words. N is the number of decoder layers."""

    explicit: str
    """what a list of ids names, e.g. "capture points unless the first id is 1" """
    no_ids: str
    """what is captured when the config holds no ids, e.g. "capture points 2, N//2, N-3" """


def meaning(cls: type, config: SimpleNamespace) -> Meaning:
    """What explicit ids, and none, mean to `cls` for this target.

    Raises:
        ValueError: the class cannot be asked; the message says why.
    """
    layers = plain_config.num_layers(config)
    deep = config if layers >= _SHALLOWEST else plain_config.with_layers(config, _SHALLOWEST)
    return Meaning(_explicit(cls, deep), _no_ids(cls, config))


def compare_with_recorded(cls: type, config: SimpleNamespace) -> str:
    """What was compared between this SGLang and the tested one, and the outcome: a sentence."""
    name, table = cls.__name__, sglang_models.recorded_rules()
    found, tested = meaning(cls, config), table["version"]
    asked = f"SGLang {sglang_models.sglang_version()} was asked afresh"
    before = table["classes"].get(name)
    if before is None:
        return f"{asked}; the table recorded with {tested} does not know {name}"
    parts = {"explicit ids": (found.explicit, before["explicit"]), "no ids": (found.no_ids, before["no_ids"])}
    changes = [f"{what} are {now} (in {tested}: {then})" for what, (now, then) in parts.items() if now != then]
    if changes:
        return f"{asked}; {name} differs: {'; '.join(changes)}"
    said = ", ".join(f"{what} are {now}" for what, (now, _) in parts.items())
    return f"{asked}; {name} answers as in {tested}: {said}"


def _explicit(cls: type, config: SimpleNamespace) -> str:
    n = plain_config.num_layers(config)
    shifts: dict[tuple[int, ...], int | None] = {}
    answers: dict[tuple[int, ...], str] = {}
    for ids in _lists(n):
        try:
            points = layer_stubs.ask(cls, config, list(ids))
        except ValueError as e:
            answers[ids], reason = "refused", e
            continue
        steps = {point - i for point, i in zip(points, sorted(ids), strict=False)}
        shifts[ids] = steps.pop() if len(steps) == 1 and len(points) == len(ids) else None
        answers[ids] = f"layer outputs {[p - 1 for p in points]}"
    if not shifts:
        raise ValueError(str(reason))
    words = _in_words(shifts, n)
    refused = [ids for ids in answers if ids not in shifts]
    if words and refused:
        when = _when(refused, list(shifts), n)
        words = when and f"{words}; fails if {when}"
    return words or "; ".join(f"{list(ids)}: {answer}" for ids, answer in answers.items())


def _lists(n: int) -> list[tuple[int, ...]]:
    """Lists of distinct ids that tell the conditions in `_WHEN` apart, for a target of n ≥ 12 layers."""
    a, b = n // 3, 2 * n // 3
    ascending = [(2, a, b), (1, a, b), (0, a, b), (0, 1, b), (a, b), (1, b), (2, 3, a, b), (1, 2, a, b), (3, a, n - 2)]
    high = [(2, a, n - 1), (2, a, n), (1, a, n), (a, n)]
    others = [(a, 1, b), (b, 1), (b, a, 2), (a, 2, b), (b, a, 0), (a, n, 2), (n, a, 2), (n, 1, 2), (a, n - 1, 2)]
    return ascending + high + others


def _in_words(shifts: dict[tuple[int, ...], int | None], n: int) -> str | None:
    """Words for what each list was shifted by: one shift for all, or one with an exception that has a name."""
    found = sorted(set(shifts.values()), key=lambda s: -list(shifts.values()).count(s))
    names = [_SHIFTS.get(s, f"capture points {s:+d}") if s is not None else None for s in found]
    if None in names or len(found) > 2:
        return None
    if len(found) == 1:
        return names[0]
    usual = [ids for ids, s in shifts.items() if s == found[0]]
    when = _when([ids for ids in shifts if ids not in usual], usual, n)
    return when and f"{names[0]} unless {when}"


def _when(these: list[tuple[int, ...]], others: list[tuple[int, ...]], n: int) -> str | None:
    """The name of a condition that holds for `these` lists of ids and for none of the `others`."""
    for name, holds in _WHEN.items():
        if all(holds(ids, n) for ids in these) and not any(holds(ids, n) for ids in others):
            return name
    return None


def _no_ids(cls: type, config: SimpleNamespace) -> str:
    answers = {n: layer_stubs.ask(cls, plain_config.with_layers(config, n), None) for n in _DEPTHS}
    if len({len(points) for points in answers.values()}) == 1:
        terms = [_term({n: points[i] for n, points in answers.items()}) for i in range(len(answers[_DEPTHS[0]]))]
        if None not in terms:
            return f"capture points {', '.join(terms)}"
    return "; ".join(f"capture points {list(points)} for N = {n}" for n, points in answers.items())


def _term(values: dict[int, int]) -> str | None:
    """A formula in N for one capture point, given its value for some N: a number, N//2 or N with something added."""
    for base, of in (("", lambda n: 0), ("N//2", lambda n: n // 2), ("N", lambda n: n)):
        added = {value - of(n) for n, value in values.items()}
        if len(added) == 1:
            step = added.pop()
            return str(step) if not base else base + (f"{step:+d}" if step else "")
    return None
