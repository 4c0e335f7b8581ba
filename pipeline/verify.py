"""Stage 6: prove the export, by replaying its files independently and by serving them in the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.files import write_json
from pipeline.manifest import Manifest
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
            fix=f"read {path}; python -m pipeline.validate {draft} --target {target.path} checks the files",
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
    """Accuracy of the exported files on the held-out samples, against the trainer's last validation."""
    drafter = ExportedDrafter(draft, load_embedding(target))
    steps = config.train.ttt_steps
    found = teacher_forced_accuracy(drafter, _samples(target, manifest, run_dir, "heldout"), steps)
    trained = manifest.stages["train"].metrics
    result = {
        "replayed_accuracy": found.per_step(),
        "trainer_accuracy": trained.get("heldout_accuracy"),
        "tau_row_replayed@3": found.tau_row(3),
        "tau_row_trainer@3": trained.get("heldout_tau_row@3"),
        "replayed_rows": found.rows[0],
    }
    allowed = max(_ROUNDING[trained["precision"]], 2 / max(found.rows[-1], 1))  # on few rows one flip is much
    pairs = [
        (f"accuracy of step {j}", a, b)
        for j, (a, b) in enumerate(zip(found.per_step(), trained.get("heldout_accuracy") or []))
    ]
    if trained.get("heldout_tau_row@3") is not None:
        pairs.append(("τ_row@3", found.tau_row(3), trained["heldout_tau_row@3"]))
    return result, [
        f"{what}: {ours:.4f} replayed from the exported files, {theirs:.4f} in the trainer's validation"
        for what, ours, theirs in pairs
        if abs(ours - theirs) > allowed * (3 if what.startswith("τ") else 1)
    ]


def _samples(
    target: Target, manifest: Manifest, run_dir: Path, part: str
) -> Iterator[tuple[Tensor, list[int], Tensor, Tensor]]:
    """The samples of a part of the split as `teacher_forced_accuracy` reads them, from the dump and samples.jsonl."""
    split = json.loads((run_dir / "standardize" / "split.json").read_text(encoding="utf-8"))
    wanted = set(split[part])
    masks = {s.id: s.loss_mask for s in read_samples(run_dir / "prompts" / "samples.jsonl") if s.id in wanted}
    store = HiddenStore(dump_shards(manifest, run_dir))
    head, teacher = load_output_head(target), manifest.slots["teacher"]
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
        hidden = head.norm(final[part]) if pre_norm else final[part]
        answer[part] = head.logits(hidden).argmax(-1)
    return answer


def _is_floats(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, float) for v in value)


def _print(results: dict[str, Any]) -> None:
    if (r := results.get("replay")) is not None:
        steps = ", ".join(f"{a:.3f}" for a in r["replayed_accuracy"])
        print(
            f"verify: replay of {r['replayed_rows']} held-out rows: accuracy per step {steps}; "
            f"τ_row@3 {r['tau_row_replayed@3']:.3f}"
        )
    if (s := results.get("serve")) is not None:
        print(
            f"verify: {s['requests']} prompts in {s['serve_dtype']}: {s['texts_identical']} greedy texts identical; "
            f"τ {s['tau_engine']:.3f} in the engine ({s['accepted_engine']} drafts accepted in {s['cycles_engine']} "
            f"verifications), {s['tau_replayed']:.3f} replayed ({s['accepted_replayed']} in {s['cycles_replayed']})"
        )
