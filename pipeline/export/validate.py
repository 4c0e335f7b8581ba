"""Check a drafter directory before an engine loads it, because engines do not.

SGLang drops weight names it does not know, falls back to its own layers when the ids are missing, and reads rope, norms
and vocabulary maps from fields that other tools spell differently; each of these is a quietly worse drafter, no crash.
The validator runs at export and as a command on any drafter, also one that others trained:

    python -m pipeline.export.validate DIR [--context TOKENS] [--target DIR]

It reads the SGLang layout (`LlamaForCausalLMEagle3`, flat config) and the speculators layout that vLLM serves, collects
every problem and says for each which field, what was found and what mends it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pipeline.errors import PipelineError
from pipeline.export.drafter_files import (
    ARCHITECTURE,
    SIZES,
    are_layer_ids,
    expected_tensors,
    read_config,
    read_tensors,
    rope_parameters_of,
)
from pipeline.export.validate_report import REEXPORT, Report
from pipeline.export.validate_weights import canonical_names, check_dtypes, check_keys, check_vocabulary
from pipeline.layers.plain_config import target_fields
from pipeline.layers.sglang_models import StatedRule
from pipeline.train.drafter_rope import drafter_rope


def validate(
    folder: Path, *, context: int | None = None, target: Path | None = None, layer_id_rule: StatedRule | None = None
) -> Report:
    """Check a drafter directory.

    Args:
        folder: holds config.json and safetensors.
        context: longest context (tokens) the drafter must serve; None: the target's, where `target` is given.
        target: folder or config.json of the target the drafter belongs to; adds the checks that need it.
        layer_id_rule: `target.layer_id_rule`, for a target whose class cannot be asked.

    Raises:
        PipelineError: there is no readable config.json or no readable safetensors file to check.
    """
    report = Report(Path(folder))
    config, layout = read_config(report.folder)
    target_config = target_fields(target) if target is not None else None
    sizes_stated = _check_sizes(config, report)
    _check_config(config, layout, report)
    num_aux = _check_ids(config, layout, report)
    _check_rope(config, layout, report)
    tensors = canonical_names(read_tensors(report.folder), layout, report)
    check_dtypes(tensors, config, report)
    if sizes_stated:
        check_keys(tensors, expected_tensors(config, num_aux or 3, layout), config, report)
        check_vocabulary(tensors, config["vocab_size"], report)
    if target_config is not None:
        _check_target(config, target_config, target, layout, report, layer_id_rule)
        context = context or target_config.get("max_position_embeddings")
    positions = config.get("max_position_embeddings")
    if context is not None and isinstance(positions, int):
        report.require(
            positions >= context,
            "max_position_embeddings",
            positions,
            f"must be at least the served context, {context}: past it the engine fails or drafts noise",
            f'make export ARGS="export.served_context={context}"',
        )
    return report


# ---------------------------------------------------------------- config.json


def _check_sizes(config: dict, report: Report) -> bool:
    """Whether all sizes are there: without them no shape can be checked."""
    good = [
        report.require(
            type(config.get(n)) is int and config[n] > 0,
            n,
            config.get(n),
            "must be written out as a positive number (an engine's default would be another model)",
        )
        for n in SIZES
    ]
    return all(good)


def _check_config(config: dict, layout: str, report: Report) -> None:
    def must_be(name: str, wanted: object, why: str) -> None:
        report.require(config.get(name) == wanted, name, config.get(name), f"must be {wanted!r}: {why}")

    if layout == "sglang":
        must_be("architectures", [ARCHITECTURE], "SGLang picks the drafter's class by it")
    else:
        must_be("speculators_model_type", "eagle3", "vLLM picks the drafter's class by it")
        must_be(
            "norm_before_residual", False, "the drafter was trained with the raw residual, and vLLM's default is True"
        )
    must_be("model_type", "llama", "both engines read the layer's shape through it")
    must_be("num_hidden_layers", 1, "an EAGLE-3 drafter has one decoder layer")
    must_be("hidden_act", "silu", "the MLP is SwiGLU")
    must_be("tie_word_embeddings", False, "the drafter has its own lm_head over its own vocabulary")
    report.require(
        not (config.get("bias") or config.get("attention_bias") or config.get("mlp_bias")),
        "attention_bias",
        True,
        "the drafter's projections have no bias",
    )
    eps = config.get("rms_norm_eps")
    report.require(isinstance(eps, float) and 0 < eps < 1, "rms_norm_eps", eps, "must be written out")
    report.require(
        type(config.get("max_position_embeddings")) is int,
        "max_position_embeddings",
        config.get("max_position_embeddings"),
        "must be written out (the default is 2048)",
    )
    width = config.get("target_hidden_size")
    report.require(
        width in (None, config.get("hidden_size")),
        "target_hidden_size",
        width,
        f"must equal hidden_size, {config.get('hidden_size')}: SGLang skips fc by comparing the two",
        "train a drafter of the target's hidden size",
    )
    report.require(config.get("partial_rotary_factor") in (None, 1, 1.0), "partial_rotary_factor",
                   config.get("partial_rotary_factor"), "must not be set: SGLang would rotate only a part of each head")
    report.require(config.get("rope_is_neox_style", True) is True, "rope_is_neox_style", config.get("rope_is_neox_style"),
                   "must not be set: SGLang would rotate neighbouring pairs instead of the two halves of a head")
    report.require(bool(config.get("use_aux_norm")) <= bool(config.get("fc_norm")), "use_aux_norm", config.get("use_aux_norm"),
                   "makes SGLang norm every slot before fc, with random weights where the file has none",
                   "write fc_norm: true and the norms' weights if it was trained so, or remove it")
    if "quantization_config" in config:
        report.notes.append("quantization_config is set: SGLang would quantize the drafter as well")


def _check_ids(config: dict, layout: str, report: Report) -> int | None:
    """Check the engine ids; returns how many hidden states fc reads, None if the config does not say."""
    key = "eagle_aux_hidden_state_layer_ids"
    nested = config.get("eagle_config") or {}
    where, other = (f"eagle_config.{key}", key) if layout == "sglang" else (key, f"eagle_config.{key}")
    ids, stray = (nested.get(key), config.get(key)) if layout == "sglang" else (config.get(key), nested.get(key))
    report.require(
        stray is None,
        other,
        stray,
        f"must not be written: this layout is read from {where}, and other engines read {other} in another convention",
    )
    if layout == "sglang":
        report.require(
            nested.get("use_aux_hidden_state") is True,
            "eagle_config.use_aux_hidden_state",
            nested.get("use_aux_hidden_state"),
            "must be true: the drafter reads the target's hidden states",
        )
    count = config.get("num_aux_hidden_states")
    if not are_layer_ids(ids):
        report.problem(where, ids, "must list the engine's layer ids: without them the engine silently takes its own")
        return count if type(count) is int else None
    report.require(
        min(ids) >= 0,
        where,
        ids,
        "negative ids are refused: SGLang captures the embedding for -1, which is no layer output",
    )
    report.require(len(set(ids)) == len(ids), where, ids, "must be distinct: fc reads every hidden state once")
    if ids != sorted(ids) and layout == "sglang":  # ids are what the class makes of them: DeepSeek layer 0 needs [5, 1]
        report.notes.append(
            f"{where} = {ids} does not ascend: the engine concatenates in layer order, and so must the drafter's trainer "
            "have done; --target says which layers these are"
        )
    elif ids != sorted(ids):
        report.problem(where, ids, "must ascend: they are capture points, and vLLM sorts them")
    report.require(count in (None, len(ids)), "num_aux_hidden_states", count, f"must be {len(ids)}, the number of ids")
    report.require(
        len(ids) == 3 or count is not None,
        "num_aux_hidden_states",
        count,
        f"must be written for {len(ids)} ids: an engine's default is 3",
    )
    return len(ids)


def _check_rope(config: dict, layout: str, report: Report) -> None:
    new = config.get("rope_parameters")
    if not isinstance(new, dict) or "rope_theta" not in new or "rope_type" not in new:
        report.problem(
            "rope_parameters",
            new,
            "must hold rope_theta and rope_type (transformers 5 reads only this spelling)",
            "copy the target's rope_theta and rope_scaling into it",
        )
        return
    if layout == "speculators":
        return  # speculators and vLLM write and read the new spelling only
    report.require(
        config.get("rope_theta") == new["rope_theta"],
        "rope_theta",
        config.get("rope_theta"),
        f"must equal rope_parameters.rope_theta, {new['rope_theta']}: older readers take this one",
    )
    old = config.get("rope_scaling")
    scaling = None if new["rope_type"] == "default" else {k: v for k, v in new.items() if k != "rope_theta"}
    if old is not None:
        old = {("rope_type" if k == "type" else k): v for k, v in old.items() if k != "rope_theta"}
    report.require(old == scaling, "rope_scaling", old, f"must say the same as rope_parameters, {scaling}")


# ---------------------------------------------------------------- the target


def _check_target(
    config: dict, target: dict, path: Path, layout: str, report: Report, layer_id_rule: StatedRule | None
) -> None:
    for name in ("hidden_size", "vocab_size"):
        report.require(
            config.get(name) == target.get(name),
            name,
            config.get(name),
            f"the target has {target.get(name)}",
            "use the drafter with the target it was trained for",
        )
    ours, theirs = rope_parameters_of(config), rope_parameters_of(target)
    report.require(
        any(rope.items() <= ours.items() for rope in (theirs, drafter_rope(theirs))),
        "rope_parameters",
        ours,
        f"the target has {theirs}: features and drafts would be rotated differently",
    )
    key = "eagle_aux_hidden_state_layer_ids"
    ids = (config.get("eagle_config") or {}).get(key) if layout == "sglang" else config.get(key)
    if not are_layer_ids(ids):
        return  # reported already
    if layout == "speculators":
        report.notes.append(f"vLLM captures layer outputs {[i - 1 for i in ids]} for ids {ids}")
        layers = target.get("num_hidden_layers", 0)
        report.require(max(ids) <= layers, key, ids, f"the target has {layers} layers, so capture points end there")
    else:
        from pipeline.layers.layer_ids import capture_points_for

        try:
            points = capture_points_for(path, ids, layer_id_rule)
        except PipelineError as e:
            report.problem("eagle_config.eagle_aux_hidden_state_layer_ids", ids, e.what, e.fix or REEXPORT)
        else:
            report.notes.append(f"the installed SGLang captures layer outputs {[p - 1 for p in points]} for ids {ids}")
            layers = target.get("num_hidden_layers", 0)
            report.require(max(points) <= layers, "eagle_config.eagle_aux_hidden_state_layer_ids", ids,
                           f"the target has layer outputs 0 to {layers - 1}")


# ---------------------------------------------------------------- command


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.export.validate", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a drafter's folder, e.g. runs/demo/export/sglang")
    parser.add_argument("--context", type=int, help="longest context to serve, tokens (default: the target's)")
    parser.add_argument(
        "--target", type=Path, help="the target's folder or config.json: adds rope, sizes and layer checks"
    )
    parser.add_argument(
        "--layer-id-rule", choices=get_args(StatedRule), help="what an id is to the target's SGLang class, if it cannot be asked"
    )
    args = parser.parse_args(argv)
    try:
        report = validate(args.folder, context=args.context, target=args.target, layer_id_rule=args.layer_id_rule)
        for note in report.notes:
            print(f"note: {note}")
        report.raise_if_bad()
    except PipelineError as e:
        print(e, file=sys.stderr)
        return 1
    print(f"{args.folder}: no problem found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
