"""The validator: a right drafter passes, and every known mistake is named with its field and its mend."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pipeline.errors import PipelineError
from pipeline.export.drafter_files import rope_parameters_of
from pipeline.export.validate import main, validate
from tests.tiny_models import tiny_llama

H, HEADS, KV, D, MLP, V, VD = 16, 4, 2, 8, 24, 64, 32


def drafter(folder: Path, *, num_aux: int = 3, change=None, tensors=None, drop=()) -> Path:
    """A right drafter written by hand from SGLang's llama_eagle3.py, then `change`d (config) and spoilt (tensors)."""
    ids = [1, 3, 5, 7, 9][:num_aux]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "draft_vocab_size": VD,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_aux_hidden_states": num_aux,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    shapes = {
        "fc.weight": (H, num_aux * H),
        "norm.weight": (H,),
        "lm_head.weight": (VD, H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (HEADS * D, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KV * D, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KV * D, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, HEADS * D),
        "midlayer.mlp.gate_proj.weight": (MLP, H),
        "midlayer.mlp.up_proj.weight": (MLP, H),
        "midlayer.mlp.down_proj.weight": (H, MLP),
    }
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    target_ids = torch.arange(0, V, 2)
    weights |= {
        "d2t": target_ids - torch.arange(VD),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, target_ids, True),
    }
    weights |= tensors or {}
    for name in drop:
        del weights[name]
    if change is not None:
        change(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def set_(**values):
    return lambda config: config.update(values)


def eagle(**values):
    return lambda config: config["eagle_config"].update(values)


def without(*names):
    return lambda config: [config.pop(name) for name in names]


@pytest.mark.parametrize("num_aux", [2, 3, 5])
def test_a_right_drafter_passes(tmp_path, num_aux):
    report = validate(drafter(tmp_path, num_aux=num_aux), context=4096)
    assert report.problems == [] and report.notes == []


SPOILT = torch.ones(H)
IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"
MISTAKES = {
    "wrong architecture string (sglang 33966)": (
        dict(change=set_(architectures=["LlamaForCausalLM"])),
        "architectures",
    ),
    "two decoder layers": (dict(change=set_(num_hidden_layers=2)), "num_hidden_layers"),
    "tied embeddings copied from the target (SpecForge 139)": (
        dict(change=set_(tie_word_embeddings=True)),
        "tie_word_embeddings",
    ),
    "head_dim left to the default": (dict(change=without("head_dim")), "head_dim"),
    "max positions missing": (dict(change=without("max_position_embeddings")), "max_position_embeddings"),
    "max positions below the served context (vLLM 48894)": (
        dict(change=set_(max_position_embeddings=2048)),
        "max_position_embeddings",
    ),
    "rope_theta only in rope_parameters (Automodel 2920)": (dict(change=without("rope_theta")), "rope_theta"),
    "rope_theta of another model (SpecForge PR 270)": (dict(change=set_(rope_theta=5e5)), "rope_theta"),
    "rope_parameters missing": (dict(change=without("rope_parameters")), "rope_parameters"),
    "scaling dropped in one spelling (SpecForge 219)": (
        dict(change=set_(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})),
        "rope_scaling",
    ),
    "ids missing": (dict(change=lambda c: c["eagle_config"].pop("eagle_aux_hidden_state_layer_ids")), IDS),
    "ids at the top level": (
        dict(change=set_(eagle_aux_hidden_state_layer_ids=[1, 3, 5])),
        "eagle_aux_hidden_state_layer_ids",
    ),
    "embedding as a slot (-1)": (dict(change=eagle(eagle_aux_hidden_state_layer_ids=[-1, 3, 5])), IDS),
    "an id twice": (dict(change=eagle(eagle_aux_hidden_state_layer_ids=[1, 1, 5])), IDS),
    "two ids for a fc of three": (
        dict(change=lambda c: (eagle(eagle_aux_hidden_state_layer_ids=[1, 3])(c), set_(num_aux_hidden_states=2)(c))),
        "fc.weight",
    ),
    "five ids, number of states not written": (
        dict(num_aux=5, change=without("num_aux_hidden_states")),
        "num_aux_hidden_states",
    ),
    "use_aux_hidden_state off": (dict(change=eagle(use_aux_hidden_state=False)), "eagle_config.use_aux_hidden_state"),
    "hidden size of another target": (dict(change=set_(target_hidden_size=32)), "target_hidden_size"),
    "d2t missing (Automodel 2447)": (dict(drop=["d2t"]), "d2t"),
    "t2d missing": (dict(drop=["t2d"]), "t2d"),
    "a weight missing": (dict(drop=["midlayer.hidden_norm.weight"]), "midlayer.hidden_norm.weight"),
    "a weight under a name nobody reads": (
        dict(tensors={"midlayer.hidden_layernorm.weight": SPOILT}),
        "midlayer.hidden_layernorm.weight",
    ),
    "fc_norm trained, not switched on": (
        dict(tensors={f"fc_norm.{i}.weight": SPOILT.clone() for i in range(3)}),
        "fc_norm.0.weight",
    ),
    "fc_norm switched on, not trained": (dict(change=set_(fc_norm=True)), "fc_norm.0.weight"),
    "fc_norm where SGLang does not look": (
        dict(change=eagle(fc_norm=True), tensors={f"fc_norm.{i}.weight": SPOILT.clone() for i in range(3)}),
        "fc_norm.0.weight",
    ),
    "norm_before_fc trained, not switched on (sglang 32334)": (
        dict(tensors={"input_norm.weight": torch.ones(3 * H)}),
        "input_norm.weight",
    ),
    "a wrong shape": (dict(tensors={"lm_head.weight": torch.randn(V, H)}), "lm_head.weight"),
    "NaN": (dict(tensors={"norm.weight": torch.full((H,), float("nan"))}), "norm.weight"),
    "a weight in another type": (dict(tensors={"norm.weight": torch.ones(H, dtype=torch.bfloat16)}), "norm.weight"),
    "d2t holds target ids instead of offsets": (dict(tensors={"d2t": torch.arange(0, V, 2) + 1}), "d2t"),
    "d2t in int32": (dict(tensors={"d2t": torch.arange(VD, dtype=torch.int32)}), "d2t"),
    "two draft ids for one target id": (dict(tensors={"d2t": torch.arange(VD).flip(0) - torch.arange(VD)}), "d2t"),
    "t2d of another vocabulary": (dict(tensors={"t2d": torch.arange(V) % 2 == 1}), "t2d"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(tmp_path, mistake):
    how, field = MISTAKES[mistake]
    report = validate(drafter(tmp_path, **how), context=4096)
    assert field in [p.field for p in report.problems], report.problems
    assert all(p.mend for p in report.problems)
    with pytest.raises(PipelineError, match="not fit to serve"):
        report.raise_if_bad()


def test_ids_that_do_not_ascend_are_a_note_because_only_the_engine_knows_what_they_mean(tmp_path):
    report = validate(drafter(tmp_path, change=eagle(eagle_aux_hidden_state_layer_ids=[3, 1, 5])), context=4096)
    assert report.problems == [] and ["does not ascend" in note for note in report.notes] == [True]


def test_all_problems_are_collected(tmp_path):
    report = validate(drafter(tmp_path, change=set_(tie_word_embeddings=True, rope_theta=5e5), drop=["t2d"]))
    assert {p.field for p in report.problems} == {"tie_word_embeddings", "rope_theta", "t2d"}


@pytest.mark.parametrize("spelling", ["layers.0.", "model.layers.0."])
def test_the_other_spelling_of_the_layer_is_accepted_with_a_note(tmp_path, spelling):
    folder = drafter(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({n.replace("midlayer.", spelling): t for n, t in weights.items()}, folder / "model.safetensors")
    report = validate(folder)
    assert report.problems == [] and len(report.notes) == 1 and spelling in report.notes[0]


def test_both_spellings_at_once_are_refused(tmp_path):
    report = validate(drafter(tmp_path, tensors={"layers.0.hidden_norm.weight": torch.ones(H)}))
    assert [p.value for p in report.problems] == ["twice"]


def test_an_embedding_is_accepted_with_a_note(tmp_path):
    report = validate(drafter(tmp_path, tensors={"embed_tokens.weight": torch.randn(V, H)}))
    assert report.problems == [] and "target's embedding" in report.notes[0]


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, V - 1), min_size=VD, max_size=VD), st.integers(0, VD - 1), st.integers(1, 5))
def test_any_ascending_vocabulary_passes_and_any_other_does_not(tmp_path_factory, chosen, where, by):
    ids = torch.tensor(sorted(chosen))
    maps = {"d2t": ids - torch.arange(VD), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)}
    folder = tmp_path_factory.mktemp("d")
    assert validate(drafter(folder, tensors=maps)).problems == []
    maps["d2t"] = maps["d2t"].clone()
    maps["d2t"][where] += by
    assert {p.field for p in validate(drafter(folder, tensors=maps)).problems} <= {"d2t", "t2d"}
    assert validate(drafter(folder, tensors=maps)).problems != []


