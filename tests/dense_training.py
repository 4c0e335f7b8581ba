"""Thirty steps of training in plain fp64: `dense_reference.ttt`, autograd, clipping by hand, torch's AdamW.

    python -m tests.dense_training      makes tests/data/golden_curve.json anew (after a wanted change of data or init)

Taken from the pipeline are the data, their order and scale and the weights to start with; every number that training computes
from these is computed here.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from pipeline.samples import read_samples
from pipeline.store import HiddenStore, shard_paths
from pipeline.train.batches import plan_epoch
from pipeline.train.drafter import Drafter
from pipeline.train.drafter_config import drafter_config
from pipeline.train.start import scale_samples, slot_scale, start_weights
from tests.dense_reference import ttt
from tests.tiny_run import TinyRun, tiny_run

GOLDEN = Path(__file__).parent / "data" / "golden_curve.json"
STEPS, DECAY, LR, WARMUP, FLOOR, BETAS, WEIGHT_DECAY, CLIP = 30, 0.8, 2e-3, 3, 0.1, (0.9, 0.95), 0.1, 1.0
SETTINGS = {  # the same, for the trainer
    "train.epochs": 5, "train.batch_tokens": 64, "train.gradient_accumulation": 1, "train.ttt_steps": 3,
    "train.loss_decay": DECAY, "train.loss": "ce", "train.lr": LR, "train.schedule": "cosine",
    "train.warmup_ratio": WARMUP / STEPS, "train.min_lr_ratio": FLOOR, "train.betas": list(BETAS),
    "train.weight_decay": WEIGHT_DECAY, "train.max_grad_norm": CLIP, "train.precision": "fp32", "train.ema": None,
    "train.log_every": 1, "drafter.init": "identity", "drafter.lm_head_init": "target",
}


def golden_run(root: Path) -> TinyRun:
    """The run whose training is compared: a tiny random target, 18 samples, 6 steps an epoch."""
    run = tiny_run(root)
    run.stage("standardize")
    return run


def dense_curve(run: TinyRun) -> dict:
    """What training must log: per step the loss of every TTT step in nats a row, and the gradient's norm unclipped."""
    target, config = run.config(**SETTINGS)
    vocab = load_file(run.folder / "standardize" / "vocab.safetensors")
    draft_ids = vocab["t2d"].nonzero().squeeze(1)
    matrices = load_file(run.target_dir / "model.safetensors")
    embedding, lm_head = (matrices[n].double() for n in ("model.embed_tokens.weight", "lm_head.weight"))

    shape = drafter_config(config, target, num_fc_inputs=3, draft_vocab_size=len(draft_ids))
    drafter = Drafter(shape, draft_ids)
    start_weights(drafter, config.seed, matrices["lm_head.weight"][draft_ids])
    weights = {name: p.detach().double().requires_grad_() for name, p in drafter.named_parameters()}
    optimizer = torch.optim.AdamW([
        {"params": [w for w in weights.values() if w.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0},
    ], lr=LR, betas=BETAS)  # fmt: skip

    store = HiddenStore(shard_paths(run.folder / "dump"))
    refs = {ref.id: ref for ref in store.samples}
    samples = {}
    for sample in read_samples(run.folder / "prompts" / "samples.parquet"):
        ref = refs[sample.id]
        samples[sample.id] = {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "features": torch.cat([store.rows(ref, f"layer_output.{n}").double() for n in (1, 2, 3)], -1),
            "final_hidden": store.rows(ref, "final_hidden").double(),
        }
    train = json.loads((run.folder / "standardize" / "split.json").read_text())["train"]
    lengths = [len(samples[i]["input_ids"]) for i in train]
    some = torch.cat([samples[train[i]]["features"] for i in scale_samples(lengths)])
    scale = torch.tensor(slot_scale(shape, some)).double().repeat_interleave(shape.hidden_size)
    for sample in samples.values():
        sample["features"] *= scale
    order = [
        [train[i] for micro in step[0] for i in micro.samples]
        for epoch in range(SETTINGS["train.epochs"])
        for step in plan_epoch(lengths, batch_tokens=SETTINGS["train.batch_tokens"], seed=config.seed, epoch=epoch)
    ]
    assert len(order) == STEPS

    curve = {"loss": [], "grad_norm": []}
    for step, ids in enumerate(order):
        parts = [ttt(weights, shape, samples[i], embedding, lm_head, draft_ids, 3) for i in ids]
        losses = [
            torch.stack([part.loss_sums[j] for part in parts]).sum() / max(sum(part.loss_rows[j] for part in parts), 1)
            for j in range(3)
        ]
        optimizer.zero_grad()
        sum(DECAY**j * loss for j, loss in enumerate(losses)).backward()
        norm = math.sqrt(sum(float(w.grad.square().sum()) for w in weights.values()))
        for w in weights.values():
            w.grad *= min(1.0, CLIP / norm)
        done = (step - WARMUP) / (STEPS - 1 - WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = LR * ((step + 1) / WARMUP if step < WARMUP else
                                FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2)  # fmt: skip
        optimizer.step()
        curve["loss"].append([loss.item() for loss in losses])
        curve["grad_norm"].append(norm)
    tokens = sum(sum(sample["input_ids"]) for sample in samples.values())
    return {"made_by": "python -m tests.dense_training", "sum_of_all_token_ids": tokens, **curve}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        curve = dense_curve(golden_run(Path(root)))
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(curve, indent=1) + "\n")
    print(f"{GOLDEN}: loss from {curve['loss'][0]} to {curve['loss'][-1]}")
