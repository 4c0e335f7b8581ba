"""Checkpoints that are whole or not there: `step-00000200/` with safetensors and JSON, no pickle.

    model.safetensors      the drafter's parameters and buffers, fp32, as trained: fc reads scaled slots (`start`)
    optimizer.safetensors  step and moments per parameter
    ema.safetensors        the averaged parameters, with `train.ema`
    state.json             where training is: optimizer step, epoch, position in the epoch, validation history
    complete.json          size and sha256 of the others, written last

The folder is written under a temporary name and renamed. Reading checks it against complete.json, so a half-written or
altered checkpoint is passed over, never taken for a whole one. Tensors are whole, whatever ranks held parts of them.
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
from pipeline.train.ema import Ema
from pipeline.train.parallel import contribute, part, whole
from pipeline.train.ranks import is_main_process

_FILES = {"model.safetensors", "optimizer.safetensors", "state.json"}
_EMA = "ema.safetensors"


def save_checkpoint(root: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict,
                    ema: Ema | None = None, *, write: bool = True) -> Path:
    """Write `root/step-<step>/` and return it. Every rank calls this, one with `write`.

    Args:
        state: plain JSON values.
        write: False: only give the writing rank this rank's parts of tensors.
    """
    path, tmp = root / f"step-{step:08d}", root / f".tmp-step-{step:08d}"
    files = {"model.safetensors": model.state_dict(), "optimizer.safetensors": _optimizer_tensors(model, optimizer)}
    if ema is not None:
        files[_EMA] = ema.average
    if not write:
        for tensors in files.values():
            for tensor in tensors.values():
                contribute(tensor)
        return path
    for leftover in root.glob(".tmp-step-*"):  # of a run that was killed while it saved
        shutil.rmtree(leftover, ignore_errors=True)
    with _removed_on_failure(tmp), clear_disk_errors(root):
        make_dir(tmp)
        for name, tensors in files.items():
            save_safetensors(tmp / name, {key: whole(tensor) for key, tensor in tensors.items()})
        write_json(tmp / "state.json", state)
        sizes_and_hashes = {name: [(tmp / name).stat().st_size, sha256_file(tmp / name)]
                            for name in (*files, "state.json")}
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
        return _FILES <= set(recorded) <= _FILES | {_EMA} and all(
            (path / name).stat().st_size == size and sha256_file(path / name) == digest
            for name, (size, digest) in recorded.items())
    except (OSError, ValueError, TypeError):
        return False


def latest_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint; damaged ones are named on the way and passed over."""
    for path in sorted(root.glob("step-*"), reverse=True):
        if is_whole(path):
            return path
        if is_main_process():
            print(f"train: checkpoint {path.name} is incomplete or altered and is passed over", flush=True)
    return None


@torch.no_grad()
def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None = None) -> dict:
    """Put weights, moments and averages back; returns `state`. Every rank reads the file and keeps its own part."""
    state = model.state_dict()
    for name, tensor in _read(path / "model.safetensors").items():
        state[name].copy_(part(tensor, state[name]))
    parameters = dict(model.named_parameters())
    for key, tensor in _read(path / "optimizer.safetensors").items():
        what, name = key.split("/", 1)
        p = parameters[name]
        # bitsandbytes counts steps in a plain number.
        value = int(tensor) if what == "step" and tensor.dtype == torch.int64 else part(tensor, p)
        optimizer.state[p][what] = value
    if ema is not None:
        for name, tensor in _read(path / _EMA).items():
            ema.average[name].copy_(part(tensor, ema.average[name]))
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def best_weights(path: Path) -> dict[str, Tensor]:
    """What a checkpoint's validation was of: the averages where there are some, else the weights; and the buffers."""
    averages = _read(path / _EMA) if (path / _EMA).exists() else {}
    return _read(path / "model.safetensors") | averages


def prune_checkpoints(root: Path, keep_last: int, best: int | None) -> None:
    """Delete all but the last `keep_last` checkpoints and the one of step `best`."""
    paths = sorted(root.glob("step-*"))
    for path in paths[:-keep_last]:
        if best is None or path.name != f"step-{best:08d}":
            shutil.rmtree(path, ignore_errors=True)


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`<what>/<parameter>` → tensor, e.g. `exp_avg/fc.weight`, in the same order on every rank."""
    tensors = {f"{what}/{name}": torch.as_tensor(value) for name, p in model.named_parameters()
               for what, value in optimizer.state.get(p, {}).items()}
    # bitsandbytes keeps one code book (qmap) for all parameters; safetensors writes no tensor twice.
    return {key: tensor.clone() if key.startswith("qmap") else tensor for key, tensor in tensors.items()}


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as e:
        raise PipelineError(f"the checkpoint cannot be read: {e}", field=str(path),
                            fix=f"rm -r {path.parent}, then the same command again goes on from an older one") from e
