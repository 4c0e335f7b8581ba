"""The capture plugin's parts without an engine. tests/test_dump.py runs them in the real one."""

import ctypes
import json
import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeline.dump.capture import _spans, every_layer, inner_model
from pipeline.dump.capture_plan import CHECK, PROBE, SAMPLE, Captured, CapturePlan, RequestTag, Span
from pipeline.dump.capture_writer import CaptureWriter, take_over
from pipeline.store import HiddenStore, shard_paths

H = 4


def make_plan(folder: Path, attempt: str = "a1", shard_tokens: int = 10) -> CapturePlan:
    plan = CapturePlan(attempt=attempt, folder=str(folder), layers=[1, 3], num_layers=5, dtype="float32",
                       shard_tokens=shard_tokens)
    take_over(folder, attempt)
    return plan


def row(position: int, state: int, sample: int) -> list[float]:
    return [float(1000 * sample + 10 * position + state)] * H


def states_of(sample: int, start: int, length: int) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row(p, s, sample) for p in range(start, start + length)])
            for s, name in enumerate(("layer_output.1", "layer_output.3", "final_hidden"))}


def forward(*parts: tuple[RequestTag, list[int], int, int, int]) -> Captured:
    """A forward made of (tag, ids of the whole request, sample number, start, length)."""
    spans, ids, states, at = [], [], [], 0
    for tag, all_ids, sample, start, length in parts:
        spans.append(Span(tag, at, start, length))
        ids += all_ids[start:start + length]
        states.append(states_of(sample, start, length))
        at += length
    merged = {name: torch.cat([s[name] for s in states]) for name in states[0]}
    return Captured(spans, torch.tensor(ids), merged, ready=lambda: None)


def tag_of(plan: CapturePlan, sample: int, ids: list[int], kind: str = SAMPLE) -> RequestTag:
    return RequestTag.of(plan.attempt, kind, f"s/{sample}", ids)


def quarantined(plan: CapturePlan) -> dict[str, str]:
    lines = [json.loads(line) for p in plan.control.glob("quarantine-*.jsonl") for line in p.read_text().splitlines()]
    return {q["id"]: q["reason"] for q in lines}


def reported_error(plan: CapturePlan) -> dict:
    [path] = plan.control.glob("error-*.json")
    text = path.read_text().strip()
    return json.loads(text) if text else {}


@given(sample_id=st.text(min_size=1), ids=st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_request_id_round_trip_for_any_sample_id(sample_id, ids):
    tag = RequestTag.of("abc123", SAMPLE, sample_id, ids)
    assert RequestTag.parse(str(tag), "abc123") == tag
    assert RequestTag.parse(str(tag), "other") is None
    assert RequestTag.parse(sample_id, "abc123") is None or sample_id.startswith("abc123/")


def test_spans_follow_the_batch_and_skip_requests_of_others():
    tag = RequestTag.of("a1", SAMPLE, "x", [1, 2, 3, 4, 5])
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
                            rids=["health-check", str(tag)], extend_prefix_lens_cpu=[0, 2], extend_seq_lens_cpu=[7, 3])
    assert _spans(batch, "a1") == [Span(tag, row=7, start=2, length=3)]
    batch.forward_mode = SimpleNamespace(is_extend_without_speculative=lambda: False)
    assert _spans(batch, "a1") == []


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_chunks_of_any_size_in_mixed_batches_become_whole_samples(data, tmp_path_factory):
    """Samples are cut into chunks at random and the chunks of different samples are mixed, in order within a sample."""
    plan = make_plan(tmp_path_factory.mktemp("dump"), shard_tokens=data.draw(st.integers(1, 40)))
    lengths = data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=6))
    ids = {i: [100 * i + p for p in range(n)] for i, n in enumerate(lengths)}
    writer, done = CaptureWriter(plan), dict.fromkeys(ids, 0)
    while open_ := [i for i in ids if done[i] < lengths[i]]:
        batch = data.draw(st.lists(st.sampled_from(open_), min_size=1, unique=True))
        parts = []
        for i in batch:
            n = data.draw(st.integers(1, lengths[i] - done[i]))
            parts.append((tag_of(plan, i, ids[i]), ids[i], i, done[i], n))
            done[i] += n
        writer.take(forward(*parts))
    writer.finish()
    store = HiddenStore(shard_paths(Path(plan.folder)))
    assert sorted(r.id for r in store.samples) == sorted(f"s/{i}" for i in ids)
    for ref in store.samples:
        i = int(ref.id[2:])
        assert store.input_ids(ref).tolist() == ids[i]
        for name, state in states_of(i, 0, lengths[i]).items():
            assert torch.equal(store.rows(ref, name), state)
    assert quarantined(plan) == {}


