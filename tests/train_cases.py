"""Shared by the tests of training: copies of a run, what training left behind, two ranks, and ways to be killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipeline.manifest import FileRecord, save_manifest
from tests.tiny_run import ROOT, TinyRun, tiny_run

CLOCK = {"tokens_per_second", "data_wait", "mfu", "memory_gib"}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> TinyRun:
    """A run that is ready to train, not to be trained itself."""
    run = tiny_run(tmp_path_factory.mktemp("train"))
    run.stage("standardize")
    return run


@pytest.fixture
def run(base, tmp_path) -> TinyRun:
    """A private copy of it."""
    shutil.copytree(base.root / "runs", tmp_path / "runs")
    return TinyRun(base.target_dir, tmp_path)


def weights(run: TinyRun) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "train" / "drafter.safetensors")


def as_served(run: TinyRun, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's weights with the recorded scale of the slots taken into fc."""
    scale = torch.tensor(run.manifest.stages["train"].metrics["slot_scale"])
    fc = tensors["fc.weight"]
    return tensors | {"fc.weight": (fc.unflatten(1, (len(scale), -1)) * scale[:, None]).flatten(1)}


def metrics(run: TinyRun) -> list[dict]:
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run.folder / "train" / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]


def again(run: TinyRun, tmp_path: Path, name: str) -> TinyRun:
    """Another copy of the run, untrained."""
    shutil.copytree(run.root / "runs", tmp_path / name / "runs")
    return TinyRun(run.target_dir, tmp_path / name)


class Killed(BaseException):
    """Nothing may catch it, as nothing catches kill -9."""


def assert_same_training(a: TinyRun, b: TinyRun) -> None:
    assert len(metrics(a)) == len(metrics(b))
    for x, y in zip(metrics(a), metrics(b)):
        assert x.keys() == y.keys()
        for key in x:
            assert x[key] == pytest.approx(y[key], rel=2e-5, abs=1e-6), key
    for name, value in weights(a).items():  # AdamW divides by the gradient's size, which magnifies rounding
        torch.testing.assert_close(value, weights(b)[name], rtol=1e-3, atol=2e-4, msg=name)


def change_dump(run: TinyRun, change: Callable[[dict[str, torch.Tensor]], None], shards: str = "shard-*") -> None:
    """Change tensors of the dump as stage 3 did not see them, and the records with them."""
    for path in run.folder.glob(f"dump/{shards}.safetensors"):
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata()
        tensors = dict(load_file(path))
        change(tensors)
        save_file(tensors, path, metadata=metadata)
    manifest = run.manifest
    manifest.stages["dump"].outputs = [FileRecord.of(run.folder, run.folder / f.path)
                                       for f in manifest.stages["dump"].outputs]
    manifest.stages["standardize"].inputs["dump"] = manifest.stages["dump"].digest()
    save_manifest(run.folder, manifest)


def spoil_a_prompt(run: TinyRun) -> str:
    """Put a NaN that stage 3 did not see into a prompt's feature row; returns the sample's id."""
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layer_output.2"][1, 5] = float("nan")

    change_dump(run, spoil, "shard-00001")
    with safe_open(run.folder / "dump" / "shard-00001.safetensors", framework="pt") as f:
        return json.loads(f.metadata()["sample_ids"])[0]


RANKS = """
import json, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from pipeline.errors import PipelineError
from pipeline.train.ranks import dismiss, is_main_process, leaving_at_once, wait_for_rank_0
from pipeline.train.train import train
from tests.tiny_run import TinyRun
run = TinyRun(Path({target!r}), Path({folder!r}))
overrides = json.loads({overrides!r})
{before}
with leaving_at_once():
    try:
        if is_main_process():
            run.stage("train", **overrides)
            dismiss("cpu")
        elif wait_for_rank_0("cpu"):
            target, config = run.config(**overrides)
            assert train(config, target, run.manifest, run.folder, run.folder / "train") is None
    except PipelineError as e:
        sys.exit(f"error: {{e}}")
"""


def ranks_script(run: TinyRun, tmp_path: Path, *, before: str = "", **overrides: object) -> Path:
    """What every rank runs. `before`: what it runs first."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(root=str(ROOT), target=str(run.target_dir), folder=str(run.root), before=before,
                                   overrides=json.dumps(overrides)))
    return script


def start(module: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def launch(run: TinyRun, tmp_path: Path, *, before: str = "", **overrides: object) -> subprocess.Popen:
    """Two ranks, as `make train GPUS=2` starts them."""
    return start("pipeline.launch", "2", str(ranks_script(run, tmp_path, before=before, **overrides)))


def finish(process: subprocess.Popen) -> str:
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 0, out
    return out
