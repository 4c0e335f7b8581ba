"""The training loop on one process: it learns, goes on bit for bit, and does not depend on how the data is cut."""

import contextlib
import json
import math
import os
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline import products
from pipeline.errors import PipelineError
from pipeline.manifest import FileRecord, save_manifest
from pipeline.train.batches import plan_epoch
from pipeline.train.checkpoint import is_whole
from pipeline.train.drafter import Drafter
from pipeline.train.train import Trainer
from tests.tiny_disk import fill, tiny_disk
from tests.tiny_run import tiny_run
from tests.train_cases import (  # noqa: F401 (base and run are fixtures)
    Killed,
    again,
    as_served,
    assert_same_training,
    base,
    metrics,
    run,
    spoil_a_prompt,
    weights,
)


def test_overfits_a_few_samples(tmp_path):
    run = tiny_run(tmp_path, samples=6, std=0.4)  # large weights make a decided teacher
    settings = {"drafter.draft_vocab_size": 128}  # room for every token of the answers
    assert run.stage("standardize", **settings).stages["standardize"].metrics["train_teacher_coverage"] == 1.0
    run.stage("train", **settings, **{"train.epochs": 80, "train.lr": 5e-3, "train.validate_every_epochs": 80})
    last = [m for m in metrics(run) if "accuracy" in m][-1]
    assert min(last["accuracy"]) > 0.95 and last["tau_row@3"] > 3.85


def test_what_is_written(run):
    manifest = run.stage("train")
    record = manifest.stages["train"]
    assert [f.path for f in record.outputs] == ["train/drafter.safetensors", "train/config.json", "train/metrics.jsonl"]
    tensors, shape = weights(run), json.loads((run.folder / "train" / "config.json").read_text())
    vocab = load_file(run.folder / "standardize" / "vocab.safetensors")
    assert torch.equal(tensors["d2t"], vocab["d2t"]) and torch.equal(tensors["t2d"], vocab["t2d"])
    assert tensors["fc.weight"].shape == (64, 192) and tensors["lm_head.weight"].shape == (64, 64)
    assert all(t.dtype == torch.float32 for n, t in tensors.items() if n not in ("d2t", "t2d"))
    assert shape["num_fc_inputs"] == 3 and shape["rope_parameters"]["rope_theta"] == 10000.0 and shape["head_dim"] == 16
    heldout = [m for m in metrics(run) if "heldout_tau_row@3" in m]
    assert record.metrics["heldout_tau_row@3_per_epoch"] == [m["heldout_tau_row@3"] for m in heldout]
    assert record.metrics["heldout_tau_row@3"] == max(record.metrics["heldout_tau_row@3_per_epoch"])


def test_logged_loss_is_in_nats_per_row(run):
    """An untrained drafter with small logits guesses evenly among 64 tokens; the mean over steps uses their weights."""
    run.stage("train", **{"train.log_every": 1, "train.lr": 1e-9})
    first = metrics(run)[0]
    assert first["mean_loss"] == pytest.approx(math.log(64), rel=0.1)
    a, b, c = first["loss"]
    assert first["mean_loss"] == pytest.approx((a + 0.8 * b + 0.64 * c) / 2.44)


def test_twice_is_byte_identical(run, tmp_path):
    other = again(run, tmp_path, "other")
    for r in (run, other):
        r.stage("train", **{"train.precision": "bf16"})
    assert (run.folder / "train" / "drafter.safetensors").read_bytes() == \
           (other.folder / "train" / "drafter.safetensors").read_bytes()


def test_held_out_metrics_do_not_depend_on_ttt_steps(run):
    """With one TTT step in training, validation still walks three: τ_row@3 means the same everywhere."""
    record = run.stage("train", **{"train.ttt_steps": 1}).stages["train"]
    assert len(record.metrics["heldout_accuracy"]) == 3


def train_killed(run, monkeypatch, kill_after: int, **settings) -> None:
    """Train, be killed after so many optimizer steps, type the same command again."""
    step, done = Trainer._optimizer_step, []

    def killed(self, *args):
        result = step(self, *args)
        done.append(self.at.step)
        if len(done) == kill_after:
            raise Killed
        return result

    monkeypatch.setattr(Trainer, "_optimizer_step", killed)
    with pytest.raises(Killed):
        run.stage("train", **settings)
    monkeypatch.undo()
    run.stage("train", **settings)


def assert_identical(a, b) -> None:
    assert weights(a).keys() == weights(b).keys()
    for name, value in weights(a).items():
        assert torch.equal(value, weights(b)[name]), name
    assert metrics(a) == metrics(b)


