"""Packing, order, the share of each rank, and batches against the shards they come from."""

import json
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pipeline.errors import PipelineError
from pipeline.standardize import layout
from pipeline.store import HiddenStore, ShardBuilder, shard_path, shard_paths
from pipeline.target import load_output_head
from pipeline.train.batches import AlignedFiles, MicroBatch, Prefetcher, TrainingData, pack, plan_epoch
from tests.tiny_run import TinyRun, tiny_run


def test_pack_by_hand():
    assert pack([4, 3, 9, 2, 2], [0, 1, 2, 3, 4], 8) == [[0, 1], [2], [3, 4]]
    assert pack([4, 3, 9, 2, 2], [4, 2, 0], 4) == [[4], [2], [0]]
    assert pack([], [], 8) == []


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40), batch_tokens=st.integers(1, 60),
       ranks=st.integers(1, 4), accumulation=st.integers(1, 3), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_plan_invariants(lengths, batch_tokens, ranks, accumulation, seed, epoch):
    def plan(ranks, accumulation):
        return plan_epoch(lengths, batch_tokens=batch_tokens, seed=seed, epoch=epoch, ranks=ranks,
                          accumulation=accumulation)

    steps = plan(ranks, accumulation)
    assert steps == plan(ranks, accumulation)  # follows from its arguments alone
    counted = [m.samples for step in steps for rank in step for m in rank if m.counts]
    assert sorted(i for samples in counted for i in samples) == list(range(len(lengths)))  # every sample once
    for samples in counted:
        assert sum(lengths[i] for i in samples) <= batch_tokens or len(samples) == 1
    for step in steps:
        assert len(step) == ranks and len({len(rank) for rank in step}) == 1 <= len(step[0]) <= accumulation
    # What an optimizer step learns from depends on ranks · accumulation only.
    learned = [sorted(m.samples for rank in step for m in rank if m.counts) for step in steps]
    assert learned == [sorted(m.samples for m in step[0]) for step in plan(1, ranks * accumulation)]


def test_epochs_and_seeds_differ():
    def order(seed, epoch):
        plan = plan_epoch([1] * 50, batch_tokens=1, seed=seed, epoch=epoch)
        return [m.samples[0] for step in plan for m in step[0]]

    assert len({tuple(order(s, e)) for s in range(3) for e in range(3)}) == 9


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TinyRun:
    run = tiny_run(tmp_path_factory.mktemp("batches"))
    run.stage("standardize")
    return run


def data(run: TinyRun, ids: list[str], dtype=torch.float32) -> TrainingData:
    target, _ = run.config()
    store = HiddenStore(shard_paths(run.folder / "dump"))
    return TrainingData(store, AlignedFiles(run.folder / "standardize", store), run.manifest.slots, ids,
                        load_output_head(target), dtype)


def test_a_batch_holds_the_rows_of_its_samples_in_order(run):
    ids = ["s20", "s0", "s17"]  # of both shards
    batch = data(run, ids).load((2, 0, 1))
    store = HiddenStore(shard_paths(run.folder / "dump"))
    refs = {r.id: r for r in store.samples}
    start = 0
    for sample, length in zip(("s17", "s20", "s0"), batch.sample_lengths.tolist()):
        ref, rows = refs[sample], slice(start, start + length)
        assert length == ref.length
        assert torch.equal(batch.input_ids[rows], store.input_ids(ref))
        for i, layer in enumerate((1, 2, 3)):
            assert torch.equal(batch.features[rows, 64 * i:64 * (i + 1)], store.rows(ref, f"layer_output.{layer}"))
        assert torch.equal(batch.final_hidden[rows], store.rows(ref, "final_hidden"))
        assert int(batch.loss_mask[rows].sum()) - 1 == int((batch.teacher_argmax[rows] >= 0).sum())
        start += length
    assert start == len(batch.input_ids)


def test_pre_norm_teacher_gets_the_final_norm(run):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    target, _ = run.config()
    head = load_output_head(target)
    slots = {**run.manifest.slots}
    slots["teacher"] = slots["teacher"].model_copy(update={"norm": "pre"})
    store = HiddenStore(shard_paths(run.folder / "dump"))
    aligned = AlignedFiles(run.folder / "standardize", store)
    got = TrainingData(store, aligned, slots, ["s1"], head, torch.float32).load((0,)).final_hidden
    norm = LlamaRMSNorm(64, eps=head.norm_eps)
    norm.weight.data.copy_(head.norm_weight)
    raw = data(run, ["s1"]).load((0,)).final_hidden
    torch.testing.assert_close(got, norm(raw).detach())


