"""RMSNorm and SwiGLU: values and gradients of the plain formulas, which autograd differentiates in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from dense_reference import rms_norm as plain_rms_norm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.train.norm_and_gate import rms_norm, swiglu

# Against fp64 of the same inputs, relative to the greatest. A rounding to bf16 changes a number by up to 2^-8; RMSNorm does
# it once, SwiGLU twice.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=2).flatmap(
    lambda lead: st.integers(1, 130).map(lambda last: (*lead, last)))  # fmt: skip


def random(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def compare(found_of, wanted_of, inputs: list[torch.Tensor], upstream: torch.Tensor, added) -> None:
    """Value and gradients of two functions. added: of the fp64 inputs and upstream gradient, how great the terms are that
    make up each gradient; they may cancel, so an error is relative to them."""
    inputs = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, wanted = found_of(*inputs), wanted_of(*exact)
    assert found.dtype == upstream.dtype and found.shape == wanted.shape
    found.backward(upstream)
    wanted.backward(upstream.double())
    sizes = [wanted, *added(*(x.detach() for x in exact), upstream.double())]
    for x, y, size in zip([found, *(x.grad for x in inputs)], [wanted, *(x.grad for x in exact)], sizes, strict=True):
        assert (x.double() - y).abs().max() <= TOLERANCE[x.dtype] * size.abs().max()
    for x in inputs:
        assert x.grad.dtype == x.dtype


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from(list(TOLERANCE)), st.sampled_from([1e-6, 1e-5, 0.3]), st.floats(-2, 3), st.integers(0, 99))
def test_rms_norm(shape, dtype, eps, magnitude, seed):
    """With a master weight in fp32, as training has it, whatever x is; eps from negligible to greater than x²."""
    x, upstream = random(seed, shape, shape, dtype=dtype)
    x = x * 10**magnitude
    (weight,) = random(seed + 1, shape[-1:], dtype=torch.promote_types(dtype, torch.float32))

    def added(x, weight, gradient):
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return gradient * weight * scale, (gradient * x * scale).abs().sum_to_size(weight.shape)

    compare(lambda *of: rms_norm(*of, eps), lambda *of: plain_rms_norm(*of, eps), [x, weight + 1], upstream, added)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from(list(TOLERANCE)), st.floats(-2, 1), st.integers(0, 99))
def test_swiglu(shape, dtype, magnitude, seed):
    gate, up, upstream = random(seed, shape, shape, shape, dtype=dtype)

    def added(gate, up, gradient):
        share = torch.sigmoid(gate)
        slope = share + (gate * share * (1 - share)).abs()  # of silu
        return gradient * up * slope, gradient * gate * share

    compare(swiglu, lambda gate, up: gate * torch.sigmoid(gate) * up, [gate * 10**magnitude, up], upstream, added)


def test_bf16_is_as_exact_as_torchs_own():
    """The mean error of values and gradients is that of autograd's, with an RMSNorm that widens x as ours does."""
    x, up, upstream = random(0, (64, 512), (64, 512), (64, 512), dtype=torch.bfloat16)
    weight = random(1, (512,), dtype=torch.float32)[0]

    def errors(norm, gated) -> torch.Tensor:
        found = []
        for function, inputs in ((norm, (x, weight)), (gated, (x, up))):
            inputs = [i.clone().requires_grad_() for i in inputs]
            exact = [i.detach().double().requires_grad_() for i in inputs]
            plain = (lambda x, w: plain_rms_norm(x, w, 1e-5)) if function is norm else lambda g, u: F.silu(g) * u
            out, wanted = function(*inputs), plain(*exact)
            out.backward(upstream)
            wanted.backward(upstream.double())
            pairs = [(out, wanted), *((i.grad, e.grad) for i, e in zip(inputs, exact, strict=True))]
            found += [(a.double() - b).abs().mean() for a, b in pairs]
        return torch.stack(found)

    ours = errors(lambda x, w: rms_norm(x, w, 1e-5), swiglu)
    torchs = errors(lambda x, w: F.rms_norm(x.float(), (512,), w, 1e-5).bfloat16(), lambda g, u: F.silu(g) * u)
    assert (ours <= 1.02 * torchs + 1e-5).all()  # the weight's gradient is fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_the_inputs_and_a_number_per_row(dtype):
    x, up = random(0, (40, 64), (40, 64), dtype=dtype)
    weight = torch.ones(64, requires_grad=True)
    leaves = x.requires_grad_(), up.requires_grad_(), weight
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        (rms_norm(x, weight, 1e-5).sum() + swiglu(x, up).sum()).backward()
    beyond = [t for t in kept if t.data_ptr() not in {leaf.data_ptr() for leaf in leaves}]
    assert [t.shape for t in beyond] == [(40, 1)]


def test_a_row_of_zeros():
    """A token whose embedding is 0: 0 in, 0 out, and the slope is 1/√eps."""
    x = torch.zeros(3, 8, requires_grad=True)
    weight = torch.full((8,), 2.0, requires_grad=True)
    out = rms_norm(x, weight, 1e-4)
    out.backward(torch.ones_like(out))
    assert (out == 0).all() and (weight.grad == 0).all()
    assert torch.allclose(x.grad, torch.full_like(x, 200.0))


def test_no_row():
    x = torch.zeros(0, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    (rms_norm(x, weight, 1e-5).sum() + swiglu(x, x).sum()).backward()
    assert x.grad.shape == (0, 8) and (weight.grad == 0).all()


def test_the_gradient_of_what_is_frozen_is_not_worked_out():
    x, upstream = random(0, (5, 64), (5, 64), dtype=torch.float32)
    gradients = []
    for frozen in (False, True):
        weight = torch.ones(64, requires_grad=True)
        with _Calls() as calls:
            rms_norm(x.requires_grad_(not frozen), weight, 1e-5).backward(upstream)
        gradients.append((weight.grad, calls.count))
    (wanted, more), (found, fewer) = gradients
    assert torch.equal(found, wanted) and fewer < more


class _Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_second_derivative_is_refused():
    x, up = random(0, (2, 8), (2, 8), dtype=torch.float64)
    x.requires_grad_()
    for out in (rms_norm(x, torch.ones(8, dtype=torch.float64), 1e-5), swiglu(x, up)):
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.sum().backward()
