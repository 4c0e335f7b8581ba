"""Somebody else's drafter: its files under this project's names, with what they say and what they leave out.

Read are safetensors with `fc.weight`, one decoder layer (`midlayer.*` or `layers.0.*`), `norm`, `lm_head`, and the maps
`d2t` and `t2d`, beside a config.json in SGLang's or speculators' form. Sizes come from the tensors; what neither they nor
config.json say is the target's. Pickled weights are refused: reading one can run what its maker wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import PipelineError
from pipeline.export.drafter_files import expected_tensors, norm_before_fc, read_config, read_tensors, rope_parameters_of
from pipeline.export.validate_report import Report
from pipeline.export.validate_weights import canonical_names
from pipeline.files import sha256_file
from pipeline.target import Target, load_embedding
from pipeline.train.drafter_config import DrafterConfig

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OLD_NAMES = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
_NOT_THE_DRAFTERS = ("embed_tokens.", "verifier_lm_head.", "verifier_norm.")
_USE_ANOTHER = "choose an EAGLE-3 drafter of this target, or name its target: make diagnose DRAFT=dir TARGET=folder"


@dataclass
class ForeignDrafter:
    """A drafter whose wiring is not known yet.

    Attributes:
        layout: "sglang" or "speculators".
        shape: sizes and rope as the tensors, config.json and the target say; the norms as config.json says.
        weights: fp32, under SGLang's names, without `d2t` and `t2d`.
        d2t, t2d: as stored; None where the files have none.
        norm_before_residual: what config.json says, where it says nothing the default of who reads this layout.
        ids: the layer ids in config.json, in whatever convention; None: none.
        notes: what is worth knowing about the files.
    """

    folder: Path
    layout: str
    shape: DrafterConfig
    weights: dict[str, Tensor]
    d2t: Tensor | None
    t2d: Tensor | None
    norm_before_residual: bool
    ids: list[int] | None
    notes: list[str] = field(default_factory=list)

    @property
    def slots(self) -> int:
        return self.shape.num_fc_inputs

    def slot_weight(self, slot: int) -> Tensor:
        """fc's columns for one slot, [H, H]."""
        width = self.shape.hidden_size
        return self.weights["fc.weight"][:, slot * width : (slot + 1) * width]

    def digest(self) -> dict[str, str]:
        """sha256 of config.json and of every file of weights."""
        files = [self.folder / "config.json", *sorted(self.folder.glob("*.safetensors"))]
        return {path.name: sha256_file(path) for path in files}


def read_drafter(folder: Path, target: Target) -> ForeignDrafter:
    """Read a drafter's folder.

    Raises:
        PipelineError: pickled weights; or a drafter of another width, with other tensors, or of another kind.
    """
    folder = Path(folder)
    _refuse_pickles(folder)
    config, layout = read_config(folder)
    report = Report(folder)
    tensors = canonical_names(read_tensors(folder), layout, report)
    for old, new in _OLD_NAMES.items():
        tensors = {name.replace(old, new, 1) if name.startswith(old) else name: t for name, t in tensors.items()}
    report.raise_if_bad()
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    notes = _compare_embedding(tensors, target)
    weights = {name: t.float() for name, t in tensors.items() if not name.startswith(_NOT_THE_DRAFTERS)}
    if (missing := [n for n in ("fc.weight", "lm_head.weight") if n not in weights]):
        raise _refused(folder, f"there is no {missing[0]}: this is no EAGLE-3 drafter with a head of its own", missing[0])
    shape, more = _shape(folder, config, weights, target)
    sizes = {**vars(shape), "eagle_config": None}
    expected = {n: s for n, s in expected_tensors(sizes, shape.num_fc_inputs, layout).items() if n not in ("d2t", "t2d")}
    for name in sorted(expected.keys() | weights.keys()):
        found, wanted = (list(weights[name].shape) if name in weights else None), expected.get(name)
        if wanted is None:
            raise _refused(folder, f"{name} is no weight of a drafter that SGLang's llama_eagle3.py can serve", name, found)
        if found != list(wanted):
            what = "is missing" if found is None else f"has shape {found}"
            raise _refused(folder, f"{name} {what}; the other tensors ask for {list(wanted)}", name, found)
        if not torch.isfinite(weights[name]).all():
            raise _refused(folder, f"{name} holds NaN or infinity", name)
    key = "eagle_aux_hidden_state_layer_ids"
    ids = (config.get("eagle_config") or {}).get(key, config.get(key))
    return ForeignDrafter(
        folder=folder, layout=layout, shape=shape, weights=weights, d2t=d2t, t2d=t2d,
        # SGLang has no such switch, and False is the default of speculators' config (models/eagle3/config.py).
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        ids=ids if isinstance(ids, list) and all(type(i) is int for i in ids) else None, notes=notes + more)