def test_bad_samples_are_quarantined_with_the_reason_and_good_ones_beside_them_kept(tmp_path):
    plan = make_plan(tmp_path)
    writer = CaptureWriter(plan)
    ids = [5, 6, 7]
    good, nan, inf, other, cut = (tag_of(plan, i, ids) for i in range(5))
    captured = forward(*((tag, ids, i, 0, 3) for i, tag in enumerate((good, nan, inf))))
    captured.states["layer_output.3"][4, 2] = float("nan")  # sample 1
    captured.states["final_hidden"][8, 0] = float("-inf")   # sample 2
    writer.take(captured)
    writer.take(forward((other, [5, 9, 7], 3, 0, 3)))       # the tag was made for 5, 6, 7
    writer.take(forward((cut, ids, 4, 0, 2)))               # its third row never comes
    writer.finish()
    assert [r.id for r in HiddenStore(shard_paths(tmp_path)).samples] == ["s/0"]
    reasons = quarantined(plan)
    assert reasons["s/1"] == "not finite: layer_output.3"
    assert reasons["s/2"] == "not finite: final_hidden"
    assert "other token ids" in reasons["s/3"]
    assert reasons["s/4"] == "2 of 3 rows arrived"


def test_a_request_that_the_engine_starts_anew_is_stored_once(tmp_path):
    plan = make_plan(tmp_path)
    writer, ids = CaptureWriter(plan), list(range(6))
    tag = tag_of(plan, 0, ids)
    for start, length in ((0, 4), (0, 3), (3, 3)):
        writer.take(forward((tag, ids, 0, start, length)))
    writer.finish()
    store = HiddenStore(shard_paths(tmp_path))
    assert [r.length for r in store.samples] == [6]
    assert torch.equal(store.rows(store.samples[0], "layer_output.1"), states_of(0, 0, 6)["layer_output.1"])


def test_a_gap_between_chunks_is_an_error_of_the_stage(tmp_path):
    plan = make_plan(tmp_path)
    writer, ids = CaptureWriter(plan), list(range(6))
    writer.start()
    writer.put(forward((tag_of(plan, 0, ids), ids, 0, 0, 2)))
    writer.put(forward((tag_of(plan, 0, ids), ids, 0, 3, 3)))
    writer.join(timeout=20)
    assert not writer.is_alive() and "came after 2 of 6" in reported_error(plan)["what"]
    writer.put(forward((tag_of(plan, 1, ids), ids, 1, 0, 6)))  # must neither block nor raise into the engine


def test_the_thread_writes_the_rest_when_asked_to_finish(tmp_path):
    plan = make_plan(tmp_path, shard_tokens=1000)
    writer, ids = CaptureWriter(plan), list(range(6))
    writer.start()
    writer.put(forward((tag_of(plan, 0, ids), ids, 0, 0, 6)))
    (plan.control / "finish").touch()
    writer.join(timeout=20)
    assert [r.id for r in HiddenStore(shard_paths(tmp_path)).samples] == ["s/0"]
    assert len(list(plan.control.glob("finished-*.json"))) == 1 and reported_error(plan) == {}


def test_shard_numbers_go_on_after_the_highest(tmp_path):
    ids = list(range(6))
    for attempt, sample in (("a1", 0), ("a2", 1)):
        plan = make_plan(tmp_path, attempt)
        writer = CaptureWriter(plan)
        writer.take(forward((tag_of(plan, sample, ids), ids, sample, 0, 6)))
        writer.finish()
    assert [p.name for p in shard_paths(tmp_path)] == ["shard-00000.safetensors", "shard-00001.safetensors"]


