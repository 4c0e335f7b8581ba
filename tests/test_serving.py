"""Launch lines, checked by the engine's own argument parser, and the scripts around them."""

import json
import shlex
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from pipeline.errors import PipelineError
from pipeline.export.serving import (
    DRAFT_ATTENTION_BACKENDS,
    draft_arguments,
    sglang_command,
    vllm_command,
    write_serving,
)
from pipeline.manifest import EngineExport, ExportRecord, Manifest, TargetRecord, bind_slots
from pipeline.target import Target
from pipeline.verify import serve_check
from pipeline.verify.checks import Subject
from tests.tiny_run import tiny_config


def setting(tmp_path, *, mla=False, **overrides):
    """(config, target, manifest, record) of a run that exported both engines, without weights."""
    facts = TargetRecord(
        path="org/model",
        architecture="LlamaForCausalLM",
        num_layers=8,
        hidden_size=64,
        vocab_size=512,
        dtype="bfloat16",
        config_sha256="",
        tokenizer_sha256="",
        chat_template_sha256="",
    )
    text = SimpleNamespace(kv_lora_rank=16) if mla else SimpleNamespace()
    hf = SimpleNamespace(get_text_config=lambda: text)
    target = Target(
        path=tmp_path,
        config=hf,
        record=facts,
        dtype="bfloat16",
        trust_remote_code=overrides.get("target.trust_remote_code", False),
    )
    config = tiny_config("org/model", tmp_path, **overrides)
    record = ExportRecord(
        engines={
            "sglang": EngineExport(
                version="0.5.23",
                ids=[1, 3, 5],
                capture_points=[2, 4, 6],
                model_class="LlamaForCausalLM",
                rule_source="here",
                proven=True,
            ),
            "vllm": EngineExport(
                version="not asked", ids=[2, 4, 6], capture_points=[2, 4, 6], rule_source="there", proven=False
            ),
        }
    )
    return config, target, Manifest(run="r", target=facts, slots=bind_slots([1, 3, 5], 64)), record


def parsed(words: list[str]):
    """What the installed SGLang makes of a launch line."""
    import argparse

    from pipeline.engines.engine import prepare_environment

    prepare_environment("cpu")
    from sglang.srt.server_args import ServerArgs

    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(words[3:])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sglang_understands_every_flag(tmp_path, device):
    config, target, *_ = setting(
        tmp_path,
        **{
            "target.tp_size": 8,
            "export.draft_steps": 5,
            "export.topk": 4,
            "export.draft_tokens": 16,
            "export.served_context": 4096,
            "dump.mem_fraction_static": 0.8,
            "target.quantization": "fp8",
            "target.trust_remote_code": True,
            "target.revision": "abc",
        },
    )
    args = parsed(sglang_command(config, target, device=device, model="org/model", draft="./sglang"))
    assert (args.speculative_algorithm, args.speculative_draft_model_path) == ("EAGLE3", "./sglang")
    assert (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens) == (5, 4, 16)
    assert (args.model_path, args.revision, args.dtype, args.tp_size) == (
        "org/model",
        "abc",
        "bfloat16",
        8 if device == "cuda" else 1,
    )
    assert (args.host, args.port, args.trust_remote_code, args.device) == ("127.0.0.1", 30000, True, device)
    assert (args.context_length, args.mem_fraction_static) == (4096, 0.8)
    # the drafter was trained unquantized and would inherit the target's quantization
    assert (args.quantization, args.speculative_draft_model_quantization) == ("fp8", "unquant")
    assert (args.attention_backend == "intel_amx") == (device == "cpu")


def test_nothing_is_trusted_or_quantized_unasked(tmp_path):
    config, target, *_ = setting(tmp_path)
    line = sglang_command(config, target, device="cuda", model="m", draft="d")
    assert not {"--trust-remote-code", "--quantization", "--speculative-draft-model-quantization", "--revision"} & set(
        line
    )
    assert "--trust-remote-code" not in vllm_command(config, target, model="m", draft="d")


def test_draft_attention_backends_exist_in_the_installed_sglang():
    from pipeline.engines.engine import prepare_environment

    prepare_environment("cpu")
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES

    assert set(DRAFT_ATTENTION_BACKENDS.values()) <= set(DRAFT_ATTENTION_BACKEND_CHOICES)


def test_serving_yaml_names_every_wire(tmp_path):
    write_serving(tmp_path, *setting(tmp_path), {}, device="cuda")
    found = yaml.safe_load((tmp_path / "serving.yaml").read_text())
    assert found["wiring"] == {
        "fc.0": "layer output 1",
        "fc.1": "layer output 3",
        "fc.2": "layer output 5",
        "teacher": "final hidden, post-norm",
    }
    assert found["engines"]["sglang"]["ids"] == found["engines"]["sglang"]["layer_outputs"] == [1, 3, 5]
    assert found["engines"]["vllm"]["ids"] == [2, 4, 6] and found["engines"]["vllm"]["layer_outputs"] == [1, 3, 5]
    assert found["engines"]["sglang"]["derived"]["rule_source"] == "here"
    assert parsed(shlex.split(found["engines"]["sglang"]["launch"])).speculative_draft_model_path == "./sglang"
    assert "draft-attention-backend" not in found["engines"]["sglang"]["launch"]
    assert set(found["packages"]) == {"sglang", "speculators", "transformers", "torch"}


