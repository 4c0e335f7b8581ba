"""What a search over wirings shows, and what it does not: margins over resampled samples, and "undetermined".

Two questions come before any margin. Does the drafter, wired as fits best, know anything? It must beat a guess that reads
nothing: the other samples' mean distribution, and their most frequent token. And does another hypothesis fit as well?
Samples are drawn anew with replacement, the same ones for both; where the interval of the difference reaches zero, every
slot in which the two differ is undetermined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline.diagnose.foreign_drafter import Reading
from pipeline.diagnose.wiring_search import Found, FusedStates, Hypothesis, Scores, Variant, divergences, variant_of
from pipeline.verify.wiring import FEWEST, Difference, differences

_FLOOR = 0.01  # share of an even distribution in the guess that reads nothing
_SMALLEST = 0.02  # of what the drafter knows: a switch that matters less is not told from how well the drafter was trained


@dataclass
class Ranked:
    """A hypothesis scored on every probe, against the best one of the same variant (whose differences are zero)."""

    wiring: tuple[str, ...]
    variant: Variant
    divergence: float
    """nats per row"""
    accuracy: float
    behind: Difference
    """nats per row; above zero: worse than the best"""
    hits_behind: Difference
    """accuracy less the best one's; below zero: worse than the best"""

    @property
    def worse(self) -> bool:
        """Clearly worse than the best: the divergence says so and the accuracy does not say the opposite."""
        return self.behind.sign() > 0 and self.hits_behind.sign() <= 0


@dataclass
class SlotVerdict:
    """What one slot reads."""

    best: str
    determined: bool
    runner_up: str
    margin: Difference
    """nats per row by which the runner-up, in this slot alone or with others, is worse"""
    also_possible: list[str] = field(default_factory=list)
    ruled_out: dict[str, float] = field(default_factory=dict)
    """candidates that left the race early → standard errors behind"""


@dataclass
class Switch:
    """A switch of the drafter's forward. Where the evidence does not determine it, what the files say holds."""

    value: bool
    stated: bool | None
    """what config.json and the weights say; None: nothing"""
    determined: bool
    margin: Difference | None
    """by how much the other setting is worse; None: there was nothing to compare, e.g. a norm whose weights are not there"""

    @classmethod
    def of(cls, fits: bool, stated: bool | None, determined: bool, margin: Difference | None) -> Switch:
        return cls(fits if determined or stated is None else stated, stated, determined, margin)

    @property
    def known(self) -> bool:
        return self.determined or self.stated is not None


@dataclass
class Verdict:
    """The outcome of a diagnosis.

    Attributes:
        why_undetermined: reasons for which nothing is known, whatever the slots say; empty if the drafter knows something.
        reading: of the vocabulary maps, with the divergence under each reading.
    """

    slots: list[SlotVerdict]
    switches: dict[str, Switch]
    ranked: list[Ranked]
    reading: Reading
    readings: dict[str, float]
    guess: dict[str, float]
    samples: int
    rows: int
    why_undetermined: list[str] = field(default_factory=list)

    @property
    def determined(self) -> bool:
        return (not self.why_undetermined and all(slot.determined for slot in self.slots)
                and all(switch.known for switch in self.switches.values()))

    def as_json(self) -> dict[str, Any]:
        reading = {"name": self.reading.name, "problems": list(self.reading.problems)}
        return {"determined": self.determined, **dataclasses.asdict(dataclasses.replace(self, reading=None)), "reading": reading}


def judge(scores: Scores, found: Found, readings: Sequence[Reading], *, stated: dict[str, bool | None]) -> Verdict:
    """Margins of everything that was scored on all probes.

    Args:
        stated: what config.json says of each switch; None: nothing.
    """
    samples, reading = len(scores.probes), found.reading
    bests = _compare(scores, reading, [found.best, *(h for h in found.best_of_variant.values() if h != found.best)])
    # A switch that is in doubt must not put the slots in doubt: wirings are compared under the same switches.
    groups = {r.variant: _compare(scores, reading, [Hypothesis(r.wiring, r.variant), *(
        h for h in scores.complete() if h.variant == r.variant and h.wiring != r.wiring)]) for r in bests if not r.worse}
    guess_nats, guess_hits = guess_that_reads_nothing(scores, reading)
    knows = float((guess_nats - scores.divergence(found.best, reading, samples)).sum() / scores.rows.sum())
    smallest = _SMALLEST * max(knows, 0.0)
    by_reading = {readings[r].name: float(scores.divergence(found.best, r, samples).sum() / scores.rows.sum())
                  for r in range(len(readings))}
    return Verdict(
        slots=[_slot(slot, groups, found) for slot in range(len(found.best.wiring))],
        switches=_switches(scores, found, bests, stated, smallest), ranked=groups[found.best.variant], reading=readings[reading],
        readings=by_reading,
        guess={"divergence": float(guess_nats.sum() / scores.rows.sum()),
               "accuracy": float(guess_hits.sum() / scores.rows.sum())},
        samples=samples, rows=int(scores.rows.sum()),
        why_undetermined=_evidence(scores.rows, scores.divergence(found.best, reading, samples),
                                   scores.hits(found.best, reading, samples), guess_nats, guess_hits))


