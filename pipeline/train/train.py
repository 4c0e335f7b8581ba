"""Stage 4: train the drafter with training-time test (TTT), on one process or many.

The loss of an optimizer step is Σ_j decay^j · (Σ loss of the rows that count at TTT step j) / (number of those rows).
Both sums run over everything the step learns from: all packed samples, accumulated batches and ranks. The counts follow
from masks, so they are added up before the first forward, and the gradients of all batches simply add.

Training goes on exactly where it was: the checkpoint holds weights, moments and the position in the data, whose order
follows from seed and epoch; dropout's masks follow from seed, step and rank, and training draws nothing else. So a run
that was killed ends with the same bits as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.files import make_dir, read_json, save_safetensors, write_json
from pipeline.manifest import Manifest
from pipeline.precision import bf16_is_faster
from pipeline.products import fast_fp32
from pipeline.stage import StageResult
from pipeline.standardize import dump_shards
from pipeline.store import HiddenStore
from pipeline.target import OutputHead, Target, load_embedding, load_output_head
from pipeline.train.alignment import PackedBatch, Rows
from pipeline.train.allocator import keep_freed_memory
from pipeline.train.batches import AlignedFiles, MicroBatch, Prefetcher, TrainingData, pack, plan_epoch
from pipeline.train.checkpoint import best_weights, latest_checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint
from pipeline.train.drafter import Drafter, FrozenTarget, TTTOutput
from pipeline.train.drafter_config import drafter_config
from pipeline.train.ema import Ema
from pipeline.train.loss import Objective
from pipeline.train.metrics import NAMES, TAU, TAU_STEPS, ratios, stack
from pipeline.train.optimizer import make_optimizer
from pipeline.train.parallel import gathered, global_norm, gradients_added_up, share
from pipeline.train.position import Position
from pipeline.train.ranks import announce, errors_said_once, make_accelerator, sigterm_noticed
from pipeline.train.regression import regression_samples, start_from_regression
from pipeline.train.schedule import configured_rate
from pipeline.train.spikes import find_spikes
from pipeline.train.start import of_columns, scale_samples, serving_weights, slot_scale, start_weights
from pipeline.train.throughput import Meter, step_flops
from pipeline.train.training_log import TrainingLog
from pipeline.train.warm_start import load_into
from pipeline.vocab import DraftVocab, read_vocab


def train(config: Config, target: Target, manifest: Manifest, run_dir: Path, folder: Path) -> StageResult | None:
    """Run stage 4. Under `pipeline.launch` every rank calls this (see `pipeline.train.ranks`); only rank 0 gets a result.

    Writes `drafter.safetensors` (fp32, the weights of the best epoch on held-out samples), `config.json` (the fields of
    `DrafterConfig`), `metrics.jsonl` and `checkpoints/` into `folder`, and goes on from the checkpoints that are there.

    Raises:
        PipelineError: an input is damaged, or loss or gradients became NaN or infinite.
        SystemExit: with code 0, after SIGTERM and a saved checkpoint.
    """
    from pipeline.engines.engine import resolve_device

    if config.threads:
        torch.set_num_threads(config.threads)
    with sigterm_noticed() as stop_asked, errors_said_once(stop_asked), full_memory_explained(config):
        device = resolve_device(config.device)
        with fast_fp32(device):
            trainer = Trainer(config, target, manifest, run_dir, folder, device)
            trainer.run(stop_asked)
    return trainer.result() if trainer.accelerator.is_main_process else None


@contextlib.contextmanager
def full_memory_explained(config: Config) -> Iterator[None]:
    """Turn a device's full memory into a message that names what to change."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        tokens = config.train.batch_tokens
        raise PipelineError(
            f"the device's memory is full: {str(e).partition(' GPU ')[0]}", field="train.batch_tokens", value=tokens,
            fix=f'make train ARGS="train.batch_tokens={max(1, tokens // 2)} train.gradient_accumulation='
                f'{2 * config.train.gradient_accumulation}", which trains from the beginning and helps down to the longest '
                "sample; fewer train.ttt_steps; with several GPUs train.parallel=fsdp; while fitting the linear drafter: "
                "drafter.init=identity") from e