# 6 steps an epoch, checkpoints every 3 steps and at epoch ends: in the middle, at a checkpoint, at the epoch's edge.
@pytest.mark.parametrize("kill_after", [1, 2, 3, 4, 5, 6, 7, 12])
def test_killed_and_continued_is_the_same_to_the_bit(base, tmp_path, monkeypatch, kill_after):
    whole, broken = again(base, tmp_path, "whole"), again(base, tmp_path, "broken")
    whole.stage("train")
    assert whole.manifest.stages["train"].counts["steps"] == 12
    train_killed(broken, monkeypatch, kill_after)
    assert_identical(whole, broken)


EVERYTHING = {"train.batch_tokens": 40, "train.gradient_accumulation": 2, "train.ema": 0.9, "train.schedule": "wsd",
              "train.dropout": 0.3, "train.epochs": 4, "train.spike_factor": 0.3, "train.log_every": 3,
              "train.lr": 1e-5}  # so slow that some batches are above the median


@pytest.mark.parametrize("where", ["middle", "edge"])
def test_killed_with_accumulation_averages_dropout_and_spikes(base, tmp_path, monkeypatch, where):
    whole, broken = again(base, tmp_path, "whole"), again(base, tmp_path, "broken")
    whole.stage("train", **EVERYTHING)
    edge = [m["step"] for m in metrics(whole) if "heldout_accuracy" in m][1]  # after the second epoch
    train_killed(broken, monkeypatch, edge if where == "edge" else edge + 2, **EVERYTHING)
    assert_identical(whole, broken)


def test_dropout_masks_differ_by_step_and_rank(base, tmp_path, monkeypatch):
    seeds, forward = [], Drafter.forward

    def seen(self, *args, **kwargs):
        if self.training:
            seeds.append(torch.initial_seed())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Drafter, "forward", seen)
    plain, dropping = again(base, tmp_path, "plain"), again(base, tmp_path, "dropping")
    plain.stage("train", **{"train.log_every": 1})
    seeds.clear()
    dropping.stage("train", **{"train.log_every": 1, "train.dropout": 0.3})
    assert len(set(seeds)) == len(seeds) == 12
    assert metrics(plain)[0]["mean_loss"] != metrics(dropping)[0]["mean_loss"]

    target, config = dropping.config(**{"train.dropout": 0.3})
    trainer = Trainer(config, target, dropping.manifest, dropping.folder, tmp_path / "ranks", "cpu")
    micros = trainer._plan(0)[0][0]
    seeds.clear()
    for trainer.ranks, trainer.rank in ((2, 0), (2, 1)):
        trainer._optimizer_step(micros, [trainer.data.load(micro.samples) for micro in micros], False)
    assert len(set(seeds)) == 2


def test_spikes_name_the_samples_of_one_batch(run):
    run.stage("train", **EVERYTHING)
    spikes = [m for m in metrics(run) if "spike_loss" in m]
    assert spikes and all(m["spike_loss"] > m["usual_loss"] for m in spikes)
    target, config = run.config(**EVERYTHING)
    trainer = Trainer(config, target, run.manifest, run.folder, run.folder / "train", "cpu")
    starts = [0, *(m["step"] for m in metrics(run) if "heldout_accuracy" in m)]
    for m in spikes:
        plan = plan_epoch(trainer.data.lengths, batch_tokens=40, seed=0, epoch=m["epoch"] - 1, accumulation=2)
        micros = plan[m["step"] - 1 - starts[m["epoch"] - 1]][0]
        assert m["spike_samples"] in [trainer.data.ids(micro.samples) for micro in micros]


def test_averages_are_what_is_validated_and_exported(run, tmp_path):
    """Of a decay so near to 1 that d = (1+n) / (10+n): the average worked out from the weights after every step."""
    settings = {"train.ema": 0.9999, "train.epochs": 1, "train.checkpoint_every": 1, "train.keep_checkpoints": 99}
    record = run.stage("train", **settings).stages["train"]
    steps = [load_file(p / "model.safetensors") for p in sorted((run.folder / "train/checkpoints").iterdir())]
    target, config = run.config(**{**settings, "train.ema": None})
    untrained = Trainer(config, target, run.manifest, run.folder, tmp_path / "new", "cpu").drafter
    average = {name: p.detach().double() for name, p in untrained.named_parameters()}
    for n, tensors in enumerate(steps):
        decay = (1 + n) / (10 + n)
        average = {name: decay * value + (1 - decay) * tensors[name] for name, value in average.items()}
    for name, value in as_served(run, average).items():
        torch.testing.assert_close(weights(run)[name].double(), value, rtol=1e-5, atol=1e-7)
    assert not torch.equal(weights(run)["fc.weight"], as_served(run, steps[-1])["fc.weight"])
    # Validating the exported weights on their own, over raw features, gives the recorded numbers.
    trainer = Trainer(config, target, run.manifest, run.folder, tmp_path / "other", "cpu")
    trainer.drafter.load_state_dict(weights(run))
    trainer.scale = torch.ones(())
    trainer.log.start(0, 1, None)
    trainer._validate()
    assert trainer.at.history[0]["accuracy"] == pytest.approx(record.metrics["heldout_accuracy"])


