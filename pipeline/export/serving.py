"""serving.yaml and the launch scripts: how each engine is started on the exported drafter.

The SGLang flags come from `engine.engine_arguments` and `draft_arguments`, which also start the engine for the serve
check: quantization and attention backends of what is launched are those of what was verified. Two things may differ by
configuration: the shape of the drafts (export.draft_steps and topk; the check drafts a chain of verify.draft_steps) and,
on a CPU, the type (the check computes in fp32, where greedy text is reproducible).

As a command it prints the environment that SGLang needs on a device:

    eval "$(python -m pipeline.export.serving --environment cpu)"
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.engines.engine import engine_arguments, prepare_environment, tensor_parallel
from pipeline.files import write_text
from pipeline.manifest import ExportRecord, Manifest
from pipeline.stage import package_versions
from pipeline.target import EMBEDDED, Target

DRAFT_ATTENTION_BACKENDS = {"hopper": "fa3", "blackwell": "trtllm_mha", "other": "flashinfer"}
"""GPU generation → `--speculative-draft-attention-backend` for targets with latent attention (MLA). The drafter has
ordinary attention and cannot run on the backend it would inherit (sglang issue 23490)."""
_GENERATIONS = {"9.*": "hopper", "10.*": "blackwell", "*": "other"}
"""Compute capability, as a shell pattern → GPU generation. 12.*, consumer Blackwell, lacks the trtllm kernels."""
_TARGET, _HERE, _BACKEND = "@TARGET@", "@HERE@", "@BACKEND@"  # stand for shell variables until a script is quoted
_PORTS = {"sglang": 30000, "vllm": 8000}
_PACKAGES = ("sglang", "speculators", "transformers", "torch")


def target_name(config: Config, target: Target) -> str:
    """What a server is started on: the hub id if the target has one, else the local folder."""
    local = config.target.path == EMBEDDED or Path(config.target.path).is_dir()
    return str(target.path) if local else config.target.path


def is_mla(text_config: Any) -> bool:
    """Whether the target has multi-head latent attention (DeepSeek, Kimi)."""
    return getattr(text_config, "kv_lora_rank", None) is not None


def needs_draft_backend(target: Target, device: str) -> bool:
    """Whether the drafter must be given an attention backend of its own."""
    return device == "cuda" and is_mla(target.text)


def draft_backend_here() -> str:
    """The draft attention backend for this machine's GPU."""
    import torch

    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    generation = next(g for pattern, g in _GENERATIONS.items() if fnmatch.fnmatch(capability, pattern))
    return DRAFT_ATTENTION_BACKENDS[generation]


def draft_arguments(
    target: Target, quantization: str | None, device: str, *, backend: str | None = None
) -> dict[str, str]:
    """`ServerArgs` fields that keep the drafter from inheriting what is right for the target only.

    Args:
        quantization: asked for the target; the drafter was trained without.
        device: "cpu" or "cuda".
        backend: draft attention backend where the target needs one; None: the one for this machine's GPU.
    """
    arguments = {} if quantization is None else {"speculative_draft_model_quantization": "unquant"}
    if needs_draft_backend(target, device):
        arguments["speculative_draft_attention_backend"] = backend or draft_backend_here()
    return arguments


def sglang_command(
    config: Config, target: Target, *, device: str, model: str, draft: str, backend: str | None = None
) -> list[str]:
    """`sglang.launch_server` with every flag that matters.

    Args:
        device: "cpu" or "cuda".
        model, draft: as they shall stand on the command line.
        backend: draft attention backend, for targets that need one (see `draft_arguments`).
    """
    arguments = engine_arguments(
        model,
        device=device,
        dtype=target.dtype,
        tp_size=tensor_parallel(config, device, check=False),
        context_length=config.export.served_context,
        draft_path=draft,
        draft_steps=config.export.draft_steps,
        topk=config.export.topk,
        draft_tokens=config.export.draft_tokens,
        quantization=config.target.quantization,
        trust_remote_code=target.trust_remote_code,
        mem_fraction_static=config.dump.mem_fraction_static,
        extra=draft_arguments(target, config.target.quantization, device, backend=backend)
        | {"revision": config.target.revision},
    )
    arguments |= {"host": "127.0.0.1", "port": _PORTS["sglang"]}
    flags: list[str] = []
    for name, value in arguments.items():
        if value is False or name in ("log_level", "random_seed"):
            continue
        flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return ["python", "-m", "sglang.launch_server", *flags]


def vllm_command(config: Config, target: Target, *, model: str, draft: str) -> list[str]:
    """`vllm serve` with every flag that matters. vLLM drafts a chain, so there is no tree to describe."""
    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": config.export.draft_steps}
    flags = [
        "--dtype",
        target.dtype,
        "--tensor-parallel-size",
        str(tensor_parallel(config, "cuda", check=False)),
        "--host",
        "127.0.0.1",
        "--port",
        str(_PORTS["vllm"]),
        "--speculative-config",
        json.dumps(speculative),
    ]
    options = {
        "--revision": config.target.revision,
        "--quantization": config.target.quantization,
        "--max-model-len": config.export.served_context,
    }
    for flag, value in options.items():
        flags += [] if value is None else [flag, str(value)]
    return ["vllm", "serve", model, *flags, *(["--trust-remote-code"] if target.trust_remote_code else [])]


