"""The exported files against what SGLang's and speculators' own code reads."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from pipeline.errors import PipelineError
from pipeline.export.export import export, read_trained, write_sglang
from pipeline.export.export_vllm import build_speculator, write_vllm
from pipeline.export.rope_check import check_rope, check_rope_of_target
from pipeline.export.validate import validate
from pipeline.layers import layer_ids, sglang_models
from pipeline.layers.layer_ids import derive_sglang_ids
from pipeline.layers.vllm_ids import derive_vllm_ids
from pipeline.manifest import load_manifest, save_manifest
from pipeline.stage import StageResult
from pipeline.target import load_embedding, load_output_head
from pipeline.train.drafter import Drafter, DrafterConfig, FrozenTarget, PackedBatch
from pipeline.train.drafter_config import drafter_config
from pipeline.verify.replay import ExportedDrafter
from tests.tiny_disk import tiny_disk
from tests.tiny_models import tiny_deepseek_v3, tiny_llama, tiny_model
from tests.tiny_run import TinyRun, tiny_run

# Read from SGLang 0.5.23's models/llama_eagle3.py: what load_weights finds a parameter (or the vocabulary map) for.
KEYS = {
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
ROPES = [
    {"rope_type": "default", "rope_theta": 100000.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    YARN,
    {**YARN, "mscale_all_dim": 0.707},
    {k: v for k, v in YARN.items() if not k.startswith("mscale")} | {"truncate": False},
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> TinyRun:
    """A tiny run whose stages up to training are done."""
    run = tiny_run(tmp_path_factory.mktemp("run"), vocab=512)
    run.stage("standardize")
    run.stage("train", **{"train.epochs": 1})
    return run


def run_export(run: TinyRun, folder: Path, **overrides) -> StageResult:
    target, config = run.config(**overrides)
    shutil.rmtree(folder, ignore_errors=True)
    return export(config, target, run.manifest, run.folder, folder)


def random_drafter(tmp_path, *, slots=3, seed=0, **changes) -> tuple[DrafterConfig, dict]:
    """A drafter of H=64 with random weights and norms, as stage 4 writes it."""
    config = DrafterConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "vocab_size": 512,
            "draft_vocab_size": 128,
            "max_position_embeddings": 2048,
            "num_fc_inputs": slots,
            **changes,
        }
    )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    model = Drafter(config, ids)
    with torch.no_grad():
        for parameter in model.parameters():
            base = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(base + 0.15 * torch.randn(parameter.shape, generator=generator))
    return config, {k: v.detach().clone() for k, v in model.state_dict().items()}


def test_export_of_a_run(trained, tmp_path):
    result = run_export(trained, tmp_path / "export")
    sglang, vllm = tmp_path / "export" / "sglang", tmp_path / "export" / "vllm"
    assert set(load_file(sglang / "model.safetensors")) == KEYS
    assert set(load_file(vllm / "model.safetensors")) == {k.replace("midlayer.", "layers.0.") for k in KEYS}
    config = json.loads((sglang / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
    assert "eagle_aux_hidden_state_layer_ids" not in config and not config["tie_word_embeddings"]
    other = json.loads((vllm / "config.json").read_text())
    assert other["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4] and other["norm_before_residual"] is False
    assert other["transformer_layer_config"]["num_aux_hidden_states"] == 3 and "auto_map" not in other
    assert other["speculators_config"]["verifier"] == {
        "name_or_path": str(trained.target_dir),
        "architectures": ["LlamaForCausalLM"],
    }
    engines = result.export.engines
    assert (
        engines["sglang"].ids == [1, 2, 3]
        and engines["sglang"].proven
        and engines["sglang"].model_class == "LlamaForCausalLM"
    )
    assert engines["sglang"].capture_points == engines["vllm"].capture_points == [2, 3, 4]
    assert {p.relative_to(tmp_path / "export").as_posix() for p in result.outputs} == {
        "sglang/config.json",
        "sglang/model.safetensors",
        "vllm/config.json",
        "vllm/model.safetensors",
        "serving.yaml",
        "launch_sglang.sh",
        "launch_vllm.sh",
    }
    assert {p.name for p in (tmp_path / "export").iterdir()} == {
        "sglang",
        "vllm",
        "serving.yaml",
        "launch_sglang.sh",
        "launch_vllm.sh",
    }


def test_weights_are_the_trained_ones(trained, tmp_path):
    run_export(trained, tmp_path / "export", **{"export.engines": ["sglang"]})
    exported = load_file(tmp_path / "export" / "sglang" / "model.safetensors")
    for name, tensor in load_file(trained.folder / "train" / "drafter.safetensors").items():
        assert torch.equal(exported[name], tensor), name
    run_export(trained, tmp_path / "half", **{"export.engines": ["sglang"], "export.dtype": "bf16"})
    half = load_file(tmp_path / "half" / "sglang" / "model.safetensors")
    assert (
        half["fc.weight"].dtype == torch.bfloat16
        and half["d2t"].dtype == torch.int64
        and half["t2d"].dtype == torch.bool
    )
    assert json.loads((tmp_path / "half" / "sglang" / "config.json").read_text())["dtype"] == "bfloat16"


def test_two_exports_are_byte_identical(trained, tmp_path):
    a, b = run_export(trained, tmp_path / "a"), run_export(trained, tmp_path / "b")
    for first, second in zip(a.outputs, b.outputs, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


def test_served_context_raises_max_positions(trained, tmp_path):
    run_export(trained, tmp_path / "export", **{"export.served_context": 9000})
    for engine in ("sglang", "vllm"):
        assert validate(tmp_path / "export" / engine, context=9000).problems == []


def test_a_slot_that_only_one_engine_captures(trained, tmp_path, capsys):
    """Where SGLang captures something else than the residual stream, a drafter is right for SGLang only."""
    manifest = load_manifest(trained.folder)
    manifest.slots["fc.1"] = manifest.slots["fc.1"].model_copy(update={"equals_transformers": False})
    target, config = trained.config()
    result = export(config, target, manifest, trained.folder, tmp_path / "export")
    assert set(result.export.engines) == {"sglang"} and "slot fc.1" in result.metrics["vllm_refused"]
    assert not (tmp_path / "export" / "vllm").exists() and not (tmp_path / "export" / "launch_vllm.sh").exists()
    refused = yaml.safe_load((tmp_path / "export" / "serving.yaml").read_text())["engines"]["vllm"]["refused"]
    assert "slot fc.1" in refused and "right for SGLang only" in refused
    assert f"no files for vllm: {refused}" in capsys.readouterr().out


def test_other_slots_than_trained_are_refused(trained, tmp_path):
    manifest = load_manifest(trained.folder)
    del manifest.slots["fc.2"]
    with pytest.raises(PipelineError, match="trained on 3 slots, the manifest binds 2"):
        read_trained(trained.folder / "train", manifest)


@pytest.mark.parametrize(
    "changes",
    [
        dict(slots=2),
        dict(slots=5),
        dict(fc_norm=True),
        dict(norm_before_fc=True),
        dict(norm_output=True),
        dict(slots=5, fc_norm=True, norm_output=True),
        dict(draft_vocab_size=512),
    ],
    ids=str,
)
def test_every_shape_is_exported_for_both_engines(trained, tmp_path, changes):
    target, _ = trained.config()
    drafter, weights = random_drafter(tmp_path, **changes)
    layers = [0, 1, 2, 3, 4][: drafter.num_fc_inputs]
    ids, points = derive_sglang_ids(trained.target_dir, layers), derive_vllm_ids(layers, 6)
    write_sglang(tmp_path / "sglang", drafter, weights, ids, dtype="float32", context=2048, target_text=target.text)
    speculator = build_speculator(
        drafter,
        points,
        dtype="float32",
        context=2048,
        target_text=target.text,
        verifier=str(trained.target_dir),
        architecture="LlamaForCausalLM",
        draft_steps=3,
    )
    write_vllm(tmp_path / "vllm", drafter, weights, speculator, dtype="float32")
    for engine in ("sglang", "vllm"):
        assert validate(tmp_path / engine, context=2048).problems == []

    torch.manual_seed(1)
    tokens, features = torch.randint(0, 512, (24,)), torch.randn(24, drafter.num_fc_inputs * 64)
    embedding, rows = load_embedding(target), torch.arange(20)
    ours = ExportedDrafter(tmp_path / "sglang", embedding).draft(tokens, features, rows, 3, forced=True)
    theirs = speculators_drafts(tmp_path / "vllm", tokens, features, steps=3)
    target_ids = weights["t2d"].nonzero().squeeze(1)
    for j in range(3):
        assert torch.equal(target_ids[theirs[j][:20]], ours[:, j]), f"step {j}"
    assert torch.equal(trainer_hits(drafter, weights, tokens, features, target, ours), torch.tensor([20, 20, 20]))


def speculators_drafts(folder: Path, tokens: torch.Tensor, features: torch.Tensor, *, steps: int) -> list[torch.Tensor]:
    """Draft-vocabulary ids of every row and step from speculators' own model, read from the files."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config)
    # The embedding is the target's, read from where the config says. speculators 0.9.0 looks for NaN to see that it is
    # missing, but from_pretrained leaves arbitrary memory in what a file lacks.
    torch.nn.init.constant_(model.embed_tokens.weight, float("nan"))
    model.load_verifier_weights()
    with torch.no_grad():
        drafts = model.eval()(
            hidden_states=features[None, :-1],
            input_ids=tokens[None, 1:],
            document_ids=torch.zeros(1, len(tokens) - 1, dtype=torch.long),
            ttt_steps=steps,
        )
    return [d[0] for d in drafts]


