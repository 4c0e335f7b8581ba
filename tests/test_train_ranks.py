"""The training loop on several processes: the same as on one, exact when killed, and one message when it fails."""

import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.train.train import Trainer
from tests.train_cases import (  # noqa: F401 (base and run are fixtures)
    again,
    assert_same_training,
    base,
    finish,
    launch,
    metrics,
    ranks_script,
    run,
    spoil_a_prompt,
    start,
    weights,
)


@pytest.mark.slow
def test_two_processes_equal_one_with_accumulation_and_two_machines(base, tmp_path):
    """18 samples in batches of ≤ 40 tokens: steps of two batches, one for each rank, and a filler in the last.

    Two machines: the README's torchrun line, both of them here, as two agents that meet on the loopback.
    """
    one, two, machines = (again(base, tmp_path, name) for name in ("one", "two", "machines"))
    common = {"train.epochs": 2, "train.log_every": 1, "train.batch_tokens": 40, "drafter.init": "regression"}
    one.stage("train", **common, **{"train.gradient_accumulation": 2})
    finish(launch(two, tmp_path, **common))
    assert two.manifest.stages["train"].counts["ranks"] == 2
    assert_same_training(one, two)
    assert "up to date" in finish(launch(two, tmp_path, **common))  # rank 1 is let go, nothing hangs

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    agent = ("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1",
             str(ranks_script(machines, tmp_path, **common)))
    for process in [start(*agent), start(*agent)]:
        finish(process)
    assert metrics(two) == metrics(machines)
    assert all(torch.equal(v, weights(machines)[n]) for n, v in weights(two).items())


@pytest.mark.slow
def test_two_processes_with_shards_equal_one_and_one_reads_their_checkpoints(base, tmp_path):
    """FSDP2 on gloo; the norm of the gradient that is clipped is that of all shards."""
    one, two = again(base, tmp_path, "one"), again(base, tmp_path, "two")
    common = {"train.epochs": 2, "train.log_every": 1, "train.batch_tokens": 40, "train.max_grad_norm": 0.2,
              "drafter.init": "regression"}
    one.stage("train", **common, **{"train.gradient_accumulation": 4})
    finish(launch(two, tmp_path, **common, **{"train.gradient_accumulation": 2, "train.parallel": "fsdp"}))
    assert max(m["grad_norm"] for m in metrics(one) if "grad_norm" in m) > 0.2
    assert_same_training(one, two)

    target, config = two.config(**common)
    trainer = Trainer(config, target, two.manifest, two.folder, two.folder / "train", "cpu")
    last = two.folder / "train" / "checkpoints" / f"step-{trainer.at.step:08d}"
    assert trainer.at.step == two.manifest.stages["train"].counts["steps"]
    saved, moments = load_file(last / "model.safetensors"), load_file(last / "optimizer.safetensors")
    for name, p in trainer.drafter.named_parameters():
        assert torch.equal(p, saved[name]) and moments[f"exp_avg/{name}"].shape == p.shape
        assert torch.equal(trainer.optimizer.state[p]["exp_avg_sq"], moments[f"exp_avg_sq/{name}"])


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"train.parallel": "fsdp", "train.ema": 0.9, "train.dropout": 0.3,
                                       "train.gradient_accumulation": 2}])
def test_two_processes_killed_hard_and_continued(base, tmp_path, more):
    whole, broken = again(base, tmp_path, "whole"), again(base, tmp_path, "broken")
    settings = {"train.epochs": 40, "train.checkpoint_every": 2, "train.validate_every_epochs": 10, **more}
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
from pipeline.train.train import Trainer
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
def test_what_was_tracked_before_an_error_is_kept(run, tmp_path):
    """wandb writes the last of it when told that the run is over, or never: the rank leaves at once."""
    pytest.importorskip("wandb")
    before = """
from pipeline.train.train import Trainer
step = Trainer._optimizer_step
def fails(self, *args):
    if self.at.step == 5:
        raise PipelineError("disk gone")
    return step(self, *args)
Trainer._optimizer_step = fails
"""
    process = launch(run, tmp_path, before=before, **{"tracking.mode": "offline", "train.log_every": 1})
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and out.count("error: disk gone") == 1, out
    [tracked] = (run.folder / "train" / "wandb").glob("offline-run-*/*.wandb")
    assert tracked.read_bytes().count(b"grad_norm") >= 5


@pytest.mark.slow
def test_an_error_of_all_ranks_before_the_first_step_is_said_once(run, tmp_path):
    before = """
import pipeline.train.train
def missing(*_):
    raise PipelineError("no masks")
pipeline.train.train.AlignedFiles = missing
"""
    process = launch(run, tmp_path, before=before)
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "Traceback" not in out and out.count("error:") == 1, out


@pytest.mark.slow
@pytest.mark.parametrize("fails", [True, False])
def test_a_process_group_that_aborts_when_the_interpreter_goes_down_changes_nothing(run, tmp_path, fails):
    """As gloo's threads do now and then after an error: nobody shall read of SIGABRT instead of what went wrong."""
    before = "import atexit, os\natexit.register(os.abort)\n"
    if fails:
        before += """
import pipeline.train.train
def missing(*_):
    raise PipelineError("no masks")
pipeline.train.train.AlignedFiles = missing
"""
    process = launch(run, tmp_path, before=before)
    out = process.communicate(timeout=120)[0]
    assert process.returncode == fails and out.count("error:") == fails and "SIGABRT" not in out, out


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_exits_with_0(run, tmp_path):
    process = launch(run, tmp_path, **{"train.epochs": 500, "train.checkpoint_every": 2})
    while not any((run.folder / "train" / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.communicate()[0]
    process.terminate()
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and out.count("stopped by SIGTERM") == 1 and "Traceback" not in out, out
