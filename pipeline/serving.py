"""serving.yaml and the launch scripts: how each engine is started on the exported drafter.

The SGLang flags come from `engine.engine_arguments`, which also starts the engine for the dump and the serve check, so
what is launched is what was verified. As a command it prints the environment that SGLang needs on a device:

    eval "$(python -m pipeline.serving --environment cpu)"
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.engine import engine_arguments, prepare_environment, tensor_parallel
from pipeline.files import write_text
from pipeline.manifest import ExportRecord, Manifest
from pipeline.target import EMBEDDED, Target

DRAFT_ATTENTION_BACKENDS = {"hopper": "fa3", "blackwell": "trtllm_mha", "other": "flashinfer"}
"""GPU generation → `--speculative-draft-attention-backend` for targets with latent attention (MLA). The drafter has
ordinary attention and cannot run on the backend it would inherit (sglang issue 23490)."""
_GENERATION_OF_CAPABILITY = {
    "9.*": "hopper",
    "10.*": "blackwell",
    "*": "other",
}  # 12.*, consumer Blackwell, lacks trtllm
_TARGET, _HERE = "@TARGET@", "@HERE@"  # stand for shell variables until the words of a script are quoted
_PORTS = {"sglang": 30000, "vllm": 8000}
_PACKAGES = ("sglang", "speculators", "transformers", "torch")


def target_name(config: Config, target: Target) -> str:
    """What a server is started on: the hub id if the target has one, else the local folder."""
    local = config.target.path == EMBEDDED or Path(config.target.path).is_dir()
    return str(target.path) if local else config.target.path


def is_mla(text_config: Any) -> bool:
    """Whether the target has multi-head latent attention (DeepSeek, Kimi)."""
    return getattr(text_config, "kv_lora_rank", None) is not None


def sglang_command(config: Config, target: Target, *, device: str, model: str, draft: str) -> list[str]:
    """`sglang.launch_server` with every flag that matters.

    Args:
        device: "cpu" or "cuda".
        model, draft: as they shall stand on the command line.
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
        extra=draft_arguments(config.target.quantization) | {"revision": config.target.revision},
    )
    arguments |= {"host": "127.0.0.1", "port": _PORTS["sglang"]}
    flags: list[str] = []
    for name, value in arguments.items():
        if value is False or name in ("log_level", "random_seed"):
            continue
        flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return ["python", "-m", "sglang.launch_server", *flags]


def draft_arguments(quantization: str | None) -> dict[str, str]:
    """The drafter would inherit the target's quantization, which it was not trained with."""
    return {} if quantization is None else {"speculative_draft_model_quantization": "unquant"}


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
    """Write serving.yaml and `launch_<engine>.sh` for every exported engine; returns the files."""
    import yaml

    model, mla = target_name(config, target), is_mla(target.text)
    layers = manifest.fc_layers()
    engines: dict[str, Any] = {name: {"refused": reason} for name, reason in refused.items()}
    written = []
    for name, exported in record.engines.items():

        def command(model: str, draft: str, name: str = name) -> list[str]:
            if name == "sglang":
                return sglang_command(config, target, device=device, model=model, draft=draft)
            return vllm_command(config, target, model=model, draft=draft)

        line = shlex.join(command(model, f"./{name}"))
        backend = name == "sglang" and mla and device == "cuda"
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
            "launch": line + (" --speculative-draft-attention-backend <see below>" if backend else ""),
        } | ({"draft_attention_backend": DRAFT_ATTENTION_BACKENDS} if name == "sglang" and mla else {})
        written.append(
            _write_script(
                folder / f"launch_{name}.sh",
                command(_TARGET, f"{_HERE}/{name}"),
                model=model,
                device=device,
                engine=name,
                choose_backend=backend,
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
        "packages": _versions(),
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
    """A launch script that works from any folder. `command` holds `_TARGET` and `_HERE` in place of the paths."""
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
            lines += ['eval "$("$PYTHON" -m pipeline.serving --environment cpu)"  # SGLang without a GPU']
    if choose_backend:
        lines += ['case "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)" in']
        lines += [
            f"  {capability}) backend={DRAFT_ATTENTION_BACKENDS[generation]} ;;  # {generation}"
            for capability, generation in _GENERATION_OF_CAPABILITY.items()
        ]
        lines += ["esac"]
        words += ["--speculative-draft-attention-backend", '"$backend"']
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
    for stand_in, variable in ((_TARGET, '"$TARGET"'), (_HERE, '"$here"')):
        quoted = quoted.replace(stand_in, close + variable + reopen)
    return quoted


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.serving", description=__doc__.partition("\n")[0])
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
