"""Stage 2 end to end on tiny random models: transformers in-process, SGLang through the stage's command line."""

import asyncio
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from dump_cases import damage_embedding, make_config, make_run, random_samples, run_stage_02, start_stage
from safetensors.torch import load_file
from test_capture import make_plan, small_disk
from tiny_models import tiny_deepseek_v3, tiny_llama

from pipeline.dump.capture_plan import CHECK, SAMPLE
from pipeline.dump.dump import dump
from pipeline.dump.dump_sglang import _Client
from pipeline.dump.reference import Reference
from pipeline.errors import PipelineError
from pipeline.files import make_dir
from pipeline.manifest import load_manifest
from pipeline.store import HiddenStore, sample_ids, shard_paths
from pipeline.target import open_target

NAN_TOKEN = 3
LENGTHS = [5, 17, 300, 40, 128, 129, 60, 33, 21, 9, 600, 77, 512]  # the context is 512


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    folder = tiny_llama(tmp_path_factory.mktemp("llama") / "target")
    damage_embedding(folder, NAN_TOKEN)
    return folder


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory) -> Path:
    return tiny_deepseek_v3(tmp_path_factory.mktemp("deepseek") / "target")


def samples_with_nan():
    samples = random_samples(LENGTHS)
    samples[7].input_ids[11] = NAN_TOKEN
    return samples


def dump_with_transformers(target_dir: Path, root: Path, *more: str, layers=(1, 2, 4)):
    target, config = open_target(make_config(target_dir, root, "dump.engine=transformers", *more))
    folder = make_dir(root / "test" / "dump")
    return dump(config, target, None, root / "test", folder, slot_layers=list(layers[:3]), layers=list(layers))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def quarantine_of(run_dir: Path) -> dict[str, str]:
    lines = (run_dir / "dump" / "quarantine.jsonl").read_text().splitlines()
    return {q["id"]: q["reason"] for q in map(json.loads, lines)}


def assert_equals_reference(run_dir: Path, target_dir: Path, samples, tolerance: float) -> None:
    """Every row of every state in shards and probes against transformers, computed here on the same tokens."""
    reference = Reference(target_dir, dtype=torch.float32)
    by_id = {s.id: s for s in samples}
    store = HiddenStore(shard_paths(run_dir / "dump"))
    every = range(len(reference.layers))
    for ref in store.samples:
        expected = reference.states(by_id[ref.id].input_ids, every)
        assert store.input_ids(ref).tolist() == by_id[ref.id].input_ids
        for name in store.state_names:
            assert relative_error(store.rows(ref, name), expected[name]) <= tolerance, (ref.id, name)
    probes = load_file(run_dir / "dump" / "probes.safetensors")
    for probe in load_manifest(run_dir).dump.probe_ids if load_manifest(run_dir).dump else []:
        expected = reference.states(by_id[probe].input_ids, every)
        assert probes[f"{probe}/input_ids"].tolist() == by_id[probe].input_ids
        assert {k for k in probes if k.startswith(f"{probe}/")} == {f"{probe}/{n}" for n in ("input_ids", *expected)}
        for name, state in expected.items():
            assert relative_error(probes[f"{probe}/{name}"], state) <= tolerance, (probe, name)


# ---------------------------------------------------------------- reference


def test_reference_hooks_agree_with_transformers_own_hidden_states(llama):
    """Where both exist: hidden_states[l + 1] is layer output l, except for the last, which is after the norm."""
    from transformers import AutoModelForCausalLM

    ids = random_samples([30])[0].input_ids
    states = Reference(llama, dtype=torch.float32).states(ids, range(6))
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with torch.inference_mode():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer in range(5):
        assert torch.equal(states[f"layer_output.{layer}"], hidden[layer + 1][0])
    assert torch.equal(states["final_hidden"], hidden[6][0])
    assert not torch.allclose(states["layer_output.5"], hidden[6][0])
    assert torch.allclose(model.model.norm(states["layer_output.5"]), hidden[6][0])


# ---------------------------------------------------------------- the stage, with transformers