def _refuse_pickles(folder: Path) -> None:
    pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
    if pickles and not list(folder.glob("*.safetensors")):
        convert = ("import torch; from safetensors.torch import save_file; save_file({k: v.contiguous() for k, v in "
                   f"torch.load('{pickles[0]}', weights_only=True, map_location='cpu').items()}}, 'model.safetensors')")
        raise PipelineError(
            f"{folder / pickles[0]} is a pickle: reading it can run code that its maker put there, so it is not read",
            field=str(folder), value=", ".join(pickles),
            fix=f"convert it once, in that folder: python -c \"{convert}\" (weights_only reads tensors and runs nothing)")


def _shape(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], target: Target
           ) -> tuple[DrafterConfig, list[str]]:
    """Sizes from the tensors, the rest from config.json, else from the target; and notes on where these differ."""
    text, hidden = target.text, weights["fc.weight"].shape[0]
    width = weights["fc.weight"].shape[1]
    if width // hidden > target.num_layers:
        raise _refused(folder, f"fc reads {width // hidden} states, the target has only {target.num_layers} layers", "fc.weight",
                       [hidden, width])
    if hidden != target.hidden_size or width % hidden or width == hidden:
        raise _refused(
            folder, f"fc maps {width} to {hidden}; the target's hidden size is {target.hidden_size}, so it should map two or "
            f"more times {target.hidden_size} to {target.hidden_size}", "fc.weight", [hidden, width])
    try:
        q, k, gate = (weights[f"midlayer.{n}_proj.weight"].shape[0] for n in ("self_attn.q", "self_attn.k", "mlp.gate"))
    except KeyError as e:
        raise _refused(folder, f"{e.args[0]} is missing", e.args[0]) from e
    head_dim = config.get("head_dim")
    if head_dim is None and type(heads := config.get("num_attention_heads")) is int and q % heads == 0:
        head_dim = q // heads
    head_dim = head_dim or getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    found = {"hidden_size": hidden, "num_attention_heads": q // head_dim, "num_key_value_heads": k // head_dim,
             "head_dim": head_dim, "intermediate_size": gate, "draft_vocab_size": weights["lm_head.weight"].shape[0],
             "vocab_size": target.vocab_size}
    notes = [f"config.json says {name} = {config[name]}, the {'target' if name == 'vocab_size' else 'weights'} {value}"
             for name, value in found.items() if config.get(name, value) != value]
    rope, theirs = rope_parameters_of(config), rope_parameters_of(text.to_dict())
    if "rope_theta" not in rope:
        rope = theirs
        notes.append(f"config.json states no rope_theta: the target's rope is used, {theirs}")
    elif not theirs.items() <= rope.items():
        notes.append(f"config.json states the rope {rope}, the target has {theirs}")
    return DrafterConfig(
        **found, max_position_embeddings=config.get("max_position_embeddings") or text.max_position_embeddings,
        rope_parameters=rope, rms_norm_eps=config.get("rms_norm_eps") or text.rms_norm_eps, num_fc_inputs=width // hidden,
        fc_norm="fc_norm.0.weight" in weights, norm_before_fc="input_norm.weight" in weights,
        norm_output=bool(config.get("norm_output"))), notes + _unused_norms(config, weights)


def _unused_norms(config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
    stated = {"fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm")), "norm_before_fc": norm_before_fc(config)}
    there = {"fc_norm": "fc_norm.0.weight" in weights, "norm_before_fc": "input_norm.weight" in weights}
    return [f"config.json says {name} = {stated[name]}, its weights are {'' if there[name] else 'not '}there"
            for name in stated if stated[name] != there[name]]


