"""Checkpoints that are whole or not there: `step-00000200/` with safetensors and JSON, no pickle.

    model.safetensors      the drafter's parameters and buffers, fp32
    optimizer.safetensors  AdamW's step and moments per parameter
    state.json             where training is: optimizer step, epoch, position in the epoch, validation history
    complete.json          size and sha256 of the three, written last

The folder is written under a temporary name and renamed. Reading checks it against complete.json, so a half-written or
altered checkpoint is passed over, never taken for a whole one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.errors import PipelineError
from pipeline.files import clear_disk_errors, make_dir, save_safetensors, sha256_file, write_json

_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def save_checkpoint(root: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> Path:
    """Write `root/step-<step>/` and return it. `state`: plain JSON values."""
    path, tmp = root / f"step-{step:08d}", root / f".tmp-step-{step:08d}"
    for leftover in root.glob(".tmp-step-*"):  # of a run that was killed while it saved
        shutil.rmtree(leftover, ignore_errors=True)
    with _removed_on_failure(tmp), clear_disk_errors(root):
        make_dir(tmp)
        weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
        save_safetensors(tmp / "model.safetensors", weights)
        save_safetensors(tmp / "optimizer.safetensors", _optimizer_tensors(model, optimizer))
        write_json(tmp / "state.json", state)
        sizes_and_hashes = {name: [(tmp / name).stat().st_size, sha256_file(tmp / name)] for name in _FILES}
        write_json(tmp / "complete.json", sizes_and_hashes)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(tmp, path)
    return path


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """A full disk must not be kept full by half a checkpoint."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def is_whole(path: Path) -> bool:
    """Whether every file of a checkpoint is as it was when the checkpoint was finished."""
    try:
        recorded = json.loads((path / "complete.json").read_text(encoding="utf-8"))
        return set(recorded) == set(_FILES) and all(
            (path / name).stat().st_size == size and sha256_file(path / name) == digest
            for name, (size, digest) in recorded.items())
    except (OSError, ValueError, TypeError):
        return False


def latest_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint; damaged ones are named on the way and passed over."""
    for path in sorted(root.glob("step-*"), reverse=True):
        if is_whole(path):
            return path
        print(f"train: checkpoint {path.name} is incomplete or altered and is passed over", flush=True)
    return None


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Put the weights and moments back; returns `state`."""
    load_weights(path, model)
    tensors = _read(path / "optimizer.safetensors")
    saved: dict[int, dict[str, Tensor]] = {}
    numbers = {name: i for i, name in enumerate(_parameter_order(model, optimizer))}
    for key, tensor in tensors.items():
        what, name = key.split("/", 1)
        saved.setdefault(numbers[name], {})[what] = tensor
    optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def load_weights(path: Path, model: nn.Module) -> None:
    """Put only the weights of a checkpoint into `model`."""
    model.load_state_dict(_read(path / "model.safetensors"))


def prune_checkpoints(root: Path, keep_last: int, best: int | None) -> None:
    """Delete all but the last `keep_last` checkpoints and the one of step `best`."""
    paths = sorted(root.glob("step-*"))
    for path in paths[:-keep_last]:
        if best is None or path.name != f"step-{best:08d}":
            shutil.rmtree(path, ignore_errors=True)


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`<what>/<parameter>` → tensor, e.g. `exp_avg/fc.weight`."""
    names = _parameter_order(model, optimizer)
    return {f"{what}/{names[i]}": tensor.detach().cpu().contiguous()
            for i, entry in optimizer.state_dict()["state"].items() for what, tensor in entry.items()}


def _parameter_order(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the parameters in the order in which the optimizer numbers them."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as e:
        raise PipelineError(f"the checkpoint cannot be read: {e}", field=str(path),
                            fix=f"rm -r {path.parent}, then the same command again goes on from an older one") from e
