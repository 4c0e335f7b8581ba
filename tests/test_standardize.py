"""Stage 3: needed rows by hand, the teacher's argmax against transformers, the maps, and every refusal's message."""

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pipeline.errors import PipelineError
from pipeline.samples import read_samples
from pipeline.standardize import full_vocabulary_argmax, needed_rows
from pipeline.store import HiddenStore, shard_paths
from pipeline.target import OutputHead
from pipeline.vocab import read_vocab
from tests.tiny_disk import fill, tiny_disk
from tests.tiny_run import TinyRun, tiny_run


def test_needed_rows_by_hand():
    """Two turns; tokens 2-4 and 7-8 are the target's. Row r predicts r+1, and some row before r must learn from it.

    row    0  1  2  3  4  5  6  7  8
    mask   0  0  1  1  1  0  0  1  1
    row 1 predicts token 2, but no row counts for the first response token: it comes from the target itself.
    rows 2, 3 predict 3, 4 and rows 1, 2 learn from them; row 4 predicts a header; row 7 predicts 8; row 8 nothing.
    """
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1])
    assert needed_rows(mask).nonzero().flatten().tolist() == [2, 3, 7]
    assert needed_rows(torch.tensor([1, 1, 1])).tolist() == [False, True, False]  # row 0 has no row before it
    assert needed_rows(torch.tensor([1])).tolist() == [False]


@settings(max_examples=100, deadline=None)
@given(mask=st.lists(st.integers(0, 1), min_size=1, max_size=14), steps=st.integers(1, 5))
def test_needed_rows_are_exactly_the_teachers_of_gated_rows(mask, steps):
    """Against the gate written as in the README: row i counts at step j iff l_{i+1} … l_{i+2+j} = 1, i+2+j < T."""
    length = len(mask)
    teachers = {i + 1 + j for j in range(steps) for i in range(length)
                if i + 2 + j <= length - 1 and all(mask[i + 1:i + 3 + j])}
    assert set(needed_rows(torch.tensor(mask)).nonzero().flatten().tolist()) == teachers


def test_argmax_in_chunks_and_ties(monkeypatch):
    import pipeline.standardize as module

    monkeypatch.setattr(module, "_ROW_CHUNK", 3)
    monkeypatch.setattr(module, "_VOCAB_CHUNK", 7)
    rng = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(20, 4, generator=rng), torch.randn(10, 4, generator=rng)
    head = OutputHead(weight=weight, norm_weight=torch.ones(4), norm_eps=1e-6)
    assert torch.equal(full_vocabulary_argmax(hidden, head), (hidden.double() @ weight.double().T).argmax(-1).int())
    weight[2] *= 10
    weight[15] = weight[9] = weight[2]  # equal logits in three chunks: the lowest id wins
    tied = full_vocabulary_argmax(weight[2:3], head)
    assert tied.item() == 2


def test_bf16_neighbours_are_told_apart():
    """Two logits that round to the same bf16 number: 256.0 and 256.5."""
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.001953125]], dtype=torch.bfloat16)
    head = OutputHead(weight=weight, norm_weight=torch.ones(2), norm_eps=1e-6)
    hidden = torch.tensor([[256.0, 256.0]], dtype=torch.bfloat16)
    assert (hidden @ weight.T).argmax(-1).item() == 0  # the bf16 product cannot see it
    assert full_vocabulary_argmax(hidden, head).item() == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TinyRun:
    run = tiny_run(tmp_path_factory.mktemp("standardize"), dumped=(1, 2, 3, 4))
    run.stage("standardize")
    return run


def test_teacher_argmax_equals_transformers(run):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.target_dir, dtype=torch.float32).eval()
    samples = {s.id: s for s in read_samples(run.folder / "prompts" / "samples.parquet")}
    store = HiddenStore(shard_paths(run.folder / "dump"))
    checked = 0
    for ref in store.samples:
        aligned = load_file(run.folder / "standardize" / store.paths[ref.shard].name)
        rows = slice(ref.start, ref.start + ref.length)
        sample, argmax = samples[ref.id], aligned["teacher_argmax"][rows]
        assert aligned["loss_mask"][rows].tolist() == sample.loss_mask
        with torch.no_grad():
            logits = model(torch.tensor([sample.input_ids])).logits[0]
        needed = needed_rows(torch.tensor(sample.loss_mask))
        assert torch.equal(argmax >= 0, needed)
        assert torch.equal(argmax[needed], logits.argmax(-1)[needed].int())
        checked += int(needed.sum())
    assert checked > 100


