"""Which states of the target does a drafter's fc expect? A search over wirings, without trying all of them.

fc is linear: fc([h_0 | h_1 | …]) = Σ_s W_s h_s. So per sample each product of a slot with a candidate state is computed
once, and a wiring costs one sum and the drafter's layer. Candidates for every slot are the embedding, every layer output
and the final hidden. The search is coordinate ascent: from the best of a coarse grid, which holds every order of its
layers, one slot is changed at a time to the candidate that fits best, until no change of a slot and no exchange of two
helps. It starts on few samples; the more there are, the fewer candidates are left: one that is clearly worse than the best
is not tried again (a race: Maron & Moore 1994, "Hoeffding races").

How well a wiring fits is the divergence of the drafter's first step from the target's distribution over the draft
vocabulary, KL(target | drafter) in nats per row, at the best of a few temperatures: an overconfident drafter becomes
"better" when noise is fed to it, and a temperature takes that away.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.standardize import full_vocabulary_argmax
from pipeline.store import FINAL_HIDDEN
from pipeline.target import OutputHead
from pipeline.verify.replay import ExportedDrafter
from pipeline.verify.states import EMBEDDING
from pipeline.verify.wiring import Probe

TEMPERATURES = (1.0, 1.6, 2.6)
_FIRST = 6  # samples of the coarse grid and of the first climb
_STARTS = 2
_GRID = 120  # most wirings of the coarse grid
_RULED_OUT = 5.0  # standard errors behind the best
_KEPT = 3  # candidates per slot that stay in the race whatever they score: margins are measured against them
_TOGETHER = 2  # candidates per slot whose combinations are all tried at the end; as many combinations as _JOINT at most
_JOINT = 32
_NUMBERS = 1 << 27  # most numbers held of a kind (products of fc with a sample's states, teachers): 512 MiB


@dataclass(frozen=True)
class Variant:
    """Switches that change what the first step computes."""

    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False


@dataclass(frozen=True)
class Hypothesis:
    wiring: tuple[str, ...]
    """per fc slot the name of a candidate state"""
    variant: Variant

    def changed(self, slot: int, candidate: str) -> Hypothesis:
        return Hypothesis((*self.wiring[:slot], candidate, *self.wiring[slot + 1 :]), self.variant)

    def exchanged(self, a: int, b: int) -> Hypothesis:
        wiring = list(self.wiring)
        wiring[a], wiring[b] = wiring[b], wiring[a]
        return Hypothesis(tuple(wiring), self.variant)


class Scores:
    """What hypotheses score on each probe sample; computed when first asked for.

    Args:
        drafter: its `target_id` is not looked at: `readings` say what a draft id means.
        head: the target's output head, on the drafter's device.
        readings: per reading of the vocabulary maps the target id of every draft id, [Vd].
    """

    def __init__(self, drafter: ExportedDrafter, probes: Sequence[Probe], head: OutputHead, readings: Sequence[Tensor]):
        self.drafter, self.probes, self.head = drafter, probes, head
        self.readings = [ids.to(drafter.device) for ids in readings]
        self._head_rows = [head.weight[ids].float() for ids in self.readings]
        self.rows = torch.tensor([len(p.rows) for p in probes], dtype=torch.float64)
        self.evaluations = 0
        # Per hypothesis [S, R, 1 + temperatures]: hits, and the divergence summed over rows; NaN where not computed.
        self._found: dict[Hypothesis, Tensor] = {}
        self._teachers: dict[tuple[int, int], tuple[list[Tensor], Tensor]] = {}

    def compute(self, hypotheses: Iterable[Hypothesis], samples: int) -> None:
        """Score hypotheses on the first `samples` probes, one probe after the other."""
        todo = [h for h in dict.fromkeys(hypotheses) if self._done(h) < samples]
        for h in todo:
            self._found.setdefault(
                h, torch.full((len(self.probes), len(self.readings), 1 + len(TEMPERATURES)), float("nan"), dtype=torch.float64))
        first = min((self._done(h) for h in todo), default=samples)
        for s in range(first, samples):
            if missing := [h for h in todo if self._found[h][s, 0, 0].isnan()]:
                self._score_sample(s, missing)

    def divergence(self, h: Hypothesis, reading: int, samples: int) -> Tensor:
        """[samples] nats summed over each sample's rows, at the temperature that fits all of them best."""
        self.compute([h], samples)
        nats = self._found[h][:samples, reading, 1:]
        return nats[:, nats.sum(0).argmin()]

    def hits(self, h: Hypothesis, reading: int, samples: int) -> Tensor:
        self.compute([h], samples)
        return self._found[h][:samples, reading, 0]

    def complete(self) -> list[Hypothesis]:
        """Hypotheses that were scored on every probe."""
        return [h for h in self._found if self._done(h) == len(self.probes)]

    def _done(self, h: Hypothesis) -> int:
        return 0 if h not in self._found else int((~self._found[h][:, 0, 0].isnan()).sum())

    @torch.inference_mode()
    def _score_sample(self, s: int, hypotheses: Sequence[Hypothesis]) -> None:
        probe, device = self.probes[s], self.drafter.device
        ids, rows = probe.ids.to(device), probe.rows.to(device)
        teachers, answer = self.teachers(s)
        entropies = [-(p * p.clamp_min(1e-30).log()).sum(-1) for p in teachers]
        fused = FusedStates(self.drafter, probe)
        for h in hypotheses:
            drafter = variant_of(self.drafter, h.variant)
            logits = drafter.forced_logits(ids, fused(h.wiring, h.variant), rows, 1)[:, 0]
            found = [torch.cat([(target_id[logits.argmax(-1)] == answer).sum()[None].double(), nats])
                     for target_id, nats in zip(self.readings, divergences(logits, teachers, entropies))]
            self._found[h][s] = torch.stack(found).cpu()
            self.evaluations += 1

    def teachers(self, s: int, step: int = 0) -> tuple[list[Tensor], Tensor]:
        """Of one probe: per reading the target's distribution [N, Vd] over the draft vocabulary, and its argmax [N]."""
        if (s, step) in self._teachers:
            return self._teachers[s, step]
        probe, last = self.probes[s], len(self.probes[s].ids) - 1
        final = probe.state(FINAL_HIDDEN)[(probe.rows + 1 + step).clamp(max=last)].to(self.drafter.device)
        teachers = [torch.softmax(self.head.finish(final.float() @ weight.T), -1) for weight in self._head_rows]
        found = teachers, full_vocabulary_argmax(final, self.head).long().to(self.drafter.device)
        if sum(p.numel() for kept, _ in self._teachers.values() for p in kept) < _NUMBERS:
            self._teachers[s, step] = found
        return found