def test_unknown_sample_and_damaged_file_are_named(run, tmp_path):
    with pytest.raises(PipelineError, match="nobody"):
        data(run, ["s0", "nobody"])
    (tmp_path / "shard-00000.safetensors").write_bytes(b"short")
    with pytest.raises(PipelineError, match="make standardize"):
        AlignedFiles(tmp_path, HiddenStore(shard_paths(run.folder / "dump")))


@pytest.mark.parametrize("order", [["s0", "s1"], ["s1", "s0"], ["s1"]])
def test_a_dump_made_anew_is_not_read_with_the_old_masks(run, tmp_path, order):
    """Same name, same rows, the same samples in another order: the masks would be those of other tokens."""
    store = HiddenStore(shard_paths(run.folder / "dump"))
    refs = {ref.id: ref for ref in store.samples}

    def write(ids: list[str]) -> HiddenStore:
        builder = ShardBuilder(store.state_names, 1000)
        for i in ids:
            builder.add(i, store.input_ids(refs[i]), {name: store.rows(refs[i], name) for name in store.state_names})
        builder.write(shard_path(tmp_path, 0))
        return HiddenStore([shard_path(tmp_path, 0)])

    first = write(["s0", "s1"])
    rows = first.samples[-1].start + first.samples[-1].length
    (folder := tmp_path / "aligned").mkdir()
    save_file({"loss_mask": torch.ones(rows, dtype=torch.uint8), "teacher_argmax": torch.ones(rows, dtype=torch.int32)},
              folder / "shard-00000.safetensors", metadata={"checksums": json.dumps({"layout": layout(first.samples)})})
    again = write(order)
    if order == ["s0", "s1"]:
        assert AlignedFiles(folder, again).rows(again.samples[1], "loss_mask").tolist() == [1] * again.samples[1].length
    else:
        with pytest.raises(PipelineError, match="was made for another dump") as e:
            AlignedFiles(folder, again)
        assert "make standardize" in str(e.value)


def test_files_are_opened_once_for_both_parts_and_closed_again(run, monkeypatch):
    monkeypatch.setattr(AlignedFiles, "OPEN", 1)
    store = HiddenStore(shard_paths(run.folder / "dump"))
    aligned = AlignedFiles(run.folder / "standardize", store)
    for ref in reversed(store.samples):
        assert len(aligned.rows(ref, "loss_mask")) == ref.length
    assert aligned._open.cache_info().currsize == 1 < len(store.paths)


def test_prefetcher_gives_steps_in_order_and_stays_bounded(run):
    source = data(run, [f"s{i}" for i in range(12)])
    loaded = []
    load = source.load
    source.load = lambda samples, pin=False: (loaded.append(samples), load(samples))[1]
    steps = [[MicroBatch((i,), True)] for i in range(12)]
    with Prefetcher(source, steps, ahead=2) as batches:
        for i, (batch,) in enumerate(batches):
            assert torch.equal(batch.input_ids, load((i,)).input_ids)
            assert len(loaded) <= i + 1 + 3  # two queued, one in the hands of the thread
            time.sleep(0.01)
            if i == 5:
                break  # leaving early ends the thread
    assert not batches._thread.is_alive()


def test_prefetcher_raises_where_the_step_is_used(run):
    source = data(run, ["s0"])

    def fail(samples, pin=False):
        raise PipelineError("shard lost")

    source.load = fail
    with pytest.raises(PipelineError, match="shard lost"), Prefetcher(source, [[MicroBatch((0,), True)]]) as batches:
        list(batches)


def test_the_loader_computes_alone_and_leaves_the_numbers_of_threads_as_they_are():
    """Two OpenMP pools on the same cores wait for each other at the end of every parallel operation."""
    before, inside = torch.get_num_threads(), []

    class Data:
        def load(self, samples, pin):
            inside.append(torch.get_num_threads())

    torch.set_num_threads(3)
    try:
        with Prefetcher(Data(), [[MicroBatch((0,), True)]] * 2) as batches:
            assert len(list(batches)) == 2
            assert torch.get_num_threads() == 3
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (inside, later, torch.get_num_threads()) == ([1, 1], [3], 3)
    finally:
        torch.set_num_threads(before)
