"""vLLM's serve check: how it is asked and read, and, where `make install-vllm` was run, the real vLLM."""

import shutil
import sys
from pathlib import Path

import pytest

from pipeline.engines import vllm_env
from pipeline.errors import PipelineError
from pipeline.export.export import export
from pipeline.files import read_json, write_json
from pipeline.samples import read_samples
from pipeline.verify.checks import Subject
from pipeline.verify.served import Served, _per_position
from pipeline.verify.vllm_check import question, serve_vllm_check, served, why_not
from tests.conftest import LEARNED_SETTINGS
from tests.tiny_run import TinyRun, tiny_run

HEAD_DIM = {"drafter.head_dim": 32}  # vLLM's attention on a CPU takes multiples of 32
STEPS, TOKENS = 3, 8


# ---------------------------------------------------------------- without vLLM


def test_counters_of_a_request_by_hand():
    """Five verifications: two accepted nothing, one 1 draft, two 3. So 3 drafts at position 0, 2 at positions 1 and 2."""
    answer = {"outputs": [[4, 5]], "plain": [[4, 6]], "beyond": [[7]], "histograms": [[2, 1, 0, 2]]}
    [request] = served([[1, 2, 3]], answer)
    assert request == Served(
        prompt=[1, 2, 3], output=[4, 5], plain=[4, 6], beyond=[7], verifications=5, correct=7, histogram=[2, 1, 0, 2]
    )
    assert _per_position([request.histogram], 3) == [3, 2, 2]


def test_a_request_that_ended_before_its_first_verification():
    answer = {"outputs": [[4]], "plain": [[4]], "beyond": [[7]], "histograms": [[]]}
    [request] = served([[1]], answer)
    assert (request.verifications, request.correct) == (0, 0)


@pytest.fixture
def subject(tmp_path) -> Subject:
    """A run of which only the folders of its exports exist."""
    from pipeline.target import open_target
    from tests.tiny_models import tiny_llama
    from tests.tiny_run import tiny_config

    target, config = open_target(tiny_config(tiny_llama(tmp_path / "target"), tmp_path, **{"verify.draft_steps": 5}))
    for engine in ("sglang", "vllm"):
        (tmp_path / "export" / engine).mkdir(parents=True)
    return Subject(config, target, None, tmp_path, tmp_path, draft=tmp_path / "export" / "sglang")


def test_what_vllm_is_asked(subject):
    asked = question(subject, [[1, 2]], device="cpu", dtype="float32")
    assert asked == {
        "engine": {
            "model": str(subject.target.path),
            "dtype": "float32",
            "tensor_parallel_size": 1,
            "trust_remote_code": False,
            "seed": subject.config.seed,
        },
        "draft": str(subject.run_dir / "export" / "vllm"),
        "draft_steps": 5,
        "prompts": [[1, 2]],
        "max_tokens": subject.config.verify.serve_tokens,
        "stop": [2],
    }


def test_without_vllm_the_check_says_how_to_install_it(subject, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_env, "VLLM_PYTHON", tmp_path / "nothing")
    assert "not installed" in why_not(subject)
    with pytest.raises(PipelineError, match="make install-vllm"):
        serve_vllm_check(subject)


def test_without_an_export_for_vllm_the_check_says_how_to_make_it(subject, monkeypatch):
    monkeypatch.setattr(vllm_env, "VLLM_PYTHON", Path(sys.executable))
    assert why_not(subject) is None
    shutil.rmtree(subject.run_dir / "export" / "vllm")
    with pytest.raises(PipelineError, match=r"no vLLM export.*\n.*\n.*export.engines=\[sglang,vllm\]"):
        serve_vllm_check(subject)


SCRIPT = """
import json, os, sys
question = json.load(sys.stdin)
print("a line of the engine", file=sys.stderr)
if "fail" in question:
    sys.exit("no room")
try:
    import pipeline
    found = True
except ImportError:
    found = False
print(json.dumps({"question": question, "package": found, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}))
"""


