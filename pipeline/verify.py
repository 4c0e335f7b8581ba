"""Stage 6: prove the export, by replaying its files independently and by serving them in the real engine."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.engine import resolve_device
from pipeline.errors import PipelineError
from pipeline.files import read_json, sha256_text, write_json
from pipeline.manifest import Manifest
from pipeline.metrics import TAU_STEPS
from pipeline.replay import ExportedDrafter, gated_rows, teacher_forced_accuracy
from pipeline.samples import read_samples
from pipeline.serve_check import serve_check
from pipeline.stage import StageResult
from pipeline.standardize import dump_shards
from pipeline.store import HiddenStore
from pipeline.target import OutputHead, Target, load_embedding, load_output_head
from pipeline.validate import validate

_CHUNK = 256  # rows of full-vocabulary logits held at a time
_ROUNDING = {"fp32": 0.002, "bf16": 0.015}
"""Precision of the trainer's validation → how far an accuracy replayed in fp32 may lie from it."""


def verify(config: Config, target: Target, manifest: Manifest, run_dir: Path, folder: Path) -> StageResult:
    """Run `verify.checks`; all results go to `verify/verify.json`, also when a check fails.

    Raises:
        PipelineError: a check failed.
    """
    draft = run_dir / "export" / "sglang"
    if not draft.is_dir():
        raise PipelineError(
            "there is no SGLang export to verify",
            field="export.engines",
            value=config.export.engines,
            fix='make export ARGS="export.engines=[sglang,vllm]"',
        )
    context = config.export.served_context or target.text.max_position_embeddings
    validate(draft, context=context, target=target.path).raise_if_bad()
    results: dict[str, Any] = {}
    problems: list[str] = []
    if "replay" in config.verify.checks:
        results["replay"], failed = replay_check(config, target, manifest, run_dir, draft)
        problems += failed
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the engine that comes next sizes its memory by what is free
    if "serve" in config.verify.checks:
        results["serve"], failed = serve_check(config, target, manifest, run_dir, folder)
        problems += failed
    path = folder / "verify.json"
    write_json(path, {"checks": results, "problems": problems})
    _print(results)
    if problems:
        raise PipelineError(
            "the export did not pass:\n" + "\n".join(f"  - {p}" for p in problems),
            field=str(path),
            fix=f'read {path}; make validate DRAFT={draft} ARGS="--target {target.path}" checks the files',
        )
    flat = {key: value for check in results.values() for key, value in check.items()}
    return StageResult(
        outputs=[path],
        counts={k: v for k, v in flat.items() if type(v) is int},
        metrics={k: v for k, v in flat.items() if type(v) in (float, bool, str) or _is_floats(v)},
    )


def replay_check(
    config: Config, target: Target, manifest: Manifest, run_dir: Path, draft: Path
) -> tuple[dict, list[str]]:
    """Accuracy of the exported files on held-out samples, against the trainer's validation of the weights it kept.

    The trainer validates on all held-out samples. Replayed on all of them, only rounding may differ; on
    `verify.replay_samples` of them, three standard errors of such a choice are allowed as well.
    """
    device = resolve_device(config.device)
    drafter = ExportedDrafter(draft, load_embedding(target), device)
    trained = manifest.stages["train"].metrics
    theirs = trained["heldout_accuracy"]
    steps = len(theirs)  # the TTT steps of the training, at least 3
    heldout = len(read_json(run_dir / "standardize" / "split.json", fix="make standardize")["heldout"])
    count = min(config.verify.replay_samples or heldout, heldout)
    found = teacher_forced_accuracy(
        drafter, _samples(target, manifest, run_dir, "heldout", count=count, device=device), steps
    )
    rounding = max(_ROUNDING[trained["precision"]], 2 / max(found.rows[-1], 1))  # on few rows one flip is much
    allowed, tau_allowed = [rounding] * steps, rounding * TAU_STEPS
    if count < heldout:
        joint = list(itertools.accumulate(trained["heldout_conditional_accuracy"], operator.mul))
        allowed = [rounding + 3 * e for e in found.standard_error("hits", theirs)]
        tau_allowed += 3 * sum(found.standard_error("prefix", joint)[:TAU_STEPS])
    result = {
        "replayed_accuracy": found.per_step(),
        "trainer_accuracy": theirs,
        "allowed_difference": allowed,
        "tau_row_replayed@3": found.tau_row(TAU_STEPS),
        "tau_row_trainer@3": trained["heldout_tau_row@3"],
        "tau_row_allowed_difference": tau_allowed,
        "compared_within": "rounding" if count == heldout else "rounding and 3 standard errors of the replayed samples",
        "replayed_samples": count,
        "heldout_samples": heldout,
        "replayed_rows": found.rows[0],
    }
    compared = [
        (f"accuracy of step {j}", *numbers) for j, numbers in enumerate(zip(found.per_step(), theirs, allowed))
    ] + [("τ_row@3", result["tau_row_replayed@3"], result["tau_row_trainer@3"], tau_allowed)]
    return result, [
        f"{what}: {a:.4f} replayed from the exported files, {b:.4f} in the trainer's validation (allowed: {most:.4f})"
        for what, a, b, most in compared
        if abs(a - b) > most
    ]


