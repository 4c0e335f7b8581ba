"""Tiny random models with a real tokenizer, for tests that want a whole model folder and the real engine.

    target = tiny_llama(tmp_path / "target")            # fp32 weights, 6 layers, about 1 MB

Same arguments and seed, same bytes. The weights are large (std 0.08) so that layers differ clearly and greedy argmaxes
are decided by more than rounding.
"""

from __future__ import annotations

from pathlib import Path

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


def tiny_llama(
    folder: Path,
    *,
    layers: int = 6,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 128,
    vocab: int = 512,
    max_positions: int = 2048,
    tie_word_embeddings: bool = False,
    std: float = 0.08,
    seed: int = 0,
) -> Path:
    """Save a random Llama (fp32) with tokenizer to `folder` and return it. `head_dim` None means hidden / heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=max_positions,
        rope_theta=10000.0,
        tie_word_embeddings=tie_word_embeddings,
    )
    return _save(folder, LlamaForCausalLM, config, vocab, std, seed)


def tiny_deepseek_v3(
    folder: Path,
    *,
    layers: int = 6,
    hidden: int = 64,
    heads: int = 4,
    vocab: int = 512,
    max_positions: int = 2048,
    experts: int = 4,
    std: float = 0.08,
    seed: int = 0,
) -> Path:
    """Save a random DeepSeek-V3 (fp32: latent attention, one dense layer, then routed and shared experts)."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_shared_experts=1,
        n_routed_experts=experts,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        moe_layer_freq=1,  # this and the next two are in the released config.json; SGLang reads them, transformers not
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=max_positions,
        rope_parameters={  # as in the released models; SGLang's CPU path serves latent attention with YaRN only
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": max_positions // 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        num_mtp_layers=0,
        tie_word_embeddings=False,
    )
    return _save(folder, DeepseekV3ForCausalLM, config, vocab, std, seed)


def _save(folder: Path, model_class, config, vocab: int, std: float, seed: int) -> Path:
    folder = Path(folder)
    tokenizer = tiny_tokenizer(folder, vocab)
    config.architectures = [model_class.__name__]
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:  # norm weights, near one but distinct, so that a forgotten norm shows
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    return folder