def _compare(scores: Scores, reading: int, hypotheses: Sequence[Hypothesis]) -> list[Ranked]:
    """The first one, and then the others, best first, with their differences from it."""
    samples, total = len(scores.probes), scores.rows.sum()
    nats = torch.stack([scores.divergence(h, reading, samples) for h in hypotheses])
    hits = torch.stack([scores.hits(h, reading, samples) for h in hypotheses])
    rows = scores.rows.expand_as(hits)
    ranked = [Ranked(h.wiring, h.variant, float(n.sum() / total), float(k.sum() / total), behind, off)
              for h, n, k, behind, off in zip(hypotheses, nats, hits, differences(nats, rows), differences(hits, rows))]
    return [ranked[0], *sorted(ranked[1:], key=lambda r: r.divergence)]


def guess_that_reads_nothing(scores: Scores, reading: int) -> tuple[Tensor, Tensor]:
    """Per sample: divergence of the other samples' mean distribution in nats, and hits of their most frequent answer."""
    sums, entropy, answers = [], [], []
    for s in range(len(scores.probes)):
        teachers, answer = scores.teachers(s)
        p = teachers[reading].double()
        sums.append(p.sum(0).cpu())
        entropy.append(float(-(p * p.clamp_min(1e-30).log()).sum()))
        answers.append(answer.cpu())
    total, everything = torch.stack(sums).sum(0), torch.cat(answers)
    counts = torch.bincount(everything)
    nats, hits = [], []
    for own, h, answer in zip(sums, entropy, answers):
        others = total - own
        q = (1 - _FLOOR) * others / others.sum().clamp_min(1e-9) + _FLOOR / len(others)
        nats.append(float(-(own * q.log()).sum()) - h)
        others_answers = counts - torch.bincount(answer, minlength=len(counts))
        hits.append(float((answer == others_answers.argmax()).sum()))
    return torch.tensor(nats, dtype=torch.float64), torch.tensor(hits, dtype=torch.float64)


def _evidence(rows: Tensor, nats: Tensor, hits: Tensor, guess_nats: Tensor, guess_hits: Tensor) -> list[str]:
    if len(rows) < FEWEST:
        return [f"{len(rows)} samples with drafts are too few to tell anything from chance; at least {FEWEST} are needed"]
    reasons = []
    both = rows.expand(2, -1)
    if differences(torch.stack([guess_nats, nats]), both)[1].sign() >= 0:
        reasons.append(f"the best wiring is {float(nats.sum() / rows.sum()):.2f} nats per row from the target, a guess that "
                       f"reads nothing {float(guess_nats.sum() / rows.sum()):.2f}")
    if differences(torch.stack([guess_hits, hits]), both)[1].sign() <= 0:
        reasons.append(f"the best wiring is right on {float(hits.sum() / rows.sum()):.1%} of the rows, the most frequent "
                       f"token on {float(guess_hits.sum() / rows.sum()):.1%}")
    return reasons


def _slot(slot: int, groups: dict[Variant, list[Ranked]], found: Found) -> SlotVerdict:
    best = found.best.wiring[slot]
    possible = list(dict.fromkeys(r.wiring[slot] for ranked in groups.values() for r in ranked
                                  if r.wiring[slot] != best and not r.worse))
    others = [r for r in groups[found.best.variant] if r.wiring[slot] != best]
    nearest = min(others, key=lambda r: (r.worse, r.behind.value))
    return SlotVerdict(best, not possible, nearest.wiring[slot], nearest.behind, possible, found.ruled_out[slot])


def _switches(scores: Scores, found: Found, bests: Sequence[Ranked], stated: dict[str, bool | None],
              smallest: float) -> dict[str, Switch]:
    switches = {}
    for name in ("norm_before_residual", "fc_norm", "norm_before_fc"):
        value = getattr(found.best.variant, name)
        other = dataclasses.replace(found.best.variant, **{name: not value})
        against = next((r for r in bests if r.variant == other), None)
        determined = against is None or (against.worse and against.behind.value >= smallest)
        switches[name] = Switch.of(value, stated.get(name), determined, against and against.behind)
    return switches | {"norm_output": _norm_output(scores, found.best, found.reading, stated.get("norm_output"), smallest)}


@torch.inference_mode()
def _norm_output(scores: Scores, best: Hypothesis, reading: int, stated: bool | None, smallest: float) -> Switch:
    """Whether the second step is fed the hidden after the final norm."""
    nats: dict[bool, list[float]] = {False: [], True: []}
    rows_of = []
    for s, probe in enumerate(scores.probes):
        ahead = probe.rows + 3 < len(probe.ids)
        rows = probe.rows[ahead]
        if not len(rows):
            continue
        teachers, _ = scores.teachers(s, step=1)
        p = teachers[reading][ahead.to(teachers[reading].device)]
        fused = FusedStates(scores.drafter, probe)(best.wiring, best.variant)
        rows_of.append(len(rows))
        for value in (False, True):
            drafter = variant_of(scores.drafter, best.variant, norm_output=value)
            ids = probe.ids.to(drafter.device)
            logits = drafter.forced_logits(ids, fused, rows.to(drafter.device), 2)[:, 1]
            entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
            nats[value].append(float(divergences(logits, [p], [entropy])[0][0]))
    table = {value: torch.tensor(found, dtype=torch.float64) for value, found in nats.items()}
    value = bool(table[True].sum() < table[False].sum())
    if not rows_of:
        return Switch.of(False, stated, False, None)
    rows = torch.tensor(rows_of, dtype=torch.float64).expand(2, -1)
    margin = differences(torch.stack([table[value], table[not value]]), rows)[1]
    return Switch.of(value, stated, margin.sign() > 0 and margin.value >= smallest, margin)
