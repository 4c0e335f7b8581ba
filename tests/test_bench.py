"""The benchmark of the training step: the scripts do the same job, and lines of other machines are told apart."""

import argparse
import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

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


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The module, without any results."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    module = importlib.import_module("bench")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "lines.jsonl")
    return module


def test_lines_of_another_machine_are_not_taken_for_ones_of_here(bench):
    assert bench.read() == []
    with pytest.raises(SystemExit, match="nothing is measured"):
        bench.report(bench.GRID, None)
    for machine, threads in (("here", 2), ("there", 2), ("here", 1), ("there", 2)):
        bench.write({"machine": machine, "threads": threads})
    assert bench.read(("here", 2)) == [{"machine": "here", "threads": 2}]
    assert bench.read(("elsewhere", 2)) == []
    assert len(bench.read()) == 2  # there, where the last line is from


def test_machines_of_one_model_name_are_told_apart(bench, monkeypatch):
    """Two generations that a hypervisor both calls "AMD EPYC"."""
    text = "processor\t: 0\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: AMD EPYC\nflags\t\t: avx2 avx512_bf16\n"
    names = set()
    for family, model in ((25, 17), (26, 2)):
        monkeypatch.setattr(bench.Path, "read_text", lambda _, f=family, m=model: text.format(f, m))
        names.add(bench.machine_name().split(" × ")[1])
    assert names == {"AMD EPYC family 25 model 17 avx512_bf16", "AMD EPYC family 26 model 2 avx512_bf16"}


def test_a_report_of_some_configurations_leaves_the_others_in_the_plot(bench, monkeypatch, capsys):
    plotted = []
    monkeypatch.setattr(bench, "plot", plotted.extend)
    here = {"machine": "here", "threads": 2}
    bench.write({"kind": "rates", "gflops": {"fp32": 100.0, "bf16": 300.0}, **here})
    for c in bench.GRID[:2]:
        for impl, seconds in (("ours", 1.0), ("speculators", 3.0), ("specforge", 2.0)):
            bench.write({"impl": impl, **c, "tuned": False, "s_per_step": seconds, "tok_per_s": 10 / seconds,
                         "peak_rss_mib": 100, "rss_before_mib": 50, "gflop_pruned": 100.0, "other_cpu_frac": 0.0, **here})
    bench.report(bench.GRID[:1], None)
    out = capsys.readouterr().out
    assert out.count("| S=") == out.count("| 3.00 |") == out.count("| 2.00 |") == 1  # × limit, ratio to the better peer
    assert [(c, peer["impl"]) for c, _, peer in plotted] == [(c, "specforge") for c in bench.GRID[:2]]


def test_rounds_take_turns_and_the_median_counts(bench, monkeypatch):
    """What an interrupted run measured is not measured again."""
    c = next(c for c in bench.GRID if c["dtype"] == "bf16")
    seconds = {("ours", False): [1.0, 9.0, 2.0], ("speculators", False): [5.0, 4.0, 6.0],
               ("specforge", False): [7.0, 1.5, 8.0], ("speculators", True): [3.0, 2.0, 2.5]}  # fmt: skip
    measured = []

    def measure(impl, python, c, tuned, args):
        times = seconds[impl, tuned]
        measured.append((impl, tuned))
        return {"impl": impl, **c, "tuned": tuned, "s_per_step": times[measured.count((impl, tuned)) - 1], "threads": 2,
                "peak_rss_mib": 1, "kl_first": [1.0], "machine": bench.machine_name()}  # fmt: skip

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "pythons", lambda args: dict.fromkeys(("ours", *bench.PEERS)))
    monkeypatch.setattr(bench, "matmul_rates", lambda threads: {"kind": "rates", "threads": 2, "machine": bench.machine_name()})
    for rounds in (1, 3, 3):
        bench.run([c], argparse.Namespace(rounds=rounds, threads=2, minutes=None))
    *untuned, tuned = seconds
    assert measured == [*untuned, tuned, *untuned * 2, tuned, tuned]
    lines = bench.read()
    assert bench.find(lines, c, "ours")["s_per_step"] == 2.0
    assert bench.better_peer(lines, c)["s_per_step"] == 5.0
    assert bench.find(lines, c, "speculators", True)["s_per_step"] == 2.5


def test_nothing_of_the_plot_is_cut_off(bench, monkeypatch):
    """In DejaVu Sans, whose digits are 7.63 px wide at 12 px; most letters are narrower."""
    monkeypatch.setattr(bench, "ROOT", bench.RESULTS.parent)
    bench.plot([(c, {"tok_per_s": 7000.0}, {"tok_per_s": 300.0}) for c in bench.GRID])
    svg = ElementTree.parse(bench.RESULTS.with_suffix(".svg")).getroot()
    width = float(svg.get("viewBox").split()[2])
    for text in svg.iter("{http://www.w3.org/2000/svg}text"):
        x, room = float(text.get("x")), 7.63 * len(text.text)
        begin = {"start": x, "end": x - room, "middle": x - room / 2}[text.get("text-anchor")]
        assert 0 <= begin and begin + room <= width, text.text
