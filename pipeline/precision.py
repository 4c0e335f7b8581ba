"""In which precision this machine computes fastest: what `auto` means where a precision is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pipeline.config import Config


def bf16_is_faster(device: torch.device) -> bool:
    """Whether products in bf16 take less time than in fp32.

    On a CPU without instructions for them (AVX512_BF16, AMX) they take about twice as long. Measured with AVX512_BF16, on one
    Zen 4 core: products 2.3 times as fast (190 against 80 GFLOP/s by MKL), a training step of the demo 1.4 times; on two Zen
    5 cores, fp32 by oneDNN (`pipeline.products`): 1.9 times (938 against 490 GFLOP/s), a step 1.25 times. GPUs older than Ampere
    (V100, T4) have none either, and flash attention does not run on them.
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def respond_dtype(config: Config, engine: str) -> str:
    """`prompts.respond_dtype` with auto resolved: "target", "fp32", "bf16" or "fp16".

    Args:
        engine: what answers, see `prompts.respond.engine_name`.
    """
    import torch

    from pipeline.engines.engine import resolve_device

    if (asked := config.prompts.respond_dtype) != "auto":
        return asked
    device = torch.device(resolve_device(config.device))
    return "bf16" if engine == "transformers" and device.type == "cpu" and bf16_is_faster(device) else "target"