def test_every_sample_is_in_a_shard_or_in_quarantine_with_its_reason(llama, tmp_path):
    samples = samples_with_nan()
    run_dir = make_run(llama, tmp_path, samples)
    result = dump_with_transformers(llama, tmp_path)
    store = HiddenStore(shard_paths(run_dir / "dump"))
    refused = quarantine_of(run_dir)
    assert set(refused) == {"sample/7", "sample/10"}
    assert refused["sample/7"].startswith("not finite") and "600 tokens" in refused["sample/10"]
    assert {r.id for r in store.samples} == {s.id for s in samples} - set(refused)
    assert result.counts | {"bytes": 0} == {"samples": 11, "tokens": 1298, "quarantined": 2, "shards": 4, "bytes": 0}
    assert result.dump.layers == [1, 2, 4] and result.dump.capture_points == [2, 3, 5]
    assert result.dump.probe_ids == ["sample/1", "sample/5", "sample/9"]
    assert_equals_reference(run_dir, llama, samples, 0.0)


def test_fingerprints_are_those_of_the_rows(llama, tmp_path):
    samples = random_samples([10, 11, 12])
    make_run(llama, tmp_path, samples)
    record = dump_with_transformers(llama, tmp_path).dump
    expected = Reference(llama, dtype=torch.float32).states(samples[1].input_ids, [2])["layer_output.2"]
    found = record.fingerprints["layer_output.2"]
    assert list(found.first_five) == ["sample/1[0]", "sample/1[5]", "sample/1[10]"]
    assert found.first_five["sample/1[5]"] == expected[5, :5].tolist()
    norms = expected.square().sum(-1).sqrt()
    assert found.row_norm_mean == pytest.approx(norms.mean().item(), rel=1e-6)
    assert found.row_norm_std == pytest.approx(norms.var(correction=0).sqrt().item(), rel=1e-4)


def test_dtype_is_the_stored_one_and_probes_can_be_left_out(llama, tmp_path):
    make_run(llama, tmp_path, random_samples([10, 11]))
    record = dump_with_transformers(llama, tmp_path, "dump.dtype=bf16", "dump.probe_samples=0").dump
    assert load_file(tmp_path / "test" / "dump" / "probes.safetensors") == {} and record.fingerprints == {}
    store = HiddenStore(shard_paths(tmp_path / "test" / "dump"))
    assert record.dtype == "bfloat16" and store.rows(store.samples[0], "final_hidden").dtype == torch.bfloat16


def test_a_dump_goes_on_with_what_is_missing(llama, tmp_path):
    samples = random_samples([50] * 20)
    run_dir = make_run(llama, tmp_path, samples)
    dump_with_transformers(llama, tmp_path, "dump.shard_tokens=100")
    first, *_, last = shard_paths(run_dir / "dump")
    kept = {p: p.read_bytes() for p in shard_paths(run_dir / "dump")[1:-1]}
    first.unlink(), last.unlink()
    dump_with_transformers(llama, tmp_path, "dump.shard_tokens=100")
    assert all(p.read_bytes() == content for p, content in kept.items())
    assert sorted(r.id for r in HiddenStore(shard_paths(run_dir / "dump")).samples) == sorted(s.id for s in samples)


def test_no_room_is_refused_before_any_work_with_the_number_of_samples_that_fit(llama, tmp_path, monkeypatch):
    make_run(llama, tmp_path, random_samples([100] * 10))
    per_token = 4 * 64 * 4 + 4  # three layers and the final hidden, H = 64, fp32; the token id
    free = 5 * 100 * per_token + 17
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10 * free, 9 * free, free))
    with pytest.raises(PipelineError) as e:
        dump_with_transformers(llama, tmp_path, "dump.probe_samples=0")
    assert "about 5 of 10 samples would fit" in str(e.value) and 'ARGS="prompts.limit=5"' in str(e.value)
    assert shard_paths(tmp_path / "test" / "dump") == []


def test_samples_that_were_too_long_are_dumped_when_the_context_is_raised(llama, tmp_path):
    samples = random_samples([50, 200, 60, 300])
    run_dir = make_run(llama, tmp_path, samples)
    dump_with_transformers(llama, tmp_path, "target.context_length=100")
    assert set(quarantine_of(run_dir)) == {"sample/1", "sample/3"}
    dump_with_transformers(llama, tmp_path, "target.context_length=250")
    assert set(quarantine_of(run_dir)) == {"sample/3"}
    assert_equals_reference(run_dir, llama, samples, 0.0)


def test_the_number_of_samples_that_fit_does_not_hang_on_their_order(llama, tmp_path, monkeypatch):
    # prompts.limit spreads over categories: it does not take the first ones, here the short ones.
    per_token = 4 * 64 * 4 + 4
    make_run(llama, tmp_path, random_samples([10] * 5 + [190] * 5))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 500 * per_token))
    with pytest.raises(PipelineError, match="about 5 of 10 samples"):
        dump_with_transformers(llama, tmp_path, "dump.probe_samples=0")


