import json
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pipeline import store as store_module
from pipeline.errors import PipelineError
from pipeline.store import HiddenStore, ShardBuilder, sample_ids, shard_path, shard_paths

STATES = ["layer_output.1", "layer_output.10", "final_hidden"]
H = 4


def make_sample(index: int, length: int, dtype=torch.float32) -> tuple[str, torch.Tensor, dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(index)
    states = {name: torch.randn(length, H, generator=rng).to(dtype) for name in STATES}
    return f"sample-{index}", torch.randint(0, 1000, (length,), generator=rng), states


def write_shards(folder: Path, samples, shard_tokens: int) -> list[Path]:
    builder = ShardBuilder(STATES, shard_tokens)
    for sample_id, ids, states in samples:
        if not builder.has_room(len(ids)):
            builder.write(shard_path(folder, len(shard_paths(folder))))
        builder.add(sample_id, ids, states)
    if builder.rows:
        builder.write(shard_path(folder, len(shard_paths(folder))))
    return shard_paths(folder)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), shard_tokens=st.integers(1, 60),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_round_trip_for_any_lengths_and_shard_size(lengths, shard_tokens, dtype):
    samples = [make_sample(i, n, dtype) for i, n in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(Path(folder), samples, shard_tokens)
        store = HiddenStore(paths)
        assert [r.id for r in store.samples] == [s[0] for s in samples]
        assert store.state_names == STATES
        for ref, (_, ids, states) in zip(store.samples, samples):
            assert torch.equal(store.input_ids(ref), ids)
            for name, state in states.items():
                got = store.rows(ref, name)
                assert got.dtype == dtype and torch.equal(got, state)
        for i, path in enumerate(paths):
            in_shard = [r for r in store.samples if r.shard == i]
            rows = sum(r.length for r in in_shard)
            assert rows <= shard_tokens or len(in_shard) == 1
            assert sample_ids(path) == [r.id for r in in_shard]


def test_shard_is_plain_safetensors_as_documented(tmp_path):
    write_shards(tmp_path, [make_sample(0, 3), make_sample(1, 5)], 100)
    tensors = load_file(tmp_path / "shard-00000.safetensors")
    assert set(tensors) == {"input_ids", "offsets", *STATES}
    assert tensors["offsets"].tolist() == [0, 3, 8]
    assert tensors["input_ids"].dtype == torch.int32 and tensors["input_ids"].shape == (8,)
    assert tensors["final_hidden"].shape == (8, H)


def test_more_than_100000_shards_stay_in_order(tmp_path):
    for number in (99_999, 100_000, 2):
        builder = ShardBuilder(STATES, 10)
        sample = make_sample(number, 1)
        builder.add(*sample)
        builder.write(shard_path(tmp_path, number))
    assert [r.id for r in HiddenStore(shard_paths(tmp_path)).samples] == ["sample-2", "sample-99999", "sample-100000"]


def test_few_shards_are_mapped_at_once_and_any_order_reads_right(tmp_path, monkeypatch):
    # Linux allows a process 65,530 maps: a dump of 10 TB has more shards than can be mapped together.
    monkeypatch.setattr(store_module, "_OPEN_SHARDS", 3)
    samples = {s[0]: s for s in (make_sample(i, 1 + i % 3) for i in range(24))}
    store = HiddenStore(write_shards(tmp_path, samples.values(), 4))
    assert len(store.paths) >= 8

    def mapped() -> int:
        return len({line.split()[-1] for line in open("/proc/self/maps") if str(tmp_path) in line})

    assert mapped() == 0
    order = store.samples * 3
    random.Random(0).shuffle(order)
    for ref in order:
        _, ids, states = samples[ref.id]
        assert torch.equal(store.input_ids(ref), ids)
        assert all(torch.equal(store.rows(ref, name), state) for name, state in states.items())
        assert 1 <= mapped() <= 3


@pytest.mark.parametrize("damage", ["truncated", "header", "missing", "foreign", "offsets"])
def test_damaged_shard_is_named_with_the_command_that_mends_it(tmp_path, damage):
    [path] = write_shards(tmp_path, [make_sample(0, 3), make_sample(1, 5)], 100)
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-20])
    elif damage == "header":
        path.write_bytes(content[:8] + b"x" * 20 + content[28:])
    elif damage == "missing":
        path.unlink()
    elif damage == "foreign":
        save_file({"weight": torch.zeros(2)}, path)
    else:
        tensors = load_file(path)
        tensors["offsets"] = torch.tensor([0, 3, 9])
        save_file(tensors, path, {"format": "eagle3-hidden-states", "version": "1",
                                  "sample_ids": json.dumps(["sample-0", "sample-1"])})
    with pytest.raises(PipelineError) as e:
        HiddenStore([path])
    assert path.name in str(e.value) and "make dump" in str(e.value)


def test_a_state_that_was_not_dumped_is_named(tmp_path):
    [path] = write_shards(tmp_path, [make_sample(0, 3)], 100)
    with pytest.raises(PipelineError, match="layer_output.7"):
        store = HiddenStore([path])
        store.rows(store.samples[0], "layer_output.7")


def test_a_sample_in_two_shards_is_an_error(tmp_path):
    for number in (0, 1):
        builder = ShardBuilder(STATES, 10)
        builder.add(*make_sample(5, 2))
        builder.write(shard_path(tmp_path, number))
    with pytest.raises(PipelineError, match="sample-5"):
        HiddenStore(shard_paths(tmp_path))


def test_states_of_the_wrong_length_are_refused():
    sample_id, ids, states = make_sample(0, 4)
    states["final_hidden"] = states["final_hidden"][:3]
    with pytest.raises(ValueError):
        ShardBuilder(STATES, 10).add(sample_id, ids, states)
