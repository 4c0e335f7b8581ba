"""What a drafter directory holds: the names, shapes and config fields that SGLang's `models/llama_eagle3.py` reads.

Two layouts: SGLang's (flat config, `LlamaForCausalLMEagle3`) and speculators' (nested layer config, ids as capture
points at the top level), which vLLM serves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError

ARCHITECTURE = "LlamaForCausalLMEagle3"
MIDLAYER = "midlayer."
OTHER_SPELLINGS = ("model.layers.0.", "layers.0.", "model.midlayer.")
"""Names of the decoder layer in other people's files; the engines load them as well."""
SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "draft_vocab_size",
)
"""The config fields that decide every tensor's shape."""


def read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """The config, flattened, and its layout: "sglang" or "speculators".

    Raises:
        PipelineError: there is no readable config.json.
    """
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        if not isinstance(raw, dict):
            raise ValueError(f"it holds a {type(raw).__name__}, not an object")
        json.dumps(raw, ensure_ascii=False).encode()  # half a character, which nobody could write back
        for key in ("eagle_config", "rope_parameters", "rope_scaling", "transformer_layer_config"):
            if not isinstance(raw.get(key, {}), dict | None):
                raise ValueError(f"{key} = {raw[key]!r} is not an object")
    except (OSError, ValueError, RecursionError) as e:
        raise PipelineError(
            f"{path} cannot be read: {e}", field=str(path), fix="name the folder of a drafter, or make export"
        ) from e
    if "speculators_model_type" not in raw:
        return raw, "sglang"
    return {**(raw.pop("transformer_layer_config", None) or {}), **raw}, "speculators"


def _refuse_constant(word: str) -> None:
    raise ValueError(f"it holds {word}, which is no JSON")


def read_tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of the folder's safetensors files, as named there, in the order of the files.

    Raises:
        PipelineError: there is none, or one is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise PipelineError(
            f"{folder} holds no safetensors file",
            field=str(folder),
            fix="make export; a .bin checkpoint must be converted to safetensors first",
        )
    tensors: dict[str, Any] = {}
    for path in files:
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as e:
            raise PipelineError(f"{path} cannot be read: {e}", field=str(path), fix="make export") from e
        if twice := sorted(tensors.keys() & found.keys()):
            raise PipelineError(f"{path} holds {twice[0]}, as another file of the folder does: which one an engine keeps is its "
                                "own affair", field=twice[0], value=path.name, fix="remove one of the files, or make export")
        tensors |= found
    return tensors


def expected_tensors(config: dict[str, Any], num_aux: int, layout: str) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape, as SGLang's llama_eagle3.py builds them for this config."""
    hidden, heads, kv, head_dim, mlp, target_vocab, vocab = (config[name] for name in SIZES)
    expected = {
        "fc.weight": (hidden, num_aux * hidden),
        f"{MIDLAYER}input_layernorm.weight": (hidden,),
        f"{MIDLAYER}hidden_norm.weight": (hidden,),
        f"{MIDLAYER}self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        f"{MIDLAYER}self_attn.k_proj.weight": (kv * head_dim, 2 * hidden),
        f"{MIDLAYER}self_attn.v_proj.weight": (kv * head_dim, 2 * hidden),
        f"{MIDLAYER}self_attn.o_proj.weight": (hidden, heads * head_dim),
        f"{MIDLAYER}post_attention_layernorm.weight": (hidden,),
        f"{MIDLAYER}mlp.gate_proj.weight": (mlp, hidden),
        f"{MIDLAYER}mlp.up_proj.weight": (mlp, hidden),
        f"{MIDLAYER}mlp.down_proj.weight": (hidden, mlp),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    if layout == "sglang" or vocab != target_vocab:  # speculators keeps no map for a full vocabulary
        expected |= {"d2t": (vocab,), "t2d": (target_vocab,)}
    if norm_before_fc(config):
        expected["input_norm.weight"] = (num_aux * hidden,)
    if config.get("fc_norm"):
        expected |= {f"fc_norm.{i}.weight": (hidden,) for i in range(num_aux)}
    return expected


def are_layer_ids(ids: Any) -> bool:
    """Whether this is what a config lists as layer ids: one or more whole numbers."""
    return isinstance(ids, list) and bool(ids) and all(type(i) is int for i in ids)


def norm_before_fc(config: dict) -> bool:
    """Whether SGLang builds `input_norm`: it reads the nested key first, then the top-level one."""
    return bool((config.get("eagle_config") or {}).get("norm_before_fc", config.get("norm_before_fc", False)))


def rope_parameters_of(config: dict) -> dict[str, Any]:
    """transformers 5's `rope_parameters` of a config.json in either spelling; only what the file states.

    Targets with several kinds of layers (Gemma 3) state one entry per kind: the drafter's layer has full attention. How
    much of a head the target rotates (GLM) is left out: engines rotate a drafter's heads whole.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters = dict(parameters.get("full_attention", parameters))
    if "rope_theta" in config:
        parameters.setdefault("rope_theta", config["rope_theta"])
    old_type = parameters.pop("type", "default")
    parameters.pop("partial_rotary_factor", None)
    return {"rope_type": old_type} | parameters


def cast(weights: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Floating-point tensors in `dtype`, `d2t` and `t2d` as they are."""
    import torch

    to = getattr(torch, dtype)
    return {name: (t.to(to) if t.is_floating_point() else t).contiguous() for name, t in weights.items()}