def write_serving(
    folder: Path,
    config: Config,
    target: Target,
    manifest: Manifest,
    record: ExportRecord,
    refused: dict[str, str],
    *,
    device: str,
) -> list[Path]:
    """Write serving.yaml and `launch_<engine>.sh` for every exported engine; returns the files.

    `launch` in serving.yaml is a command line, or one per GPU generation where they differ; the script chooses.
    """
    import yaml

    model = target_name(config, target)
    layers = manifest.fc_layers()
    engines: dict[str, Any] = {name: {"refused": reason} for name, reason in refused.items()}
    written = []
    for name, exported in record.engines.items():

        def command(model: str, draft: str, backend: str | None = None, name: str = name) -> list[str]:
            if name == "sglang":
                return sglang_command(config, target, device=device, model=model, draft=draft, backend=backend)
            return vllm_command(config, target, model=model, draft=draft)

        choose = name == "sglang" and needs_draft_backend(target, device)
        launch: str | dict[str, str]
        if choose:
            launch = {g: shlex.join(command(model, f"./{name}", b)) for g, b in DRAFT_ATTENTION_BACKENDS.items()}
        else:
            launch = shlex.join(command(model, f"./{name}"))
        engines[name] = {
            "drafter": name,
            "ids": exported.ids,
            "capture_points": exported.capture_points,
            "layer_outputs": [p - 1 for p in exported.capture_points],
            "derived": {
                "rule_source": exported.rule_source,
                "model_class": exported.model_class,
                "engine_version": exported.version,
                "proven": exported.proven,
                "validated_by": exported.validated_by,
            },
            "launch_script": f"launch_{name}.sh",
            "launch": launch,
        }
        written.append(
            _write_script(
                folder / f"launch_{name}.sh",
                command(_TARGET, f"{_HERE}/{name}", _BACKEND),
                model=model,
                device=device,
                engine=name,
                choose_backend=choose,
            )
        )
    content = {
        "version": 1,
        "run": manifest.run,
        "target": {
            "path": model,
            **manifest.target.model_dump(include={"revision", "architecture", "dtype", "quantization"}),
        },
        "wiring": {f"fc.{i}": f"layer output {layer}" for i, layer in enumerate(layers)}
        | {"teacher": f"final hidden, {manifest.slots['teacher'].norm}-norm"},
        "engines": engines,
        "packages": dict.fromkeys(_PACKAGES, "not installed") | package_versions(_PACKAGES),
    }
    header = (
        "# How to serve this drafter. Written by stage 5 from manifest.json; to change it, export again.\n"
        "# Paths in `launch` are relative to this folder; the scripts can be started from anywhere.\n"
    )
    path = folder / "serving.yaml"
    write_text(path, header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=10_000))
    return [*written, path]


def _write_script(
    path: Path, command: list[str], *, model: str, device: str, engine: str, choose_backend: bool
) -> Path:
    """A launch script that works from any folder. `command` holds `_TARGET`, `_HERE` and `_BACKEND` for variables."""
    words = [_shell_word(word) for word in command]
    lines = [
        "#!/usr/bin/env bash",
        f"# Serve the target with the drafter in {engine}/ beside this script. Further flags are handed on.",
        "set -euo pipefail",
        'here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"',
        f"TARGET=${{TARGET:-{shlex.quote(model)}}}",
    ]
    if engine == "sglang":
        lines += [
            f'PYTHON="${{PYTHON:-{sys.executable}}}"  # the interpreter that exported',
            'command -v "$PYTHON" >/dev/null || PYTHON=python3',
        ]
        words = ['"$PYTHON"', *words[1:]]
        if device == "cpu":
            lines += ['eval "$("$PYTHON" -m pipeline.export.serving --environment cpu)"  # SGLang without a GPU']
    if choose_backend:
        lines += ['case "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)" in']
        lines += [
            f"  {capability}) backend={DRAFT_ATTENTION_BACKENDS[generation]} ;;  # {generation}"
            for capability, generation in _GENERATIONS.items()
        ]
        lines += ["esac"]
    flags = next(i for i, word in enumerate(words) if word.startswith("--"))
    head, rest = words[:flags], words[flags:]
    grouped: list[str] = []
    for word in rest:
        if word.startswith("--"):
            grouped.append(word)
        else:
            grouped[-1] += f" {word}"
    lines += ["exec " + " \\\n  ".join([" ".join(head), *grouped, '"$@"'])]
    write_text(path, "\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def _shell_word(word: str) -> str:
    """Quote a word for the shell, with the variables put in where their stand-ins are."""
    quoted = shlex.quote(word)
    close, reopen = ("'", "'") if quoted.startswith("'") else ("", "")
    for stand_in, variable in ((_TARGET, '"$TARGET"'), (_HERE, '"$here"'), (_BACKEND, '"$backend"')):
        quoted = quoted.replace(stand_in, close + variable + reopen)
    return quoted


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.export.serving", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--environment",
        choices=("cpu", "cuda"),
        required=True,
        help="print the variables SGLang needs there, as shell exports",
    )
    args = parser.parse_args(argv)
    before = dict(os.environ)
    prepare_environment(args.environment)
    for name, value in os.environ.items():
        if before.get(name) != value:
            print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
