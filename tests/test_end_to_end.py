"""The real thing, small: SmolLM2, SGLang on this machine, every stage as a user types it, and what users do wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.manifest import load_manifest
from tests.tiny_models import tiny_llama

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {p.stem.split("_", 1)[1].split("_")[0]: p for p in sorted((ROOT / "stages").glob("0*.py"))}
SCRIPTS = {"prompts": SCRIPTS.pop("generate"), **SCRIPTS}
ORDER = ("prompts", "dump", "standardize", "train", "export", "verify")
SMALL = ("prompts=small", "train=small", "verify.serve_prompts=6", "verify.serve_tokens=32")

pytestmark = pytest.mark.slow


def stage(name: str, root: Path, *overrides: str) -> subprocess.CompletedProcess:
    """Run a stage script as `make` does."""
    command = [sys.executable, str(SCRIPTS[name]), f"run.root={root}", "run.name=e2e", *SMALL, *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)


def refused(name: str, root: Path, *overrides: str) -> str:
    """Run a stage that must fail: exit code 1, one message, no traceback. Returns the message."""
    done = stage(name, root, *overrides)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("error:") == 1 and "mend:" in done.stderr, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with the finished run e2e."""
    root = tmp_path_factory.mktemp("runs")
    for name in ORDER:
        done = stage(name, root)
        assert done.returncode == 0, f"{name}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return root


@pytest.fixture
def copy(root, tmp_path) -> Path:
    """A copy of the run to damage. copytree keeps mtimes."""
    shutil.copytree(root / "e2e", tmp_path / "e2e")
    return tmp_path


def test_every_stage_is_recorded_and_the_numbers_add_up(root):
    manifest = load_manifest(root / "e2e")
    assert tuple(manifest.stages) == ORDER
    prompts, dump = manifest.stages["prompts"].counts, manifest.stages["dump"].counts
    assert prompts["kept"] == 60
    assert dump["samples"] == 60 and dump["tokens"] == prompts["tokens"]
    assert manifest.fc_layers() == [1, 14, 26]
    assert manifest.dump.capture_points == [2, 15, 27] and manifest.dump.requested_ids == [1, 14, 26]
    assert manifest.dump.engine == "sglang" and manifest.dump.model_class == "LlamaForCausalLM"
    assert manifest.slots["fc.2"].columns == (1152, 1728)


def test_serving_configs_carry_each_engines_own_ids(root):
    import yaml

    run = root / "e2e"
    sglang = json.loads((run / "export/sglang/config.json").read_text())
    vllm = json.loads((run / "export/vllm/config.json").read_text())
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    assert "eagle_aux_hidden_state_layer_ids" not in sglang
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    serving = yaml.safe_load((run / "export/serving.yaml").read_text())
    assert serving["engines"]["sglang"]["ids"] == [1, 14, 26] and serving["engines"]["vllm"]["ids"] == [2, 15, 27]
    assert os.access(run / "export/launch_sglang.sh", os.X_OK)


def test_served_once_greedy_text_unchanged_and_accept_length_as_replayed(root):
    metrics = load_manifest(root / "e2e").stages["verify"].metrics
    assert metrics["serve.text_identical"] is True
    assert metrics["serve.tau_engine"] == metrics["serve.tau_replayed"]
    trained = load_manifest(root / "e2e").stages["train"].metrics
    assert metrics["replay.replayed_accuracy"] == pytest.approx(trained["heldout_accuracy"], abs=0.01)
    assert trained["heldout_tau_row@3"] > 1.05  # two epochs on 54 short answers: more than nothing


def test_finished_stages_say_so_and_do_nothing(root):
    before = (root / "e2e" / "manifest.json").read_bytes()
    for name in ORDER:
        done = stage(name, root)
        assert done.returncode == 0 and "up to date" in done.stdout, done.stdout + done.stderr
    assert (root / "e2e" / "manifest.json").read_bytes() == before


def test_the_summary_is_one_page_with_the_wiring_and_what_to_type_next(root):
    page = subprocess.run([sys.executable, "-m", "pipeline.summary", str(root / "e2e")], cwd=ROOT, capture_output=True,
                          text=True, check=True).stdout
    for words in ("fc.0", "hidden_states[2]", "hidden_states[27]", "τ_row@3", "τ_walk@3", "serving.yaml", "launch_sglang.sh"):
        assert words in page
    assert len(page.splitlines()) < 50


def test_two_runs_of_stages_3_to_5_give_byte_identical_exports(root, tmp_path):
    for folder in ("prompts", "dump"):
        shutil.copytree(root / "e2e" / folder, tmp_path / "e2e" / folder)
    manifest = load_manifest(root / "e2e")
    for name in ORDER[2:]:
        del manifest.stages[name]
    (tmp_path / "e2e/manifest.json").write_text(manifest.model_dump_json())
    for name in ("standardize", "train", "export"):
        done = stage(name, tmp_path)
        assert done.returncode == 0, done.stderr
    for file in ("export/sglang/model.safetensors", "export/sglang/config.json", "export/vllm/model.safetensors",
                 "train/drafter.safetensors", "standardize/vocab.safetensors"):
        assert (root / "e2e" / file).read_bytes() == (tmp_path / "e2e" / file).read_bytes(), file


def test_layers_that_were_not_dumped(copy):
    message = refused("standardize", copy, "slots.layers=[3,14,26]")
    assert "slot fc.0 holds layer output 1, you asked for 3" in message
    assert f'make dump RUN=e2e ROOT={copy} ARGS="slots.layers=[3,14,26] ' in message  # and the rest of what was typed
    assert "slot fc.0 holds layer output 1, you asked for 3" in refused("train", copy, "slots.layers=[3,14,26]")


def test_a_manifest_of_another_target(copy, tmp_path_factory):
    other = tiny_llama(tmp_path_factory.mktemp("other") / "llama", layers=8)
    message = refused("train", copy, "target=local", f"target.path={other}")
    assert "another target" in message and "num_layers" in message


@pytest.mark.parametrize("damage, words", [
    (lambda p: p.unlink(), "is missing"),
    (lambda p: p.write_bytes(p.read_bytes()[:-100]), "truncated"),
    (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\x7f"), "altered"),
], ids=["missing", "truncated", "altered"])
def test_a_damaged_shard(copy, damage, words):
    shard = min((copy / "e2e/dump").glob("shard-*.safetensors"))
    damage(shard)
    for name in ("standardize", "train"):
        message = refused(name, copy, "force=true")
        assert words in message and shard.name in message and "make dump" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(copy):
    assert "no CUDA device" in refused("train", copy, "device=cuda", "force=true")


def test_a_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "runs").write_text("a file in the way")
    assert "cannot write" in refused("prompts", tmp_path / "runs")


def test_a_disk_without_room(root, tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        shutil.copytree(root / "e2e/prompts", tmp_path / "e2e/prompts")
        manifest = load_manifest(root / "e2e")
        for name in ORDER[1:]:
            del manifest.stages[name]
        (tmp_path / "e2e/manifest.json").write_text(manifest.model_dump_json())
        refusal = refused("dump", tmp_path)  # the estimate says so before the engine starts
        assert "would fit" in refusal or "room" in refusal
        assert not list((tmp_path / "e2e").rglob("shard-*"))
        assert "dump" not in load_manifest(tmp_path / "e2e").stages
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
