"""The training loop: it learns, it goes on bit for bit, and what it averages does not depend on how the data is cut."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint import is_whole
from pipeline.errors import PipelineError
from pipeline.manifest import FileRecord, save_manifest
from pipeline.metrics import ratios
from pipeline.train import Trainer, learning_rate
from tests.tiny_disk import fill, tiny_disk
from tests.tiny_run import ROOT, TinyRun, tiny_run


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> TinyRun:
    run = tiny_run(tmp_path_factory.mktemp("train"))
    run.stage("standardize")
    return run


@pytest.fixture
def run(base, tmp_path) -> TinyRun:
    """A private copy of a run that is ready to train."""
    shutil.copytree(base.root / "runs", tmp_path / "runs")
    return TinyRun(base.target_dir, tmp_path)


def weights(run: TinyRun) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "train" / "drafter.safetensors")


def metrics(run: TinyRun) -> list[dict]:
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run.folder / "train" / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("tokens_per_second", "data_wait")} for line in lines]


def again(run: TinyRun, tmp_path: Path, name: str) -> TinyRun:
    """Another copy of the run, untrained."""
    shutil.copytree(run.root / "runs", tmp_path / name / "runs")
    return TinyRun(run.target_dir, tmp_path / name)


def test_schedule_by_hand():
    def at(step):
        return learning_rate(step, 12, lr=1.0, warmup_ratio=0.25, min_lr_ratio=0.1)

    assert [at(s) for s in range(3)] == [1 / 3, 2 / 3, 1.0]  # three steps of warm-up
    assert at(3) == 1.0 and at(7) == pytest.approx(0.1 + 0.9 * 0.5) and at(11) == pytest.approx(0.1)  # cosine


def test_ratios_by_hand():
    """Ten rows at step 0, eight at step 1, five at step 2. Of the six right at step 0 one is not gated at step 1."""
    found = ratios(torch.tensor([[8.0, 4.0, 2.0], [8, 4, 2], [10, 8, 5], [10, 5, 2], [6, 5, 2], [6, 4, 1]]))
    assert found["loss"] == [1, 1, 1]
    assert found["accuracy"] == pytest.approx([0.6, 5 / 8, 0.4])
    assert found["conditional_accuracy"] == pytest.approx([0.6, 4 / 5, 1 / 2])
    assert found["tau_row@3"] == pytest.approx(1 + 0.6 + 0.5 + 0.2)
    assert "tau_row@3" not in ratios(torch.ones(6, 2))
    assert ratios(torch.zeros(6, 3))["tau_row@3"] == 1.0  # nothing counted, no division by zero


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


class Killed(BaseException):
    """Nothing may catch it, as nothing catches kill -9."""


# 6 steps an epoch, checkpoints every 3 steps and at epoch ends: in the middle, at a checkpoint, at the epoch's edge.
@pytest.mark.parametrize("kill_at", [1, 2, 3, 4, 5, 6, 7, 12])
def test_killed_and_continued_is_the_same_to_the_bit(base, tmp_path, monkeypatch, kill_at):
    whole, broken = again(base, tmp_path, "whole"), again(base, tmp_path, "broken")
    whole.stage("train")
    assert whole.manifest.stages["train"].counts["steps"] == 12

    step, done = Trainer._optimizer_step, []

    def killed(self, *args):
        result = step(self, *args)
        done.append(self.at.step)
        if len(done) == kill_at:
            raise Killed
        return result

    monkeypatch.setattr(Trainer, "_optimizer_step", killed)
    with pytest.raises(Killed):
        broken.stage("train")
    monkeypatch.undo()
    broken.stage("train")
    assert weights(whole).keys() == weights(broken).keys()
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(broken)[name]), name
    assert metrics(whole) == metrics(broken)


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
    assert torch.equal(saved["fc.weight"], weights(run)["fc.weight"])


@pytest.mark.parametrize("cut", [
    {"train.batch_tokens": 10_000}, {"train.batch_tokens": 100, "train.gradient_accumulation": 99}])
def test_loss_and_gradient_do_not_depend_on_packing(base, tmp_path, cut):
    """One sample per batch with accumulation over the whole epoch, against one large batch and against a few."""
    single, packed = again(base, tmp_path, "single"), again(base, tmp_path, "packed")
    common = {"train.epochs": 3, "train.log_every": 1, "train.lr": 1e-3}
    single.stage("train", **common, **{"train.batch_tokens": 1, "train.gradient_accumulation": 1000})
    packed.stage("train", **common, **cut)
    assert_same_training(single, packed)


def assert_same_training(a: TinyRun, b: TinyRun) -> None:
    assert len(metrics(a)) == len(metrics(b))
    for x, y in zip(metrics(a), metrics(b)):
        assert x.keys() == y.keys()
        for key in x:
            assert x[key] == pytest.approx(y[key], rel=2e-5, abs=1e-6), key
    for name, value in weights(a).items():  # AdamW divides by the gradient's size, which magnifies rounding
        torch.testing.assert_close(value, weights(b)[name], rtol=1e-3, atol=2e-4, msg=name)


RANKS = """
import json, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from pipeline.errors import PipelineError
from pipeline.ranks import dismiss, is_main_process, wait_for_rank_0
from pipeline.train import train
from tests.tiny_run import TinyRun
run = TinyRun(Path({target!r}), Path({folder!r}))
overrides = json.loads({overrides!r})
{before}
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


