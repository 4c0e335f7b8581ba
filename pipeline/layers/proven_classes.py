"""What runs have shown about SGLang's classes: a stub proves ids, not tensors.

A tiny random model of each class of `PROVEN_CLASSES` was dumped by the engine with every layer, and compared with
transformers. `tests/test_proven_classes.py` measures every entry of both tables anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """What arrives at the capture points of a class."""

    deviation: str | None = None
    """what arrives instead of the residual stream; None: the residual stream, as transformers computes it"""
    last_reached: bool = False
    """whether capture point N delivers too: layer output N-1, with its residual"""


PROVEN_CLASSES: Mapping[str, Proof] = {
    "DeepseekV2ForCausalLM": Proof(),
    "DeepseekV3ForCausalLM": Proof(),
    "Gemma3ForCausalLM": Proof(deviation="the hidden state without the pending residual, not the residual stream"),
    "Gemma4ForCausalLM": Proof(last_reached=True),
    "Glm4MoeForCausalLM": Proof(),
    "Glm4MoeLiteForCausalLM": Proof(),
    "GptOssForCausalLM": Proof(last_reached=True),
    "LlamaForCausalLM": Proof(),
    "MellumForCausalLM": Proof(),
    "Ministral3ForCausalLM": Proof(),
    "MistralForCausalLM": Proof(),
    "Phi3ForCausalLM": Proof(),
    "Qwen2ForCausalLM": Proof(),
    "Qwen2MoeForCausalLM": Proof(),
    "Qwen3ForCausalLM": Proof(),
    "Qwen3MoeForCausalLM": Proof(),
}

NOT_WITHOUT_A_GPU: Mapping[str, str] = {
    "ExaoneMoeForCausalLM": "One of the attention backends in ['fa3', 'triton', 'trtllm_mha'] is required",
    "Llama4ForCausalLM": "expected m1 and m2 to have the same dtype",
    "MiniMaxM2ForCausalLM": "rms_sumsq_serial",
    "Qwen3NextForCausalLM": "No module named 'sgl_kernel.mamba'",
}
"""Classes whose tiny model the engine does not run on a CPU → what it says. They are asked on a stub only."""
