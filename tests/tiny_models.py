"""Tiny random models with a real tokenizer, for tests that want a whole model folder and the real engine.

    target = tiny_llama(tmp_path / "target")            # fp32 weights, 6 layers, about 1 MB
    target = tiny_model(tmp_path / "target", "Qwen3MoeForCausalLM")

Same arguments and seed, same bytes. The weights are large (std 0.08) so that layers differ clearly and greedy argmaxes
are decided by more than rounding.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
EOS = "<|im_end|>"

# ChatML without generation tags, like the templates of many real targets.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog while the river runs to the sea.",
    "A draft model proposes several tokens and the target model verifies them in one forward pass.",
    "How many apples are left if Anna has twelve apples and gives five of them to her brother?",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i, add(i, 1))",
    "Please write a short poem about the winter, the snow and the quiet night.",
    "system user assistant: the capital of France is Paris, and the capital of Italy is Rome.",
    "Translate the following sentence into German: where is the next station, please?",
    "In 1969 two people walked on the moon; 3.14159 is close to the ratio of a circle.",
]


def tiny_tokenizer(folder: Path, vocab: int = 512):
    """Train and save a byte-level BPE tokenizer with at most `vocab` ids; any text round-trips. Returns it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_CORPUS * 2, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token=EOS, pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


@dataclass(frozen=True)
class Family:
    """transformers' `model_type` and what a tiny model of it needs beyond `_COMMON` (None: leave that one out)."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)


_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_ROUTED = {  # the names of DeepSeek and GLM for the same, and what SGLang reads of the released config.json beside them
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": None,  # that of the rotated part, says transformers
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_parameters": _YARN,  # as in the released models; SGLang's CPU path serves latent attention with YaRN only
}
_TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}
_MIXED_ATTENTION = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 3}

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family("deepseek_v2", _ROUTED | _LATENT | {
        "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", _ROUTED | _LATENT | {"num_mtp_layers": 0}),
    "ExaoneMoeForCausalLM": Family("exaone_moe", _EXPERTS | {
        "sliding_window": 32, "num_shared_experts": 1, "routed_scaling_factor": 1.0}),
    "Gemma3ForCausalLM": Family("gemma3_text", _MIXED_ATTENTION | {
        "rope_parameters": _TWO_ROPES, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "Gemma4ForCausalLM": Family("gemma4_text", _MIXED_ATTENTION | {
        "rope_parameters": _TWO_ROPES, "global_head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True}),
    "Glm4MoeForCausalLM": Family("glm4_moe", _ROUTED | {
        "use_qk_norm": True, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    # transformers normalises the latents with 1e-6 whatever the config says; SGLang reads the config.
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", _ROUTED | _LATENT | {"rms_norm_eps": 1e-6}),
    "GptOssForCausalLM": Family("gpt_oss", _MIXED_ATTENTION | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Llama4ForCausalLM": Family("llama4_text", {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 512, "no_rope_layer_interval": 4}),
    "LlamaForCausalLM": Family("llama"),
    "MellumForCausalLM": Family("mellum", _EXPERTS | _MIXED_ATTENTION | {"rope_parameters": _TWO_ROPES}),
    "MiniMaxM2ForCausalLM": Family("minimax_m2", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16, "scoring_func": "sigmoid",
        "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}),
    "Ministral3ForCausalLM": Family("ministral3", {
        "sliding_window": None, "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}}),
    "MistralForCausalLM": Family("mistral", {"sliding_window": None}),
    "Phi3ForCausalLM": Family("phi3", {"sliding_window": None, "head_dim": None}),
    "Qwen2ForCausalLM": Family("qwen2", {"head_dim": None}),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 64, "head_dim": None}),
    "Qwen3ForCausalLM": Family("qwen3"),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _EXPERTS),
    "Qwen3NextForCausalLM": Family("qwen3_next", _EXPERTS | {
        "shared_expert_intermediate_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 3,
        "full_attention_interval": 2}),
}
"""SGLang's class → the family; transformers calls its class the same."""


def tiny_model(folder: Path, architecture: str, *, std: float = 0.08, seed: int = 0, **changes: Any) -> Path:
    """Save a random model (fp32) with tokenizer to `folder` and return it.

    Args:
        architecture: a key of `FAMILIES`.
        changes: config values other than the table's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    family = FAMILIES[architecture]
    values = {name: value for name, value in (_COMMON | family.config | changes).items() if value is not None}
    config = AutoConfig.for_model(family.model_type, **copy.deepcopy(values))  # transformers fills nested dicts in place
    folder = Path(folder)
    tokenizer = tiny_tokenizer(folder, config.vocab_size)
    config.architectures = [architecture]
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1 and not name.endswith("bias"):
                # Norm weights, near one but distinct, so that a forgotten norm shows. Attention sinks are among them, which
                # SGLang keeps in bf16.
                parameter.copy_((1 + 0.1 * torch.randn(parameter.shape, generator=generator)).bfloat16())
            else:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    return folder


def tiny_llama(folder: Path, *, layers: int = 6, hidden: int = 64, heads: int = 4, kv_heads: int = 2,
               head_dim: int | None = None, intermediate: int = 128, vocab: int = 512, max_positions: int = 2048,
               tie_word_embeddings: bool = False, std: float = 0.08, seed: int = 0) -> Path:
    """`tiny_model` of the Llama family, with the shapes that tests vary. `head_dim` None means hidden / heads."""
    return tiny_model(
        folder, "LlamaForCausalLM", std=std, seed=seed, num_hidden_layers=layers, hidden_size=hidden,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim or hidden // heads,
        intermediate_size=intermediate, vocab_size=vocab, max_position_embeddings=max_positions,
        tie_word_embeddings=tie_word_embeddings)


def tiny_deepseek_v3(folder: Path, *, seed: int = 0) -> Path:
    """`tiny_model` of DeepSeek-V3: latent attention, one dense layer, then routed and shared experts."""
    return tiny_model(folder, "DeepseekV3ForCausalLM", seed=seed)