def resolve_precision(asked: str, device: torch.device) -> str:
    """"fp32" or "bf16"; auto: the one in which `device` computes faster."""
    if asked != "auto":
        return asked
    return "bf16" if bf16_is_faster(device) else "fp32"


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step, the same on every rank."""

    stop: bool
    """whether any rank was asked to stop"""
    grad_norm: float
    """before clipping"""
    lr: float
    flops: float
    losses: list[list[float]]
    """[micro-batch][rank]: weighted mean over the rows of that batch, NaN where none counts"""


class Trainer:
    """Everything one rank holds. `run` trains, `result` writes the final files."""

    def __init__(self, config: Config, target: Target, manifest: Manifest, run_dir: Path, folder: Path, device: str):
        self.config, self.c, self.folder = config, config.train, folder
        self.accelerator = make_accelerator(device)
        announce(self.accelerator)
        self.device = self.accelerator.device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.ranks, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.log = TrainingLog(config, manifest, folder, main=self.accelerator.is_main_process)
        self.precision = resolve_precision(self.c.precision, self.device)
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        vocab = read_vocab(run_dir / "standardize" / "vocab.safetensors")
        split = read_json(run_dir / "standardize" / "split.json", fix='make standardize ARGS="force=true"')
        head = load_output_head(target, rows=vocab.target_ids())

        slots = manifest.slots
        self.drafter_config = drafter_config(config, target, num_fc_inputs=len(manifest.fc_layers()),
                                             draft_vocab_size=vocab.size)
        self.drafter = Drafter(self.drafter_config, vocab.target_ids(), self.c.dropout)
        store = HiddenStore(dump_shards(manifest, run_dir))
        aligned = AlignedFiles(run_dir / "standardize", store)
        self.data, self.heldout = (TrainingData(store, aligned, slots, split[part], head, dtype)
                                   for part in ("train", "heldout"))
        if not self.data.refs:
            raise PipelineError("there is no sample to train on", field="standardize/split.json: train", value="[]",
                                fix="a run with more conversations: make run RUN=<new name>")
        self.checkpoints = make_dir(folder / "checkpoints")
        self.frozen = FrozenTarget(load_embedding(target).to(dtype),
                                   dataclasses.replace(head, weight=head.weight.to(dtype))).to(self.device)
        self.at = Position()
        if (latest := latest_checkpoint(self.checkpoints)) is None:
            self._start(target, manifest, vocab, head)
        self.drafter.to(self.device)
        self.model = share(self.drafter, self.accelerator, self.c.parallel)
        self.optimizer = make_optimizer(self.drafter, self.c)
        self.ema = None if self.c.ema is None else Ema(self.drafter, self.c.ema)

        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")
        self.step_weights = self.c.loss_decay ** torch.arange(self.c.ttt_steps, dtype=torch.float64)
        self.objective = Objective(self.c.loss, self.c.hard_label_weight, self.c.lk_eta)
        self.total_steps = sum(len(self._plan(epoch)) for epoch in range(self.c.epochs))
        if latest is not None:
            self.at = Position(**load_checkpoint(latest, self.drafter, self.optimizer, self.ema))
            self.log.say(f"train: going on from {latest.name} (epoch {self.at.epoch + 1}, step {self.at.step + 1})")
            self._read_slots_by(self.at.slot_scale)
        self.window = torch.zeros(len(NAMES), self.c.ttt_steps, dtype=torch.float64, device=self.device)
        if self.at.window and self.rank == 0:  # the sum over ranks
            self.window += torch.tensor(self.at.window, dtype=torch.float64, device=self.device)

    def _start(self, target: Target, manifest: Manifest, vocab: DraftVocab, head: OutputHead) -> None:
        """The scale of the slots and the first weights."""
        some = self.data.load(scale_samples(self.data.lengths)).features
        self._read_slots_by(slot_scale(self.drafter_config, some))
        shape, seed = self.config.drafter, self.config.seed
        start_weights(self.drafter, seed, head.weight if shape.lm_head_init == "target" else None)
        if self.c.init_from is not None:
            self.log.say(load_into(self.drafter, vocab.target_ids(), Path(self.c.init_from), target, manifest))
            self.drafter.fc.weight.data.div_(of_columns(self.at.slot_scale, self.drafter_config))
        elif shape.init == "regression":
            self.drafter.to(self.device)
            if self.rank == 0:  # `share` gives the others the same weights
                self.log.say("train: fitting the linear drafter to start from")
                batches = (self._scaled(self.data.load(batch)) for batch in regression_samples(self.data.lengths))
                rows = start_from_regression(self.drafter, batches, self.frozen, seed)
                self.log.say(f"train: starting from what fits {rows} rows of {len(self.data.refs)} samples best")

    def _read_slots_by(self, scale: list[float]) -> None:
        self.at.slot_scale = scale
        self.scale = of_columns(scale, self.drafter_config).to(self.frozen.embedding)

    def run(self, stop_asked: threading.Event) -> None:
        """Train from where training is to the end."""
        self.at.tracking_id = self.log.start(self.at.step, self.total_steps, self.at.tracking_id)
        self.meter = Meter(self.device, self.precision, self.ranks)
        try:
            while not self._finished():
                self._epoch(stop_asked)
        except Exception:
            self.log.failed()
            raise
        if self.at.epoch < self.c.epochs:
            self.log.say(f"train: stopped early after epoch {self.at.epoch} of {self.c.epochs}: {self.c.early_stop} "
                         f"validations in a row were no better than the one after epoch {self.at.best()['epoch']}")
        self.log.finish()

    def _finished(self) -> bool:
        return self.at.epoch == self.c.epochs or self.at.stopped_early(self.c.early_stop)

    def _plan(self, epoch: int) -> list[list[list[MicroBatch]]]:
        return plan_epoch(self.data.lengths, batch_tokens=self.c.batch_tokens, seed=self.config.seed, epoch=epoch,
                          ranks=self.ranks, accumulation=self.c.gradient_accumulation)

    def _epoch(self, stop_asked: threading.Event) -> None:
        self.drafter.train()
        left = self._plan(self.at.epoch)[self.at.batch:]
        mine = [step[self.rank] for step in left]
        with Prefetcher(self.data, mine, pin=self.device.type == "cuda") as batches:
            for number, (step, own, loaded) in enumerate(zip(left, mine, batches), start=1):
                done = self._optimizer_step(own, loaded, stop_asked.is_set())
                self.at.step, self.at.batch = self.at.step + 1, self.at.batch + 1
                counted = [micro for micros in step for micro in micros if micro.counts]
                self.meter.add(tokens=sum(self.data.lengths[i] for micro in counted for i in micro.samples),
                               flops=done.flops, waited=batches.take_wait())
                self._watch(step, done.losses)
                self.log.bar.update()
                if self.at.step % self.c.log_every == 0:
                    self._log(done)
                if number == len(left):
                    break  # the end of the epoch saves its own checkpoint
                if done.stop or self.at.step % self.c.checkpoint_every == 0:
                    self._save()
                if done.stop:
                    self._stop()
        self.at.epoch, self.at.batch = self.at.epoch + 1, 0
        validate = self.at.epoch % self.c.validate_every_epochs == 0 or self.at.epoch == self.c.epochs
        if validate:
            self._validate()
        if validate or done.stop or self.at.step % self.c.checkpoint_every == 0:
            self._save()
        if done.stop and not self._finished():
            self._stop()

    def _optimizer_step(self, micros: list[MicroBatch], batches: list[PackedBatch], stop: bool) -> StepResult:
        """One step over this rank's micro-batches."""
        steps = self.c.ttt_steps
        rows = [self.drafter.select_rows(batch, steps) for batch in batches]
        counted = sum((r.loss_rows for r, m in zip(rows, micros) if m.counts), torch.zeros(steps, dtype=torch.int64))
        flops = sum(step_flops(self.drafter_config, len(b.input_ids), r)
                    for b, r, m in zip(batches, rows, micros) if m.counts)
        sums = self._sum_over_ranks(torch.cat([counted.double(), torch.tensor([flops, stop], dtype=torch.float64)]))
        # DDP and FSDP average gradients over ranks, and the loss is a sum.
        weights = self.step_weights / sums[:steps].clamp(min=1) * self.ranks
        torch.manual_seed((self.config.seed * 1_000_003 + self.at.step) * self.ranks + self.rank)  # of dropout's masks
        losses, nats = [], torch.zeros(len(batches), self.ranks, dtype=torch.float64, device=self.device)
        for i, (batch, r, micro) in enumerate(zip(batches, rows, micros)):
            with gradients_added_up(self.model, self.accelerator, last=i == len(batches) - 1):
                with self.autocast:
                    output = self.model(self._scaled(batch), self.frozen, weights * micro.counts, r, self.objective)
                output.loss.backward()
            losses.append(output.loss.detach())
            if micro.counts:
                self.window += stack(output)
            nats[i, self.rank] = self._nats_per_row(output, r, micro)
        norm = global_norm(torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.c.max_grad_norm))
        if not math.isfinite(norm):  # as it is if any loss of any rank is not
            raise self._not_finite(micros, losses, norm)
        # Read before the optimizer's kernels are queued, so that the next batch is prepared while they run.
        every_loss = self._sum_over_ranks(nats).tolist()
        lr = configured_rate(self.at.step, self.total_steps, self.c)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.at.step)
        return StepResult(stop=bool(sums[-1] > 0), grad_norm=norm, lr=lr, flops=float(sums[-2]), losses=every_loss)

    def _scaled(self, batch: PackedBatch) -> PackedBatch:
        """The batch on the device, its features as fc reads them while it trains; the batch itself is used up."""
        batch = batch.to(self.device)
        batch.features.mul_(self.scale)
        return batch

    def _nats_per_row(self, output: TTTOutput, rows: Rows, micro: MicroBatch) -> Tensor | float:
        """A batch's loss with the weights of training, NaN if no row of it counts."""
        if not micro.counts or not int(rows.loss_rows.sum()):
            return math.nan
        return self._weighted(output.metrics["loss_sum"]) / self._weighted(rows.loss_rows)

    def _weighted(self, per_step: Tensor) -> Tensor:
        return per_step.double() @ self.step_weights.to(per_step.device)

    def _watch(self, step: list[list[MicroBatch]], losses: list[list[float]]) -> None:
        """Say which samples a spike came with. `step[rank][i]`, `losses[i][rank]`: micro-batch i of a rank."""
        if self.c.spike_factor is None:
            return
        micros = [step[rank][i] for i in range(len(losses)) for rank in range(self.ranks)]
        flat = [loss for of_ranks in losses for loss in of_ranks]
        for i, usual in find_spikes(flat, self.at.losses, self.c.spike_factor):
            ids = self.data.ids(micros[i].samples)
            self.log.record(self.at.step, {"epoch": self.at.epoch + 1, "spike_loss": flat[i], "usual_loss": usual,
                                           "spike_samples": ids})
            self.log.say(f"train: loss spike at step {self.at.step}: {flat[i]:.3f} a row, usual are {usual:.3f}; "
                         f"samples {ids}")

    @torch.no_grad()
    def _validate(self) -> None:
        """Accuracy and τ_row over all gated rows of the held-out samples; counts are summed over batches and ranks."""
        self.drafter.eval()
        steps = max(self.c.ttt_steps, TAU_STEPS)
        sums = torch.zeros(len(NAMES), steps, dtype=torch.float64, device=self.device)
        order = list(range(len(self.heldout.lengths)))
        mine = [[MicroBatch(tuple(b), True)] for b in pack(self.heldout.lengths, order, self.c.batch_tokens)]
        averaged = contextlib.nullcontext() if self.ema is None else self.ema.applied()
        with averaged, gathered(self.drafter), Prefetcher(self.heldout, mine[self.rank::self.ranks]) as batches:
            for (batch,) in batches:
                with self.autocast:
                    sums += stack(self.drafter(self._scaled(batch), self.frozen, torch.ones(steps)))
        found = ratios(self._sum_over_ranks(sums))
        self.at.history.append({"epoch": self.at.epoch, "step": self.at.step, **found})
        self.log.record(self.at.step, {"epoch": self.at.epoch, **{f"heldout_{k}": v for k, v in found.items()}})
        accuracy = " ".join(f"{a:.3f}" for a in found["accuracy"])
        self.log.say(f"epoch {self.at.epoch}/{self.c.epochs}: held-out accuracy per step {accuracy}, "
                     f"τ_row@{TAU_STEPS} {found[TAU]:.3f}")

    def _log(self, done: StepResult) -> None:
        found = ratios(self._sum_over_ranks(self.window))
        self.window.zero_()
        # Per row, as an average over steps with the weights of training.
        loss = float(self._weighted(torch.tensor(found["loss"])) / self.step_weights.sum())
        values = {"epoch": self.at.epoch + 1, "mean_loss": loss, **found, "lr": done.lr, "grad_norm": done.grad_norm,
                  **self.meter.read()}
        self.log.record(self.at.step, values)
        self.log.progress(values)

    def _save(self) -> None:
        window = self._sum_over_ranks(self.window)
        main, best = self.accelerator.is_main_process, self.at.best()
        save_checkpoint(self.checkpoints, self.at.step, self.drafter, self.optimizer,
                        dataclasses.asdict(self.at) | {"window": window.tolist()}, self.ema, write=main)
        if main:
            prune_checkpoints(self.checkpoints, self.c.keep_checkpoints, best and best["step"])
        self.accelerator.wait_for_everyone()

    def _stop(self) -> None:
        self.log.finish()
        self.log.say(f"train: stopped by SIGTERM after step {self.at.step} of {self.total_steps}, checkpoint saved; "
                     "training is not finished, the same command goes on from there")
        raise SystemExit(0)

    def _not_finite(self, micros: list[MicroBatch], losses: list[Tensor], grad_norm: float) -> PipelineError:
        """Name the samples that are to blame: weights are still good, so each can be tried alone."""
        from accelerate.utils import gather_object

        bad = []
        self.drafter.eval()
        with torch.no_grad(), self.autocast, gathered(self.drafter):
            for i in dict.fromkeys(i for micro in micros for i in micro.samples):
                output = self.drafter(self._scaled(self.data.load((i,))), self.frozen, self.step_weights,
                                      objective=self.objective)
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

    def result(self) -> StageResult:
        """Write the best epoch's weights and say what was reached."""
        best = self.at.best()
        weights, shape = self.folder / "drafter.safetensors", self.folder / "config.json"
        trained = best_weights(self.checkpoints / f"step-{best['step']:08d}")
        save_safetensors(weights, serving_weights(trained, of_columns(self.at.slot_scale, self.drafter_config)))
        write_json(shape, dataclasses.asdict(self.drafter_config))
        return StageResult(
            outputs=[weights, shape, self.folder / "metrics.jsonl"],
            counts={"steps": self.at.step, "epochs": self.at.epoch, "best_epoch": best["epoch"], "ranks": self.ranks,
                    "train_samples": len(self.data.refs), "train_tokens": sum(self.data.lengths),
                    "heldout_samples": len(self.heldout.refs),
                    "parameters": sum(p.numel() for p in self.drafter.parameters())},
            metrics={"precision": self.precision, "slot_scale": self.at.slot_scale,
                     "heldout_accuracy": best["accuracy"],
                     "heldout_conditional_accuracy": best["conditional_accuracy"], f"heldout_{TAU}": best[TAU],
                     f"heldout_{TAU}_per_epoch": [h[TAU] for h in self.at.history]})
