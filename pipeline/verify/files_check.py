"""Files check: the exported files as an engine reads them, against the manifest and the trained drafter.

The validator says what an engine would get wrong in any drafter directory. Here the run is known as well, so every field
is held against the one that the export would write, every tensor against the trained one, and the ids against the layer
outputs of the manifest, by what the installed engine makes of them. A vLLM export beside it is read as well: its ids and
tensors need no vLLM to be checked.
"""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.engines.engine import resolve_device
from pipeline.errors import PipelineError
from pipeline.export.drafter_files import SIZES, are_layer_ids, read_config, read_tensors
from pipeline.export.export import read_trained, sglang_config
from pipeline.export.rope_check import check_rope
from pipeline.export.serving import needs_draft_backend
from pipeline.export.validate import validate
from pipeline.export.validate_report import Report
from pipeline.export.validate_weights import canonical_names
from pipeline.layers.layer_ids import capture_points_for, derive_sglang_ids
from pipeline.train.drafter_config import DrafterConfig
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.vllm_check import export_beside

_IDS = "eagle_aux_hidden_state_layer_ids"
# Judged by the validator: what they may be depends on what is served, not on how the drafter was trained.
_FREE = {"architectures", "max_position_embeddings", "dtype", "torch_dtype", "eagle_config", "bos_token_id", "eos_token_id"}
# Written by other tools, and read by no engine's drafter.
_HARMLESS = {"transformers_version", "_name_or_path", "use_cache", "initializer_range", "pad_token_id"}


def files_check(subject: Subject) -> CheckResult:
    """The validator's problems, and every difference from what was trained and what the manifest binds."""
    draft, target, manifest = subject.draft, subject.target, subject.manifest
    context = subject.config.export.served_context or target.text.max_position_embeddings
    rule = subject.config.target.layer_id_rule
    report = validate(draft, context=context, target=target.path, layer_id_rule=rule)
    problems = [str(p) for p in report.problems] + _launch_problems(subject)
    config, layout = read_config(draft)
    weights = canonical_names(read_tensors(draft), layout, Report(draft))
    ids = (config.get("eagle_config") or {}).get(_IDS)
    measured: dict[str, Any] = {"tensors": len(weights), "ids": ids, "dtype": config.get("dtype")}
    if are_layer_ids(ids):
        try:
            measured["layer_outputs"] = [point - 1 for point in capture_points_for(target.path, ids, rule)]
            problems += other_layers(ids, measured["layer_outputs"], manifest.fc_layers(), "the installed SGLang")
        except PipelineError:
            pass  # the validator asked as well
    notes, trained, drafter = list(report.notes), None, None
    if "train" in manifest.stages:
        drafter, trained = read_trained(subject.run_dir / "train", manifest)
        problems += other_fields(config, drafter, subject) + other_weights(weights, trained, drafter.num_fc_inputs)
        problems += _other_rope(drafter, draft)
        measured["compared_with"] = "the trained weights"
    else:
        notes.append("this run trained nothing: the weights are not compared")
    if (vllm := export_beside(draft)).is_dir():
        problems += [f"vLLM export: {p}" for p in _vllm_problems(vllm, subject, drafter, trained, context)]
        measured["vllm_export"] = str(vllm)
    return CheckResult(
        measured=measured,
        summary=f"{len(weights)} tensors, ids {ids}: the engine captures layer outputs {measured.get('layer_outputs', '?')}",
        problems=problems,
        notes=notes,
    )


def _vllm_problems(folder: Path, subject: Subject, drafter: DrafterConfig | None, trained: dict[str, Tensor] | None,
                   context: int) -> list[str]:
    """The validator's problems, ids that are not the manifest's layers, fields and tensors that are not the trained ones."""
    declared = subject.manifest.fc_layers()
    problems = [str(p) for p in validate(folder, context=context, target=subject.target.path).problems]
    config, layout = read_config(folder)
    if layout != "speculators":
        return [*problems, "config.json is not in speculators' format, which vLLM reads"]
    if are_layer_ids(ids := config.get(_IDS)):
        captured = sorted({i - 1 for i in ids})  # ids are capture points; vLLM delivers them in the order of the layers
        problems += other_layers(ids, captured, declared, "vLLM")
    if drafter is not None and trained is not None:
        problems += [f"config.json: {key} = {config.get(key)}, the drafter was trained with {getattr(drafter, key)}"
                     for key in (*SIZES, "rms_norm_eps", "rope_parameters") if config.get(key) != getattr(drafter, key)]
        problems += other_weights(canonical_names(read_tensors(folder), layout, Report(folder)), trained, len(declared))
    return problems