def trainer_hits(config, weights, tokens, features, target, drafts) -> torch.Tensor:
    """How many of the drafts the trainer's own unroll makes as well: it counts a hit where the teacher agrees."""
    model = Drafter(config, weights["t2d"].nonzero().squeeze(1))
    model.load_state_dict(weights)
    hits = []
    for step in range(3):
        # Teacher of row i at this step is the argmax recorded at token i+1+step: put the draft there.
        argmax = torch.zeros(len(tokens), dtype=torch.int32)
        argmax[1 + step : 21 + step] = drafts[:, step].int()
        mask = torch.zeros(len(tokens), dtype=torch.bool)
        mask[1 : 22 + step] = True  # rows 0 … 19 are gated at this step
        batch = PackedBatch(
            input_ids=tokens,
            features=features,
            final_hidden=torch.randn(len(tokens), 64),
            loss_mask=mask,
            teacher_argmax=argmax,
            sample_lengths=torch.tensor([len(tokens)]),
        )
        frozen = FrozenTarget(load_embedding(target), load_output_head(target, weights["t2d"].nonzero().squeeze(1)))
        with torch.no_grad():
            hits.append(int(model(batch, frozen, torch.ones(3)).metrics["hits"][step]))
    return torch.tensor(hits)


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r['rope_type']}-{r.get('mscale_all_dim', '')}")
def test_sglang_rotates_the_exported_drafter_as_the_trainer_does(trained, tmp_path, rope):
    drafter, weights = random_drafter(tmp_path, rope_parameters=rope, max_position_embeddings=131072)
    target, _ = trained.config()
    ids = derive_sglang_ids(trained.target_dir, [1, 2, 3])
    write_sglang(tmp_path / "d", drafter, weights, ids, dtype="float32", context=131072, target_text=target.text)
    assert validate(tmp_path / "d", context=131072).problems == []
    check_rope(drafter, tmp_path / "d")
    with pytest.raises(PipelineError, match="rotates"):
        check_rope(
            dataclasses.replace(drafter, rope_parameters={**rope, "rope_theta": 2 * rope["rope_theta"]}), tmp_path / "d"
        )


