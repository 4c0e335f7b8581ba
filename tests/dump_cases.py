"""Runs with samples of random tokens, and the dump stage's own command line, for the tests of stage 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from pipeline.config import Config, load_config
from pipeline.samples import Sample, write_samples
from pipeline.stage import StageResult, run_stage

ROOT = Path(__file__).resolve().parent.parent


def random_samples(lengths: list[int], *, vocab: int = 512, seed: int = 0) -> list[Sample]:
    """One sample per length; every fourth is held out. Token 3 never occurs: tests give it a damaged embedding."""
    rng = torch.Generator().manual_seed(seed)
    return [Sample(id=f"sample/{i}", split="heldout" if i % 4 == 1 else "train", category=None, messages=[],
                   input_ids=torch.randint(4, vocab, (n,), generator=rng).tolist(), loss_mask=[1] * n,
                   finish_reason=None)
            for i, n in enumerate(lengths)]


def overrides(target_dir: Path, root: Path, *more: str) -> list[str]:
    return ["target=local", f"target.path={target_dir}", "target.dtype=fp32", f"run.root={root}", "run.name=test",
            "device=cpu", "target.context_length=512", "dump.shard_tokens=400", "dump.disk_reserve_gib=0", *more]


def make_config(target_dir: Path, root: Path, *more: str) -> Config:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=overrides(target_dir, root, *more))
    return load_config(OmegaConf.to_container(cfg, resolve=True))


def make_run(target_dir: Path, root: Path, samples: list[Sample]) -> Path:
    """A run whose stage 1 has finished with these samples."""
    from pipeline.target import open_target

    target, config = open_target(make_config(target_dir, root))
    run_dir = root / config.run.name

    def work(manifest, folder):
        write_samples(folder / "samples.parquet", samples)
        return StageResult(outputs=[folder / "samples.parquet"])

    run_stage("prompts", run_dir, target=target.record, config={}, seed=0, work=work)
    return run_dir


def start_stage(target_dir: Path, root: Path, *more: str) -> subprocess.Popen:
    """Start `stages/02_dump_hidden_states.py` on the run below `root`."""
    command = [sys.executable, str(ROOT / "stages" / "02_dump_hidden_states.py"), *overrides(target_dir, root, *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})


def run_stage_02(target_dir: Path, root: Path, *more: str) -> tuple[int, str]:
    """Run the stage to its end: exit code and output."""
    process = start_stage(target_dir, root, *more)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def damage_embedding(target_dir: Path, token: int) -> None:
    """Make the embedding of one token NaN, as fp16 overflow would."""
    from safetensors.torch import load_file, save_file

    path = target_dir / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, path, {"format": "pt"})
