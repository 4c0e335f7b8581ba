"""The target model as the stages see it: facts from its config, its tokenizer, and the few tensors training needs.

Training and standardizing need the embedding, the final norm and the output head. They are read one by one from the
checkpoint's safetensors shards; the model itself is never built here (Kimi-K2.5 has 1T parameters).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import Config, TargetConfig
from pipeline.errors import PipelineError
from pipeline.files import read_json, sha256_file, sha256_json, sha256_text
from pipeline.manifest import TargetRecord

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

EMBEDDED = "embedded:smollm2-135m-instruct"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                    "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt", "chat_template.jinja",
                    "chat_template.json")
# Multimodal wrappers put a prefix before the language model (SpecForge PR 666); DeepSeek's multi-token-prediction layers
# carry embed_tokens and heads of their own below `model.layers.`, which these patterns do not match.
_PREFIX = r"^(?:(?:model|language_model|text_model|transformer)\.)*"
_TENSORS = {
    "embedding": re.compile(_PREFIX + r"(?:embed_tokens|wte|word_embeddings)\.weight$"),
    "final norm": re.compile(_PREFIX + r"(?:norm|final_layernorm|ln_f)\.weight$"),
    "output head": re.compile(_PREFIX + r"(?:lm_head|output)\.weight$"),
}
# Language models whose final norm multiplies by 1 + weight (model types of transformers 5.19).
_CENTRED_NORM = ("gemma", "gemma2", "gemma3_text", "minimax_m3_vl_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next",
                 "step3p5", "vaultgemma")


@dataclass(frozen=True)
class Target:
    """An opened target.

    Attributes:
        path: local folder with config, tokenizer and weights.
        config: the checkpoint's own config (of the wrapper, for multimodal targets).
        record: what the manifest keeps.
        dtype: name of the torch dtype the target computes in, e.g. ``bfloat16``.
    """

    path: Path
    config: PretrainedConfig
    record: TargetRecord
    dtype: str
    trust_remote_code: bool

    @cached_property
    def text(self) -> PretrainedConfig:
        """The language model's part of the config."""
        return self.config.get_text_config()

    @property
    def num_layers(self) -> int:
        return self.record.num_layers

    @property
    def hidden_size(self) -> int:
        return self.record.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.record.vocab_size

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.path, self.trust_remote_code)

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a turn: those of generation_config.json, else of the config, else of the tokenizer."""
        found: list[int] = []
        path = self.path / "generation_config.json"
        if path.exists():
            found = _as_list(read_json(path, fix="repair the target's generation_config.json").get("eos_token_id"))
        found = found or _as_list(getattr(self.text, "eos_token_id", None))
        return found or _as_list(self.tokenizer().eos_token_id)

    @cached_property
    def _tensor_files(self) -> dict[str, str]:
        """Tensor name → file of the checkpoint."""
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            return read_json(index, fix=f"download {self.record.path} again")["weight_map"]
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise PipelineError("the target has no safetensors weights", field="target.path", value=str(self.path),
                                fix="download the safetensors files, or convert .bin files with transformers")
        return {name: f.name for f in files for name in self._open(f).keys()}

    def _open(self, file: Path):
        from safetensors import safe_open

        try:
            return safe_open(file, framework="pt")
        except Exception as e:  # a missing file is an OSError, a truncated one safetensors' own error
            raise PipelineError(f"cannot read {file}: {e}", field="target.path", value=str(self.path),
                                fix="download that file again") from e

    def find_tensor(self, what: str) -> str | None:
        """Name of the checkpoint's tensor for `what`: "embedding", "final norm" or "output head"."""
        names = [n for n in self._tensor_files if _TENSORS[what].match(n)]
        if len(names) > 1:
            raise PipelineError(f"several tensors look like the target's {what}: {names}", field="target.path",
                                value=str(self.path), fix="report this architecture")
        return names[0] if names else None

    def load_tensor(self, what: str, *, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Read one tensor (or some rows of it) from its shard.

        Raises:
            PipelineError: the checkpoint has no such tensor, or its file is damaged.
        """
        if (name := self.find_tensor(what)) is None:
            raise PipelineError(f"the checkpoint has no tensor that looks like the {what}", field="target.path",
                                value=str(self.path), fix=f"names tried: {_TENSORS[what].pattern}")
        tensor = self._open(self.path / self._tensor_files[name]).get_tensor(name)
        return tensor if rows is None else tensor[rows]


@dataclass(frozen=True)
class OutputHead:
    """The target's final norm and output head, for teacher logits.

    Attributes:
        weight: [V or number of rows asked for, H].
        norm_weight: [H], what the final RMS norm multiplies by (1 + the checkpoint's weight in some families).
        logit_scale, softcap: as SGLang applies them (layers/logits_processor.py): scale, then softcap.
    """

    weight: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    logit_scale: float = 1.0
    softcap: float | None = None

    def to(self, device: str | torch.device) -> OutputHead:
        return replace(self, weight=self.weight.to(device), norm_weight=self.norm_weight.to(device))

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final RMS norm to pre-norm hidden states [..., H]; returns fp32."""
        import torch

        x = hidden.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm_eps) * self.norm_weight.float()

    def logits(self, final_hidden: torch.Tensor) -> torch.Tensor:
        """Post-norm final hidden states [..., H] → logits [..., V] in fp32."""
        return self.finish(final_hidden.float() @ self.weight.float().T)

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and softcap raw products."""
        import torch

        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def open_target(config: Config) -> tuple[Target, Config]:
    """Open the configured target and check the configured facts against its checkpoint.

    Returns the target and the configuration with every fact that was null filled in from the checkpoint.

    Raises:
        PipelineError: no such folder or hub id, remote code needed but not allowed, or a fact that differs.
    """
    asked = config.target
    path = local_folder(asked.path, asked.revision, asked.trust_remote_code)
    hf_config = _load_config(path, asked)
    text = hf_config.get_text_config()
    architecture = (hf_config.architectures or [type(hf_config).__name__])[0]
    facts = {
        "architecture": architecture, "num_layers": text.num_hidden_layers, "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size, "max_position_embeddings": text.max_position_embeddings,
    }
    if getattr(text, "rms_norm_eps", None) is None:
        raise PipelineError("the target's final norm is not an RMS norm: neither its final hidden states nor an EAGLE-3 "
                            "drafter can be computed as the engine does", field=f"{path / 'config.json'}: rms_norm_eps",
                            fix="choose a target whose config.json states rms_norm_eps")
    for key, found in facts.items():
        if (value := getattr(asked, key)) is not None and value != found:
            raise PipelineError(f"the target's checkpoint says {key} = {found}, the configuration says {value}",
                                field=f"target.{key}", value=value,
                                fix=f"correct it in conf/target/{asked.name}.yaml, or choose the right target.path")
    dtype = DTYPES.get(asked.dtype) or str(getattr(text, "dtype", None) or "bfloat16").removeprefix("torch.")
    tokenizer = load_tokenizer(path, asked.trust_remote_code)
    if not tokenizer.chat_template:
        raise PipelineError("the target's tokenizer has no chat template", field="target.path", value=str(path),
                            fix="use the instruct model, or put chat_template.jinja into its folder")
    quantization = asked.quantization or (getattr(hf_config, "quantization_config", None) or {}).get("quant_method")
    record = TargetRecord(
        path=asked.path, revision=asked.revision, architecture=architecture, num_layers=facts["num_layers"],
        hidden_size=facts["hidden_size"], vocab_size=facts["vocab_size"], dtype=dtype, quantization=quantization,
        config_sha256=sha256_file(path / "config.json"),
        tokenizer_sha256=sha256_json([(n, sha256_file(path / n)) for n in _TOKENIZER_FILES if (path / n).exists()]),
        chat_template_sha256=sha256_text(json.dumps(tokenizer.chat_template)))
    target = Target(path=path, config=hf_config, record=record, dtype=dtype, trust_remote_code=asked.trust_remote_code)
    return target, _fill(config, target, facts)


def load_output_head(target: Target, rows: torch.Tensor | None = None) -> OutputHead:
    """The final norm and the output head (all of it, or the given rows); tied heads come from the embedding."""
    tied = bool(getattr(target.text, "tie_word_embeddings", False))
    what = "embedding" if tied or target.find_tensor("output head") is None else "output head"
    if what == "embedding" and not tied:
        raise PipelineError("the checkpoint has no output head and its config does not tie it to the embedding",
                            field="target.path", value=str(target.path), fix="download the checkpoint again")
    text = target.text
    scale = getattr(text, "logit_scale", None) or 1.0  # Cohere
    if getattr(text, "logits_scaling", None):          # Granite divides
        scale = 1.0 / text.logits_scaling
    norm_weight = target.load_tensor("final norm")
    if text.model_type in _CENTRED_NORM:
        norm_weight = 1 + norm_weight.float()
    return OutputHead(weight=target.load_tensor(what, rows=rows), norm_weight=norm_weight,
                      norm_eps=text.rms_norm_eps, logit_scale=float(scale),
                      softcap=getattr(text, "final_logit_softcapping", None))


def load_embedding(target: Target) -> torch.Tensor:
    """The token embedding [V, H] as the engine shares it with the drafter: raw, without a family's embedding scale."""
    return target.load_tensor("embedding")


def cache_dir() -> Path:
    """Where prepared targets are kept: $EAGLE3_CACHE, else eagle3-pipeline in the user's cache folder."""
    if path := os.environ.get("EAGLE3_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle3-pipeline"


def local_folder(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """The folder behind a target's configured path, which is fetched from the hub or prepared if need be."""
    if path == EMBEDDED:
        from pipeline.smollm2 import prepare

        return prepare(cache_dir())
    if Path(path).is_dir():
        return Path(path).resolve()
    if path.startswith(("/", ".", "~")) or path.startswith("embedded:"):
        raise PipelineError("the target's folder does not exist", field="target.path", value=path,
                            fix='give a folder, a hub id, or leave the default: ARGS="target=smollm2_135m"')
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"] + (["*.py"] if trust_remote_code else [])
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=wanted))
    except Exception as e:  # the hub client has a dozen error types for "not there" and "no network"
        raise PipelineError(f"cannot fetch the target from the hub: {type(e).__name__}: {str(e).splitlines()[0]}",
                            field="target.path", value=path,
                            fix='check name and network, or give a downloaded folder: ARGS="target.path=/models/…"') from e


def _load_config(path: Path, asked: TargetConfig) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=asked.trust_remote_code)
    except Exception as e:
        hint = "if it needs its own code and you trust it: target.trust_remote_code=true"
        raise PipelineError(f"cannot read the target's config: {str(e).splitlines()[0]}", field="target.path",
                            value=str(path), fix=hint) from e


def load_tokenizer(path: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as e:
        raise PipelineError(f"cannot load the target's tokenizer: {str(e).splitlines()[0]}", field="target.path",
                            value=str(path), fix="if it needs its own code and you trust it: "
                            "target.trust_remote_code=true") from e


def _fill(config: Config, target: Target, facts: dict) -> Config:
    """The configuration with null facts of target and drafter taken from the checkpoint."""
    text = target.text
    heads = text.num_attention_heads
    shape = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "intermediate_size": text.intermediate_size,
    }
    nulls = {k: v for k, v in facts.items() if getattr(config.target, k) is None}
    drafter = {k: v for k, v in shape.items() if getattr(config.drafter, k) is None}
    if config.drafter.max_position_embeddings is None:
        drafter["max_position_embeddings"] = facts["max_position_embeddings"]
    raw = config.model_dump()
    raw["target"] |= nulls
    raw["drafter"] |= drafter
    return Config.model_validate(raw)


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
