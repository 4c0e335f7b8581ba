"""Products of fp32 matrices on a CPU, by oneDNN instead of MKL.

On CPUs of other makers MKL runs AVX2 code; oneDNN's is AVX-512, twice as fast on Zen 5 (two threads: 490 against 218
GFLOP/s). On Intel's both have AVX-512, and nothing was measured there. Torch hands fp32 products to oneDNN only with the
permission to round factors to bf16 (`torch.backends.mkldnn.matmul.fp32_precision`), which oneDNN makes use of where AMX is
there. So the permission is given for products whose factors may be rounded, and for all where a trial shows that none is.

The permission is the process's. While training runs no other thread multiplies matrices (the loader's only copies). The
processes that SGLang starts on a CPU have it, after the same trial, for good.

`wide_product` is for factors in bf16 whose product is not to be rounded, `wide_dtype` says what such results are kept in.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

_SETTINGS = torch.backends.mkldnn.matmul


@contextlib.contextmanager
def _rounding_allowed(allowed: bool) -> Iterator[None]:
    """Give the permission, or leave it as it is."""
    before = _SETTINGS.fp32_precision
    if allowed:
        _SETTINGS.fp32_precision = "bf16"
    try:
        yield
    finally:
        if allowed:
            _SETTINGS.fp32_precision = before


@contextlib.contextmanager
def fast_fp32(device: str = "cpu") -> Iterator[None]:
    """On a CPU let oneDNN multiply fp32 matrices if it has AVX-512 code that keeps them; elsewhere do nothing.

    Meanwhile `torch.get_float32_matmul_precision`, which knows one setting for all devices, refuses to answer.
    """
    with _rounding_allowed(device == "cpu" and _onednn_keeps_fp32()):
        yield


def use_fast_fp32() -> None:
    """`fast_fp32` for the rest of this process."""
    if _onednn_keeps_fp32():
        _SETTINGS.fp32_precision = "bf16"


def fp32_by_onednn() -> bool:
    """Whether torch hands products of fp32 matrices on a CPU to oneDNN at the moment."""
    return _SETTINGS.fp32_precision == "bf16"


@functools.cache
def _onednn_keeps_fp32() -> bool:
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    fp32 = {"dtype": torch.float32, "device": "cpu"}
    number = 1 + 2**-15  # 1 in bf16; sums of up to 512 of it are exact in fp32
    # Several, since oneDNN chooses its code by the shape.
    shapes = ((32, 64, 64), (512, 512, 1024))
    with _rounding_allowed(True), torch.autocast("cpu", enabled=False):
        products = [torch.full((m, k), a, **fp32) @ torch.full((k, n), b, **fp32) / k
                    for m, k, n in shapes for a, b in ((number, 1), (1, number))]  # fmt: skip
    return all(bool((product == number).all()) for product in products)


def wide_dtype(x: Tensor) -> torch.dtype:
    """What sums over x are kept in: fp64 if x is, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide_product(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """scale · a @ b, [n, i, k] and [n, k, j] → [n, i, j] in fp32, or fp64 if a is. Torch's product of bf16 matrices is bf16.

    Where b is bf16, a may be rounded to bf16. Not under autocast, which would round the result.
    """
    with _rounding_allowed(b.dtype == torch.bfloat16 and b.device.type == "cpu"):
        wide = wide_dtype(a)
        return torch.baddbmm(a.new_zeros((), dtype=wide), a.to(wide), b.to(wide), beta=0, alpha=scale)
