"""The benchmark of the training step: the scripts do the same job, and lines of other machines are told apart."""

import importlib
import json
import subprocess
import sys

import pytest

from tests.tiny_run import ROOT

TINY = ("--seq-len 64 --ttt 3 --draft-vocab 256 --hidden 64 --heads 4 --kv-heads 2 --head-dim 16 --intermediate 128 "
        "--target-vocab 512 --threads 1 --warmup 1 --steps 1").split()


@pytest.mark.slow
def test_speculators_does_the_same_job_in_this_environment():
    """At TTT step 0 rows and losses are defined alike: see benchmarks/train_step.py."""
    pytest.importorskip("speculators")
    lines = [json.loads(subprocess.run(
        [sys.executable, "-W", "ignore", f"benchmarks/{name}_step.py", *TINY], cwd=ROOT, check=True, capture_output=True,
        text=True).stdout.splitlines()[-1]) for name in ("train", "speculators")]
    assert lines[0]["kl_first"][0] == pytest.approx(lines[1]["kl_first"][0], abs=5e-4)


def test_lines_of_another_machine_are_not_taken_for_ones_of_here(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    bench = importlib.import_module("bench")
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "lines.jsonl")
    assert bench.read() == []
    with pytest.raises(SystemExit, match="nothing is measured"):
        bench.report(bench.GRID, None)
    for machine, threads in (("here", 2), ("there", 2), ("here", 1), ("there", 2)):
        bench.write({"machine": machine, "threads": threads})
    assert bench.read(("here", 2)) == [{"machine": "here", "threads": 2}]
    assert bench.read(("elsewhere", 2)) == []
    assert len(bench.read()) == 2  # there, where the last line is from