def test_a_refused_engine_says_why(tmp_path):
    config, target, manifest, record = setting(tmp_path)
    del record.engines["vllm"]
    files = write_serving(tmp_path, config, target, manifest, record, {"vllm": "because"}, device="cuda")
    assert yaml.safe_load((tmp_path / "serving.yaml").read_text())["engines"]["vllm"] == {"refused": "because"}
    assert [f.name for f in files] == ["launch_sglang.sh", "serving.yaml"]


def words_started(script, tmp_path, *extra: str, compute_cap: str = "9.0", **env) -> list[str]:
    """Run a launch script with stand-ins for python, vllm and nvidia-smi that print what they are started with."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, body in (
        ("show", 'printf "%s\\n" "$@"'),
        ("vllm", 'printf "%s\\n" vllm "$@"'),
        ("nvidia-smi", f"echo {compute_cap}"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    done = subprocess.run(
        [str(script), *extra],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env={"PATH": f"{tools}:/usr/bin:/bin", "PYTHON": str(tools / "show"), **env},
    )
    return done.stdout.splitlines()


def test_scripts_start_the_engines_from_anywhere(tmp_path):
    folder = tmp_path / "with space"
    write_serving(folder, *setting(tmp_path), {}, device="cuda")
    words = words_started(folder / "launch_sglang.sh", tmp_path, "--port", "30001")
    args = parsed(["python", *words])
    assert (args.model_path, args.speculative_draft_model_path, args.port) == ("org/model", f"{folder}/sglang", 30001)
    assert "--speculative-draft-attention-backend" not in words
    assert (
        parsed(["python", *words_started(folder / "launch_sglang.sh", tmp_path, TARGET="/models/x y")]).model_path
        == "/models/x y"
    )
    words = words_started(folder / "launch_vllm.sh", tmp_path)
    assert words[:3] == ["vllm", "serve", "org/model"]
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative == {"method": "eagle3", "model": f"{folder}/vllm", "num_speculative_tokens": 3}
    for name in ("sglang", "vllm"):
        assert "set -euo pipefail" in (folder / f"launch_{name}.sh").read_text()


@pytest.mark.parametrize("changes", [{"export.topk": 4}, {"export.draft_tokens": 7}], ids=str)
def test_drafts_that_sglang_would_change_or_not_start_with_are_refused(tmp_path, changes):
    """A tree without a size, and a chain with another size than it has, which SGLang overrides with a warning."""
    with pytest.raises(PipelineError, match="draft_tokens"):
        setting(tmp_path, **changes)


GPUS = [("9.0", "fa3"), ("10.0", "trtllm_mha"), ("12.0", "flashinfer"), ("8.9", "flashinfer")]


@pytest.mark.parametrize("compute_cap, backend", GPUS)
def test_the_serve_check_drafts_as_the_script_does(tmp_path, monkeypatch, compute_cap, backend):
    capability = tuple(map(int, compute_cap.split(".")))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    config, target, manifest, _ = setting(tmp_path, mla=True, **{"target.quantization": "fp8"})
    asked = {}
    monkeypatch.setattr(serve_check, "resolve_device", lambda device: "cuda")
    monkeypatch.setattr(serve_check, "tensor_parallel", lambda config, device: 1)
    monkeypatch.setattr(serve_check, "heldout_prompts", lambda path, count: [[1]])

    def serve(*args, draft_options, **options):
        asked.update(draft_options)
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_check, "serve", serve)
    with pytest.raises(KeyboardInterrupt):
        serve_check.serve_check(Subject(config, target, manifest, tmp_path, tmp_path, draft=tmp_path))
    assert asked == {"speculative_draft_model_quantization": "unquant", "speculative_draft_attention_backend": backend}
    line = sglang_command(config, target, device="cuda", model="m", draft="d", backend=backend)
    args = parsed(line)
    assert {name: getattr(args, name) for name in asked} == asked


def test_only_latent_attention_on_a_gpu_needs_a_draft_backend(tmp_path):
    for mla, device in ((True, "cpu"), (False, "cuda"), (False, "cpu")):
        assert draft_arguments(setting(tmp_path, mla=mla)[1], None, device) == {}


@pytest.mark.parametrize("compute_cap, backend", GPUS)
def test_mla_targets_get_a_draft_attention_backend_of_their_gpu(tmp_path, compute_cap, backend):
    """sglang 23490: the drafter cannot run on the latent-attention backend that it would inherit."""
    write_serving(tmp_path, *setting(tmp_path, mla=True), {}, device="cuda")
    words = words_started(tmp_path / "launch_sglang.sh", tmp_path, compute_cap=compute_cap)
    assert parsed(["python", *words]).speculative_draft_attention_backend == backend
    launch = yaml.safe_load((tmp_path / "serving.yaml").read_text())["engines"]["sglang"]["launch"]
    assert set(launch) == {"hopper", "blackwell", "other"}
    for generation, line in launch.items():  # each is a whole line
        found = parsed(shlex.split(line)).speculative_draft_attention_backend
        assert found == DRAFT_ATTENTION_BACKENDS[generation]
    assert any(parsed(shlex.split(line)).speculative_draft_attention_backend == backend for line in launch.values())