def test_deepseek_ids_are_capture_points(trained, tmp_path):
    """The same layer outputs, other numbers: SGLang's DeepSeek takes ids as capture points unless the first is 1."""
    folder = tiny_deepseek_v3(tmp_path / "target")
    drafter, weights = random_drafter(tmp_path, slots=2)
    target, _ = trained.config()
    ids = derive_sglang_ids(folder, [2, 4])
    write_sglang(tmp_path / "d", drafter, weights, ids, dtype="float32", context=2048, target_text=target.text)
    found = json.loads((tmp_path / "d" / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert found == [3, 5]
    report = validate(tmp_path / "d", target=folder)
    assert any("layer outputs [2, 4]" in note for note in report.notes)


def test_ids_that_do_not_ascend_are_right_where_the_engine_says_so(tmp_path, trained):
    """DeepSeek's layer output 0 needs ids that start with another than 1: (5, 1)."""
    folder = tiny_deepseek_v3(tmp_path / "target")
    drafter, weights = random_drafter(tmp_path, slots=2)
    target, _ = trained.config()
    ids = derive_sglang_ids(folder, [0, 4])
    assert ids.ids == (5, 1)
    write_sglang(tmp_path / "d", drafter, weights, ids, dtype="float32", context=2048, target_text=target.text)
    report = validate(tmp_path / "d", target=folder)
    assert [p.field for p in report.problems] == ["rope_parameters"]  # this drafter's rope is not the tiny target's
    assert any("layer outputs [0, 4]" in note for note in report.notes)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 50000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 512,
         "attention_factor": 1.0},
    ],
    ids=lambda r: r["rope_type"],
)
def test_a_rope_that_engines_compute_otherwise_is_not_the_drafters(tmp_path, rope, capsys):
    """The trained, exported and served drafter of such a target has one that all compute alike."""
    run = TinyRun(tiny_llama(tmp_path / "target"), tmp_path)
    path = run.target_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": rope}))
    target, config = run.config()
    with pytest.raises(PipelineError, match="rotates"):
        check_rope(random_drafter(tmp_path, rope_parameters=rope, head_dim=16)[0])
    check_rope_of_target(config, target)
    assert (f"the target's RoPE is '{rope['rope_type']}'" in capsys.readouterr().out) == (rope["rope_type"] != "yarn")
    ours = drafter_config(config, target, num_fc_inputs=3, draft_vocab_size=128).rope_parameters
    drafter, weights = random_drafter(tmp_path, rope_parameters=ours)
    ids = derive_sglang_ids(run.target_dir, [1, 2, 3])
    write_sglang(tmp_path / "d", drafter, weights, ids, dtype="float32", context=2048, target_text=target.text)
    check_rope(drafter, tmp_path / "d")
    assert validate(tmp_path / "d", context=2048, target=run.target_dir).problems == []


