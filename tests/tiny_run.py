"""A run folder whose stages 1 and 2 are done, made with transformers from a tiny random target.

    run = tiny_run(tmp_path)
    run.stage("standardize"); run.stage("train", **{"train.epochs": 2})
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from pipeline.config import Config, load_config
from pipeline.dump.reference import Reference
from pipeline.files import save_safetensors
from pipeline.manifest import DumpRecord, Manifest, bind_slots, load_manifest
from pipeline.samples import Sample, read_samples, write_samples
from pipeline.stage import StageResult, run_stage
from pipeline.store import ShardBuilder, shard_path, shard_paths
from pipeline.target import Target, open_target

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {  # small enough for a second of training
    "drafter.draft_vocab_size": 64, "drafter.num_attention_heads": 4, "drafter.num_key_value_heads": 2,
    "drafter.init": "identity",  # a few samples are fewer rows than a regression has unknowns: for tests that ask for it
    "drafter.head_dim": 16, "drafter.intermediate_size": 96, "train.batch_tokens": 64, "train.epochs": 2,
    "train.dropout": 0.0, "train.ema": None, "train.precision": "fp32", "train.checkpoint_every": 3,
    "train.log_every": 2, "tracking.mode": "none", "device": "cpu", "slots.layers": [1, 2, 3],
}


def tiny_config(target: Path, root: Path, **overrides: object) -> Config:
    """The repository's own default configuration for a tiny target; `overrides` are dotted keys."""
    raw: dict = {}
    groups = ("prompts", "dump", "drafter", "train", "export", "verify")
    for name in (*groups, "tracking"):
        file = ROOT / "conf" / name / ("offline.yaml" if name == "tracking" else "default.yaml")
        raw[name] = yaml.safe_load(file.read_text())
    raw |= {k: v for k, v in yaml.safe_load((ROOT / "conf" / "config.yaml").read_text()).items()
            if k not in ("defaults", "hydra")}
    raw["target"] = {
        "name": "tiny", "path": str(target), "revision": None, "dtype": "fp32", "quantization": None,
        "trust_remote_code": False, "architecture": None, "num_layers": None, "hidden_size": None, "vocab_size": None,
        "max_position_embeddings": None, "slots_layers": [1, 2, 3],
        "layer_id_rule": None,
        "drafter": dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")),
        "tp_size": 1, "context_length": 512}
    raw["run"] = {"root": str(root / "runs"), "name": "tiny"}
    for key, value in {**SETTINGS, **overrides}.items():
        section, _, name = key.rpartition(".")
        (raw[section] if section else raw)[name] = value
    return load_config(raw)


@dataclass
class TinyRun:
    target_dir: Path
    root: Path

    @property
    def folder(self) -> Path:
        return self.root / "runs" / "tiny"

    @property
    def manifest(self) -> Manifest:
        return load_manifest(self.folder)

    def config(self, **overrides: object) -> tuple[Target, Config]:
        return open_target(tiny_config(self.target_dir, self.root, **overrides))

    def stage(self, name: str, **overrides: object) -> Manifest:
        """Run stage 3 or 4 the way the stage scripts do."""
        from pipeline.standardize import standardize
        from pipeline.train.train import train

        target, config = self.config(**overrides)
        work = {"standardize": standardize, "train": train}[name]
        return run_stage(name, self.folder, target=target.record, seed=config.seed,
                         config={k: str(v) for k, v in overrides.items()},
                         work=lambda manifest, folder: work(config, target, manifest, self.folder, folder))


def tiny_run(root: Path, *, samples: int = 24, seed: int = 0, shard_tokens: int = 300,
             dumped: tuple[int, ...] = (1, 2, 3), probes: Sequence[str] = (), copies: bool = False,
             **target_shape) -> TinyRun:
    """Make target, samples and shards.

    A sample is 4-9 random tokens and a greedy answer of 6-20; every fourth is held out. The first three `dumped` layers
    are the fc slots. `probes` are ids ("s0", "s1", …) of samples whose every layer output is kept. `copies`: held-out
    samples have the tokens of trained ones, so that the epoch that knows most by heart is the best one.
    """
    from tests.tiny_models import tiny_llama

    run = TinyRun(tiny_llama(root / "target", **target_shape), root)
    target, config = run.config()
    model = _model(run.target_dir)
    rng = torch.Generator().manual_seed(seed)

    def prompts(_manifest: Manifest, folder: Path) -> StageResult:
        made = []
        for i in range(samples):
            if copies and i % 4 == 3:
                made.append(replace(made[-1], id=f"s{i}", split="heldout"))
                continue
            prompt = int(torch.randint(4, 10, (1,), generator=rng))
            answer = int(torch.randint(6, 21, (1,), generator=rng))
            ids = torch.randint(3, 60, (1, prompt), generator=rng)
            with torch.no_grad():
                for _ in range(answer):
                    ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            made.append(Sample(
                id=f"s{i}", split="heldout" if i % 4 == 3 else "train", category=None, messages=[],
                input_ids=ids[0].tolist(), loss_mask=[0] * prompt + [1] * answer, finish_reason="length"))
        write_samples(folder / "samples.parquet", made)
        return StageResult(outputs=[folder / "samples.parquet"])

    def dump(_manifest: Manifest, folder: Path) -> StageResult:
        builder = ShardBuilder([*(f"layer_output.{layer}" for layer in dumped), "final_hidden"], shard_tokens)
        for sample in read_samples(run.folder / "prompts" / "samples.parquet"):
            ids = torch.tensor(sample.input_ids)
            if not builder.has_room(len(ids)):
                builder.write(shard_path(folder, len(shard_paths(folder))))
            with torch.no_grad():
                hidden = model(ids[None], output_hidden_states=True).hidden_states
            states = {f"layer_output.{layer}": hidden[layer + 1][0].clone() for layer in dumped}
            builder.add(sample.id, ids, states | {"final_hidden": hidden[-1][0].clone()})
        builder.write(shard_path(folder, len(shard_paths(folder))))
        save_safetensors(folder / "probes.safetensors", _probe_states(run, set(probes)))
        record = DumpRecord(engine="transformers", engine_version="0", model_class="Llama", layers=list(dumped),
                            requested_ids=[], capture_points=[layer + 1 for layer in dumped], dtype="float32",
                            plugin_sha256="", probe_ids=list(probes), fingerprints={})
        slots = bind_slots(list(dumped[:3]), target.hidden_size)
        return StageResult(outputs=[*shard_paths(folder), folder / "probes.safetensors"], slots=slots, dump=record)

    for name, work in (("prompts", prompts), ("dump", dump)):
        run_stage(name, run.folder, target=target.record, seed=config.seed, config={}, work=work)
    return run


def _probe_states(run: TinyRun, probes: set[str]) -> dict[str, torch.Tensor]:
    """What dump/probes.safetensors holds."""
    reference, tensors = Reference(run.target_dir, dtype=torch.float32), {}
    for sample in read_samples(run.folder / "prompts" / "samples.parquet"):
        if sample.id in probes:
            states = reference.states(sample.input_ids, range(len(reference.layers)))
            states["input_ids"] = torch.tensor(sample.input_ids, dtype=torch.int32)
            tensors |= {f"{sample.id}/{name}": state for name, state in states.items()}
    return tensors


def _model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
