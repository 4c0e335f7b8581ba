"""Replay check: the exported files on held-out samples, against the trainer's validation of the weights it kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.engines.engine import resolve_device
from pipeline.errors import PipelineError
from pipeline.files import read_json, sha256_text
from pipeline.manifest import Manifest
from pipeline.samples import read_samples, samples_file
from pipeline.standardize import dump_shards, full_vocabulary_argmax
from pipeline.store import HiddenStore
from pipeline.target import Target, load_embedding, load_output_head
from pipeline.train.metrics import TAU_STEPS
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.replay import Accuracy, ExportedDrafter, gated_rows, teacher_forced_accuracy

_ROUNDING = {"fp32": 0.001, "bf16": 0.015}
"""Precision of the trainer's validation → how far an accuracy replayed in fp32 may lie from it."""
_FLIPS = 2  # rows that may fall the other way by rounding: on few rows one is much


def replay_check(subject: Subject) -> CheckResult:
    """Accuracy and accepted prefixes of every step, equal to the trainer's within rounding.

    The trainer validates on all held-out samples. Replayed on all of them, only rounding may differ; on
    `verify.replay_samples` of them, three standard errors of such a choice are allowed as well.

    Raises:
        PipelineError: there is no trainer's validation to compare with, or the files cannot be replayed.
    """
    config, manifest, run_dir = subject.config, subject.manifest, subject.run_dir
    trained = manifest.stages["train"].metrics if "train" in manifest.stages else {}
    if "heldout_accuracy" not in trained:
        raise PipelineError(
            "this run has no trainer's validation to compare a replay with",
            field="stages.train.metrics.heldout_accuracy",
            value="absent",
            fix='make verify ARGS="verify.checks=[files,wiring,live,serve]"',
        )
    device = resolve_device(config.device)
    drafter = ExportedDrafter(subject.draft, load_embedding(subject.target), device)
    steps = len(trained["heldout_accuracy"])  # the TTT steps of the training, at least 3
    heldout = len(read_json(run_dir / "standardize" / "split.json", fix="make standardize")["heldout"])
    count = min(config.verify.replay_samples or heldout, heldout)
    samples = teacher_forced_samples(subject.target, manifest, run_dir, "heldout", count=count, device=device)
    found = teacher_forced_accuracy(drafter, samples, steps)
    coarse = "bf16" if "bfloat16" in (drafter.config.get("dtype"), drafter.config.get("torch_dtype")) else "fp32"
    compared = _compare(found, trained, _ROUNDING["bf16" if "bf16" in (coarse, trained["precision"]) else "fp32"],
                        whole=count == heldout)
    within = "rounding" if count == heldout else "rounding and 3 standard errors of the replayed samples"
    measured: dict[str, Any] = {
        "replayed_accuracy": found.per_step(),
        "trainer_accuracy": trained["heldout_accuracy"],
        "replayed_accepted_prefixes": found.prefix,
        "replayed_conditional_accuracy": found.conditional(),
        "trainer_conditional_accuracy": trained["heldout_conditional_accuracy"],
        "tau_row_replayed@3": found.tau_row(TAU_STEPS),
        "tau_row_trainer@3": trained["heldout_tau_row@3"],
        "allowed_differences": {what: allowed for what, _, _, allowed in compared},
        "compared_within": within,
        "replayed_samples": count,
        "heldout_samples": heldout,
        "replayed_rows": found.rows,
        "reached_rows": found.reached,
    }
    per_step = ", ".join(f"{a:.3f}" for a in found.per_step())
    return CheckResult(
        measured=measured,
        summary=f"{found.rows[0]} rows of {count} of {heldout} held-out samples: accuracy per step {per_step}; τ_row@3 "
        f"{measured['tau_row_replayed@3']:.3f}; compared with the trainer within {within}",
        problems=[
            f"{what}: {mine:.4f} replayed from the exported files, {theirs:.4f} in the trainer's validation (allowed "
            f"difference: {allowed:.4f})"
            for what, mine, theirs, allowed in compared
            if abs(mine - theirs) > allowed
        ],
    )


def _compare(found: Accuracy, trained: dict[str, Any], rounding: float, *, whole: bool) -> list[tuple[str, float, float, float]]:
    """(what, replayed, trainer's, largest difference allowed). `whole`: all that the trainer validated on was replayed.

    The share of accepted prefixes that go on is the trainer's conditional accuracy: with the rows that are reached it
    gives the number of accepted prefixes of every length.
    """
    def allowed(rows: int, standard_error: float) -> float:
        return max(rounding, _FLIPS / max(rows, 1)) + (0 if whole else 3 * standard_error)

    accuracy, conditional = trained["heldout_accuracy"], trained["heldout_conditional_accuracy"]
    compared = []
    errors = found.standard_error("hits", "rows", accuracy)
    for j, numbers in enumerate(zip(found.per_step(), accuracy)):
        compared.append((f"accuracy of step {j}", *numbers, allowed(found.rows[j], errors[j])))
    errors = found.standard_error("prefix", "reached", conditional)
    for j, numbers in enumerate(zip(found.conditional(), conditional)):
        compared.append((f"accepted after {j} accepted drafts", *numbers, allowed(found.reached[j], errors[j])))
    joint = torch.tensor(conditional).cumprod(0).tolist()
    tau_error = sum(found.standard_error("prefix", "rows", joint)[:TAU_STEPS])
    compared.append((f"τ_row@{TAU_STEPS}", found.tau_row(TAU_STEPS), trained[f"heldout_tau_row@{TAU_STEPS}"],
                     TAU_STEPS * max(rounding, _FLIPS / max(found.rows[-1], 1)) + (0 if whole else 3 * tau_error)))
    return compared


def teacher_forced_samples(
    target: Target, manifest: Manifest, run_dir: Path, part: str, *, count: int | None = None, device: str = "cpu"
) -> Iterator[tuple[Tensor, list[int], Tensor, Tensor]]:
    """The samples of a part of the split as `teacher_forced_accuracy` reads them, from dump and stage 1.

    Args:
        count: this many of them (None: all), the same ones every time, and mixed: files are often sorted.
        device: where the target's answers are computed.
    """
    split = read_json(run_dir / "standardize" / "split.json", fix="make standardize")
    wanted = set(sorted(split[part], key=sha256_text)[:count])
    masks = {s.id: s.loss_mask for s in read_samples(samples_file(run_dir)) if s.id in wanted}
    store = HiddenStore(dump_shards(manifest, run_dir))
    head, teacher = load_output_head(target).to(device), manifest.slots["teacher"]
    for ref in store.samples:
        if ref.id in wanted:
            ids, mask = store.input_ids(ref), masks[ref.id]
            features = torch.cat([store.rows(ref, slot.tensor) for slot in manifest.fc_slots()], -1)
            tokens = torch.tensor(gated_rows(mask, 0), dtype=torch.long) + 1
            argmax = torch.full((len(mask),), -1)
            final = store.rows(ref, teacher.tensor)[tokens].to(device)
            argmax[tokens] = full_vocabulary_argmax(head.norm(final) if teacher.norm == "pre" else final, head).long()
            yield ids, mask, features, argmax