def _samples(
    target: Target, manifest: Manifest, run_dir: Path, part: str, *, count: int | None = None, device: str = "cpu"
) -> Iterator[tuple[Tensor, list[int], Tensor, Tensor]]:
    """The samples of a part of the split as `teacher_forced_accuracy` reads them, from the dump and samples.jsonl.

    Args:
        count: this many of them (None: all), the same ones every time, and mixed: files are often sorted.
        device: where the target's answers are computed.
    """
    split = read_json(run_dir / "standardize" / "split.json", fix="make standardize")
    wanted = set(sorted(split[part], key=sha256_text)[:count])
    masks = {s.id: s.loss_mask for s in read_samples(run_dir / "prompts" / "samples.jsonl") if s.id in wanted}
    store = HiddenStore(dump_shards(manifest, run_dir))
    head, teacher = load_output_head(target), manifest.slots["teacher"]
    head = replace(head, weight=head.weight.to(device).float(), norm_weight=head.norm_weight.to(device))
    for ref in store.samples:
        if ref.id in wanted:
            ids, mask = store.input_ids(ref), masks[ref.id]
            features = torch.cat([store.rows(ref, slot.tensor) for slot in manifest.fc_slots()], -1)
            final = store.rows(ref, teacher.tensor)
            yield ids, mask, features, _argmax(final, head, pre_norm=teacher.norm == "pre", mask=mask)


def _argmax(final: Tensor, head: OutputHead, *, pre_norm: bool, mask: list[int]) -> Tensor:
    """The target's argmax at every token that some gated row learns from, -1 elsewhere."""
    tokens = torch.tensor([i + 1 for i in gated_rows(mask, 0)], dtype=torch.long)
    answer = torch.full((len(mask),), -1)
    for part in tokens.split(_CHUNK):
        hidden = final[part].to(head.weight.device)
        answer[part] = head.logits(head.norm(hidden) if pre_norm else hidden).argmax(-1).cpu()
    return answer


def _is_floats(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, float) for v in value)


def _print(results: dict[str, Any]) -> None:
    if (r := results.get("replay")) is not None:
        steps = ", ".join(f"{a:.3f}" for a in r["replayed_accuracy"])
        print(
            f"verify: replay of {r['replayed_rows']} rows of {r['replayed_samples']} of {r['heldout_samples']} held-out "
            f"samples: accuracy per step {steps}; τ_row@3 {r['tau_row_replayed@3']:.3f}; compared with the trainer within "
            f"{r['compared_within']}"
        )
    if (s := results.get("serve")) is not None:
        print(
            f"verify: {s['requests']} prompts in {s['serve_dtype']}: {s['texts_identical']} greedy texts identical; "
            f"τ {s['tau_engine']:.3f} in the engine ({s['accepted_engine']} drafts accepted in {s['cycles_engine']} "
            f"verifications), {s['tau_replayed']:.3f} replayed ({s['accepted_replayed']} in {s['cycles_replayed']})"
        )
