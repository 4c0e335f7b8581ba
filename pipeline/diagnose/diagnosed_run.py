"""The run folder of a diagnosis: probe text and its states first, and the drafter once its wiring is known.

Stages 1 to 4 are recorded as any run's are, so that export and verify read it without knowing where it came from. What
differs: all samples are held out, every layer is dumped, the vocabulary is the drafter's own, and stage "train" took the
weights from somebody's files. It says so in its configuration (`diagnosed`), with the files' checksums and, where the
columns of fc were put into ascending layer order, the order they had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.diagnose.foreign_drafter import ForeignDrafter
from pipeline.diagnose.wiring_verdict import Verdict
from pipeline.dump.dump import dump
from pipeline.dump.dump_checks import is_small
from pipeline.engines.engine import resolve_device
from pipeline.errors import PipelineError
from pipeline.files import read_json, save_safetensors, sha256_file, sha256_json, sha256_text, write_json
from pipeline.manifest import Manifest, load_manifest
from pipeline.samples import Sample, read_sample_lines, read_samples, write_samples
from pipeline.stage import StageResult, run_stage
from pipeline.standardize import dump_shards, standardize
from pipeline.store import HiddenStore
from pipeline.target import Target, load_embedding, load_output_head
from pipeline.train.alignment import PackedBatch
from pipeline.train.batches import AlignedFiles, TrainingData, pack
from pipeline.train.drafter import Drafter, FrozenTarget
from pipeline.train.drafter_config import DrafterConfig
from pipeline.train.metrics import NAMES, TAU_STEPS, ratios, stack
from pipeline.vocab import DraftVocab, read_vocab

_BATCH_TOKENS = 2048


def probe_run(config: Config, target: Target, run_dir: Path) -> Manifest:
    """Stages 1 and 2: probe samples, and every layer's output on them.

    Raises:
        PipelineError: the run exists and is none of a diagnosis.
    """
    known = load_manifest(run_dir)
    if known is not None and known.stages and "diagnose" not in next(iter(known.stages.values())).config:
        raise PipelineError(f"{run_dir} is a run of its own", field="run.name", value=run_dir.name,
                            fix="name another one: make diagnose RUN=<new name>")
    asked = config.diagnose.model_dump(mode="json", exclude={"draft", "engine"})
    source = config.diagnose.samples
    if source is None:
        asked |= {"prompts": config.prompts.model_dump(mode="json")}
    else:
        asked |= {"samples_sha256": _digest(Path(source))}
    common: dict[str, Any] = {"target": target.record, "seed": config.seed, "force": config.force}
    run_stage("prompts", run_dir, config={"diagnose": asked}, **common,
              work=lambda manifest, folder: _samples(config, target, folder))
    layers = list(range(target.num_layers - 1))
    engine = config.diagnose.engine
    if engine == "auto":
        engine = "transformers" if is_small(target) else "sglang"
    settings = config.model_copy(update={"dump": config.dump.model_copy(update={
        "engine": engine, "layers": layers, "probe_samples": config.diagnose.max_samples})})

    def every_layer(manifest: Manifest, folder: Path) -> StageResult:
        result = dump(settings, target, manifest, run_dir, folder, slot_layers=layers[:2], layers=layers)
        result.slots = {"teacher": result.slots["teacher"]}  # what the fc slots hold is the question
        return result

    return run_stage("dump", run_dir, config={"diagnose": {"engine": engine, "dtype": config.dump.dtype}}, **common,
                     work=every_layer)


def _digest(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as e:
        raise PipelineError(f"{path} cannot be read: {e.strerror}", field="diagnose.samples", value=str(path),
                            fix='ARGS="diagnose.samples=runs/<name>/prompts/samples.parquet", or a file of plain text'
                            ) from e


def _samples(config: Config, target: Target, folder: Path) -> StageResult:
    """`samples.parquet`: conversations of a run, plain text, or `prompts.source` answered by the target."""
    wanted, source, path = config.diagnose, config.diagnose.samples, folder / "samples.parquet"
    if source is None:
        from pipeline.prompts import generate

        limited = config.model_copy(update={"prompts": config.prompts.model_copy(update={"limit": wanted.max_samples})})
        generate(limited, target, folder)
        found = list(read_samples(path))
    elif Path(source).suffix == ".parquet":
        found = list(read_samples(Path(source)))
    elif Path(source).suffix == ".jsonl":
        found = list(read_sample_lines(Path(source)))
    else:
        found = list(_pieces(Path(source), target, wanted.max_tokens))
    # Held-out ones first, the same ones every time, and mixed: files are often sorted.
    found.sort(key=lambda s: (s.split != "heldout", sha256_text(s.id)))
    samples = [cut for s in found if sum((cut := _cut(s, wanted.max_tokens)).loss_mask) > 1][: wanted.max_samples]
    if not samples:
        raise PipelineError("no sample has two tokens in a row to draft from", field="diagnose.samples", value=source,
                            fix="give more text, or raise diagnose.max_tokens")
    write_samples(path, samples)
    tokens, trained = sum(len(s.input_ids) for s in samples), sum(sum(s.loss_mask) for s in samples)
    return StageResult(outputs=[path], counts={
        "read": len(found), "kept": len(samples), "train_samples": 0, "heldout_samples": len(samples), "tokens": tokens,
        "trained_tokens": trained})


def _pieces(path: Path, target: Target, length: int) -> Iterator[Sample]:
    """Plain text as samples: a quarter is the prompt, the rest counts, so that the run can be served as well."""
    ids = target.tokenizer()(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    for n, start in enumerate(range(0, len(ids), length)):
        piece = ids[start : start + length]
        if len(piece) > 2:
            prompt = max(1, len(piece) // 4)
            yield Sample(f"text-{n:05d}", "heldout", None, [], piece, [0] * prompt + [1] * (len(piece) - prompt), None)


def _cut(sample: Sample, length: int) -> Sample:
    """The sample's first tokens, as one of the held-out part. Of a long prompt the end is kept, up to the first answers."""
    first = sample.loss_mask.index(1)
    start = max(0, first - length // 2) if len(sample.input_ids) > length else 0
    part = slice(start, start + length)
    return dataclasses.replace(sample, split="heldout", input_ids=sample.input_ids[part], loss_mask=sample.loss_mask[part])


# ---------------------------------------------------------------- once the wiring is known


def write_drafter(config: Config, target: Target, run_dir: Path, drafter: ForeignDrafter, verdict: Verdict) -> Manifest:
    """Stages 3 and 4: the slots bound to what was found, and the drafter's weights in this project's order."""
    found = [int(slot.best.removeprefix("layer_output.")) for slot in verdict.slots]
    order = sorted(range(len(found)), key=found.__getitem__)
    layers = [found[i] for i in order]
    settings = config.model_copy(update={"slots": config.slots.model_copy(update={"layers": layers})})
    shape, weights, vocab = in_project_order(drafter, verdict, order, target.vocab_size)
    common: dict[str, Any] = {"target": target.record, "seed": config.seed, "force": config.force}
    run_stage("standardize", run_dir, **common,
              config={"layers": layers, "draft_vocabulary": sha256_json(vocab.target_ids().tolist())},
              work=lambda manifest, folder: standardize(settings, target, manifest, run_dir, folder, vocab=vocab))
    diagnosed = {
        "draft": str(drafter.folder), "files": drafter.digest(), "config_ids": drafter.ids, "layers_as_stored": found,
        "fc_columns_permuted": order != sorted(order), "map_read_as": verdict.reading.name,
        "lm_head_rows_permuted": bool((verdict.reading.target_ids.diff() <= 0).any())}

    def adopt(manifest: Manifest, folder: Path) -> StageResult:
        paths = [folder / "drafter.safetensors", folder / "config.json"]
        save_safetensors(paths[0], weights | {"d2t": vocab.d2t, "t2d": vocab.t2d})
        write_json(paths[1], dataclasses.asdict(shape))
        device = torch.device(resolve_device(config.device))
        accuracy = validate_drafter(shape, weights, target, manifest, run_dir, device)
        return StageResult(
            outputs=paths, counts={"parameters": sum(w.numel() for w in weights.values()), "steps": 0, "epochs": 0},
            metrics={"precision": "fp32", **{f"heldout_{k}": v for k, v in accuracy.items()}})

    if diagnosed["fc_columns_permuted"]:
        print(f"diagnose: fc's columns were stored for layer outputs {found} and are put into ascending order, {layers}")
    return run_stage("train", run_dir, config={"layers": layers, "diagnosed": diagnosed}, work=adopt, **common)


def in_project_order(drafter: ForeignDrafter, verdict: Verdict, order: list[int], vocab_size: int
                     ) -> tuple[DrafterConfig, dict[str, Tensor], DraftVocab]:
    """The drafter with slot `order[i]` as slot i, ascending draft ids, and only the norms that fit."""
    switches = {name: verdict.switches[name].value for name in ("fc_norm", "norm_before_fc", "norm_output")}
    shape = dataclasses.replace(drafter.shape, **switches)
    weights = {n: w for n, w in drafter.weights.items()
               if (not n.startswith("fc_norm.") or shape.fc_norm) and (n != "input_norm.weight" or shape.norm_before_fc)}
    weights["fc.weight"] = torch.cat([drafter.slot_weight(slot) for slot in order], 1)
    if shape.norm_before_fc:
        parts = weights["input_norm.weight"].chunk(len(order))
        weights["input_norm.weight"] = torch.cat([parts[slot] for slot in order])
    if shape.fc_norm:
        weights |= {f"fc_norm.{i}.weight": drafter.weights[f"fc_norm.{slot}.weight"] for i, slot in enumerate(order)}
    target_ids, rows = verdict.reading.target_ids.sort()
    weights["lm_head.weight"] = weights["lm_head.weight"][rows]
    t2d = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True)
    return shape, {n: w.contiguous() for n, w in weights.items()}, DraftVocab(target_ids - torch.arange(len(rows)), t2d)


