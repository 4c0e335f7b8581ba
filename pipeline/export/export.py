"""Stage 5: drafter directories per engine, serving.yaml and launch scripts, all derived from the manifest.

Nothing here is typed in twice: the layers come from the manifest's slots, each engine's ids from asking that engine
(`layer_ids`), the shapes from the trained drafter's config, rope from the target's. What was written is read back by
the validator before the stage ends.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.engines.engine import resolve_device
from pipeline.errors import PipelineError
from pipeline.export.drafter_files import ARCHITECTURE, cast
from pipeline.export.rope_check import check_rope
from pipeline.export.validate import validate
from pipeline.files import read_json, save_safetensors, write_json
from pipeline.layers.layer_ids import EngineIds, derive_sglang_ids
from pipeline.layers.vllm_ids import derive_vllm_ids
from pipeline.manifest import EngineExport, ExportRecord, Manifest
from pipeline.stage import StageResult
from pipeline.target import Target
from pipeline.train.drafter_config import DrafterConfig

_RETRAIN = "make train"


def export(config: Config, target: Target, manifest: Manifest, run_dir: Path, folder: Path) -> StageResult:
    """Write `sglang/`, `vllm/` (as `export.engines` asks), `serving.yaml` and one launch script per engine.

    An engine that cannot serve this drafter is refused with the reason, in serving.yaml and on the terminal, and the
    others are still written.

    Raises:
        PipelineError: the trained files do not fit the manifest, no ids lead to the layers, the engine rotates
            differently from the trainer, or the validator finds a problem.
    """
    from pipeline.export import serving

    drafter, weights = read_trained(run_dir / "train", manifest)
    device = resolve_device(config.device)
    dtype = _export_dtype(config.export.dtype, device)
    context = config.export.served_context or target.text.max_position_embeddings
    layers = manifest.fc_layers()
    record, outputs, metrics, refused = ExportRecord(), [], {"dtype": dtype}, {}
    for engine in config.export.engines:
        out = folder / engine
        shutil.rmtree(out, ignore_errors=True)
        if engine == "sglang":
            ids = derive_sglang_ids(target.path, layers, config.target.layer_id_rule)
            reason = why_not_sglang(manifest, ids)
        else:
            reason, ids = why_not_vllm(manifest, drafter), None
            if reason is None:
                try:
                    ids = derive_vllm_ids(layers, target.num_layers, target.path)
                except PipelineError as e:
                    reason = e.what
        if reason is not None:
            refused[engine] = reason
            print(f"export: no files for {engine}: {reason}")
            continue
        if engine == "sglang":
            write_sglang(out, drafter, weights, ids, dtype=dtype, context=context, target_text=target.text)
            check_rope(drafter, out)
            checked = ["pipeline.export.validate", "rope tables of the installed SGLang equal the trainer's"]
        else:
            from pipeline.export.export_vllm import build_speculator, write_vllm

            model = build_speculator(
                drafter,
                ids,
                dtype=dtype,
                context=context,
                target_text=target.text,
                verifier=serving.target_name(config, target),
                architecture=target.record.architecture,
                draft_steps=config.export.draft_steps,
            )
            write_vllm(out, drafter, weights, model, dtype=dtype)
            checked = ["pipeline.export.validate"]
        validate(out, context=context, target=target.path, layer_id_rule=config.target.layer_id_rule).raise_if_bad()
        record.engines[engine] = EngineExport(
            version=ids.version or "not asked",
            ids=list(ids.ids),
            capture_points=list(ids.capture_points),
            model_class=ids.model_class,
            rule_source=ids.rule_source,
            proven=ids.proven,
            validated_by=checked,
        )
        if not ids.proven:
            print(f"export: {engine} ids {list(ids.ids)}: {ids.note}")
        dumped = manifest.dump
        if dumped is not None and dumped.engine == engine and dumped.engine_version != ids.version:
            print(f"export: dumped with {engine} {dumped.engine_version}, ids derived anew from {ids.version}")
        metrics[f"{engine}_ids"] = ",".join(map(str, ids.ids))
        outputs += [out / "config.json", out / "model.safetensors"]
    if refused and not record.engines:
        raise PipelineError("no engine serves this drafter: " + "; ".join(f"{e}: {why}" for e, why in refused.items()),
                            field="export.engines", value=list(refused), fix="see the reasons, which name what mends them")
    outputs += serving.write_serving(folder, config, target, manifest, record, refused, device=device)
    return StageResult(
        outputs=outputs,
        counts={"parameters": sum(w.numel() for w in weights.values() if w.is_floating_point())},
        metrics=metrics | {f"{k}_refused": v for k, v in refused.items()},
        export=record,
    )


def read_trained(folder: Path, manifest: Manifest) -> tuple[DrafterConfig, dict[str, Any]]:
    """The drafter's config and weights as stage 4 left them.

    Raises:
        PipelineError: a file cannot be read, or it was trained on another number of slots than the manifest binds.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    raw = read_json(folder / "config.json", fix=_RETRAIN)
    try:
        drafter = DrafterConfig(**raw)
    except TypeError as e:
        raise PipelineError(
            f"the trained drafter's config does not fit this pipeline: {e}",
            field=str(folder / "config.json"),
            fix=_RETRAIN,
        ) from e
    if drafter.num_fc_inputs != len(manifest.fc_slots()):
        raise PipelineError(
            f"the drafter was trained on {drafter.num_fc_inputs} slots, the manifest binds {len(manifest.fc_slots())}",
            field="slots.layers",
            value=manifest.fc_layers(),
            fix=_RETRAIN,
        )
    path = folder / "drafter.safetensors"
    try:
        return drafter, load_file(path)
    except (OSError, SafetensorError) as e:
        raise PipelineError(f"the trained weights cannot be read: {e}", field=str(path), fix=_RETRAIN) from e