def test_stops_early_and_exports_the_best(run):
    settings = {"train.epochs": 40, "train.early_stop": 2, "train.lr": 2e-2, "train.schedule": "constant"}
    record = run.stage("train", **settings).stages["train"]
    assert record.counts["epochs"] == record.counts["best_epoch"] + 2 < 40
    per_epoch = record.metrics["heldout_tau_row@3_per_epoch"]
    assert max(per_epoch[-2:]) <= record.metrics["heldout_tau_row@3"] == max(per_epoch)


@pytest.mark.parametrize("where", ["metrics.jsonl", "checkpoint", "drafter.safetensors"])
def test_a_full_disk_is_one_clear_error_and_the_same_command_goes_on(base, tmp_path, monkeypatch, where):
    whole = again(base, tmp_path, "whole")
    whole.stage("train")
    disk = tmp_path / "disk"
    with tiny_disk(disk):
        full = again(base, tmp_path, "disk")
        method = {"metrics.jsonl": "_log", "checkpoint": "_save", "drafter.safetensors": "result"}[where]
        original = getattr(Trainer, method)

        def fill_first(self, *args):
            if self.at.step >= 4:
                fill(disk)
            return original(self, *args)

        monkeypatch.setattr(Trainer, method, fill_first)
        with pytest.raises(PipelineError, match="disk is full"):
            full.stage("train")
        monkeypatch.undo()
        (disk / "filler").unlink()
        checkpoints = list((full.folder / "train" / "checkpoints").iterdir())
        assert checkpoints and all(is_whole(c) for c in checkpoints)
        assert "train" not in full.manifest.stages
        full.stage("train")
        assert metrics(full) == metrics(whole)
        assert all(torch.equal(v, weights(full)[n]) for n, v in weights(whole).items())


def test_killed_between_last_step_and_manifest(run, monkeypatch):
    monkeypatch.setattr(Trainer, "result", lambda self: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        run.stage("train")
    monkeypatch.undo()
    monkeypatch.setattr(Trainer, "_optimizer_step", lambda *_: pytest.fail("all steps were done"))
    assert run.stage("train").stages["train"].counts["steps"] == 12


def test_sigterm_saves_and_exits_with_0(base, tmp_path, monkeypatch, capsys):
    whole, stopped = again(base, tmp_path, "whole"), again(base, tmp_path, "stopped")
    whole.stage("train")
    step = Trainer._optimizer_step

    def signalled(self, micros, batches, stop):
        result = step(self, micros, batches, stop)
        if self.at.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Trainer, "_optimizer_step", signalled)
    with pytest.raises(SystemExit) as e:
        stopped.stage("train")
    monkeypatch.undo()
    assert e.value.code == 0 and signal.getsignal(signal.SIGTERM) == before
    said = capsys.readouterr().out
    assert "stopped by SIGTERM after step 5 of 12" in said
    assert "training is not finished, the same command goes on" in said
    assert "train" not in stopped.manifest.stages and (stopped.folder / "train/checkpoints/step-00000005").is_dir()
    stopped.stage("train")
    assert all(torch.equal(v, weights(stopped)[n]) for n, v in weights(whole).items())


def test_checkpoints_of_another_plan_are_not_gone_on_from(run, monkeypatch, capsys):
    run.stage("train", **{"train.epochs": 1})
    capsys.readouterr()
    run.stage("train", **{"train.epochs": 2})
    assert "going on" not in capsys.readouterr().out


def test_last_and_best_checkpoints_are_kept(run):
    record = run.stage("train", **{"train.epochs": 5, "train.keep_checkpoints": 1, "train.lr": 5e-3}).stages["train"]
    kept = sorted(p.name for p in (run.folder / "train" / "checkpoints").iterdir())
    best = record.counts["best_epoch"] * 6
    assert kept == sorted({f"step-{best:08d}", "step-00000030"})
    saved = load_file(run.folder / "train/checkpoints" / f"step-{best:08d}" / "model.safetensors")
    assert torch.equal(as_served(run, saved)["fc.weight"], weights(run)["fc.weight"])