@torch.no_grad()
def validate_drafter(shape: DrafterConfig, weights: dict[str, Tensor], target: Target, manifest: Manifest, run_dir: Path,
                     device: torch.device) -> dict[str, Any]:
    """The trainer's validation of these weights on the run's held-out samples, by the trainer's own forward."""
    vocab = read_vocab(run_dir / "standardize" / "vocab.safetensors")
    drafter = Drafter(shape, vocab.target_ids())
    drafter.load_state_dict(weights | {"d2t": vocab.d2t, "t2d": vocab.t2d})
    drafter.to(device).eval()
    head = load_output_head(target, rows=vocab.target_ids())
    head = dataclasses.replace(head, weight=head.weight.float())
    frozen = FrozenTarget(load_embedding(target).float(), head).to(device)
    store = HiddenStore(dump_shards(manifest, run_dir))
    ids = read_json(run_dir / "standardize" / "split.json", fix="make diagnose")["heldout"]
    data = TrainingData(store, AlignedFiles(run_dir / "standardize", store), manifest.slots, ids, head, torch.float32)
    sums = torch.zeros(len(NAMES), TAU_STEPS, dtype=torch.float64)
    for batch in pack(data.lengths, list(range(len(data.lengths))), _BATCH_TOKENS):
        packed: PackedBatch = data.load(tuple(batch)).to(device)
        sums += stack(drafter(packed, frozen, torch.ones(TAU_STEPS))).cpu()
    return ratios(sums)