def test_more_than_half_in_quarantine_is_an_error(llama, tmp_path):
    samples = random_samples([10] * 4)
    for sample in samples[:3]:
        sample.input_ids[0] = NAN_TOKEN
    make_run(llama, tmp_path, samples)
    with pytest.raises(PipelineError, match="3 of 4 samples had to be quarantined.*not finite"):
        dump_with_transformers(llama, tmp_path, "dump.probe_samples=0")


def test_a_truncated_shard_from_an_earlier_start_is_named(llama, tmp_path):
    run_dir = make_run(llama, tmp_path, random_samples([50] * 4))
    dump_with_transformers(llama, tmp_path)
    path = shard_paths(run_dir / "dump")[0]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PipelineError, match="truncated"):
        dump_with_transformers(llama, tmp_path)


# ---------------------------------------------------------------- SGLang


@pytest.mark.parametrize("report, message", [
    (None, "plugin is not active"),
    ({"model_class": "LlamaForCausalLM", "capture_points": [1, 2, 4]}, r"is \[1, 2, 4\], \[2, 3, 5\] was derived"),
    ({"model_class": "TransformersForCausalLM", "capture_points": [2, 3, 5]}, "model_class is TransformersForCausalLM"),
    ({"model_class": "LlamaForCausalLM", "capture_points": [], "problem": "nothing was set"}, "nothing was set"),
])
def test_wiring_of_the_live_model_that_differs_from_the_derived_one_is_refused(tmp_path, report, message):
    checking = client(tmp_path, answer=None)
    if report:
        (checking.plan.control / "wiring-1.json").write_text(json.dumps(report))
    with pytest.raises(PipelineError, match=message):
        checking._check_wiring()


def test_a_stated_rule_that_the_live_model_does_not_follow_is_refused(tmp_path):
    checking = client(tmp_path, answer=None, rule="layer_output")
    (checking.plan.control / "wiring-1.json").write_text(
        json.dumps({"model_class": "LlamaForCausalLM", "capture_points": [1, 2, 4]}))
    with pytest.raises(PipelineError, match="state another target.layer_id_rule"):
        checking._check_wiring()


def client(tmp_path, answer, rule=None) -> _Client:
    """A client whose engine answers every request with what `answer()` returns or raises."""
    async def async_generate(**request):
        return answer()

    found = _Client.__new__(_Client)
    found.plan, found.check_refusal = make_plan(tmp_path), None
    found.llm = SimpleNamespace(async_generate=async_generate)
    found.job = SimpleNamespace(config=SimpleNamespace(target=SimpleNamespace(layer_id_rule=rule)))
    found.ids = SimpleNamespace(model_class="LlamaForCausalLM", ids=(1, 2, 4), capture_points=(2, 3, 5),
                                rule_source="llama.py")
    return found


def refuse():
    raise ValueError("longer than the KV cache")


@pytest.mark.parametrize("answer", [refuse, lambda: {"meta_info": {"finish_reason": {
    "type": "abort", "message": "longer than the KV cache"}}}])
def test_a_refused_first_request_is_quoted_and_not_taken_for_a_missing_plugin(tmp_path, answer):
    checking = client(tmp_path, answer)
    asyncio.run(checking._request(CHECK, random_samples([30])[0]))
    with pytest.raises(PipelineError, match=r"'sample/0' \(30 tokens\): .*longer than the KV cache"):
        checking._check_wiring()