def _compare_embedding(tensors: dict[str, Tensor], target: Target) -> list[str]:
    if (theirs := tensors.get("embed_tokens.weight")) is None:
        return []
    ours = load_embedding(target).float()
    if theirs.shape != ours.shape:
        return [f"it brings an embedding of shape {list(theirs.shape)}, the target's is {list(ours.shape)}; engines use the "
                "target's"]
    off = float((theirs.float() - ours).norm() / ours.norm())
    return [] if off < 1e-2 else [f"it brings an embedding of its own (relative difference {off:.2f}); engines use the target's"]


def _refused(folder: Path, what: str, where: str, value: object = None) -> PipelineError:
    return PipelineError(f"{folder} cannot be diagnosed: {what}", field=where, value=value, fix=_USE_ANOTHER)


# ---------------------------------------------------------------- the vocabulary maps


@dataclass(frozen=True)
class Reading:
    """One way to read the maps.

    Attributes:
        target_ids: [Vd] the target id of every draft id.
        problems: what speaks against it; a reading with problems can still be the one that fits.
    """

    name: str
    target_ids: Tensor
    problems: tuple[str, ...] = ()


def read_maps(d2t: Tensor | None, t2d: Tensor | None, draft_vocab: int, vocab: int) -> tuple[list[Reading], list[str]]:
    """The readings that name one target id per draft id, the usual one first, and what is wrong with the maps.

    SGLang and vLLM read `d2t` as offsets (target id = draft id + d2t); some exporters write target ids instead. `t2d` marks
    the target ids that are inside, so that in ascending order it is a reading as well.
    """
    problems = []
    marked = None
    if t2d is not None:
        marks = t2d.nonzero().flatten()
        if len(t2d) != vocab:
            problems.append(f"t2d is over {len(t2d)} target ids, the target has {vocab}")
        elif len(marks) != draft_vocab:
            problems.append(f"t2d marks {len(marks)} target ids, lm_head has {draft_vocab} rows")
        else:
            marked = marks
    readings = []
    if d2t is not None and (d2t.shape != (draft_vocab,) or d2t.is_floating_point()):
        problems.append(f"d2t is {d2t.dtype} {list(d2t.shape)}, lm_head has {draft_vocab} rows")
    elif d2t is not None:
        offsets = d2t.long() + torch.arange(draft_vocab)
        readings = [_reading("d2t as offsets", offsets, marked, vocab), _reading("d2t as target ids", d2t.long(), marked, vocab)]
        problems += [f"{readings[0].name}: {p}" for p in readings[0].problems]
    elif draft_vocab == vocab:
        readings = [Reading("no map: the whole vocabulary", torch.arange(vocab))]
    else:
        problems.append(f"there is no d2t, though lm_head has {draft_vocab} rows for {vocab} target ids")
    if marked is not None:
        readings.append(Reading("the ids that t2d marks", marked))
    usable, seen = [], []
    for reading in readings:
        ids = reading.target_ids
        one_each = bool(((ids >= 0) & (ids < vocab)).all()) and len(ids.unique()) == len(ids)
        if one_each and not any(torch.equal(ids, other) for other in seen):
            usable.append(reading)
            seen.append(ids)
    return usable, problems


def _reading(name: str, ids: Tensor, marked: Tensor | None, vocab: int) -> Reading:
    problems = []
    outside = ids[(ids < 0) | (ids >= vocab)]
    if len(outside):
        problems.append(f"{len(outside)} of {len(ids)} draft ids lead outside of the target's {vocab} ids, "
                        f"e.g. to {int(outside[0])}")
    if repeated := len(ids) - len(ids.unique()):
        problems.append(f"{repeated} of {len(ids)} draft ids lead to a target id that another one has")
    elif bool((ids.diff() <= 0).any()):
        problems.append("the target ids do not ascend")
    if marked is not None and not torch.equal(ids.sort().values, marked):
        problems.append("they are not the ids that t2d marks")
    return Reading(name, ids, tuple(problems))