def other_layers(ids: list[int], captured: list[int], declared: list[int], engine: str) -> list[str]:
    """What differs between the layer outputs that the engine captures for these ids and those of the manifest."""
    if len(captured) != len(declared):
        return [f"ids {ids} make {engine} capture layer outputs {captured}; the manifest binds {declared}"]
    return [
        f"slot fc.{i}: ids {ids} make {engine} capture layer output {found}; the manifest says {wanted}"
        for i, (found, wanted) in enumerate(zip(captured, declared))
        if found != wanted
    ]


def other_fields(config: dict[str, Any], drafter: DrafterConfig, subject: Subject) -> list[str]:
    """Fields of config.json that differ from what the export writes for the trained drafter."""
    rule = subject.config.target.layer_id_rule
    ids = derive_sglang_ids(subject.target.path, subject.manifest.fc_layers(), rule)
    wanted = sglang_config(drafter, ids, dtype="", context=1, target_text=subject.target.text)
    eagle, wanted_eagle = config.get("eagle_config") or {}, wanted["eagle_config"]
    pairs = {key: (config.get(key), wanted.get(key)) for key in config.keys() | wanted.keys() if key not in _FREE}
    pairs |= {
        f"eagle_config.{key}": (eagle.get(key), wanted_eagle.get(key))
        for key in eagle.keys() | wanted_eagle.keys()
        if key != _IDS
    }
    return [
        f"config.json: {key} = {found!r}, the drafter was trained " + ("without it" if trained is None else f"with {trained!r}")
        for key, (found, trained) in sorted(pairs.items())
        if (found or None) != (trained or None) and key not in _HARMLESS
    ]


def other_weights(weights: dict[str, Tensor], trained: dict[str, Tensor], num_slots: int) -> list[str]:
    """Tensors that are not the trained ones in the exported dtype, with what was done to them where that can be told."""
    found = []
    for name in sorted(weights.keys() & trained.keys()):
        mine, theirs = weights[name], trained[name].to(weights[name].dtype)
        if mine.shape == theirs.shape and not torch.equal(mine, theirs):
            different = int((mine != theirs).sum())
            what = _what_was_done(name, mine, theirs, num_slots)
            found.append(
                f"{name}: {different} of {mine.numel()} values are not the trained ones" + (f": {what}" if what else "")
            )
    return found


def _what_was_done(name: str, mine: Tensor, trained: Tensor, num_slots: int) -> str | None:
    if name == "fc.weight":
        blocks = trained.chunk(num_slots, -1)
        for order in itertools.permutations(range(num_slots)) if num_slots <= 5 else []:
            if torch.equal(mine, torch.cat([blocks[i] for i in order], -1)):
                return "the columns of the slots lie in the order " + ", ".join(f"fc.{i}" for i in order)
    if mine.dim() == 1 and bool((mine == 1).all()):
        return "all are 1, as if the norm had not been exported"
    return None


def _other_rope(drafter: DrafterConfig, draft: Path) -> list[str]:
    try:
        check_rope(drafter, draft)
    except PipelineError as e:
        return [str(e)]
    except Exception as e:  # what SGLang's own reader raises on a config that it does not take
        return [f"SGLang cannot read config.json: {type(e).__name__}: {e}"]
    return []


def _launch_problems(subject: Subject) -> list[str]:
    """Flags that the launch script beside the drafter must give: without them the engine serves, badly or not at all."""
    script = subject.draft.parent / "launch_sglang.sh"
    if not script.is_file():
        return []
    try:
        words = shlex.split(script.read_text(encoding="utf-8").replace("\\\n", " "), comments=True)
    except ValueError as e:  # also UnicodeDecodeError
        return [f"{script.name} cannot be read: {e}; make export"]
    given = {}  # of a flag that stands there twice the last value counts
    for word, after in zip(words, [*words[1:], ""]):
        flag, equals, value = word.partition("=")
        given[flag] = value if equals else after
    problems = []
    if given.get("--speculative-algorithm") != "EAGLE3":
        problems.append(f"{script.name}: --speculative-algorithm EAGLE3 is missing: EAGLE takes an EAGLE-3 drafter, and accepts "
                        "nothing (sglang 21272)")
    backend = "--speculative-draft-attention-backend"
    if needs_draft_backend(subject.target, resolve_device(subject.config.device)) and backend not in given:
        problems.append(f"{script.name}: {backend} is missing: the drafter would inherit the target's MLA backend (sglang 23490)")
    return problems