def test_checks_against_the_target(tmp_path):
    target = tiny_llama(tmp_path / "target", hidden=H, vocab=V, layers=8)
    report = validate(drafter(tmp_path / "d", change=lambda c: set_(max_position_embeddings=2048)(c)), target=target)
    fields = {p.field for p in report.problems}
    assert fields <= {"vocab_size"}, fields  # the tiny tokenizer may have more ids
    assert any("layer outputs [1, 3, 5]" in note for note in report.notes)
    wrong = validate(
        drafter(
            tmp_path / "e",
            change=lambda c: set_(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})(c),
        ),
        target=target,
    )
    assert "rope_parameters" in {p.field for p in wrong.problems}


def test_a_target_whose_text_config_is_null(tmp_path):
    target = tiny_llama(tmp_path / "target", hidden=H, vocab=V, layers=8)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | {"text_config": None}))
    ours = drafter(tmp_path / "d", change=set_(max_position_embeddings=2048))
    assert {p.field for p in validate(ours, target=target).problems} <= {"vocab_size"}
    (target / "config.json").write_text(json.dumps({"architectures": raw["architectures"], "text_config": raw}))
    assert {p.field for p in validate(ours, target=target).problems} <= {"vocab_size"}  # as multimodal targets have it


def test_the_context_defaults_to_the_targets(tmp_path):
    target = tiny_llama(tmp_path / "target", hidden=H, vocab=V, layers=8, max_positions=8192)
    assert "max_position_embeddings" in {p.field for p in validate(drafter(tmp_path / "d"), target=target).problems}


def test_rope_is_read_in_either_spelling():
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    old = {"rope_theta": 50000.0, "rope_scaling": scaling}
    new = {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "rope_theta": 50000.0,
        }
    }
    assert rope_parameters_of(old) == rope_parameters_of(new)
    assert rope_parameters_of({"rope_theta": 1e6}) == {"rope_type": "default", "rope_theta": 1e6}


def test_command(tmp_path, capsys):
    assert main([str(drafter(tmp_path / "good"))]) == 0
    assert main([str(drafter(tmp_path / "bad", drop=["d2t"]))]) == 1
    assert "d2t = missing" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 1
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert main([str(tmp_path / "empty")]) == 1
    assert "safetensors" in capsys.readouterr().err


def test_a_truncated_file_is_named(tmp_path):
    path = drafter(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PipelineError, match="cannot be read"):
        validate(tmp_path)
