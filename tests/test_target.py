"""The target's facts and tensors equal what transformers finds in the same folder."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config import load_config
from pipeline.errors import PipelineError
from pipeline.slots import layers_to_dump
from pipeline.target import load_embedding, load_output_head, open_target
from pipeline.train.drafter_config import drafter_config
from tests.test_config import resolved
from tests.tiny_models import FAMILIES, tiny_llama, tiny_model

# Values that released models of the family have, and that decide about the logits.
EXTRAS = {"Gemma3ForCausalLM": {"final_logit_softcapping": 5.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target") / "llama", layers=8)


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def config(path, *overrides):
    return load_config(resolved("target=local", f"target.path={path}", *overrides))


def open_local(path, *overrides):
    return open_target(config(path, *overrides))


def edit_json(path, **changes):
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps(raw))


def test_nulls_are_read_from_the_checkpoint(folder):
    target, filled = open_local(folder)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (8, 64, 512)
    assert layers_to_dump(filled, None)[0] == [1, 3, 4]
    assert (filled.drafter.num_attention_heads, filled.drafter.num_key_value_heads, filled.drafter.head_dim) == (4, 2, 16)
    assert filled.drafter.max_position_embeddings == 2048
    assert target.dtype == "float32" and target.eos_token_ids == [2]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_norm_logits_and_embedding_equal_transformers(architecture, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path, architecture, **EXTRAS.get(architecture, {}))
    target, filled = open_local(folder)
    drafter_config(filled, target, num_fc_inputs=3, draft_vocab_size=64)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(20)[None]
    seen = {}
    model.model.norm.register_forward_hook(lambda m, args, out: seen.update(pre=args[0], post=out))
    with torch.no_grad():
        expected = model(ids).logits
    head = load_output_head(target)
    torch.testing.assert_close(head.logits(seen["post"]), expected)
    torch.testing.assert_close(head.norm(seen["pre"]), seen["post"])
    rows = torch.tensor([3, 7, 500])
    torch.testing.assert_close(load_output_head(target, rows).logits(seen["post"]), expected[..., rows])
    torch.testing.assert_close(load_embedding(target), model.get_input_embeddings().weight.detach())


def test_tied_heads_come_from_the_embedding(tmp_path):
    target, _ = open_local(tiny_llama(tmp_path / "tied", tie_word_embeddings=True))
    torch.testing.assert_close(load_output_head(target).weight, load_embedding(target))


def test_scale_comes_before_softcap(folder, copy):
    edit_json(copy / "config.json", logit_scale=0.5, final_logit_softcapping=2.0)
    plain, capped = (load_output_head(open_local(p)[0]) for p in (folder, copy))
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(capped.logits(hidden), 2.0 * torch.tanh(0.5 * plain.logits(hidden) / 2.0))


def test_multimodal_prefixes_are_found_and_prediction_layers_are_not(folder, copy):
    tensors = load_file(copy / "model.safetensors")
    renamed = {f"language_model.{name}": t for name, t in tensors.items()}
    renamed["language_model.model.layers.8.embed_tokens.weight"] = torch.zeros(1)  # a multi-token-prediction layer
    renamed["vision_tower.encoder.norm.weight"] = torch.zeros(1)
    save_file(renamed, copy / "model.safetensors")
    target, _ = open_local(copy)
    torch.testing.assert_close(load_embedding(target), tensors["model.embed_tokens.weight"])
    torch.testing.assert_close(load_output_head(target).norm_weight, tensors["model.norm.weight"])
    torch.testing.assert_close(load_output_head(target).weight, tensors["lm_head.weight"])


def test_a_fact_that_differs_from_the_checkpoint_is_named(folder):
    with pytest.raises(PipelineError, match="num_layers = 8, the configuration says 9") as e:
        open_local(folder, "target.num_layers=9")
    assert e.value.field == "target.num_layers"


@pytest.mark.parametrize("damage, words", [
    (lambda p: (p / "config.json").write_text("{"), "config"),
    (lambda p: (p / "model.safetensors").unlink(), "no safetensors weights"),
    (lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:1000]), "model.safetensors"),
    (lambda p: [f.unlink() for f in p.glob("chat_template*")] + [edit_json(p / "tokenizer_config.json", chat_template=None)],
     "no chat template"),
])
def test_damaged_targets_are_one_message(copy, damage, words):
    damage(copy)
    with pytest.raises(PipelineError, match=words):
        load_output_head(open_local(copy)[0])


def test_the_record_changes_with_template_tokenizer_and_config(folder, copy):
    before = open_local(folder)[0].record
    assert open_local(copy)[0].record.model_dump(exclude={"path"}) == before.model_dump(exclude={"path"})
    for f in copy.glob("chat_template*"):
        f.write_text(f.read_text() + " ")
    after = open_local(copy)[0].record
    assert after.chat_template_sha256 != before.chat_template_sha256 and after.config_sha256 == before.config_sha256


def test_a_target_with_another_norm_is_refused_when_it_is_opened(copy):
    raw = json.loads((copy / "config.json").read_text())
    del raw["rms_norm_eps"]
    (copy / "config.json").write_text(json.dumps(raw | {
        "model_type": "cohere", "architectures": ["CohereForCausalLM"], "layer_norm_eps": 1e-5}))
    with pytest.raises(PipelineError, match="final norm is not an RMS norm") as e:
        open_local(copy)
    assert "rms_norm_eps" in e.value.field and e.value.fix


def test_missing_folders_and_gpus_are_one_message(tmp_path):
    from pipeline.engines.engine import resolve_device

    with pytest.raises(PipelineError, match="folder does not exist"):
        open_local("/nonexistent/model")
    if not torch.cuda.is_available():
        with pytest.raises(PipelineError, match="no CUDA device"):
            resolve_device("cuda")
