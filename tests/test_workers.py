"""Encoding in several processes gives what one gives, byte for byte; a worker that dies is one clear error."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from pipeline.errors import PipelineError
from pipeline.prompts import generate, workers
from pipeline.samples import read_samples
from pipeline.target import open_target
from tests.test_chat import turns
from tests.tiny_models import tiny_llama
from tests.tiny_run import tiny_config


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"), layers=1)


@pytest.fixture
def source(tmp_path):
    """300 conversations and rows, some of each refused for several reasons, some split."""
    rng, path = random.Random(0), tmp_path / "source.jsonl"
    records: list[dict] = []
    for k in range(300):
        said = [" ".join(rng.choices(["Hi", "ok", "hm", "yes", "no"], k=rng.randint(1, 30)))
                for _ in range(2 * (1 + k % 3))]
        records.append({"messages": turns(*said)})
        if k % 10 == 0:
            records.append({"input_ids": [k, 5, 6], "loss_mask": [0, int(k % 20 > 0), 0]})
        if k % 30 == 0:
            records.append({"input_ids": [k, 10**6], "loss_mask": [0, 1]})
            records.append({"messages": [{"role": "system", "content": f"{k}"}, *turns("hm " * 200, "ok")]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def made(target_dir, source, folder: Path, **overrides):
    target, config = open_target(tiny_config(target_dir, folder, **{
        "prompts.source": str(source), "prompts.respond": "keep", "prompts.truncate": "split", "prompts.max_length": 50,
        "slots.layers": [0], "target.slots_layers": [0], **overrides}))
    folder.mkdir()
    return generate(config, target, folder)


def test_any_number_of_workers_makes_the_same_files(target_dir, source, tmp_path):
    results = {n: made(target_dir, source, tmp_path / str(n), **{"prompts.workers": n}) for n in (1, 2, 3)}
    alone = results[1]
    assert {"skipped_too_long", "skipped_not_in_vocabulary", "skipped_no_trained_tokens"} & alone.counts.keys()
    assert alone.counts["skipped_not_in_vocabulary"] == 10 <= alone.counts["skipped_too_long"]
    samples = list(read_samples(tmp_path / "1" / "samples.parquet"))
    assert any("#1" in sample.id for sample in samples) and len(samples) == sum(
        alone.counts[f"{part}_samples"] for part in ("train", "heldout"))
    for n in (2, 3):
        assert (results[n].counts, results[n].metrics) == (alone.counts, alone.metrics)
        for name in ("samples.parquet", "skipped.jsonl", "quarantine.jsonl"):
            assert (tmp_path / str(n) / name).read_bytes() == (tmp_path / "1" / name).read_bytes(), (n, name)


def test_a_worker_that_dies_is_a_clear_error_and_the_others_end(target_dir, source, tmp_path, monkeypatch):
    started, original = [], subprocess.Popen

    def popen(*arguments, **options):
        started.append(process := original(*arguments, **options))
        return process

    send = workers._Worker.send

    def killed_at_the_third_message(worker, message):
        if worker._process is started[-1] and len(started) == 2 and getattr(worker, "sent", 0) == 2:
            os.kill(worker._process.pid, signal.SIGKILL)
            worker._process.wait()
        worker.sent = getattr(worker, "sent", 0) + 1
        send(worker, message)

    monkeypatch.setattr(workers.subprocess, "Popen", popen)
    monkeypatch.setattr(workers._Worker, "send", killed_at_the_third_message)
    with pytest.raises(PipelineError, match="a worker process that encodes conversations was killed by signal 9") as e:
        made(target_dir, source, tmp_path / "out", **{"prompts.workers": 2})
    assert "prompts.workers=1" in e.value.fix and not (tmp_path / "out" / "samples.parquet").exists()
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_a_worker_without_torch_ends_when_the_stage_is_gone(target_dir, source, tmp_path):
    # Only a process that has imported neither torch nor a model can be this small.
    setup = {"tokenizer": str(target_dir), "trust_remote_code": False, "chat": {"eos_token_ids": [2]},
             "rows": {"spool": str(tmp_path / "spool"), "max_length": 50, "truncate": "cut", "vocab_size": 500}}
    (tmp_path / "spool").write_bytes(b"")
    with workers._Worker(setup) as worker:
        worker.send([])
        assert worker.receive().kept == []
        peak = next(line for line in Path(f"/proc/{worker._process.pid}/status").read_text().splitlines()
                    if line.startswith("VmHWM"))
        assert int(peak.split()[1]) < 320 * 1024
        worker._process.stdin.close()
        assert worker._process.wait(timeout=20) == 0


def test_workers_are_started_where_there_is_enough_to_do():
    cores = len(os.sched_getaffinity(0))
    assert [workers.workers_for(None, n) for n in (0, 484, 10**7)] == [1, 1, cores]
    assert workers.workers_for(3, 10) == 3