@pytest.mark.parametrize("cut", [
    {"train.batch_tokens": 10_000}, {"train.batch_tokens": 100, "train.gradient_accumulation": 99}])
def test_loss_and_gradient_do_not_depend_on_packing(base, tmp_path, cut):
    """One sample per batch with accumulation over the whole epoch, against one large batch and against a few."""
    single, packed = again(base, tmp_path, "single"), again(base, tmp_path, "packed")
    common = {"train.epochs": 3, "train.log_every": 1, "train.lr": 1e-3}
    single.stage("train", **common, **{"train.batch_tokens": 1, "train.gradient_accumulation": 1000})
    packed.stage("train", **common, **cut)
    assert_same_training(single, packed)


def test_nan_stops_with_step_sample_and_checkpoint(run):
    first = spoil_a_prompt(run)
    with pytest.raises(PipelineError, match="not finite at step") as e:
        run.stage("train", **{"train.checkpoint_every": 1})
    assert f"['{first}']" in str(e.value) and "last good checkpoint" in str(e.value)
    assert "train" not in run.manifest.stages


def test_damaged_inputs_are_named(run):
    vocab = run.folder / "standardize" / "vocab.safetensors"
    save_file({"t2d": load_file(vocab)["t2d"]}, vocab)
    with pytest.raises(PipelineError, match="vocab.safetensors .*truncated or altered") as e:
        run.stage("train")
    assert "make standardize" in str(e.value)
    manifest = run.manifest
    record = manifest.stages["standardize"]
    record.outputs = [FileRecord.of(run.folder, run.folder / f.path) for f in record.outputs]
    save_manifest(run.folder, manifest)
    with pytest.raises(PipelineError, match="lacks d2t"):  # even if the manifest vouches for it
        run.stage("train")


def test_without_wandb(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run.stage("train", **{"train.epochs": 1, "tracking.mode": "offline"})
    assert "wandb is not installed" in capsys.readouterr().out
    with pytest.raises(PipelineError, match="tracking=online needs wandb"):
        run.stage("train", **{"train.epochs": 2, "tracking.mode": "online"})


@pytest.mark.slow
def test_wandb_offline_keeps_one_run(run, monkeypatch):
    pytest.importorskip("wandb")
    step = Trainer._optimizer_step

    def killed(self, *args):
        if self.at.step == 7:
            raise Killed
        return step(self, *args)

    monkeypatch.setattr(Trainer, "_optimizer_step", killed)
    with pytest.raises(Killed):
        run.stage("train", **{"tracking.mode": "offline"})
    monkeypatch.undo()
    run.stage("train", **{"tracking.mode": "offline"})
    folders = list((run.folder / "train" / "wandb").glob("offline-run-*"))
    assert len({f.name.rsplit("-", 1)[1] for f in folders}) == 1 <= len(folders)


@pytest.mark.parametrize("where", ["Drafter.unroll", "start_from_regression"])
def test_a_full_device_names_what_to_change(run, monkeypatch, where):
    """There is no GPU to fill here; torch raises this type wherever one is full."""

    def full(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …")

    monkeypatch.setattr(f"pipeline.train.drafter.{where}" if "." in where else f"pipeline.train.train.{where}", full)
    with pytest.raises(PipelineError) as caught:
        run.stage("train", **{"drafter.init": "regression"})
    assert str(caught.value.__cause__).startswith("CUDA out of memory")
    message = str(caught.value)
    for part in ("Tried to allocate 2.00 GiB.", "train.batch_tokens", "64",
                 'make train ARGS="train.batch_tokens=32 train.gradient_accumulation=2"', "from the beginning",
                 "drafter.init=identity"):
        assert part in message
    assert "GPU 0 has" not in message


@pytest.mark.parametrize("stopped", [False, True])
def test_only_training_multiplies_fp32_by_onednn(run, monkeypatch, stopped):
    """The setting is the process's: what comes after training, also after a failure, must find torch's own."""
    monkeypatch.setattr(products, "_onednn_keeps_fp32", lambda: True)
    step, seen = Trainer._optimizer_step, []

    def spied(self, *args):
        seen.append(products.fp32_by_onednn())
        if stopped:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(Trainer, "_optimizer_step", spied)
    assert not products.fp32_by_onednn()
    with pytest.raises(KeyboardInterrupt) if stopped else contextlib.nullcontext():
        run.stage("train")
    assert seen and all(seen) and not products.fp32_by_onednn()