def divergences(logits: Tensor, teachers: Sequence[Tensor], entropies: Sequence[Tensor]) -> list[Tensor]:
    """KL(teacher | softmax(logits / t)) summed over rows for every temperature t, per teacher [temperatures]."""
    partition = torch.stack([torch.logsumexp(logits / t, -1) for t in TEMPERATURES])  # [temperatures, N]
    scale = logits.new_tensor(TEMPERATURES)[:, None]
    return [(partition - (p * logits).sum(-1) / scale - h).double().sum(-1) for p, h in zip(teachers, entropies)]


def variant_of(drafter: ExportedDrafter, variant: Variant, *, norm_output: bool = False) -> ExportedDrafter:
    """The same weights with other switches; fc and its norms are left to `FusedStates`."""
    other = copy.copy(drafter)
    other.config = drafter.config | {"norm_before_residual": variant.norm_before_residual, "norm_output": norm_output}
    return other


class FusedStates:
    """fc's output for one sample under any wiring. A product of a slot with a state is computed once.

    With `norm_before_fc` one RMS spans all slots: (Σ_s W_s (w_s ⊙ h_s)) · rsqrt(mean(h²) + ε), so that sums of products and
    of squares suffice there as well.
    """

    def __init__(self, drafter: ExportedDrafter, probe: Probe):
        self.drafter, self.probe = drafter, probe
        self._products: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._held = 0

    def __call__(self, wiring: Sequence[str], variant: Variant) -> Tensor:
        """[T-1, H]"""
        parts = [self._product(slot, name, variant) for slot, name in enumerate(wiring)]
        total = torch.stack([p for p, _ in parts]).sum(0)
        if variant.norm_before_fc and not variant.fc_norm:
            mean_square = torch.stack([q for _, q in parts]).mean(0)
            total = total * torch.rsqrt(mean_square + self.drafter.config["rms_norm_eps"])
        return total

    def _product(self, slot: int, name: str, variant: Variant) -> tuple[Tensor, Tensor]:
        """W_s h [T-1, H] and the mean square of h [T-1, 1]."""
        key = (slot, name, variant.fc_norm, variant.norm_before_fc)
        if key in self._products:
            self._products[key] = self._products.pop(key)  # last to leave: slots that stay while one is changed
        else:
            state, weights = self._state(name), self.drafter.weights
            width, eps = state.shape[-1], self.drafter.config["rms_norm_eps"]
            mean_square = state.square().mean(-1, keepdim=True)
            if variant.norm_before_fc:
                state = state * weights["input_norm.weight"][slot * width : (slot + 1) * width]
            if variant.fc_norm:  # a common factor before it, as of norm_before_fc, drops out
                state = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + eps) * weights[f"fc_norm.{slot}.weight"]
            product = state @ weights["fc.weight"][:, slot * width : (slot + 1) * width].T
            while self._products and self._held + product.numel() > _NUMBERS:
                self._held -= self._products.pop(next(iter(self._products)))[0].numel()
            self._products[key] = (product, mean_square)
            self._held += product.numel()
        return self._products[key]

    def _state(self, name: str) -> Tensor:
        ids = self.probe.ids.to(self.drafter.device)
        state = self.drafter.embedding[ids] if name == EMBEDDING else self.probe.state(name).to(self.drafter.device)
        return state[:-1].float()


