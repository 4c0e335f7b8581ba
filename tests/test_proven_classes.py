"""What SGLang's classes deliver at their capture points: tiny random models, the real engine, held against transformers.

The list of `pipeline.layers.proven_classes` cannot lie: each of its entries is measured here, in fp32, over every layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from dump_cases import make_config, make_run, random_samples
from forked_engine import EngineHost
from safetensors.torch import load_file
from tiny_models import tiny_model

from pipeline.dump.dump_checks import relative_error
from pipeline.dump.reference import Reference
from pipeline.dump.target_states import state_source
from pipeline.errors import PipelineError
from pipeline.export.export import export
from pipeline.layers.proven_classes import NOT_WITHOUT_A_GPU, PROVEN_CLASSES
from pipeline.manifest import load_manifest
from pipeline.samples import read_samples, write_samples
from pipeline.stage import run_stage
from pipeline.standardize import standardize
from pipeline.store import FINAL_HIDDEN, layer_output
from pipeline.target import open_target
from pipeline.train.train import train
from pipeline.verify.checks import Subject
from pipeline.verify.serve_check import serve_check

BOUND = 1e-5  # rounding: the largest error measured is 2e-6
LAYERS, POINTS = [1, 2, 4], [2, 3, 5]
N = 6

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


def dump(host: EngineHost, architecture: str, root: Path, *overrides: str) -> tuple[int, str]:
    """Dump a tiny model with its slots and three samples, one of them longer than the prefill chunk."""
    target_dir = tiny_model(root / "target", architecture)
    make_run(target_dir, root, random_samples([40, 70, 120]))
    return host.dump(target_dir, root, f"slots.layers={LAYERS}".replace(" ", ""), "dump.chunked_prefill_size=64",
                     *overrides)


def states(root: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Of the probe: what the engine delivered and what transformers computes, by tensor name."""
    [probe] = load_manifest(root / "test").dump.probe_ids
    found = {name.removeprefix(f"{probe}/"): t for name, t in load_file(root / "test/dump/probes.safetensors").items()}
    expected = Reference(root / "target", dtype=torch.float32).states(found["input_ids"].tolist(), range(N))
    return found, expected


@pytest.mark.parametrize("architecture", PROVEN_CLASSES)
def test_what_arrives_is_what_the_list_says(architecture, host, tmp_path):
    code, output = dump(host, architecture, tmp_path)
    assert code == 0, output
    proof, manifest = PROVEN_CLASSES[architecture], load_manifest(tmp_path / "test")
    assert (manifest.dump.model_class, manifest.dump.capture_points) == (architecture, POINTS)  # of the live model

    found, expected = states(tmp_path)
    error = {name: relative_error(found[name], state) for name, state in expected.items()}
    captured = [error[layer_output(layer)] for layer in range(N - 1)]
    assert error[layer_output(N - 1)] <= BOUND and error[FINAL_HIDDEN] <= BOUND, error  # from the final norm
    if proof.deviation is None:
        assert max(captured) <= BOUND, error
        for a, b in pairwise(range(N)):  # a neighbour would have been noticed
            assert relative_error(expected[layer_output(a)], expected[layer_output(b)]) > 0.05
    else:
        assert min(captured) > 0.1, error
    equal = {name: slot.equals_transformers for name, slot in manifest.slots.items()}
    assert equal == {f"fc.{i}": proof.deviation is None for i in range(3)} | {"teacher": True}
    for slot in manifest.slots.values():  # below the bound both are rounding, which depends on the number of threads
        assert slot.relative_error == pytest.approx(error[slot.tensor], rel=0.01, abs=BOUND)

    last = json.loads((tmp_path / "last_point.json").read_text())
    assert proof.last_reached == (last["reached"] and last["error"] <= BOUND), last