def test_a_scheduler_left_over_from_an_earlier_start_cannot_write(tmp_path):
    old = make_plan(tmp_path, "old", shard_tokens=1000)
    orphan, ids = CaptureWriter(old), list(range(6))
    orphan.take(forward((tag_of(old, 0, ids), ids, 0, 0, 6)))
    new = make_plan(tmp_path, "new")
    with pytest.raises(RuntimeError, match="taken over"):
        orphan.finish()
    assert shard_paths(tmp_path) == [] and list(new.control.iterdir()) == []


def test_taking_over_clears_what_a_killed_start_left(tmp_path):
    plan = make_plan(tmp_path, "old")
    (plan.control / "finish").touch()
    (tmp_path / ".tmp-12345678-shard-00000.safetensors").write_bytes(b"half")
    make_plan(tmp_path, "new")
    assert not plan.control.exists() and list(tmp_path.glob(".tmp-*")) == []


def test_probes_are_kept_apart_and_wiring_checks_are_not_stored(tmp_path):
    plan = make_plan(tmp_path)
    writer, ids = CaptureWriter(plan), [1, 2]
    writer.take(forward((tag_of(plan, 0, ids, CHECK), ids, 0, 0, 2)))
    writer.take(forward((tag_of(plan, 1, ids, PROBE), ids, 1, 0, 2)))
    writer.finish()
    assert shard_paths(tmp_path) == [] and len(list(plan.control.glob("probe-*.safetensors"))) == 1


@contextmanager
def small_disk(path: Path, size: str):
    """A tmpfs of `size`; skips the test where mounting is not allowed."""
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(path).encode(), b"tmpfs", 0, f"size={size}".encode()) != 0:
        pytest.skip(f"mounting a tmpfs is not allowed here: {os.strerror(ctypes.get_errno())}")
    try:
        yield path
    finally:
        libc.umount2(str(path).encode(), 2)


def test_a_full_disk_is_reported_clearly_and_leaves_no_partial_shard(tmp_path):
    with small_disk(tmp_path / "disk", "256k") as disk:
        plan = make_plan(disk, shard_tokens=2000)
        writer, ids = CaptureWriter(plan), list(range(3000))
        (disk / "filler").write_bytes(b"x" * (256 * 1024 - 60_000))
        writer.start()
        writer.put(forward((tag_of(plan, 0, ids), ids, 0, 0, 3000)))  # 3000 rows x 3 x 16 bytes
        writer.join(timeout=20)
        error = reported_error(plan)
        assert "the disk is full" in error["what"] and "the same command" in error["fix"]
        assert [p.name for p in disk.iterdir() if "shard" in p.name] == []


@pytest.mark.parametrize("code", [28, 30])  # ENOSPC, EROFS
def test_a_disk_error_at_any_write_is_reported(tmp_path, monkeypatch, code):
    plan = make_plan(tmp_path, shard_tokens=2)
    writer, ids = CaptureWriter(plan), list(range(6))

    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", refuse)
    writer.start()
    writer.put(forward((tag_of(plan, 0, ids), ids, 0, 0, 6)))
    writer.join(timeout=20)
    assert "cannot write" in reported_error(plan)["what"] and shard_paths(tmp_path) == []


class AddNorm(nn.Module):
    """A final norm with SGLang's fused signature; the residual it returns lies in storage that is reused."""

    def forward(self, hidden, residual=None):
        if residual is None:
            return 2 * hidden
        residual += hidden
        return 2 * residual, residual