def test_a_question_in_another_interpreter(monkeypatch, tmp_path):
    """SGLang's stand-ins and this package are not importable there, and the CPU sees no GPU."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "shim" / "pipeline").mkdir(parents=True)
    (tmp_path / "shim" / "pipeline" / "__init__.py").touch()
    monkeypatch.setattr(vllm_env, "VLLM_PYTHON", Path(sys.executable))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shim"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    asked = {"prompts": [[1, 2]], "name": "ä"}
    answer = vllm_env.ask(script, asked, device="cpu")
    assert answer["question"] == asked and answer["gpus"] == ""
    assert vllm_env.ask(script, asked, device="cuda")["gpus"] == "3"
    with pytest.raises(PipelineError, match=r"exit code 1(.|\n)*a line of the engine\n.*no room"):
        vllm_env.ask(script, {"fail": True})


# ---------------------------------------------------------------- the real vLLM


needs_vllm = pytest.mark.skipif(not vllm_env.installed(), reason="vLLM is not installed here: make install-vllm")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TinyRun:
    """A run with exports for both engines, whose target ends its turn in the middle of some answers."""
    run = tiny_run(tmp_path_factory.mktemp("vllm"), vocab=512, dumped=(0, 2, 4), copies=True, std=0.2, head_dim=32)
    settings = LEARNED_SETTINGS | HEAD_DIM
    for stage in ("standardize", "train"):
        run.stage(stage, **settings)
    target, config = run.config(**settings, **{"export.engines": ["sglang", "vllm"], "export.draft_steps": STEPS})
    export(config, target, run.manifest, run.folder, run.folder / "export")
    generation = read_json(run.target_dir / "generation_config.json", fix="")
    generation["eos_token_id"] = [generation["eos_token_id"], token_that_comes_late(run)]
    write_json(run.target_dir / "generation_config.json", generation)
    return run


def token_that_comes_late(run: TinyRun) -> int:
    """A token that the target says in its answer to a held-out prompt, but not at once."""
    for sample in read_samples(run.folder / "prompts" / "samples.parquet"):
        answer = sample.input_ids[sample.loss_mask.index(1) :]
        late = [token for i, token in enumerate(answer) if i >= 4 and token not in answer[:i]]
        if sample.split == "heldout" and late:
            return late[0]
    raise AssertionError("every answer repeats its first four tokens")


def check(run: TinyRun, folder: Path, draft: Path | None = None):
    target, config = run.config(
        **LEARNED_SETTINGS,
        **HEAD_DIM,
        **{"verify.serve_tokens": TOKENS, "verify.draft_steps": STEPS, "verify.serve_prompts": 6},
    )
    draft = draft or run.folder / "export" / "sglang"
    return serve_vllm_check(Subject(config, target, run.manifest, run.folder, folder, draft))


@needs_vllm
@pytest.mark.slow
def test_vllm_accepts_what_the_replay_accepts(run, tmp_path):
    result = check(run, tmp_path)
    measured = result.measured
    assert result.problems == [] and result.notes == [], result
    assert measured["text_identical"] and measured["counters_identical"]
    assert measured["tau_engine"] == measured["tau_replayed"] > measured[f"tau_walk@{STEPS}"] > 1.2  # it counts past the end
    # The totals that a server publishes say the same.
    assert measured["vllm_metrics"] == {
        "num_drafts": measured["cycles_replayed"],
        "num_draft_tokens": STEPS * measured["cycles_replayed"],
        "num_accepted_tokens": measured["accepted_replayed"],
        "num_accepted_tokens_per_pos": measured["accepted_per_position_replayed"],
    }
    assert measured["vllm_version"] in vllm_env.TESTED_VLLM


@needs_vllm
@pytest.mark.slow
def test_ids_of_another_convention_do_not_pass(run, tmp_path):
    """SGLang's numbers in vLLM's config: every slot one layer too low. The text stays right, the counters do not."""
    copy = shutil.copytree(run.folder / "export", tmp_path / "export")
    config = read_json(copy / "vllm" / "config.json", fix="")
    config["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]]
    write_json(copy / "vllm" / "config.json", config)
    result = check(run, tmp_path, copy / "sglang")
    assert result.measured["text_identical"] and not result.measured["counters_identical"]
    assert any("does not give the drafter what it was trained on" in problem for problem in result.problems)
