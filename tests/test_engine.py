"""The real SGLang engine, started as the stages start it, on tiny random models."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq
from safetensors.torch import load_file, save_file

from pipeline.engines.engine import (
    engine,
    engine_arguments,
    generate,
    prepare_environment,
    resolve_device,
    tensor_parallel,
)
from pipeline.errors import PipelineError
from pipeline.sglang_cpu import SHIM_DIR
from tests.tiny_models import tiny_deepseek_v3, tiny_llama

GREEDY = {"temperature": 0, "max_new_tokens": 24}
PROMPTS = [list(range(10, 15)), list(range(40, 80)), [7]]  # the second is longer than a chunk of 16
ON_CPU = {"device": "cpu", "dtype": "float32"}

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine is for machines without a GPU")


@pytest.mark.parametrize(
    "device, gpus, tp_size, present, expected",
    [("cpu", 1, 8, 0, 1), ("cuda", 1, 1, 1, 1), ("cuda", 1, 4, 8, 4), ("cuda", 2, 4, 8, 2), ("cuda", 8, 1, 8, 8)],
)
def test_tensor_parallel_size(monkeypatch, device, gpus, tp_size, present, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: present)
    config = SimpleNamespace(gpus=gpus, target=SimpleNamespace(tp_size=tp_size))
    assert tensor_parallel(config, device) == expected


@pytest.mark.parametrize(
    "device, gpus, tp_size, present, message, fix, unchecked",
    [
        ("cpu", 8, 1, 0, "GPUS=8 asked for, this machine has no GPU", "leave GPUS out", 1),
        ("cuda", 8, 1, 4, "8 GPUs, this machine has 4", "GPUS=4", 8),
        ("cuda", 1, 8, 1, "8 GPUs, this machine has 1", 'ARGS="target.tp_size=1"', 8),
    ],
)
def test_more_gpus_than_there_are(monkeypatch, device, gpus, tp_size, present, message, fix, unchecked):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: present)
    config = SimpleNamespace(gpus=gpus, target=SimpleNamespace(tp_size=tp_size))
    with pytest.raises(PipelineError, match=message) as e:
        tensor_parallel(config, device)
    assert fix in e.value.fix
    assert tensor_parallel(config, device, check=False) == unchecked  # an export is served on another machine


def transformers_greedy(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations, one request at a time, by plain forwards over the whole sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    eos = model.generation_config.eos_token_id
    outputs = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + new_tokens and (len(ids) == len(prompt) or ids[-1] != eos):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        outputs.append(ids[len(prompt) :])
    return outputs


def repeating_drafter(folder: Path, target: Path) -> Path:
    """An EAGLE-3 drafter, written by hand, that bets on whichever token its context holds most of.

    fc, MLP, queries and keys are zero, so its attention averages the values of all earlier rows; values and output
    projection pass the embeddings on; lm_head compares with them. Random models repeat themselves, so it often wins.
    """
    embed = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    config = json.loads((target / "config.json").read_text())
    vocab, hidden = embed.shape
    zero, eye = torch.zeros(hidden, hidden), torch.eye(hidden)
    weights = {
        "fc.weight": torch.zeros(hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.self_attn.q_proj.weight": torch.cat([zero, zero], dim=1),
        "midlayer.self_attn.k_proj.weight": torch.cat([zero, zero], dim=1),
        "midlayer.self_attn.v_proj.weight": torch.cat([eye, zero], dim=1),
        "midlayer.self_attn.o_proj.weight": eye.clone(),
        "midlayer.mlp.gate_proj.weight": zero.clone(),
        "midlayer.mlp.up_proj.weight": zero.clone(),
        "midlayer.mlp.down_proj.weight": zero.clone(),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.nn.functional.normalize(embed, dim=-1),
        "d2t": torch.zeros(vocab, dtype=torch.int64),
        "t2d": torch.ones(vocab, dtype=torch.bool),
    }
    folder.mkdir()
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / "model.safetensors")
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "num_key_value_heads": config["num_attention_heads"],
        "intermediate_size": hidden,
        "draft_vocab_size": vocab,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def open_contexts() -> list[zmq.Context]:
    found = [o for o in gc.get_objects() if issubclass(type(o), zmq.Context)]
    return [context for context in found if not context.closed and not context._shadow]


def children() -> set[int]:
    return {p.pid for p in multiprocessing.active_children()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(llama):
    return transformers_greedy(llama, PROMPTS, 24)


def test_device_is_resolved_or_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(PipelineError, match="no CUDA device"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    with pytest.raises(PipelineError, match="unknown device"):
        resolve_device("tpu")


def test_arguments_of_a_capturing_engine_follow_the_dump_rules():
    arguments = engine_arguments("m", device="cpu", dtype="float32", capture_ids=(2, 15, 26))
    assert arguments["return_aux_hidden_state_layer_ids"] == [2, 15, 26]
    assert arguments["enable_return_aux_hidden_states"] and arguments["disable_radix_cache"]
    assert arguments["speculative_algorithm"] == "EAGLE3" and "speculative_draft_model_path" not in arguments
    assert arguments["max_total_tokens"] == 16384
    on_gpu = engine_arguments("m", device="cuda", dtype="bfloat16", capture_ids=(2, 15, 26))
    assert "attention_backend" not in on_gpu and "max_total_tokens" not in on_gpu
    assert on_gpu["disable_prefill_cuda_graph"]


def test_arguments_of_a_speculating_engine():
    chain = engine_arguments("m", device="cpu", dtype="float32", draft_path="d")
    assert (chain["speculative_num_steps"], chain["speculative_num_draft_tokens"]) == (3, 4)
    with pytest.raises(PipelineError, match="draft tree") as e:
        engine_arguments("m", device="cpu", dtype="float32", draft_path="d", topk=2)
    assert e.value.field == "draft_tokens"
    with pytest.raises(ValueError, match="without a drafter"):
        engine_arguments("m", device="cpu", dtype="float32", draft_path="d", capture_ids=(1,))


def test_environment_is_set_once_and_taken_back_for_a_gpu(monkeypatch):
    for name in ("SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores them
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "sglang.srt.utils.common", raising=False)
    for _ in range(2):
        prepare_environment("cpu")
    assert os.environ["PYTHONPATH"] == f"{SHIM_DIR}:/somewhere"
    assert os.environ["SGLANG_USE_CPU_ENGINE"] == "1"
    assert sys.path.count(str(SHIM_DIR)) == 1
    prepare_environment("cuda")
    assert os.environ["PYTHONPATH"] == "/somewhere"
    assert "SGLANG_USE_CPU_ENGINE" not in os.environ
    assert str(SHIM_DIR) not in sys.path


@needs_no_gpu
@pytest.mark.slow
def test_greedy_text_equals_transformers_and_nothing_else_is_touched(llama, expected):
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    handlers, signals = logging.getLogger().handlers[:], [signal.getsignal(s) for s in (signal.SIGQUIT, signal.SIGTERM)]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        before = children()
        with engine(llama, **ON_CPU, chunked_prefill_size=16) as llm:
            outputs = generate(llm, PROMPTS, GREEDY)
            assert logging.getLogger().handlers == handlers
            assert children() > before
            assert generate(llm, [], GREEDY) == []
        assert children() == before
        assert bystander.poll() is None  # SGLang's own shutdown would have killed it
        bystander.kill()
    assert [signal.getsignal(s) for s in (signal.SIGQUIT, signal.SIGTERM)] == signals
    logging.getLogger().removeHandler(handler)
    assert [out["output_ids"] for out in outputs] == expected
    for out in outputs:
        assert out["finish_reason"] == ("stop" if out["output_ids"][-1] == 2 else "length")


@needs_no_gpu
@pytest.mark.slow
def test_greedy_text_of_deepseek_v3_equals_transformers(tmp_path):
    target = tiny_deepseek_v3(tmp_path / "target")
    with engine(target, **ON_CPU, chunked_prefill_size=16) as llm:
        outputs = generate(llm, PROMPTS, GREEDY)
    assert [out["output_ids"] for out in outputs] == transformers_greedy(target, PROMPTS, 24)


@needs_no_gpu
@pytest.mark.slow
@pytest.mark.parametrize(("topk", "draft_tokens"), [(1, None), (2, 6)])
def test_speculation_accepts_drafts_and_leaves_the_text_alone(llama, expected, tmp_path, topk, draft_tokens):
    drafter = repeating_drafter(tmp_path / "drafter", llama)
    with engine(llama, **ON_CPU, draft_path=drafter, topk=topk, draft_tokens=draft_tokens) as llm:
        outputs = generate(llm, PROMPTS, GREEDY)
    assert [out["output_ids"] for out in outputs] == expected
    accepted = sum(out["meta_info"]["spec_num_correct_drafts"] for out in outputs)
    assert accepted >= 10  # else verification of accepted drafts was hardly exercised


@needs_no_gpu
@pytest.mark.slow
def test_a_start_that_fails_says_why_and_leaves_no_process(tmp_path):
    target = tiny_llama(tmp_path / "target")
    (target / "model.safetensors").unlink()
    before = children()
    with pytest.raises(PipelineError, match="SGLang did not start") as e, engine(target, **ON_CPU):
        pass
    assert "model weights" in str(e.value)  # SGLang's own complaint, from the scheduler's output
    assert str(target) in str(e.value)
    assert children() == before


@needs_no_gpu
@pytest.mark.slow
def test_an_engine_that_dies_is_an_error_and_not_the_end_of_this_process(llama):
    before = children()
    with pytest.raises(PipelineError, match="SGLang died"), engine(llama, **ON_CPU) as llm:
        for pid in llm.get_all_child_pids():
            os.kill(pid, signal.SIGKILL)
        generate(llm, PROMPTS, GREEDY)
    assert children() == before
    # What was sent to them and never read keeps no context from ending, whenever the garbage collector comes to it.
    assert not open_contexts()


@needs_no_gpu
@pytest.mark.slow
def test_engine_runs_in_a_hydra_script(llama, tmp_path):
    """As the stages run it: SGLang's children import the script again, under another name."""
    script = tmp_path / "02_script.py"
    script.write_text(
        "import hydra\n"
        "from pipeline.engines.engine import engine, generate\n"
        "@hydra.main(version_base=None, config_path=None)\n"
        "def main(cfg):\n"
        f"    with engine({str(llama)!r}, device='cpu', dtype='float32') as llm:\n"
        "        print('IDS', generate(llm, [[7]], {'temperature': 0, 'max_new_tokens': 2})[0]['output_ids'])\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE")}
    run = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "IDS [" in run.stdout