def test_a_full_disk_under_the_stages_own_quarantine_list_is_one_clear_message(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        refused = client(disk, refuse)
        (disk / "filler").write_bytes(b"x" * (64 - 4) * 1024)  # the attempt's name takes the last page
        with pytest.raises(PipelineError, match="quarantine-stage.jsonl: the disk is full"):
            asyncio.run(refused._request(SAMPLE, random_samples([30])[0]))


@pytest.mark.slow
def test_sglang_llama_equals_transformers(llama, tmp_path):
    """Batched requests, a sample longer than the prefill chunk, a bad sample in the midst, probes of every layer."""
    samples = samples_with_nan()
    run_dir = make_run(llama, tmp_path, samples)
    code, output = run_stage_02(llama, tmp_path, "slots.layers=[1,2,4]", "dump.chunked_prefill_size=128",
                                "dump.max_running_requests=8")
    assert code == 0, output
    assert_equals_reference(run_dir, llama, samples, 1e-5)
    refused = quarantine_of(run_dir)
    assert set(refused) == {"sample/7", "sample/10"} and refused["sample/7"].startswith("not finite")
    manifest = load_manifest(run_dir)
    assert manifest.dump.engine == "sglang" and manifest.dump.model_class == "LlamaForCausalLM"
    assert manifest.dump.requested_ids == [1, 2, 4] and manifest.dump.capture_points == [2, 3, 5]
    assert manifest.dump.probe_ids == ["sample/1", "sample/5", "sample/9"]
    assert {name: slot.equals_transformers for name, slot in manifest.slots.items()} == dict.fromkeys(
        ["fc.0", "fc.1", "fc.2", "teacher"], True)
    assert not (run_dir / "dump" / ".capture").exists()


@pytest.mark.slow
def test_sglang_deepseek_v3_equals_transformers_though_its_ids_are_not_the_layers(deepseek, tmp_path):
    samples = random_samples(LENGTHS[:8])
    run_dir = make_run(deepseek, tmp_path, samples)
    code, output = run_stage_02(deepseek, tmp_path, "slots.layers=[2,3,4]", "dump.chunked_prefill_size=128")
    assert code == 0, output
    assert_equals_reference(run_dir, deepseek, samples, 1e-5)
    record = load_manifest(run_dir).dump
    assert record.layers == [2, 3, 4] and record.requested_ids == [3, 4, 5] and record.capture_points == [3, 4, 5]
    assert all(slot.equals_transformers for slot in load_manifest(run_dir).slots.values())
    assert HiddenStore(shard_paths(run_dir / "dump")).state_names == [
        "layer_output.2", "layer_output.3", "layer_output.4", "final_hidden"]


def wait_for_first_shard(run_dir: Path, process) -> None:
    while not shard_paths(run_dir / "dump"):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_at_any_moment_the_same_command_completes_exactly(llama, tmp_path):
    """First the scheduler is killed, then the whole stage, then it runs through."""
    samples = random_samples([30 + i % 50 for i in range(1500)])
    run_dir = make_run(llama, tmp_path, samples)
    options = ("slots.layers=[1,2,4]", "dump.shard_tokens=256", "dump.max_running_requests=4",
               "dump.chunked_prefill_size=128", "dump.probe_samples=1")

    process = start_stage(llama, tmp_path, *options)
    wait_for_first_shard(run_dir, process)
    [scheduler] = [p for p in psutil.Process(process.pid).children(recursive=True) if "scheduler" in p.name()]
    scheduler.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "died" in output and "Traceback" not in output, output

    before = len(shard_paths(run_dir / "dump"))
    process = start_stage(llama, tmp_path, *options)
    while len(shard_paths(run_dir / "dump")) == before:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(children, timeout=20)
    stored = {p: p.read_bytes() for p in shard_paths(run_dir / "dump")}
    assert sum(len(sample_ids(p)) for p in stored) < len(samples)

    code, output = run_stage_02(llama, tmp_path, *options)
    assert code == 0, output
    assert all(p.read_bytes() == content for p, content in stored.items())
    store = HiddenStore(shard_paths(run_dir / "dump"))  # refuses duplicates
    assert sorted(r.id for r in store.samples) == sorted(s.id for s in samples)
    assert list((run_dir / "dump").glob(".tmp-*")) == []


@pytest.mark.slow
def test_a_disk_that_fills_up_during_the_dump_ends_it_with_one_clear_message(llama, tmp_path):
    with small_disk(tmp_path / "disk", "4m") as disk:
        samples = random_samples([100] * 12)
        run_dir = make_run(llama, disk, samples)
        (run_dir / "dump").mkdir()
        # The estimate passes on an empty disk; then something else takes the space.
        process = start_stage(llama, disk, "slots.layers=[1,2,4]", "dump.shard_tokens=1200", "dump.probe_samples=0")
        while not list((run_dir / "dump").glob(".capture/*/wiring-*.json")):
            assert process.poll() is None, process.communicate()[0]
            if not (disk / "filler").exists() and list((run_dir / "dump").glob(".capture/*/plan.json")):
                (disk / "filler").write_bytes(b"x" * 3_500_000)
            time.sleep(0.02)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1 and "the disk is full" in output and "Traceback" not in output, output
        assert shard_paths(run_dir / "dump") == [] and "dump" not in load_manifest(run_dir).stages