class Stack(nn.Module):
    """Layer l adds 10**l. Captures at the input of layers, by list or by marks, like SGLang's models."""

    def __init__(self, marked: bool, fused: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(4))
        self.norm, self.fused = AddNorm(), fused
        if marked:
            self.layers[2]._is_layer_to_capture = True
        else:
            self.layers_to_capture = [2]

    def forward(self, x):
        captured = []
        for i, layer in enumerate(self.layers):
            wanted = i in self.layers_to_capture if hasattr(self, "layers_to_capture") else \
                getattr(layer, "_is_layer_to_capture", False)
            if wanted:
                captured.append(x.clone())
            x = x + 10.0**i
        final = self.norm(torch.zeros_like(x), x)[0] if self.fused else self.norm(x)
        return captured, final


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_every_layer_captures_all_and_then_restores_the_model(marked, fused):
    model = nn.Module()
    model.language_model = nn.Module()
    model.language_model.model = stack = Stack(marked, fused)
    x = torch.zeros(2, 3)
    assert inner_model(model) is stack
    with every_layer(model) as last:
        captured, final = stack(x)
    assert [c[0, 0].item() for c in captured] == [1, 11, 111]
    assert last["layer_output.3"][0, 0].item() == 1111 and torch.equal(last["final_hidden"], final)
    captured, _ = stack(x)
    assert [c[0, 0].item() for c in captured] == [11] and not stack.norm._forward_hooks


def test_plugin_is_inert_and_imports_nothing_heavy_unless_switched_on():
    code = ("import sys, pipeline.dump.capture as c; c.register(); "
            "sys.exit(any(m in sys.modules for m in ('sglang', 'transformers')))")
    env = {k: v for k, v in os.environ.items() if k != "EAGLE3_CAPTURE_PLAN"}
    assert subprocess.run([sys.executable, "-c", code], env=env, cwd=Path(__file__).parent.parent).returncode == 0


def test_memory_is_bounded_by_waiting_for_a_slow_disk(tmp_path):
    plan = make_plan(tmp_path, shard_tokens=1)
    writer, ids = CaptureWriter(plan), [1]
    captured = forward((tag_of(plan, 0, ids, CHECK), ids, 0, 0, 1))
    release = time.monotonic() + 0.5
    captured.ready = lambda: time.sleep(max(0, release - time.monotonic()))
    writer.start()
    for _ in range(50):
        writer.put(captured)
        assert writer._queue.qsize() <= 4
    (plan.control / "finish").touch()
    writer.join(timeout=20)
    assert reported_error(plan) == {}


_WRITE_ALL = """
import sys, time, torch
from pathlib import Path
sys.path.insert(0, "tests")
from test_capture import forward, make_plan, tag_of
from pipeline.dump.capture_writer import CaptureWriter
from pipeline.store import sample_ids, shard_paths

folder, attempt = Path(sys.argv[1]), sys.argv[2]
plan = make_plan(folder, attempt, shard_tokens=30)
done = {i for path in shard_paths(folder) for i in sample_ids(path)}
writer = CaptureWriter(plan)
for sample in range(400):
    ids = list(range(1 + sample % 20))
    if f"s/{sample}" not in done:
        writer.take(forward((tag_of(plan, sample, ids), ids, sample, 0, len(ids))))
        time.sleep(0.002)
writer.finish()
"""


@pytest.mark.slow
def test_killed_at_random_moments_or_overtaken_by_a_second_start_every_sample_is_stored_once(tmp_path):
    rng = random.Random(0)

    def start(attempt: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", _WRITE_ALL, str(tmp_path), attempt], stderr=subprocess.DEVNULL,
                                cwd=Path(__file__).parent.parent)

    def wait_for_more_shards_than(count: int) -> None:
        while len(shard_paths(tmp_path)) <= count and process.poll() is None:
            time.sleep(0.001)

    for attempt in range(4):
        before = len(shard_paths(tmp_path))
        process = start(f"killed{attempt}")
        wait_for_more_shards_than(before)
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.wait()
    left_over = process = start("leftover")
    wait_for_more_shards_than(len(shard_paths(tmp_path)))
    assert start("last").wait(timeout=60) == 0
    left_over.wait(timeout=60)
    refs = HiddenStore(shard_paths(tmp_path)).samples  # refuses a sample that lies in two shards
    assert sorted(int(r.id[2:]) for r in refs) == list(range(400))
    assert all(r.length == 1 + int(r.id[2:]) % 20 for r in refs)