def test_vocabulary_split_and_counts(run):
    vocab = read_vocab(run.folder / "standardize" / "vocab.safetensors")
    split = json.loads((run.folder / "standardize" / "split.json").read_text())
    samples = list(read_samples(run.folder / "prompts" / "samples.parquet"))
    assert split == {part: [s.id for s in samples if s.split == part] for part in ("train", "heldout")}
    trained = {t for s in samples if s.split == "train" for t, m in zip(s.input_ids, s.loss_mask) if m}
    ids = set(vocab.target_ids().tolist())
    assert trained <= ids and len(ids) == 64 and run.config()[0].eos_token_ids[0] in ids
    record = run.manifest.stages["standardize"]
    tokens = [t for s in samples if s.split == "heldout" for t, m in zip(s.input_ids, s.loss_mask) if m]
    assert record.metrics["heldout_token_coverage"] == sum(t in ids for t in tokens) / len(tokens)
    assert record.metrics["train_token_coverage"] == 1.0
    assert record.counts["trained_tokens"] == sum(sum(s.loss_mask) for s in samples if s.split == "train")
    assert [f.path for f in record.outputs if "shard" in f.path] == [f"standardize/{p.name}" for p in
                                                                     shard_paths(run.folder / "dump")]


def test_slots_can_be_bound_again_without_a_dump(run):
    manifest = run.stage("standardize", **{"slots.layers": [1, 2, 4]})
    assert [s.tensor for s in manifest.fc_slots()] == ["layer_output.1", "layer_output.2", "layer_output.4"]
    assert manifest.slots["teacher"].norm == "post" and "dump" in manifest.stages
    with pytest.raises(PipelineError) as e:
        run.stage("standardize", **{"slots.layers": [0, 2, 3]})
    assert "slot fc.0 holds layer output 1, you asked for 0" in str(e.value)
    assert re.search(r'make dump .*ARGS="slots\.layers=\[0,2,3\]"', str(e.value))
    run.stage("standardize")


def _damage(path, how):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as f:
        metadata = f.metadata()
    tensors = dict(load_file(path))
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
        return
    if how == "missing":
        path.unlink()
        return
    if how == "ids":
        tensors["input_ids"][3] += 1
    if how == "nan":
        tensors["final_hidden"][6] = float("nan")
    if how == "width":
        tensors["layer_output.2"] = tensors["layer_output.2"][:, :-1].contiguous()
    if how == "samples":
        metadata["sample_ids"] = metadata["sample_ids"].replace('"s0"', '"x0"')
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("how, message", [
    ("truncated", "truncated or altered"), ("missing", "is missing"), ("ids", "altered"), ("nan", "altered")])
def test_a_damaged_shard_is_refused_before_it_is_read(tmp_path, how, message):
    run = tiny_run(tmp_path, samples=8)
    _damage(run.folder / "dump" / "shard-00000.safetensors", how)
    with pytest.raises(PipelineError, match=message) as e:
        run.stage("standardize")
    assert "shard-00000.safetensors" in str(e.value) and "make dump" in str(e.value)


@pytest.mark.parametrize("how, message", [
    ("ids", "'s0' has other token ids"), ("nan", "NaN or infinity"), ("width", "layer_output.2 \\(slot fc.1\\)"),
    ("samples", "are neither in a shard nor in the quarantine, e.g. 's0'")])
def test_a_wrong_shard_that_the_manifest_vouches_for_is_refused_too(tmp_path, how, message):
    """The same damage, made before the manifest was written: the content itself is looked at."""
    from pipeline.manifest import FileRecord, save_manifest

    run = tiny_run(tmp_path, samples=8)
    path = run.folder / "dump" / "shard-00000.safetensors"
    _damage(path, how)
    manifest = run.manifest
    manifest.stages["dump"].outputs = [FileRecord.of(run.folder, path)]
    save_manifest(run.folder, manifest)
    with pytest.raises(PipelineError, match=message) as e:
        run.stage("standardize")
    assert "make dump" in str(e.value)
    assert not (run.folder / "standardize" / "vocab.safetensors").exists()


