"""Products of fp32 matrices on a CPU, by oneDNN where that is faster.

Torch multiplies fp32 matrices with MKL, which on CPUs of other makers runs AVX2 code; oneDNN's is AVX-512, twice as fast
on Zen 5 (two threads: 500 against 225 GFLOP/s). Torch hands it such products only with the permission to round their
factors to bf16 (`torch.backends.mkldnn.matmul.fp32_precision`, a setting of the process), which oneDNN makes use of where
AMX is there. So the permission is given for factors that are bf16 numbers already, and for all where a trial shows that
nothing is rounded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

_SETTINGS = torch.backends.mkldnn.matmul


@contextlib.contextmanager
def _rounding_allowed() -> Iterator[None]:
    before, _SETTINGS.fp32_precision = _SETTINGS.fp32_precision, "bf16"
    try:
        yield
    finally:
        _SETTINGS.fp32_precision = before


@contextlib.contextmanager
def fast_fp32() -> Iterator[None]:
    """Let oneDNN multiply fp32 matrices if it has AVX-512 code for them that computes in fp32."""
    with _rounding_allowed() if _onednn_keeps_fp32() else contextlib.nullcontext():
        yield


def fp32_is_fast() -> bool:
    """Whether oneDNN multiplies fp32 matrices at the moment."""
    return _SETTINGS.fp32_precision == "bf16"


@functools.cache
def _onednn_keeps_fp32() -> bool:
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    number = 1 + 2**-15  # 1 in bf16; sums of up to 512 of it are exact in fp32
    with _rounding_allowed(), torch.autocast("cpu", enabled=False):
        # Several, since oneDNN chooses its code by the shape.
        products = (torch.full((m, k), number) @ torch.ones(k, n) / k for m, k, n in ((32, 64, 64), (512, 512, 1024)))
        return all(bool((product == number).all()) for product in products)


def wide_product(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """scale · a @ b of batches of matrices, in fp32 at least, where b is bf16 and a is or may be rounded to it. Torch's
    product of bf16 matrices would be rounded to bf16."""
    with _rounding_allowed() if b.dtype == torch.bfloat16 else contextlib.nullcontext():
        a, b = (x if x.dtype == torch.float64 else x.float() for x in (a, b))
        return torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=scale)
