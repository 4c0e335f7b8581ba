"""A finished dump against its own probes and against transformers: what must not pass does not."""

import dataclasses
from pathlib import Path

import pytest
import torch
from dump_cases import make_config, make_run, random_samples
from safetensors.torch import load_file
from test_dump import dump_with_transformers
from tiny_models import tiny_llama

from pipeline.dump import dump as dump_module
from pipeline.dump import dump_checks
from pipeline.dump.dump_checks import check_probes, compare_with_transformers, relative_error
from pipeline.dump.dump_transformers import run
from pipeline.errors import PipelineError
from pipeline.export.export import why_not_vllm
from pipeline.manifest import Manifest, bind_slots
from pipeline.store import HiddenStore, shard_paths
from pipeline.target import open_target

STATES = ["layer_output.1", "layer_output.2", "layer_output.4", "final_hidden"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "target")


@pytest.fixture(scope="module")
def dumped(llama, tmp_path_factory):
    """Store and probes of a right dump."""
    root = tmp_path_factory.mktemp("run")
    make_run(llama, root, random_samples([30, 40, 50, 60, 70, 80]))
    dump_with_transformers(llama, root)
    return HiddenStore(shard_paths(root / "test" / "dump")), load_file(root / "test" / "dump" / "probes.safetensors")


@pytest.fixture
def probes(dumped):
    return {name: tensor.clone() for name, tensor in dumped[1].items()}


def compared(llama: Path, probes: dict, *, dtype=torch.float32, **changes) -> dict[str, bool | None]:
    target, _ = open_target(make_config(llama, Path("unused")))
    if changes:
        object.__setattr__(target, "record", target.record.model_copy(update=changes))
    slots = bind_slots([1, 2, 4], 64)
    compare_with_transformers(slots, target, probes, ["sample/1", "sample/5"], dtype=dtype, device="cpu")
    return {name: slot.equals_transformers for name, slot in slots.items()}


def test_error_is_a_mean_over_rows_so_that_one_huge_row_hides_nothing():
    expected = torch.ones(10, 4)
    expected[0] *= 1e4
    found = expected.clone()
    found[5:] *= -1  # wrong by 2 in half of the rows
    assert relative_error(found, expected) == pytest.approx(1.0)
    assert (found - expected).norm() / expected.norm() < 1e-3


def test_shards_that_agree_with_the_probes_pass(dumped, probes):
    check_probes(dumped[0], probes, STATES)
    check_probes(dumped[0], {}, STATES)
    probes["sample/5/final_hidden"] *= 1 + 5e-5
    check_probes(dumped[0], probes, STATES)


@pytest.mark.parametrize("damage", ["other layer", "rounded", "one chunk", "not finite"])
def test_a_probe_that_differs_from_its_rows_is_an_error(dumped, probes, damage):
    state = probes["sample/5/layer_output.2"]
    if damage == "other layer":
        state.copy_(probes["sample/5/layer_output.3"])
    elif damage == "rounded":
        state.copy_(state.bfloat16().float())
    elif damage == "one chunk":
        state[64:] = state[:16]
    else:
        state[3, 7] = float("nan")
    with pytest.raises(PipelineError, match="the probe of sample 'sample/5' differs from its rows in the shard"):
        check_probes(dumped[0], probes, STATES)


def test_the_stage_holds_its_shards_against_the_probes(llama, tmp_path, monkeypatch):
    make_run(llama, tmp_path, random_samples([30, 40]))
    collect = dump_module._collect_probes

    def swapped(plan, ids):
        found = collect(plan, ids)
        one, two = "sample/1/layer_output.1", "sample/1/layer_output.2"
        return found | {one: found[two], two: found[one]}

    monkeypatch.setattr(dump_module, "_collect_probes", swapped)
    with pytest.raises(PipelineError, match="differs from its rows"):
        dump_with_transformers(llama, tmp_path)


def test_a_right_capture_equals_transformers(llama, probes):
    assert compared(llama, probes) == dict.fromkeys(["fc.0", "fc.1", "fc.2", "teacher"], True)


def test_a_capture_in_which_two_layers_are_swapped_does_not(llama, probes, capsys):
    for sample in ("sample/1", "sample/5"):
        one, two = f"{sample}/layer_output.1", f"{sample}/layer_output.2"
        probes[one], probes[two] = probes[two], probes[one]
    assert compared(llama, probes) == {"fc.0": False, "fc.1": False, "fc.2": True, "teacher": True}
    assert "slot fc.0" in (said := capsys.readouterr().out) and "layer_output.1" in said and "fc.2" not in said


@pytest.mark.parametrize("name, wrong", [("layer_output.4", "layer_output.5"), ("layer_output.1", "layer_output.0"),
                                         ("final_hidden", "layer_output.5")])
def test_a_neighbour_of_one_sample_is_enough_in_bf16_too(llama, probes, name, wrong):
    probes = {k: v if k.endswith("input_ids") else v.bfloat16() for k, v in probes.items()}
    assert set(compared(llama, probes, dtype=torch.bfloat16).values()) == {True}
    probes[f"sample/5/{name}"] = probes[f"sample/5/{wrong}"]
    assert list(compared(llama, probes, dtype=torch.bfloat16).values()).count(False) == 1


def test_what_cannot_be_compared_is_left_open(llama, probes, monkeypatch):
    nothing = dict.fromkeys(["fc.0", "fc.1", "fc.2", "teacher"])
    assert compared(llama, probes, quantization="fp8") == nothing

    def needs_remote_code(*args, **kwargs):
        raise PipelineError("transformers cannot load the target")

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.dump.reference.Reference", needs_remote_code)
        assert compared(llama, probes) == nothing
    monkeypatch.setattr(dump_checks, "_SMALL_BYTES", 1000)
    assert compared(llama, probes) == nothing


def dumped_by_sglang(llama: Path, root: Path, monkeypatch, deviation: str | None) -> dict:
    """The slots after a dump by an SGLang class of which `deviation` is known. (What it captured is the residual stream.)"""
    make_run(llama, root, random_samples([30, 40]))
    monkeypatch.setattr("pipeline.dump.dump_transformers.run",
                        lambda job: dataclasses.replace(run(job), engine="sglang", deviation=deviation))
    return dump_with_transformers(llama, root).slots


def test_a_known_deviation_is_not_forgotten_where_nothing_can_be_compared(llama, tmp_path, monkeypatch):
    """A real Gemma 3 is too large to be computed with transformers: vLLM must be refused all the same."""
    small = dumped_by_sglang(llama, tmp_path / "small", monkeypatch, "something else")
    assert all(slot.equals_transformers for slot in small.values())  # what was measured counts
    monkeypatch.setattr(dump_checks, "is_small", lambda target: False)
    slots = dumped_by_sglang(llama, tmp_path / "large", monkeypatch, "something else")
    assert {name: slot.equals_transformers for name, slot in slots.items()} == {
        "fc.0": False, "fc.1": False, "fc.2": False, "teacher": None}
    refused = why_not_vllm(Manifest.model_construct(run="test", slots=slots), drafter=None)
    assert "slot fc.0 holds what SGLang captures for layer_output.1, which differs" in refused
    unknown = dumped_by_sglang(llama, tmp_path / "unknown", monkeypatch, None)
    assert {slot.equals_transformers for slot in unknown.values()} == {None}