def write_sglang(
    folder: Path,
    drafter: DrafterConfig,
    weights: dict[str, Any],
    ids: EngineIds,
    *,
    dtype: str,
    context: int,
    target_text: Any,
) -> None:
    """config.json and model.safetensors as SGLang 0.5.23's `models/llama_eagle3.py` loads them.

    Args:
        weights: tensors under the drafter's parameter names, with `d2t` and `t2d`; the embedding is the target's and is
            not among them.
        dtype: "float32" or "bfloat16" for the weights.
        context: longest served context, tokens.
        target_text: the target's text config, for its special tokens.
    """
    write_json(
        folder / "config.json", sglang_config(drafter, ids, dtype=dtype, context=context, target_text=target_text)
    )
    save_safetensors(folder / "model.safetensors", cast(weights, dtype), metadata={"format": "pt"})


def sglang_config(
    drafter: DrafterConfig, ids: EngineIds, *, dtype: str, context: int, target_text: Any
) -> dict[str, Any]:
    """config.json for SGLang. Every size is written out: SGLang's defaults belong to another model."""
    rope = dict(drafter.rope_parameters)
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": drafter.num_attention_heads,
        "num_key_value_heads": drafter.num_key_value_heads,
        "head_dim": drafter.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": drafter.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": drafter.vocab_size,
        "draft_vocab_size": drafter.draft_vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": max(drafter.max_position_embeddings, context),
        # Both spellings: transformers 5 and SGLang read rope_parameters, older readers the other two.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "num_aux_hidden_states": drafter.num_fc_inputs,
        # Nested only: SGLang reads nothing else, and vLLM would take a top-level key in its own convention.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids.ids), "use_aux_hidden_state": True},
        "bos_token_id": getattr(target_text, "bos_token_id", None),
        "eos_token_id": getattr(target_text, "eos_token_id", None),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    # Off unless trained with, and then where llama_eagle3.py looks for each.
    if drafter.norm_before_fc:
        config["eagle_config"]["norm_before_fc"] = True
    return config | {name: True for name in ("fc_norm", "norm_output") if getattr(drafter, name)}


def why_not_sglang(manifest: Manifest, ids: EngineIds) -> str | None:
    """Why this drafter must not be exported for SGLang; None if it may."""
    if ids.deviation is None or manifest.dump is None or manifest.dump.engine == "sglang":
        return None
    return (
        f"the slots hold the residual stream ({manifest.dump.engine}), but SGLang's {ids.model_class} captures "
        f"{ids.deviation}. A drafter for SGLang needs SGLang's own states: "
        f'{_dump_again(manifest, "sglang")}, then train again'
    )


def why_not_vllm(manifest: Manifest, drafter: DrafterConfig) -> str | None:
    """Why this drafter must not be exported for vLLM; None if it may."""
    for name, slot in sorted(manifest.slots.items()):
        if slot.equals_transformers is False:
            error = "" if slot.relative_error is None else f" (relative error {slot.relative_error:.1e})"
            return (
                f"slot {name} holds what SGLang captures for {slot.tensor}, which differs from the residual stream "
                f"that vLLM captures{error}: this drafter is right for SGLang only. A drafter for vLLM needs the residual "
                f'stream: {_dump_again(manifest, "transformers")}, then train again'
            )
    if drafter.norm_before_fc and drafter.fc_norm:
        return "norm_before_fc and fc_norm together are not possible in the speculators format"
    return None


def _dump_again(manifest: Manifest, engine: str) -> str:
    return f'make dump RUN={manifest.run} ARGS="dump.engine={engine}"'


def _export_dtype(asked: str, device: str) -> str:
    if asked == "auto":
        return "float32" if device == "cpu" else "bfloat16"
    return {"fp32": "float32", "bf16": "bfloat16"}[asked]
