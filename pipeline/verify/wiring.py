"""Wiring check: do the exported weights fit the declared slots better than the mistakes people make?

The dump keeps every layer output of a few held-out samples (the probes), so the drafter can be run on them under any
wiring. For each one: accuracy of the first draft against the target's argmax, and the loss, here the negative log
likelihood of that argmax. (The loss of training is a cross entropy against the target's softened distribution, which
changes with the teacher and then compares nothing.)

Accuracy does not always show an off-by-one. Samples are drawn anew with replacement, the same ones for both wirings; where
the interval of the difference holds zero, the table says "not distinguishable" and the live probe has to decide.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import log_softmax

from pipeline.dump.dump_checks import relative_error, rounding_bound
from pipeline.engines.engine import resolve_device
from pipeline.errors import PipelineError
from pipeline.manifest import Manifest
from pipeline.samples import read_samples, samples_file
from pipeline.standardize import full_vocabulary_argmax
from pipeline.store import FINAL_HIDDEN, layer_output
from pipeline.target import OutputHead, load_embedding, load_output_head
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.replay import ExportedDrafter, gated_rows
from pipeline.verify.states import EMBEDDING, describe

DECLARED, MISSING, DOUBLED = "declared", "norm missing", "norm doubled"
BETTER, WORSE, UNDECIDED = "better", "worse", "not distinguishable"
FEWEST = 10  # samples; an interval of fewer resampled ones means nothing
_ALL_ORDERS = 3  # slots up to which every permutation is tried; beyond, swaps of two, rotations and the reversal
_RESAMPLES = 10_000
_COVERAGE = 0.997  # of an interval: about 95 % for twenty of them together
# That another wiring fits better stops an export, so its interval allows for few samples: of 16, Student's t and the
# spread that resampling understates make it 1.23 times as wide, rounded up.
_CHARGE = 1.3


@dataclass(frozen=True)
class Wiring:
    """What the slots hold and what the loss learned from.

    Attributes:
        mistake: in words; "" for the declared wiring.
        sources: per fc slot a tensor of the probes, or `EMBEDDING`.
        teacher: DECLARED, or the final norm MISSING or DOUBLED.
    """

    mistake: str
    sources: tuple[str, ...]
    teacher: str = DECLARED

    def differs(self, declared: Wiring) -> str:
        """Only what is other than declared, e.g. "fc.1 = layer output 13"."""
        slots = [f"fc.{i} = {describe(s)}" for i, s in enumerate(self.sources) if s != declared.sources[i]]
        return ", ".join(slots + ([f"a teacher with the final {self.teacher}"] if self.teacher != DECLARED else []))


def wirings(layers: Sequence[int], num_layers: int) -> list[Wiring]:
    """The declared wiring first, then the mistakes, each once.

    Args:
        layers: layer outputs of the fc slots.
        num_layers: N of the target.
    """
    def shifted(by: Sequence[int]) -> tuple[str, ...] | None:
        moved = [layer + d for layer, d in zip(layers, by)]
        if not all(-1 <= layer < num_layers for layer in moved):
            return None
        return tuple(EMBEDDING if layer < 0 else layer_output(layer) for layer in moved)

    n, declared = len(layers), tuple(map(layer_output, layers))
    steps = {-1: "one layer early", 1: "one layer late"}
    found: list[tuple[str, tuple[str, ...] | None]] = []
    for d, words in steps.items():
        found += [(f"fc.{i} {words}", shifted([d * (j == i) for j in range(n)])) for i in range(n)]
    found += [(f"all slots {words}", shifted([d] * n)) for d, words in steps.items()]
    found += [(f"slots in the order {', '.join(map(str, order))}", tuple(declared[i] for i in order)) for order in _orders(n)]
    found.append(("embedding first", (EMBEDDING, *declared[:-1])))
    found.append(("final hidden last", (*declared[1:], FINAL_HIDDEN)))
    found.append(("final hidden in the last slot", (*declared[:-1], FINAL_HIDDEN)))
    teachers = [Wiring(f"the teacher's final {norm}", declared, norm) for norm in (MISSING, DOUBLED)]
    names = {sources: words for words, sources in reversed(found) if sources and sources != declared}
    return [Wiring("", declared), *teachers, *(Wiring(words, s) for s, words in reversed(names.items()))]


def _orders(n: int) -> list[tuple[int, ...]]:
    slots = tuple(range(n))
    if n <= _ALL_ORDERS:
        return list(itertools.permutations(slots))
    swaps = [tuple({a: b, b: a}.get(i, i) for i in slots) for a, b in itertools.combinations(slots, 2)]
    return [*swaps, *(slots[by:] + slots[:by] for by in slots[1:]), slots[::-1]]


# ---------------------------------------------------------------- the drafter on the probes


@dataclass
class Probe:
    """A probe sample whose states are read one by one.

    Attributes:
        ids: [T].
        rows: [R] rows that count at step 0.
    """

    id: str
    ids: Tensor
    rows: Tensor
    file: Any

    def state(self, name: str) -> Tensor:
        return self.file.get_tensor(f"{self.id}/{name}")


def read_probes(manifest: Manifest, run_dir: Path, most_rows: int | None = None) -> Iterator[Probe]:
    """The run's probe samples that have rows to draft from.

    Args:
        most_rows: of a sample, spread over it; None: all.

    Raises:
        PipelineError: the dump kept none.
    """
    dump = manifest.dump
    path = run_dir / "dump" / "probes.safetensors"
    if dump is None or not dump.probe_ids or not path.is_file():
        raise PipelineError("the dump kept no probe samples to try wirings on", field="dump.probe_ids",
                            value=dump and dump.probe_ids, fix='make dump ARGS="dump.probe_samples=16"')
    wanted = set(dump.probe_ids)
    masks = {s.id: s.loss_mask for s in read_samples(samples_file(run_dir)) if s.id in wanted}
    file = safe_open(path, framework="pt")  # mapped: a tensor is read when it is asked for
    for sample_id in dump.probe_ids:
        rows = torch.tensor(gated_rows(masks[sample_id], 0), dtype=torch.long)
        if most_rows is not None and len(rows) > most_rows:
            rows = rows[torch.linspace(0, len(rows) - 1, most_rows).round().long().unique()]
        if len(rows):
            yield Probe(sample_id, file.get_tensor(f"{sample_id}/input_ids").long(), rows, file)


def measure(drafter: ExportedDrafter, probe: Probe, tried: Sequence[Wiring], head: OutputHead, *, pre_norm: bool,
            last_layer: int) -> Tensor:
    """Counts of one probe under every wiring: [W, 4] float64: hits, rows, loss in nats, rows the loss is over.

    Args:
        pre_norm: the dump's final hidden has no norm yet.
        last_layer: N-1, whose output is the state before the norm.
    """
    before, final = (probe.state(name)[probe.rows + 1].to(head.weight.device)
                     for name in (layer_output(last_layer), FINAL_HIDDEN))
    final = head.norm(final) if pre_norm else final
    teachers = {DECLARED: final, MISSING: before, DOUBLED: head.norm(final)}
    device = drafter.device
    answers = {name: full_vocabulary_argmax(state, head).long().to(device) for name, state in teachers.items()}
    draft_ids = torch.full((len(drafter.embedding),), -1, device=device)
    draft_ids[drafter.target_id] = torch.arange(len(drafter.target_id), device=device)
    ids, rows, counts, done, logits = probe.ids.to(device), probe.rows.to(device), [], None, torch.empty(0)
    for wiring in tried:
        if wiring.sources != done:  # wirings that differ in the teacher alone follow one another
            slots = [drafter.embedding[ids] if s == EMBEDDING else probe.state(s).to(device) for s in wiring.sources]
            features = torch.cat([s.float() for s in slots], -1)
            logits = drafter.forced_logits(ids, drafter.fuse(features[:-1]), rows, 1)[:, 0]
            done = wiring.sources
        counts.append(_count(logits, draft_ids[answers[wiring.teacher]]))
    return torch.tensor(counts, dtype=torch.float64)


def _count(logits: Tensor, answer: Tensor) -> tuple[int, int, float, int]:
    """`logits` [R, draft vocabulary], `answer` [R] draft ids, -1 outside: a miss that the loss leaves out."""
    inside = answer >= 0
    likelihood = log_softmax(logits[inside], -1).gather(1, answer[inside, None])
    return int((logits.argmax(-1) == answer).sum()), len(answer), -float(likelihood.sum()), int(inside.sum())


# ---------------------------------------------------------------- which differences are more than noise


@dataclass(frozen=True)
class Difference:
    """A wiring's accuracy or loss less the declared one's, with the interval of resampled samples."""

    value: float
    low: float
    high: float

    def sign(self, wider: float = 1.0) -> int:
        """1 and -1 where the interval, made so many times as wide, lies on one side of zero, else 0."""
        low, high = (self.value + wider * (end - self.value) for end in (self.low, self.high))
        return int(low > 0) - int(high < 0)


def differences(part: Tensor, whole: Tensor, *, seed: int = 0) -> list[Difference]:
    """Of the ratio Σ part / Σ whole of every wiring to that of the first one.

    Args:
        part, whole: [W, S] float64, per wiring and sample.
    """
    samples = part.shape[1]
    drawn = torch.randint(samples, (_RESAMPLES, samples), generator=torch.Generator().manual_seed(seed))
    times = torch.zeros(_RESAMPLES, samples, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(_RESAMPLES, samples, dtype=torch.float64))
    resampled = (times @ part.T) / (times @ whole.T).clamp(min=1)  # [B, W]
    resampled = resampled - resampled[:, :1]
    tail = (1 - _COVERAGE) / 2
    low, high = torch.quantile(resampled, torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
    value = part.sum(1) / whole.sum(1).clamp(min=1)
    return [Difference(*map(float, numbers)) for numbers in zip(value - value[0], low, high)]


def verdict(accuracy: Difference, loss: Difference) -> str:
    """What the two differences say. The loss is the finer measure, but an overconfident drafter's loss falls when noise is
    fed to it, so that it decides only where the accuracy does not point the other way."""
    better = accuracy.sign(_CHARGE) > 0 or (loss.sign(_CHARGE) < 0 and accuracy.value > 0)
    worse = accuracy.sign() < 0 or (loss.sign() > 0 and accuracy.value < 0)
    return BETTER if better else WORSE if worse else UNDECIDED


# ---------------------------------------------------------------- the check


def wiring_check(subject: Subject) -> CheckResult:
    """The table. A wiring that fits significantly better than the declared one is a problem that names it."""
    manifest, device = subject.manifest, resolve_device(subject.config.device)
    pre_norm, last = manifest.slots["teacher"].norm == "pre", manifest.target.num_layers - 1
    tried = wirings(manifest.fc_layers(), manifest.target.num_layers)
    drafter = ExportedDrafter(subject.draft, load_embedding(subject.target), device)
    head = load_output_head(subject.target).to(device)
    counts, problems, ids = [], [], []
    for probe in read_probes(manifest, subject.run_dir):
        counts.append(measure(drafter, probe, tried, head, pre_norm=pre_norm, last_layer=last))
        ids.append(probe.id)
        if not problems:
            problems += _norm_problem(probe, head, pre_norm=pre_norm, last_layer=last)
    if not counts:
        raise PipelineError("no probe sample has a row to draft from", field="dump.probe_ids",
                            value=manifest.dump.probe_ids, fix='make dump ARGS="dump.probe_samples=16"')
    hits, rows, loss, loss_rows = torch.stack(counts, 1).unbind(-1)  # [W, S] each
    table = _table(tried, hits, rows, loss, loss_rows)
    declared, others = table[0], table[1:]
    by_verdict = {v: [row for row in others if row["verdict"] == v] for v in (BETTER, WORSE, UNDECIDED)}
    if better := sorted(by_verdict[BETTER], key=lambda row: row["loss"]):
        best, more = better[0], f"; so do {len(better) - 1} other wirings" if better[1:] else ""
        problems.append(
            f"the weights fit {best['wiring']} better than the declared {_declared(tried, best)}: accuracy "
            f"{best['accuracy']:.4f} against {declared['accuracy']:.4f}, loss {best['loss']:.3f} against "
            f"{declared['loss']:.3f}{more}")
    return CheckResult(
        measured={"table": table, "probe_samples": len(ids), "probe_rows": int(rows[0].sum()), "coverage": _COVERAGE,
                  "declared_accuracy": declared["accuracy"], "declared_loss": declared["loss"],
                  **{f"mistakes_{v.replace(' ', '_')}": len(found) for v, found in by_verdict.items()}},
        summary=f"accuracy {declared['accuracy']:.3f}, loss {declared['loss']:.3f} as declared ({int(rows[0].sum())} rows "
                f"of {len(ids)} probe samples); of {len(others)} mistakes {len(by_verdict[WORSE])} are worse, "
                f"{len(by_verdict[UNDECIDED])} not distinguishable, {len(by_verdict[BETTER])} better",
        problems=problems, notes=_notes(tried, table, len(ids)))


def _table(tried: Sequence[Wiring], hits: Tensor, rows: Tensor, loss: Tensor, loss_rows: Tensor) -> list[dict[str, Any]]:
    accuracies, losses = differences(hits, rows), differences(loss, loss_rows)
    few = hits.shape[1] < FEWEST
    return [
        {
            "mistake": wiring.mistake or "declared", "wiring": wiring.differs(tried[0]) or _all(wiring),
            "accuracy": float(hits[w].sum() / rows[w].sum()),
            "loss": float(loss[w].sum() / loss_rows[w].sum().clamp(min=1)),
            "accuracy_difference": vars(accuracies[w]), "loss_difference": vars(losses[w]),
            "verdict": DECLARED if w == 0 else UNDECIDED if few else verdict(accuracies[w], losses[w]),
        }
        for w, wiring in enumerate(tried)
    ]


def _notes(tried: Sequence[Wiring], table: Sequence[dict[str, Any]], samples: int) -> list[str]:
    """What the table cannot tell, and what can."""
    notes, slots = [], len(tried[0].sources)
    undecided = [wiring for wiring, row in zip(tried, table) if row["verdict"] == UNDECIDED]
    if samples < FEWEST:
        notes.append(f"{samples} probe samples are too few to tell wirings apart: make dump "
                     'ARGS="dump.probe_samples=16"; the live probe decides about the slots')
    else:
        if of_slots := [w.mistake for w in undecided if w.teacher == DECLARED]:
            notes.append(f"not distinguishable by accuracy: {'; '.join(of_slots)}; the live probe decides")
        if of_teacher := [w.mistake for w in undecided if w.teacher != DECLARED]:
            notes.append(f"not distinguishable by accuracy: {'; '.join(of_teacher)}; whether the dumped final hidden has "
                         "its norm once is decided by comparing it with the last layer's output, which was done")
    if slots > _ALL_ORDERS:
        notes.append(f"of the orders of {slots} slots, swaps of two, the rotations and the reversal are tried, no others")
    return notes


def _norm_problem(probe: Probe, head: OutputHead, *, pre_norm: bool, last_layer: int) -> list[str]:
    """Whether the dumped final hidden has the norm that the manifest says: it is compared with the last layer's output."""
    final, before = (probe.state(name).to(head.weight.device) for name in (FINAL_HIDDEN, layer_output(last_layer)))
    once = head.norm(before)
    states = {"before it": before, "after it": once, "after it was applied twice": head.norm(once)}
    errors = {words: relative_error(final, state) for words, state in states.items()}
    declared, nearest = "before it" if pre_norm else "after it", min(errors, key=errors.get)
    bound = rounding_bound(final.dtype)
    if errors[declared] <= bound:
        return []
    says = f"the manifest says {declared} (relative error {errors[declared]:.0e})"
    if errors[nearest] <= bound:
        return [f"slot teacher holds the final hidden {nearest.replace('it', 'the final norm', 1)} (relative error "
                f"{errors[nearest]:.0e}); {says}"]
    return [f"slot teacher is not the last layer's output, neither before the final norm nor after it, once or twice; {says}"]


def _all(wiring: Wiring) -> str:
    return ", ".join(f"fc.{i} = {describe(s)}" for i, s in enumerate(wiring.sources))


def _declared(tried: Sequence[Wiring], row: dict[str, Any]) -> str:
    """What is declared where `row` differs, e.g. "layer output 14"."""
    wiring = next(w for w in tried if w.mistake == row["mistake"])
    if wiring.teacher != DECLARED:
        return "one"
    other = [i for i, (a, b) in enumerate(zip(wiring.sources, tried[0].sources)) if a != b]
    return ", ".join(describe(tried[0].sources[i]) for i in other)