# ---------------------------------------------------------------- the search


@dataclass
class Found:
    """What the search ended with.

    Attributes:
        best: the hypothesis that fits best, `reading` the reading of the maps it was found under.
        best_of_variant: the best wiring under every variant; far behind, it was not searched for beyond `best`'s wiring.
        ruled_out: per slot the candidates that were clearly worse on fewer samples → standard errors behind.
    """

    best: Hypothesis
    reading: int
    ruled_out: list[dict[str, float]] = field(default_factory=list)
    best_of_variant: dict[Variant, Hypothesis] = field(default_factory=dict)


def search(scores: Scores, slots: int, candidates: Sequence[str], variants: Sequence[Variant],
           guesses: Iterable[tuple[str, ...]] = ()) -> Found:
    """Find the hypothesis that fits best; around it every hypothesis that was close is scored on all probes.

    Args:
        candidates: names of states, the layer outputs ascending.
        guesses: wirings to start from beside the grid, such as what the ids in a config can mean.
    """
    everything = len(scores.probes)
    samples = min(_FIRST, everything)
    wirings = dict.fromkeys([*_grid(candidates, slots), *guesses])
    grid = [Hypothesis(w, v) for v in variants for w in wirings]
    scores.compute(grid, samples)
    ranked = sorted(((float(scores.divergence(h, r, samples).sum()), h, r) for h in grid for r in range(len(scores.readings))),
                    key=lambda entry: entry[0])
    reading = ranked[0][2]
    starts = [h for _, h, r in ranked if r == reading][:_STARTS]
    alive = [list(candidates) for _ in range(slots)]
    best = min((_climb(scores, start, reading, samples, alive) for start in starts),
               key=lambda h: float(scores.divergence(h, reading, samples).sum()))
    found = Found(best, reading, [{} for _ in range(slots)])
    while True:
        _rule_out(scores, found, alive, samples)
        if samples == everything:
            break
        samples = min(2 * samples, everything)
        found.best = _climb(scores, found.best, reading, samples, alive)
    together = itertools.islice(itertools.product(*(names[:_TOGETHER] for names in alive)), _JOINT)
    jointly = [found.best, *(Hypothesis(w, found.best.variant) for w in together)]
    scores.compute(jointly, everything)
    found.best = min(jointly, key=lambda h: float(scores.divergence(h, reading, everything).sum()))
    for variant in variants:
        h = Hypothesis(found.best.wiring, variant)
        near = _behind(scores, h, found, everything) < _RULED_OUT
        found.best_of_variant[variant] = _climb(scores, h, reading, everything, alive) if near else h
    found.best = min(found.best_of_variant.values(), key=lambda h: float(scores.divergence(h, reading, everything).sum()))
    return found


def _grid(candidates: Sequence[str], slots: int) -> list[tuple[str, ...]]:
    """Wirings of layers spread over the target, in every order or, where these are too many, in some of them."""
    layers = [c for c in candidates if c not in (EMBEDDING, FINAL_HIDDEN)]
    levels = min(len(layers), max(5, slots + 1))
    spread = sorted({round((i + 0.5) * len(layers) / levels - 0.5) for i in range(levels)})
    orders = list(itertools.permutations([layers[i] for i in spread], slots))
    return orders if len(orders) <= _GRID else random.Random(0).sample(orders, _GRID)


def _climb(scores: Scores, start: Hypothesis, reading: int, samples: int, alive: Sequence[Sequence[str]]) -> Hypothesis:
    """The best hypothesis that single changes and exchanges lead to."""

    def best_of(hypotheses: list[Hypothesis]) -> Hypothesis:
        scores.compute(hypotheses, samples)
        return min(hypotheses, key=lambda h: float(scores.divergence(h, reading, samples).sum()))

    now, before = start, None
    while now != before:
        before = now
        for slot, names in enumerate(alive):
            now = best_of([now, *(now.changed(slot, name) for name in names)])
        now = best_of([now, *(now.exchanged(a, b) for a, b in itertools.combinations(range(len(alive)), 2))])
    return now


def _rule_out(scores: Scores, found: Found, alive: list[list[str]], samples: int) -> None:
    """Leave in every slot the candidates that are not clearly worse than the best one, nearest first."""
    for slot, names in enumerate(alive):
        behind = {name: _behind(scores, found.best.changed(slot, name), found, samples) for name in names}
        names.sort(key=lambda name: behind[name])
        for name in [n for n in names[_KEPT:] if behind[n] > _RULED_OUT]:
            names.remove(name)
            found.ruled_out[slot][name] = behind[name]


def _behind(scores: Scores, h: Hypothesis, found: Found, samples: int) -> float:
    """By how many standard errors over samples `h` fits worse than the best."""
    difference = (scores.divergence(h, found.reading, samples) - scores.divergence(found.best, found.reading, samples))
    if samples < 2 or not difference.any():
        return 0.0
    return float(difference.mean() / (difference.std() / samples**0.5).clamp_min(1e-12))
