"""Start from a drafter that exists: one that this pipeline trained or exported, or somebody else's.

`train.init_from` names its folder. Its shape must be this run's; its vocabulary need not be: rows of lm_head go to the
token they are of, and tokens it did not have start as without a warm start. Only weights are taken, no moments.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from pipeline.diagnose.foreign_drafter import ForeignDrafter, read_drafter, read_maps
from pipeline.errors import PipelineError
from pipeline.files import sha256_file
from pipeline.manifest import Manifest, load_manifest
from pipeline.target import Target
from pipeline.train.drafter import Drafter
from pipeline.train.drafter_rope import drafter_rope

_FREE = {"draft_vocab_size", "max_position_embeddings", "rope_parameters"}


def weights_digest(folder: Path, own: Path) -> dict[str, str]:
    """sha256 of every file of weights in `folder`, before anything is changed on disk.

    Args:
        own: where this training writes.

    Raises:
        PipelineError: there are none, or they lie where this training writes.
    """
    if Path(folder).resolve().is_relative_to(own.resolve()):
        raise PipelineError(f"training cannot start from {folder}: it writes there", field="train.init_from",
                            value=str(folder), fix=f"cp -r {folder} <another folder>, and name that one")
    found = {path.name: sha256_file(path) for path in sorted(Path(folder).glob("*.safetensors"))}
    if not found:
        raise _refused(folder, "no *.safetensors lie there", "train.init_from", str(folder))
    return found


@torch.no_grad()
def load_into(drafter: Drafter, target_ids: Tensor, folder: Path, target: Target, manifest: Manifest) -> str:
    """Put a drafter's weights into `drafter`.

    Args:
        target_ids: [Vd] target id of every draft id of `drafter`.
        manifest: this run's, whose slots are compared with those of the run that the folder lies in, if it does.

    Returns:
        One line on what was taken.

    Raises:
        PipelineError: the folder holds no drafter of this shape, its vocabulary cannot be read, or its run's slots are
            others.
    """
    theirs = read_drafter(folder, target)
    ours, found = asdict(drafter.config), asdict(theirs.shape)
    other = {name for name in ours.keys() - _FREE if ours[name] != found[name]}
    if drafter_rope(theirs.shape.rope_parameters) != drafter.config.rope_parameters:
        other.add("rope_parameters")
    if other:
        name = sorted(other)[0]
        raise _refused(folder, f"its {name} is {found[name]}, this run's {ours[name]}", f"drafter.{name}", ours[name])
    if theirs.norm_before_residual:
        raise _refused(folder, "it was trained with norm_before_residual, which SGLang cannot serve", "train.init_from",
                       str(folder))
    wiring = _compare_slots(folder, manifest)
    head, known = _head_rows(theirs, target_ids, target.vocab_size, drafter.lm_head.weight)
    weights = theirs.weights | {"lm_head.weight": head}
    for name, parameter in drafter.named_parameters():
        parameter.copy_(weights[name])
    return (f"train: starting from {folder}: all weights, {known} of {len(target_ids)} rows of lm_head (the others are of "
            f"tokens it did not draft); {wiring}")


def _head_rows(theirs: ForeignDrafter, target_ids: Tensor, vocab: int, initial: Tensor) -> tuple[Tensor, int]:
    readings, problems = read_maps(theirs.d2t, theirs.t2d, theirs.shape.draft_vocab_size, vocab)
    if not readings or readings[0].problems or problems:
        what = "; ".join(problems or (readings[0].problems if readings else ("no reading of d2t and t2d",)))
        raise _refused(theirs.folder, f"which token a row of lm_head is of is not clear: {what}", "d2t", None)
    row_of = torch.full((vocab,), -1)
    row_of[readings[0].target_ids] = torch.arange(len(readings[0].target_ids))
    rows = row_of[target_ids.cpu()]
    head = initial.detach().cpu().clone()
    head[rows >= 0] = theirs.weights["lm_head.weight"][rows[rows >= 0]]
    return head, int((rows >= 0).sum())


def _compare_slots(folder: Path, manifest: Manifest) -> str:
    """Wiring cannot be seen in a folder of weights, only in the manifest of the run that made it."""
    for parent in list(Path(folder).resolve().parents)[:2]:
        if (run := load_manifest(parent)) is not None:
            theirs, ours = run.fc_layers(), manifest.fc_layers()
            if theirs != ours:
                raise _refused(folder, f"its slots hold layer outputs {theirs}, this run's {ours}", "slots.layers",
                               ours)
            return f"slots as here, {ours}"
    return "no manifest lies beside it, so that its slots are this run's is taken on trust (make diagnose can tell)"


def _refused(folder: Path, what: str, where: str, value: object) -> PipelineError:
    return PipelineError(f"training cannot start from {folder}: {what}", field=where, value=value,
                         fix="name another folder in train.init_from, or leave it null")
