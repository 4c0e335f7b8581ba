"""The validator's checks of the tensors: exact names and shapes, types, finite values, and the vocabulary maps."""

from __future__ import annotations

from typing import Any

from pipeline.export.drafter_files import MIDLAYER, OTHER_SPELLINGS
from pipeline.export.validate_report import Report


def canonical_names(tensors: dict[str, Any], layout: str, report: Report) -> dict[str, Any]:
    """The tensors with the decoder layer's names spelt `midlayer.`."""
    found: dict[str, Any] = {}
    others = set()
    for name, tensor in tensors.items():
        spelling = next((s for s in OTHER_SPELLINGS if name.startswith(s)), None)
        key = MIDLAYER + name[len(spelling) :] if spelling else name.removeprefix("model.")
        if name == "model.lm_head.weight":  # the head lies beside `model` in SGLang's class, which would not find it
            key = name
        if key in found:
            report.problem(name, "twice", f"is a second spelling of {key}: the engine keeps what it reads last")
        found[key] = tensor
        others |= {spelling} if spelling and layout == "sglang" else set()
    for spelling in sorted(others):
        report.notes.append(f"weights are named {spelling}* where SGLang's own drafters say {MIDLAYER}*: it loads both")
    return found


def check_keys(tensors: dict, expected: dict, config: dict, report: Report) -> None:
    flags = {"input_norm": "norm_before_fc", "fc_norm": "fc_norm"}
    for name in sorted(expected.keys() - tensors.keys()):
        flag = flags.get(name.split(".")[0])
        report.problem(
            name,
            "missing",
            f"{flag} is set, but its weight is not there"
            if flag
            else "the engine would keep random values for it, without a word",
        )
    for name in sorted(tensors.keys() - expected.keys()):
        flag = flags.get(name.split(".")[0])
        if name == "embed_tokens.weight":
            report.notes.append("embed_tokens.weight is there: SGLang replaces it with the target's embedding")
            report.require(
                tuple(tensors[name].shape) == (config["vocab_size"], config["hidden_size"]),
                name,
                list(tensors[name].shape),
                "must be [vocab_size, hidden_size] of the target",
            )
            continue
        report.problem(
            name,
            "unexpected",
            f"is a weight of {flag}, which the config does not switch on"
            if flag
            else "is no weight of this drafter: the engine drops names it does not know, without a word",
            f"write {flag}: true where the engine reads it, or remove the weight"
            if flag
            else "name it as the engine does, or remove it",
        )
    for name in sorted(expected.keys() & tensors.keys()):
        shape = tuple(tensors[name].shape)
        report.require(
            shape == expected[name], name, list(shape), f"must have shape {list(expected[name])}, by config.json"
        )


def check_dtypes(tensors: dict, config: dict, report: Report) -> None:
    import torch

    floats = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    for name, wanted in (("d2t", torch.int64), ("t2d", torch.bool)):
        if name in tensors:
            report.require(tensors[name].dtype == wanted, name, tensors[name].dtype, f"must be {wanted}")
    stated = config.get("dtype") or config.get("torch_dtype")
    report.require(
        config.get("torch_dtype", stated) == stated,
        "torch_dtype",
        config.get("torch_dtype"),
        f"must equal dtype, {stated}",
    )
    for name, tensor in floats.items():
        found = str(tensor.dtype).removeprefix("torch.")
        report.require(
            tensor.is_floating_point() and stated in (None, found),
            name,
            found,
            f"must have the dtype that config.json states, {stated}",
        )
        if tensor.is_floating_point():
            bad = int((~torch.isfinite(tensor)).sum())
            report.require(
                bad == 0,
                name,
                f"{bad} values",
                "must be finite: NaN or infinity drafts nothing",
                "make train, and look at where its loss went wrong",
            )


def check_vocabulary(tensors: dict, vocab_size: int, report: Report) -> None:
    """d2t holds offsets: target id = draft id + d2t[draft id]. t2d marks exactly these target ids."""
    import torch

    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or d2t.is_floating_point() or d2t.dim() != 1:
        return
    mend = "make standardize, then make train and make export: the three belong to one vocabulary"
    ids = d2t.long() + torch.arange(len(d2t))
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if not report.require(
        len(outside) == 0,
        "d2t",
        outside[:5].tolist(),
        f"draft id + offset must be a target id, 0 to {vocab_size - 1} (d2t holds offsets, not target ids)",
        mend,
    ):
        return
    if not report.require(
        bool((ids.diff() > 0).all()),
        "d2t",
        ids[1:][ids.diff() <= 0][:5].tolist(),
        "target ids must be strictly increasing and distinct",
        mend,
    ):
        return
    if t2d is not None and t2d.dtype == torch.bool and len(t2d) == vocab_size:
        marked = t2d.nonzero().squeeze(1)
        report.require(
            len(marked) == len(ids) and bool((marked == ids).all()),
            "t2d",
            f"{len(marked)} marked",
            f"must mark exactly the {len(ids)} target ids that d2t names",
            mend,
        )
