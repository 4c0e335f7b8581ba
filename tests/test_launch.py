"""The launcher of several ranks: their exit code, their words, and none of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pipeline

ROOT = Path(pipeline.__file__).resolve().parent.parent
FACTS = ("architecture", "num_layers", "hidden_size", "vocab_size", "max_position_embeddings",
         "drafter.num_attention_heads", "drafter.num_key_value_heads", "drafter.head_dim", "drafter.intermediate_size")


def start(processes: int, script: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.launch", str(processes), str(script), *arguments], cwd=ROOT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE)


def run(processes: int, script: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(processes, script, *arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def write(folder: Path, text: str) -> Path:
    (script := folder / "script.py").write_text("import os, signal, sys, time\n" + text)
    return script


def test_one_process_is_the_script_itself(tmp_path):
    script = write(tmp_path, "print(os.getppid(), sys.argv[1:], 'RANK' in os.environ); sys.exit(7)")
    process = start(1, script, "a=1", "--b")
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 7
    assert out == f"{os.getpid()} ['a=1', '--b'] False\n"  # no launcher stays between the shell and the stage


@pytest.mark.slow
def test_ranks_and_exit_code_0(tmp_path):
    script = write(tmp_path, "print(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:])")
    code, out, err = run(2, script, "x=[1,2]")
    assert (code, sorted(out.splitlines()), err) == (0, ["0 2 x=[1,2]", "1 2 x=[1,2]"], "")


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_rank_that_failed_is_heard(tmp_path, rank):
    script = write(tmp_path, f"sys.exit('error: no room') if os.environ['RANK'] == '{rank}' else time.sleep(60)")
    assert run(2, script) == (1, "", "error: no room\n")


@pytest.mark.slow
def test_a_rank_killed_without_a_word_is_named(tmp_path):
    script = write(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else time.sleep(60)")
    assert run(2, script) == (1, "", "error: rank 1 was ended by SIGKILL (out of memory?)\n")


@pytest.mark.slow
def test_sigterm_goes_to_the_ranks_and_their_exit_code_counts(tmp_path):
    script = write(tmp_path, """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
open(sys.argv[1] + os.environ["RANK"], "w").close()
while not asked:
    time.sleep(0.05)
os.write(1, b"saved\\n")  # at once: two ranks write to one pipe
""")
    process = start(2, script, str(tmp_path / "ready"))
    while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "saved\nsaved\n", "")


@pytest.mark.slow
def test_two_trainings_on_one_machine_do_not_meet(tmp_path):
    script = write(tmp_path, """
import torch.distributed as dist
dist.init_process_group("gloo")
value = __import__("torch").tensor([int(sys.argv[1])])
dist.all_reduce(value)
time.sleep(2)
dist.destroy_process_group()
print(f"={int(value)}=")
""")
    both = [start(2, script, number) for number in ("1", "10")]
    said = [process.communicate(timeout=120) for process in both]
    assert [out.count(f"={value}=") for (out, _), value in zip(said, (2, 20))] == [2, 2], said
    assert [p.returncode for p in both] == [0, 0], said


@pytest.mark.slow
def test_an_error_of_a_stage_is_one_message(tmp_path):
    """Stage 4 without the stages before it: rank 0 says so, rank 1 waits for it."""
    from tests.tiny_models import tiny_llama

    target = tiny_llama(tmp_path / "target")
    code, out, err = run(2, ROOT / "stages" / "04_train.py", f"run.root={tmp_path}/runs", "gpus=2", "device=cpu",
                         f"target.path={target}", "tracking=none", "target.slots_layers=[1,2,3]",
                         *(f"target.{fact}=null" for fact in FACTS))
    assert code == 1 and "Traceback" not in err, err
    assert (out + err).count("error:") == 1 and "make prompts" in err
