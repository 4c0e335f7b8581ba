"""vLLM's ids: asked where vLLM is installed, else the documented rule."""

from __future__ import annotations

import pytest

from pipeline.engines import vllm_env
from pipeline.errors import PipelineError
from pipeline.layers import vllm_ids
from pipeline.layers.vllm_ids import ask_vllm, derive_vllm_ids

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 61}


@pytest.fixture(autouse=True)
def _asked_anew():
    """No answer of one test, given by an interpreter that is none, is another test's."""
    ask_vllm.cache_clear()
    yield
    ask_vllm.cache_clear()


def test_the_documented_rule_is_marked_as_not_asked(monkeypatch):
    answer = derive_vllm_ids([2, 30, 58], 61)
    assert answer.ids == answer.capture_points == (3, 31, 59)
    assert "not asked: the target is not known" in answer.note and answer.version is None and not answer.proven
    assert derive_vllm_ids([0, 60], 61).ids == (1, 61)  # id N is the last layer before the norm
    monkeypatch.setattr(vllm_env, "installed", lambda: False)
    assert "not asked: vLLM is not installed here" in derive_vllm_ids([2, 30, 58], 61, LLAMA).note


@pytest.mark.parametrize(("script", "why"), [
    ("echo broken environment >&2; exit 1", "it could not be asked: broken environment"),
    ("exec sleep 60", "it could not be asked: vLLM gave no answer within 0.2 s"),
    (None, "it could not be asked: vLLM cannot be started"),
])
def test_an_interpreter_that_cannot_answer_leaves_the_documented_rule(monkeypatch, tmp_path, script, why):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755 if script else 0o644)
    monkeypatch.setattr(vllm_env, "VLLM_PYTHON", python)
    monkeypatch.setattr(vllm_ids, "_TIMEOUT", 0.2 if script == "exec sleep 60" else 60)
    answer = derive_vllm_ids([2, 30, 58], 61, LLAMA)
    assert answer.ids == (3, 31, 59) and "not asked" in answer.note and why in answer.note


def test_vllm_is_asked_without_what_sglang_needs(monkeypatch, tmp_path):
    """A class is asked without a GPU; no other Python's packages, SGLang's stand-ins or hub come in between."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONHOME.$PYTHONPATH.$CUDA_VISIBLE_DEVICES.$HF_HUB_OFFLINE" >&2; exit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(vllm_env, "VLLM_PYTHON", python)
    for name in ("PYTHONHOME", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "set")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert derive_vllm_ids([2, 30, 58], 61, LLAMA).note.endswith("it could not be asked: ...1")


def test_what_vllm_says_is_followed(monkeypatch):
    said = {"version": "9", "model_class": "X", "rule_source": "x.py X.method", "answers": [[4, 32, 60], [3, 31, 59]]}
    monkeypatch.setattr(vllm_env, "installed", lambda: True)
    monkeypatch.setattr(vllm_ids, "ask_vllm", lambda *question: said)
    answer = derive_vllm_ids([2, 30, 58], 61, LLAMA)  # it adds 1: layer outputs are the ids
    assert answer.ids == (2, 30, 58) and answer.capture_points == (3, 31, 59)
    assert answer.version == "9" and answer.rule_source == "x.py X.method"
    said["answers"] = [[4, 32, 60], "ValueError: no"]
    with pytest.raises(PipelineError, match="no ids make vLLM 9's X capture layer outputs"):
        derive_vllm_ids([2, 30, 58], 61, LLAMA)
    said |= {"error": "vLLM 9's X does not support EAGLE-3", "serves": False}
    with pytest.raises(PipelineError, match="does not support EAGLE-3"):
        derive_vllm_ids([2, 30, 58], 61, LLAMA)


@pytest.mark.slow
@pytest.mark.skipif(not vllm_env.installed(), reason="vLLM is not installed (make install-vllm)")
def test_the_installed_vllm_takes_capture_points():
    for name in ("LlamaForCausalLM", "DeepseekV3ForCausalLM"):
        said = ask_vllm(name, 61, ((3, 31, 59), (1, 2, 61), (31, 3, 3)))
        assert said["answers"][:2] == [[3, 31, 59], [1, 2, 61]] and said["no_ids"] == [2, 30, 58], said
    answer = derive_vllm_ids([2, 30, 58], 61, LLAMA)
    assert answer.ids == (3, 31, 59) and "asked on a stub of vLLM" in answer.note and answer.model_class == "LlamaForCausalLM"
    said = ask_vllm("MambaForCausalLM", 61, ((3, 31, 59),))
    assert said["serves"] is False and "does not support EAGLE-3" in said["error"]
