"""RMSNorm and SwiGLU that keep for backward hardly more than their inputs.

Autograd keeps what every single operation needs: of RMSNorm of a bf16 row on a CPU two fp32 copies, of SwiGLU silu(gate)
besides gate and up; and the unroll keeps all of it once per TTT step. To work it out again takes a pass or two over it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.products import wide_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich 2019, arXiv 1910.07467).

    Worked out in fp32 (fp64 for fp64), the product with the weight included, and returned in x's dtype. x: [..., H],
    weight: [H].
    """
    if x.device.type == "cpu":
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x.to(wide_dtype(x)), weight.shape, weight, eps).to(x.dtype)  # one kernel on a GPU


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020, arXiv 2002.05202), both of one shape and dtype."""
    return _SwiGLU.apply(gate, up)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(wide_dtype(x))
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed, wide_grad = x.to(scale.dtype) * scale, grad.to(scale.dtype)
        grad_weight = (wide_grad * normed).sum_to_size(weight.shape).to(weight.dtype)
        if not ctx.needs_input_grad[0]:  # features and the target's embeddings
            return None, grad_weight, None
        wide_grad = wide_grad * weight
        # A longer x gives the same result, but for eps: the gradient has no part along x.
        along = (wide_grad * normed).mean(-1, keepdim=True)
        return wide_grad.sub_(normed.mul_(along)).mul_(scale).to(x.dtype), grad_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
