"""SGLang plugin: EAGLE, attention sinks, DeepSeek-type and Qwen2-MoE targets, for engines without a GPU.

Stock SGLang 0.5.23 has gaps on its `torch_native` attention backend. `DraftBackendFactory` knows no draft backend of that
name ("EAGLE is not supported in decode attention backend torch_native"); the backend's prefill path reads fields that a
verify batch does not carry, ignores the draft tree's mask and takes no attention sinks (gpt-oss); multi-head latent
attention (MLA) is sent to a chunked prefill that this backend lacks; and Qwen2-MoE's gated shared expert is a Triton kernel.
`register` is the entry point (group `sglang.srt.plugins`) that SGLang calls in every process.

In the processes that SGLang starts it also lets oneDNN multiply fp32 matrices (see `pipeline.products`): the demo's dump
takes two thirds of the time on Zen 5.
"""

from __future__ import annotations

import multiprocessing
import os

_BACKEND = "torch_native"


def register() -> None:
    """Fill the gaps, only where SGLang's CPU engine is switched on."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    if multiprocessing.parent_process() is not None:  # the caller's own process goes on as it was
        _multiply_fast()
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_attention_backend(_BACKEND)(_target_backend)
    # Absorbed MLA reads the latent cache as one shared key/value head, which is plain attention.
    AttentionBackendRegistry.register(_BACKEND, lambda attention, forward_batch: AttnForwardMethod.MLA)
    HookRegistry.register(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", _create_draft_backend, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add", add_gated, HookType.REPLACE
    )


def _multiply_fast() -> None:
    """Bound oneDNN's caches, then let it multiply fp32. To be called before the process's first product: oneDNN reads the
    bounds once."""
    from pipeline.products import use_fast_fp32

    # Hardly any two prefills have the same number of tokens, and the code for a thousand shapes would be kept: 0.8 GB.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's own, and ideep's around it
        os.environ.setdefault(cache, "128")
    use_fast_fp32()


def add_gated(hidden_states, gate_weight, shared_output, final_hidden_states) -> None:
    """final_hidden_states [T, H] += sigmoid(hidden_states [T, H] · gate_weight [H]) · shared_output [T, H], in fp32."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
    final_hidden_states.copy_(final_hidden_states.float() + gate[:, None] * shared_output.float())


def _target_backend(model_runner):
    from pipeline.sglang_cpu.torch_native_eagle import EagleTorchNativeBackend

    return EagleTorchNativeBackend(model_runner)


def _create_draft_backend(create, factory, backend_name, backend_map, error_template, stamps_children=False):
    """Around `DraftBackendFactory._create_backend`: add our entry to its table of constructors.

    `stamps_children` is true for the container of one backend per draft step, false for the draft-extend backend.
    """
    from pipeline.sglang_cpu.torch_native_eagle import EagleTorchNativeBackend, MultiStepDraftBackend

    def build():
        runner = factory.draft_model_runner
        if stamps_children:
            return _BACKEND, MultiStepDraftBackend(runner, factory.topk, factory.speculative_num_steps)
        return _BACKEND, EagleTorchNativeBackend(runner)

    return create(factory, backend_name, backend_map | {_BACKEND: build}, error_template, stamps_children)