def test_quarantined_samples_are_left_out_and_counted(tmp_path):
    from pipeline.manifest import FileRecord, save_manifest
    from pipeline.samples import write_samples

    run = tiny_run(tmp_path, samples=8)
    path = run.folder / "prompts" / "samples.parquet"
    samples = list(read_samples(path))
    extra = samples[0].__class__(**{**samples[0].__dict__, "id": "bad"})
    write_samples(path, [*samples, extra])
    manifest = run.manifest
    manifest.stages["prompts"].outputs = [FileRecord.of(run.folder, path)]
    manifest.stages["dump"].inputs["prompts"] = manifest.stages["prompts"].digest()
    save_manifest(run.folder, manifest)
    (run.folder / "dump" / "quarantine.jsonl").write_text('{"id": "bad", "reason": "NaN in layer output 2"}\n')
    counts = run.stage("standardize").stages["standardize"].counts
    assert counts["quarantined"] == 1 and counts["samples"] == 8


def test_no_held_out_sample(tmp_path):
    run = tiny_run(tmp_path, samples=3)  # only every fourth is held out
    with pytest.raises(PipelineError, match="no sample is left for heldout") as e:
        run.stage("standardize")
    assert "prompts.heldout_fraction" in str(e.value)


def test_twice_is_the_same_and_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    import pipeline.standardize as module

    run = tiny_run(tmp_path, shard_tokens=150)
    first = {f.path: f.sha256 for f in run.stage("standardize").stages["standardize"].outputs}
    monkeypatch.setattr(module, "full_vocabulary_argmax", lambda *_: pytest.fail("finished shards are not done again"))
    manifest = run.manifest
    del manifest.stages["standardize"]  # as after a kill just before the manifest was written
    from pipeline.manifest import save_manifest

    save_manifest(run.folder, manifest)
    assert {f.path: f.sha256 for f in run.stage("standardize").stages["standardize"].outputs} == first


@pytest.mark.parametrize("damage", ["argmax", "mask", "truncated"])
def test_an_altered_file_of_an_interrupted_run_is_not_gone_on_from(tmp_path, damage):
    from safetensors import safe_open

    from pipeline.manifest import save_manifest

    run = tiny_run(tmp_path)
    first = {f.path: f.sha256 for f in run.stage("standardize").stages["standardize"].outputs}
    path = run.folder / "standardize" / "shard-00000.safetensors"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata()
        tensors = load_file(path)
        changed = tensors[{"argmax": "teacher_argmax", "mask": "loss_mask"}[damage]]
        changed[-2] = 1 - changed[-2]
        save_file(tensors, path, metadata=metadata)
    manifest = run.manifest
    del manifest.stages["standardize"]
    save_manifest(run.folder, manifest)
    assert {f.path: f.sha256 for f in run.stage("standardize").stages["standardize"].outputs} == first


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_head_and_states_are_on_the_stage_s_device_throughout(run, monkeypatch, norm):
    """On PyTorch's device without data, where mixing devices is an error as it is on a GPU."""
    import pipeline.standardize as module

    target, _ = run.config()
    seen = []

    def argmax(states, head):
        seen.append({states.device.type, head.weight.device.type, head.norm_weight.device.type})
        return torch.zeros(len(states), dtype=torch.int32)

    monkeypatch.setattr(module, "_device", lambda _config: torch.device("meta"))
    monkeypatch.setattr(module, "full_vocabulary_argmax", argmax)
    bound = module.bound_slots

    def with_norm(*args):
        slots = bound(*args)
        return slots | {"teacher": slots["teacher"].model_copy(update={"norm": norm})}

    monkeypatch.setattr(module, "bound_slots", with_norm)
    config, manifest = run.config()[1], run.manifest
    folder = run.root / f"standardize-{norm}"
    folder.mkdir()
    module.standardize(config, target, manifest, run.folder, folder)
    assert seen and all(devices == {"meta"} for devices in seen)


def test_a_full_disk_is_one_clear_error_and_the_same_command_goes_on(tmp_path):
    with tiny_disk(tmp_path / "disk"):
        run = tiny_run(tmp_path / "disk")
        fill(tmp_path / "disk")
        with pytest.raises(PipelineError, match="disk is full"):
            run.stage("standardize")
        (tmp_path / "disk" / "filler").unlink()
        assert "standardize" not in run.manifest.stages
        run.stage("standardize")
        assert "standardize" in run.manifest.stages