def launch(run: TinyRun, tmp_path: Path, *, before: str = "", **overrides: object) -> subprocess.Popen:
    """Two ranks. `before`: what every rank runs first."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(root=str(ROOT), target=str(run.target_dir), folder=str(run.root), before=before,
                                   overrides=json.dumps(overrides)))
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.launch", "2", str(script)], cwd=ROOT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen) -> str:
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 0, out
    return out


@pytest.mark.slow
def test_two_processes_equal_one_with_accumulation(base, tmp_path):
    """18 samples in batches of ≤ 40 tokens: steps of two batches, one for each rank, and a filler in the last."""
    one, two = again(base, tmp_path, "one"), again(base, tmp_path, "two")
    common = {"train.epochs": 2, "train.log_every": 1, "train.batch_tokens": 40}
    one.stage("train", **common, **{"train.gradient_accumulation": 2})
    finish(launch(two, tmp_path, **common))
    assert two.manifest.stages["train"].counts["ranks"] == 2
    assert_same_training(one, two)
    assert "up to date" in finish(launch(two, tmp_path, **common))  # rank 1 is let go, nothing hangs


@pytest.mark.slow
def test_two_processes_killed_hard_and_continued(base, tmp_path):
    whole, broken = again(base, tmp_path, "whole"), again(base, tmp_path, "broken")
    settings = {"train.epochs": 40, "train.checkpoint_every": 2, "train.validate_every_epochs": 10}
    finish(launch(whole, tmp_path, **settings))
    process = launch(broken, tmp_path, **settings)
    checkpoints = broken.folder / "train" / "checkpoints"
    while not any(checkpoints.glob("step-*")):
        assert process.poll() is None, process.communicate()[0]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (*children, process.pid):
        os.kill(int(pid), signal.SIGKILL)
    process.communicate()
    assert "train" not in broken.manifest.stages
    assert "going on from step-" in finish(launch(broken, tmp_path, **settings))
    assert all(torch.equal(v, weights(broken)[n]) for n, v in weights(whole).items())


def spoil_a_prompt(run: TinyRun) -> str:
    """Put a NaN that stage 3 did not see into a prompt's feature row; returns the sample's id."""
    path = run.folder / "dump" / "shard-00001.safetensors"
    from safetensors import safe_open

    with safe_open(path, framework="pt") as f:
        metadata = f.metadata()
    tensors = dict(load_file(path))
    tensors["layer_output.2"][1, 5] = float("nan")
    save_file(tensors, path, metadata=metadata)
    manifest = run.manifest
    manifest.stages["dump"].outputs = [FileRecord.of(run.folder, run.folder / f.path)
                                       for f in manifest.stages["dump"].outputs]
    digest = manifest.stages["dump"].digest()
    manifest.stages["standardize"].inputs["dump"] = digest
    save_manifest(run.folder, manifest)
    return json.loads(metadata["sample_ids"])[0]


def test_nan_stops_with_step_sample_and_checkpoint(run):
    first = spoil_a_prompt(run)
    with pytest.raises(PipelineError, match="not finite at step") as e:
        run.stage("train", **{"train.checkpoint_every": 1})
    assert f"['{first}']" in str(e.value) and "last good checkpoint" in str(e.value)
    assert "train" not in run.manifest.stages


@pytest.mark.slow
def test_an_error_of_several_ranks_is_said_once(run, tmp_path):
    """NaN strikes both ranks at once, whichever of them read the sample; both know which it was."""
    first = spoil_a_prompt(run)
    process = launch(run, tmp_path, **{"train.batch_tokens": 40})
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "Traceback" not in out
    assert out.count("error:") == 1 and f"caused by samples ['{first}']" in out


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_said_once(run, tmp_path, rank):
    """The other rank sees a broken connection, which is nobody's business."""
    before = f"""
from pipeline.train import Trainer
step = Trainer._optimizer_step
def fails(self, *args):
    if self.at.step == 3 and self.rank == {rank}:
        raise PipelineError("disk gone")
    return step(self, *args)
Trainer._optimizer_step = fails
"""
    process = launch(run, tmp_path, before=before)
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "Traceback" not in out, out
    assert out.count("error: disk gone") == 1, out


@pytest.mark.slow
def test_an_error_of_all_ranks_before_the_first_step_is_said_once(run, tmp_path):
    before = """
import pipeline.train
def missing(*_):
    raise PipelineError("no masks")
pipeline.train.AlignedFiles = missing
"""
    process = launch(run, tmp_path, before=before)
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "Traceback" not in out and out.count("error:") == 1, out


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_exits_with_0(run, tmp_path):
    process = launch(run, tmp_path, **{"train.epochs": 500, "train.checkpoint_every": 2})
    while not any((run.folder / "train" / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.communicate()[0]
    process.terminate()
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and out.count("stopped by SIGTERM") == 1 and "Traceback" not in out, out


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


def test_learning_rates_are_finite_for_one_step():
    assert math.isfinite(learning_rate(0, 1, lr=1.0, warmup_ratio=0.0, min_lr_ratio=0.0))