@pytest.mark.parametrize("architecture", NOT_WITHOUT_A_GPU)
def test_what_cannot_be_run_here_says_why(architecture, host, tmp_path):
    """These are asked on a stub only. When one of them runs some day, it belongs into the list."""
    code, output = dump(host, architecture, tmp_path)
    assert code == 1 and NOT_WITHOUT_A_GPU[architecture] in output, output


def test_a_deviation_is_known_where_nothing_was_compared(host, tmp_path):
    code, output = dump(host, "Gemma3ForCausalLM", tmp_path, "dump.probe_samples=0")
    assert code == 0, output
    slots = load_manifest(tmp_path / "test").slots
    assert {name: slot.equals_transformers for name, slot in slots.items()} == {
        "fc.0": False, "fc.1": False, "fc.2": False, "teacher": None}


def opened(root: Path, *overrides: str):
    """Target and configuration of a drafter that trains within a second."""
    return open_target(make_config(root / "target", root, "drafter.draft_vocab_size=64", "train.batch_tokens=64",
                                   "train.epochs=1", "train.precision=fp32", "tracking.mode=none", *overrides))


def test_a_drafter_for_what_only_sglang_captures(host, tmp_path):
    """Gemma 3, the whole way: SGLang's export works, vLLM's is refused with slot, error and what mends it, and a drafter
    that was trained on the residual stream is refused for SGLang."""
    code, output = dump(host, "Gemma3ForCausalLM", tmp_path)
    assert code == 0, output
    assert "slot fc.1: the engine's layer_output.2 differs from that of transformers" in output
    run_dir, (target, config) = tmp_path / "test", opened(tmp_path)
    for name, work in (("standardize", standardize), ("train", train)):
        run_stage(name, run_dir, target=target.record, seed=0, config={},
                  work=lambda manifest, folder, work=work: work(config, target, manifest, run_dir, folder))
    manifest = load_manifest(run_dir)
    result = export(config, target, manifest, run_dir, tmp_path / "export")

    ids = json.loads((tmp_path / "export/sglang/config.json").read_text())["eagle_config"]
    assert ids["eagle_aux_hidden_state_layer_ids"] == LAYERS
    assert set(result.export.engines) == {"sglang"} and not result.export.engines["sglang"].proven
    refused = result.metrics["vllm_refused"]
    assert f"slot fc.0 holds what SGLang captures for {layer_output(1)}" in refused
    assert f"(relative error {manifest.slots['fc.0'].relative_error:.1e})" in refused
    assert 'make dump RUN=test ARGS="dump.engine=transformers"' in refused
    assert refused in (tmp_path / "export/serving.yaml").read_text() and not (tmp_path / "export/vllm").exists()

    # Served, it accepts what a replay over the engine's states does; transformers' states are not what it was trained on.
    assert state_source(manifest, exact=True) == {"engine": "sglang", "dtype": "fp32"}
    asked = [replace(s, loss_mask=[0] * 8 + s.loss_mask[8:]) for s in read_samples(run_dir / "prompts/samples.parquet")]
    write_samples(tmp_path / "served/prompts/samples.parquet", asked)
    served = serve_check(Subject(config, target, manifest, tmp_path / "served", tmp_path / "verify",
                                 tmp_path / "export/sglang"))
    assert served.problems == [] and served.measured["counters_identical"]

    # States from transformers are no way out for SGLang: it would be fed something else than it was trained on.
    manifest.dump.engine = "transformers"
    for slot in manifest.slots.values():
        slot.equals_transformers = slot.relative_error = None
    target, config = opened(tmp_path, "export.engines=[sglang]")
    with pytest.raises(PipelineError, match="no engine serves this drafter: sglang: the slots hold the residual") as e:
        export(config, target, manifest, run_dir, tmp_path / "export")
    assert "SGLang's Gemma3ForCausalLM captures the hidden state without the pending residual" in e.value.what
    assert 'make dump RUN=test ARGS="dump.engine=sglang"' in e.value.what and not (tmp_path / "export/sglang").exists()
