"""Stage 4: train the drafter with training-time test (TTT), on one process or many.

The loss of an optimizer step is Σ_j decay^j · (Σ loss of the rows that count at TTT step j) / (number of those rows).
Both sums run over everything the step learns from: all packed samples, accumulated batches and ranks. The counts follow
from masks, so they are added up before the first forward, and the gradients of all batches simply add.

Training goes on exactly where it was: the checkpoint holds weights, moments and the position in the data, whose order
follows from seed and epoch, and training draws nothing else. So a run that was killed ends with the same bits as one
that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pipeline.alignment import PackedBatch
from pipeline.batches import AlignedFiles, MicroBatch, Prefetcher, TrainingData, pack, plan_epoch
from pipeline.checkpoint import latest_checkpoint, load_checkpoint, load_weights, prune_checkpoints, save_checkpoint
from pipeline.config import Config
from pipeline.drafter import Drafter, FrozenTarget
from pipeline.drafter_config import drafter_config
from pipeline.errors import PipelineError
from pipeline.files import clear_disk_errors, make_dir, read_json, save_safetensors, write_json, write_text
from pipeline.manifest import Manifest
from pipeline.metrics import NAMES, TAU_STEPS, ratios, stack
from pipeline.ranks import announce, errors_said_once, make_accelerator
from pipeline.stage import StageResult
from pipeline.standardize import dump_shards
from pipeline.store import HiddenStore
from pipeline.target import Target, load_embedding, load_output_head
from pipeline.tracking import NoTracker, start_tracking
from pipeline.vocab import read_vocab

TAU = f"tau_row@{TAU_STEPS}"


def train(config: Config, target: Target, manifest: Manifest, run_dir: Path, folder: Path) -> StageResult | None:
    """Run stage 4. Under `pipeline.launch` every rank calls this (see `pipeline.ranks`); only rank 0 gets a result.

    Writes `drafter.safetensors` (fp32, the weights of the best epoch on held-out samples), `config.json` (the fields of
    `DrafterConfig`), `metrics.jsonl` and `checkpoints/` into `folder`, and goes on from the checkpoints that are there.

    Raises:
        PipelineError: an input is damaged, or loss or gradients became NaN or infinite.
        SystemExit: with code 0, after SIGTERM and a saved checkpoint.
    """
    from pipeline.engine import resolve_device

    if config.threads:
        torch.set_num_threads(config.threads)
    with _sigterm() as stop_asked, errors_said_once(stop_asked):
        trainer = Trainer(config, target, manifest, run_dir, folder, resolve_device(config.device))
        trainer.run(stop_asked)
    return trainer.result() if trainer.accelerator.is_main_process else None


def resolve_precision(asked: str, device: torch.device) -> str:
    """"fp32" or "bf16". On a CPU without AMX a bf16 product takes about twice as long as an fp32 one."""
    if asked != "auto":
        return asked
    return "bf16" if device.type == "cuda" or torch.cpu._is_amx_tile_supported() else "fp32"


@torch.no_grad()
def start_with_small_logits(drafter: Drafter) -> None:
    """Set the final norm so that the first logits are near unit size.

    An untrained layer feeds the target's output head noise; with rows of norm 3 (SmolLM2) the first logged loss is then
    14.1 nats a row instead of 9.5 (a uniform guess: 9.0). Held-out τ_row@3 of the demo after epochs 1 and 2: 1.20 and
    1.30 without this, 1.25 and 1.32 with it.
    """
    drafter.norm.weight.fill_(min(1.0, 1.0 / float(drafter.lm_head.weight.norm(dim=1).mean())))


def learning_rate(step: int, total: int, *, lr: float, warmup_ratio: float, min_lr_ratio: float) -> float:
    """Learning rate of optimizer step `step` of `total`: linear warm-up, then cosine to `lr · min_lr_ratio`."""
    warmup = max(1, round(total * warmup_ratio))
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(1, total - 1 - warmup)
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


@dataclass
class Position:
    """Where training is; part of every checkpoint."""

    step: int = 0
    """optimizer steps done"""
    epoch: int = 0
    batch: int = 0
    """optimizer steps done in this epoch"""
    history: list[dict] = field(default_factory=list)
    """one entry per validation: epoch, step and `metrics.ratios`"""
    window: list[list[float]] | None = None
    """sums since the last logged step, so that logged numbers do not depend on interruptions either"""
    tracking_id: str | None = None

    def best(self) -> dict | None:
        """The first of the validations with the highest τ_row."""
        return max(self.history, key=lambda h: h[TAU], default=None)


class Trainer:
    """Everything one rank holds. `run` trains, `result` writes the final files."""

    def __init__(self, config: Config, target: Target, manifest: Manifest, run_dir: Path, folder: Path, device: str):
        self.config, self.c, self.folder, self.manifest = config, config.train, folder, manifest
        self.accelerator = make_accelerator(device)
        announce(self.accelerator)
        self.device = self.accelerator.device
        self.ranks, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.precision = resolve_precision(self.c.precision, self.device)
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        vocab = read_vocab(run_dir / "standardize" / "vocab.safetensors")
        split = read_json(run_dir / "standardize" / "split.json", fix='make standardize ARGS="force=true"')
        head = load_output_head(target, rows=vocab.target_ids())

        slots = manifest.slots
        self.drafter_config = drafter_config(config, target, num_fc_inputs=len(manifest.fc_layers()),
                                             draft_vocab_size=vocab.size)
        self.drafter = Drafter(self.drafter_config, vocab.target_ids())
        self.drafter.init_weights(config.seed, head.weight if config.drafter.lm_head_init == "target" else None)
        start_with_small_logits(self.drafter)
        self.drafter.to(self.device)
        self.model = self.accelerator.prepare_model(self.drafter)
        self.frozen = FrozenTarget(load_embedding(target).to(dtype),
                                   dataclasses.replace(head, weight=head.weight.to(dtype))).to(self.device)
        norms = [p for p in self.drafter.parameters() if p.ndim == 1]
        matrices = [p for p in self.drafter.parameters() if p.ndim > 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.c.weight_decay}, {"params": norms, "weight_decay": 0.0}],
            lr=self.c.lr, betas=self.c.betas, fused=True)

        store = HiddenStore(dump_shards(manifest, run_dir))
        aligned = AlignedFiles(run_dir / "standardize", store)
        self.data, self.heldout = (TrainingData(store, aligned, slots, split[part], head, dtype)
                                   for part in ("train", "heldout"))
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")
        self.step_weights = self.c.loss_decay ** torch.arange(self.c.ttt_steps, dtype=torch.float64)
        self.total_steps = sum(len(self._plan(epoch)) for epoch in range(self.c.epochs))
        self.checkpoints = make_dir(folder / "checkpoints")
        self.at = Position()
        if (latest := latest_checkpoint(self.checkpoints)) is not None:
            self.at = Position(**load_checkpoint(latest, self.drafter, self.optimizer))
            self._say(f"train: going on from {latest.name} (epoch {self.at.epoch + 1}, step {self.at.step + 1})")
        self.window = torch.zeros(len(NAMES), self.c.ttt_steps, dtype=torch.float64, device=self.device)
        if self.at.window and self.rank == 0:  # the sum over ranks
            self.window += torch.tensor(self.at.window, dtype=torch.float64, device=self.device)
        self.window_started, self.window_tokens, self.window_waited = time.perf_counter(), 0, 0.0

    def run(self, stop_asked: threading.Event) -> None:
        """Train from where training is to the end."""
        from tqdm import tqdm

        self._rewind_metrics()
        self.tracker = NoTracker()
        main = self.accelerator.is_main_process
        if main:
            self.tracker = start_tracking(
                self.config.tracking, self.folder, name=self.config.run.name, run_id=self.at.tracking_id,
                config={**self.config.model_dump(mode="json"),
                        "manifest": self.manifest.model_dump(mode="json", exclude={"stages"})})
            self.at.tracking_id = self.tracker.run_id
        with tqdm(total=self.total_steps, initial=self.at.step, disable=not main, unit="step", dynamic_ncols=True,
                  mininterval=1.0) as self.bar:
            while self.at.epoch < self.c.epochs:
                self._epoch(stop_asked)
        self.tracker.finish()

    def _plan(self, epoch: int) -> list[list[list[MicroBatch]]]:
        return plan_epoch(self.data.lengths, batch_tokens=self.c.batch_tokens, seed=self.config.seed, epoch=epoch,
                          ranks=self.ranks, accumulation=self.c.gradient_accumulation)

    def _epoch(self, stop_asked: threading.Event) -> None:
        self.drafter.train()
        left = self._plan(self.at.epoch)[self.at.batch:]
        mine = [step[self.rank] for step in left]
        with Prefetcher(self.data, mine, pin=self.device.type == "cuda") as batches:
            for number, (step, own, loaded) in enumerate(zip(left, mine, batches), start=1):
                stop, grad_norm, lr = self._optimizer_step(own, loaded, stop_asked.is_set())
                self.at.step, self.at.batch = self.at.step + 1, self.at.batch + 1
                samples = [i for micros in step for micro in micros if micro.counts for i in micro.samples]
                self.window_tokens += sum(self.data.lengths[i] for i in samples)
                self.bar.update()
                self.window_waited += batches.take_wait()
                if self.at.step % self.c.log_every == 0:
                    self._log(lr, grad_norm)
                if number == len(left):
                    break  # the end of the epoch saves its own checkpoint
                if stop or self.at.step % self.c.checkpoint_every == 0:
                    self._save()
                if stop:
                    self._stop()
        self.at.epoch, self.at.batch = self.at.epoch + 1, 0
        validate = self.at.epoch % self.c.validate_every_epochs == 0 or self.at.epoch == self.c.epochs
        if validate:
            self._validate()
        if validate or stop or self.at.step % self.c.checkpoint_every == 0:
            self._save()
        if stop and self.at.epoch < self.c.epochs:
            self._stop()

    def _optimizer_step(self, micros: list[MicroBatch], batches: list[PackedBatch],
                        stop: bool) -> tuple[bool, float, float]:
        """One step over this rank's micro-batches.

        Returns whether any rank was asked to stop, the gradient's norm before clipping, and the learning rate.
        """
        steps = self.c.ttt_steps
        rows = [self.drafter.select_rows(batch, steps) for batch in batches]
        counted = sum((r.loss_rows for r, m in zip(rows, micros) if m.counts), torch.zeros(steps, dtype=torch.int64))
        sums = self._sum_over_ranks(torch.cat([counted.double(), torch.tensor([stop], dtype=torch.float64)]))
        # DDP averages gradients over ranks, and the loss is a sum.
        weights = self.step_weights / sums[:-1].clamp(min=1) * self.ranks
        losses = []
        for i, (batch, r, micro) in enumerate(zip(batches, rows, micros)):
            last = i == len(batches) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                with self.autocast:
                    output = self.model(batch.to(self.device), self.frozen, weights * micro.counts, r)
                output.loss.backward()
            losses.append(output.loss.detach())
            if micro.counts:
                self.window += stack(output)
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.c.max_grad_norm)
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):  # as it is if any loss of any rank is not
            raise self._not_finite(micros, losses, grad_norm)
        lr = learning_rate(self.at.step, self.total_steps, lr=self.c.lr, warmup_ratio=self.c.warmup_ratio,
                           min_lr_ratio=self.c.min_lr_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return bool(sums[-1] > 0), grad_norm, lr

    @torch.no_grad()
    def _validate(self) -> None:
        """Accuracy and τ_row over all gated rows of the held-out samples; counts are summed over batches and ranks."""
        self.drafter.eval()
        steps = max(self.c.ttt_steps, TAU_STEPS)
        sums = torch.zeros(len(NAMES), steps, dtype=torch.float64, device=self.device)
        order = list(range(len(self.heldout.lengths)))
        mine = [[MicroBatch(tuple(b), True)] for b in pack(self.heldout.lengths, order, self.c.batch_tokens)]
        with Prefetcher(self.heldout, mine[self.rank::self.ranks]) as batches:
            for (batch,) in batches:
                with self.autocast:
                    sums += stack(self.drafter(batch.to(self.device), self.frozen, torch.ones(steps)))
        found = ratios(self._sum_over_ranks(sums))
        self.at.history.append({"epoch": self.at.epoch, "step": self.at.step, **found})
        self._record({"epoch": self.at.epoch, **{f"heldout_{k}": v for k, v in found.items()}})
        accuracy = " ".join(f"{a:.3f}" for a in found["accuracy"])
        self._say(f"epoch {self.at.epoch}/{self.c.epochs}: held-out accuracy per step {accuracy}, "
                  f"τ_row@{TAU_STEPS} {found[TAU]:.3f}")

    def _log(self, lr: float, grad_norm: float) -> None:
        now = time.perf_counter()
        seconds, self.window_started = now - self.window_started, now
        wait, self.window_waited = self.window_waited / seconds, 0.0
        found = ratios(self._sum_over_ranks(self.window))
        self.window.zero_()
        # Nats per row, as an average over steps with the weights of training.
        loss = float(self.step_weights @ torch.tensor(found["loss"], dtype=torch.float64) / self.step_weights.sum())
        rate, self.window_tokens = self.window_tokens / seconds, 0
        self._record({"epoch": self.at.epoch + 1, "mean_loss": loss, **found, "lr": lr, "grad_norm": grad_norm,
                      "tokens_per_second": round(rate, 1), "data_wait": round(wait, 4)})
        tau = f" τ_row@3={found[TAU]:.2f}" if TAU in found else ""
        accuracy = "/".join(f"{a:.2f}" for a in found["accuracy"])
        self.bar.set_postfix_str(f"epoch {self.at.epoch + 1} loss={loss:.3f} acc={accuracy}{tau} {rate:.0f} tok/s "
                                 f"wait={wait:.0%}", refresh=False)

    def _record(self, values: dict) -> None:
        if self.accelerator.is_main_process:
            path = self.folder / "metrics.jsonl"
            with clear_disk_errors(path), open(path, "a", encoding="utf-8") as f:
                f.write(json.dumps({"step": self.at.step, **values}) + "\n")
            self.tracker.log(values, self.at.step)

    def _rewind_metrics(self) -> None:
        """Drop the lines that an interrupted run wrote after its last checkpoint: those steps are done again."""
        path = self.folder / "metrics.jsonl"
        if self.accelerator.is_main_process:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            whole = [line for line in lines if line.endswith("\n")]
            write_text(path, "".join(line for line in whole if json.loads(line)["step"] <= self.at.step))

    def _save(self) -> Path:
        path = self.checkpoints / f"step-{self.at.step:08d}"
        window = self._sum_over_ranks(self.window)
        if self.accelerator.is_main_process:
            state = dataclasses.asdict(self.at) | {"window": window.tolist()}
            save_checkpoint(self.checkpoints, self.at.step, self.drafter, self.optimizer, state)
            best = self.at.best()
            prune_checkpoints(self.checkpoints, self.c.keep_checkpoints, best and best["step"])
        self.accelerator.wait_for_everyone()
        return path

    def _stop(self) -> None:
        self.tracker.finish()
        self._say(f"train: stopped by SIGTERM after step {self.at.step} of {self.total_steps}, checkpoint saved; "
                  "training is not finished, the same command goes on from there")
        raise SystemExit(0)

    def _not_finite(self, micros: list[MicroBatch], losses: list[Tensor], grad_norm: float) -> PipelineError:
        """Name the samples that are to blame: weights are still good, so each can be tried alone."""
        from accelerate.utils import gather_object

        bad = []
        with torch.no_grad(), self.autocast:
            for i in dict.fromkeys(i for micro in micros for i in micro.samples):
                output = self.drafter(self.data.load((i,)).to(self.device), self.frozen, self.step_weights)
                if not math.isfinite(output.loss):
                    bad += self.data.ids((i,))
        bad = gather_object(bad)  # every rank sees the same gradient, and comes here
        whole = latest_checkpoint(self.checkpoints)
        blame = (f"samples {bad}" if bad else
                 f"no sample alone, together {[s for m in micros for s in self.data.ids(m.samples)]}")
        return PipelineError(
            f"loss or gradient is not finite at step {self.at.step + 1}: loss {[float(x) for x in losses]}, gradient "
            f"norm {grad_norm}; caused by {blame}; last good checkpoint: {whole or 'none yet'}",
            field="train.lr", value=self.c.lr,
            fix='look at these samples, or lower the rate: make train ARGS="train.lr=…"; the same command as before '
                "goes on from the last good checkpoint")

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        return values if self.ranks == 1 else self.accelerator.reduce(values.to(self.device), "sum").to(values.device)

    def _say(self, message: str) -> None:
        if self.accelerator.is_main_process:
            from tqdm import tqdm

            tqdm.write(message)

    def result(self) -> StageResult:
        """Write the best epoch's weights and say what was reached."""
        best = self.at.best()
        load_weights(self.checkpoints / f"step-{best['step']:08d}", self.drafter)
        weights, shape = self.folder / "drafter.safetensors", self.folder / "config.json"
        save_safetensors(weights, {k: v.detach().cpu().contiguous() for k, v in self.drafter.state_dict().items()})
        write_json(shape, dataclasses.asdict(self.drafter_config))
        return StageResult(
            outputs=[weights, shape, self.folder / "metrics.jsonl"],
            counts={"steps": self.at.step, "epochs": self.at.epoch, "best_epoch": best["epoch"], "ranks": self.ranks,
                    "train_samples": len(self.data.refs), "train_tokens": sum(self.data.lengths),
                    "heldout_samples": len(self.heldout.refs),
                    "parameters": sum(p.numel() for p in self.drafter.parameters())},
            metrics={"precision": self.precision, "heldout_accuracy": best["accuracy"],
                     "heldout_conditional_accuracy": best["conditional_accuracy"], f"heldout_{TAU}": best[TAU],
                     f"heldout_{TAU}_per_epoch": [h[TAU] for h in self.at.history]})


@contextlib.contextmanager
def _sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets instead of ending the process, so that a checkpoint can be saved first."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