def test_draft_steps_reach_both_engines(trained, tmp_path):
    run_export(trained, tmp_path / "export", **{"export.draft_steps": 5})
    other = json.loads((tmp_path / "export" / "vllm" / "config.json").read_text())
    assert other["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    launch = yaml.safe_load((tmp_path / "export" / "serving.yaml").read_text())["engines"]["sglang"]["launch"]
    assert "--speculative-num-steps 5" in launch and "--speculative-num-draft-tokens 6" in launch


def test_an_unproven_class_and_another_version_are_said_once(trained, tmp_path, capsys, monkeypatch):
    run_export(trained, tmp_path / "export", **{"export.engines": ["sglang"]})
    assert "export: sglang" not in capsys.readouterr().out
    monkeypatch.setattr(layer_ids, "PROVEN_CLASSES", {})
    run_export(trained, tmp_path / "export", **{"export.engines": ["sglang"]})
    assert capsys.readouterr().out.count("LlamaForCausalLM is not among the classes") == 1

    monkeypatch.undo()
    monkeypatch.setattr(sglang_models, "sglang_version", lambda: "0.9.9")
    manifest = load_manifest(trained.folder)
    manifest.dump = manifest.dump.model_copy(update={"engine": "sglang", "engine_version": "0.5.23"})
    target, config = trained.config(**{"export.engines": ["sglang"]})
    result = export(config, target, manifest, trained.folder, tmp_path / "export")
    said = capsys.readouterr().out
    assert said.count("SGLang 0.9.9 was asked afresh; LlamaForCausalLM answers as in 0.5.23") == 1
    assert "dumped with sglang 0.5.23, ids derived anew from 0.9.9" in said
    assert result.export.engines["sglang"].version == "0.9.9" and not result.export.engines["sglang"].proven


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_full_disk_is_one_message_and_leaves_nothing_half_written(trained, tmp_path, engine):
    with tiny_disk(tmp_path / "disk", "64k"):
        with pytest.raises(PipelineError, match="disk is full") as e:
            run_export(trained, tmp_path / "disk" / "export", **{"export.engines": [engine]})
        assert "free some space" in e.value.fix
        assert not list((tmp_path / "disk").rglob("*.safetensors")) and not list((tmp_path / "disk").rglob("*tmp*"))
        assert not (tmp_path / "disk" / "export" / f"building-{engine}").exists()


def test_a_damaged_training_output_is_named(trained, tmp_path):
    shutil.copytree(trained.folder / "train", tmp_path / "train")
    path = tmp_path / "train" / "drafter.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(PipelineError, match="cannot be read"):
        read_trained(tmp_path / "train", trained.manifest)
    (tmp_path / "train" / "config.json").write_text('{"hidden": 1}')
    with pytest.raises(PipelineError, match="does not fit"):
        read_trained(tmp_path / "train", trained.manifest)


def test_nan_in_the_weights_stops_the_export(trained, tmp_path):
    shutil.copytree(trained.folder, tmp_path / "run")
    path = tmp_path / "run" / "train" / "drafter.safetensors"
    weights = load_file(path)
    weights["norm.weight"][3] = float("nan")
    save_file(weights, path)
    target, config = trained.config()
    save_manifest(tmp_path / "run", trained.manifest)
    with pytest.raises(PipelineError, match="norm.weight = 1 values"):
        export(config, target, trained.manifest, tmp_path / "run", tmp_path / "export")


def test_a_target_that_rotates_a_part_of_each_head(tmp_path):
    """GLM: the drafter's layer is Llama's, whose heads both engines rotate whole; trainer, export and validator agree."""
    run = TinyRun(tiny_model(tmp_path / "target", "Glm4MoeForCausalLM"), tmp_path)
    target, config = run.config()
    assert target.text.rope_parameters["partial_rotary_factor"] == 0.5
    check_rope_of_target(config, target)
    rope = drafter_config(config, target, num_fc_inputs=3, draft_vocab_size=128).rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 10000.0}
    drafter, weights = random_drafter(tmp_path, rope_parameters=rope)
    ids = derive_sglang_ids(run.target_dir, [1, 2, 3])
    write_sglang(tmp_path / "d", drafter, weights, ids, dtype="float32", context=2048, target_text=target.text)
    check_rope(drafter, tmp_path / "d")
    assert validate(tmp_path / "d", context=2048, target=run.target_dir).problems == []
