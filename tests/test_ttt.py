"""TTT attention equals the dense form: output and every gradient."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from dense_cases import lengths_and_masks
from dense_reference import attention
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.train import ttt
from pipeline.train.alignment import select_rows
from pipeline.train.ttt import ttt_attention

# bf16 has 8 bits: the inputs are the same in both, the dense form works on them in fp64.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@st.composite
def cases(draw):
    kv_heads = draw(st.integers(1, 3))
    lengths, masks = draw(lengths_and_masks(longest=20))
    return dict(
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 8, 10, 64])),
        lengths=lengths,
        mask=[bit for mask in masks for bit in mask],
        own_steps=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 10_000)),
    )


@torch.no_grad()
def relative(found: torch.Tensor, wanted: torch.Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest entry (or over `floor`, for what cancels to almost nothing)."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=floor)) if wanted.numel() else 0.0


def check(case: dict, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    lengths = torch.tensor(case["lengths"])
    total, own_steps = int(lengths.sum()), case["own_steps"]

    def leaf(rows: int, heads: int) -> torch.Tensor:
        x = torch.randn(rows, heads, case["head_dim"], generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    mask = torch.tensor(case["mask"])
    rows = select_rows(mask, lengths, torch.zeros(total, dtype=torch.long), 1)
    index = rows.index
    q = leaf(total, case["heads"])
    keys = [leaf(total, case["kv_heads"]) for _ in range(own_steps + 1)]
    values = [leaf(total, case["kv_heads"]) for _ in range(own_steps + 1)]
    grad = torch.randn(q[index].shape, generator=generator, dtype=torch.float64).to(dtype)
    leaves = [q, *keys, *values]

    found = ttt_attention(
        q[index], keys[0], values[0], [k[index] for k in keys[1:]], [v[index] for v in values[1:]], rows.segments
    )
    # The dense form of the same numbers, for bf16 in a precision that adds no error of its own.
    wide = torch.float64 if dtype == torch.bfloat16 else dtype
    dense_leaves = [x.detach().to(wide).requires_grad_() for x in leaves]
    dense_q, dense_keys, dense_values = dense_leaves[0], dense_leaves[1 : own_steps + 2], dense_leaves[own_steps + 2 :]
    samples = [torch.arange(total).split(case["lengths"])[b] for b in range(len(lengths))]
    dense = torch.cat([attention(dense_q[s], [k[s] for k in dense_keys], [v[s] for v in dense_values]) for s in samples])
    dense = dense[index]
    assert relative(found, dense, 1e-30) <= TOLERANCE[dtype]
    options = dict(allow_unused=True, materialize_grads=True)
    dense_grads = torch.autograd.grad(dense, dense_leaves, grad.to(wide), **options)
    # With one visible key dq and dk are exactly 0, the difference of two terms as large as dv.
    floor = max(0.1 * float(g.abs().max()) for g in dense_grads)
    for a, b in zip(torch.autograd.grad(found, leaves, grad, **options), dense_grads, strict=True):
        assert relative(a, b, max(floor, 1e-30)) <= TOLERANCE[dtype]


@settings(max_examples=100, deadline=None)
@given(cases())
def test_equals_dense_fp64(case):
    check(case, torch.float64)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_equals_dense_fp32(case):
    check(case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=80, deadline=None)
@given(case=cases(), alignment=st.integers(1, 5), queries=st.integers(1, 4), scores=st.sampled_from([1, 60, 10_000]))
def test_products_equal_dense(dtype, case, alignment, queries, scores):
    """They are the same for every precision, whether or not they are taken in it here."""
    with (
        patch.object(ttt, "_by_products", lambda _: True),
        patch.multiple(ttt, _ALIGNMENT=alignment, _QUERIES=alignment * queries, _SCORES=scores),
    ):
        check(case, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fast_fp32", "scores"), [(False, None), (True, None), (True, 1)])
@pytest.mark.parametrize("own_steps", [0, 6])
def test_large_enough_to_cross_blocks(own_steps, fast_fp32, scores, dtype):
    """The kernel, products of `_QUERIES` queries, products of `_ALIGNMENT`."""
    mask = [i >= 31 and i % 197 != 0 for i in range(400)] + [True] * 90
    case = dict(heads=6, kv_heads=2, head_dim=64, lengths=[400, 90], mask=mask, own_steps=own_steps, seed=0)
    with patch.object(ttt, "_SCORES", scores or ttt._SCORES), patch.object(ttt, "fp32_by_onednn", lambda: fast_fp32):
        check(case, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_no_segment_sees_its_own_keys_only(dtype):
    """As padding does. With the one own key it is that key's value; with none it is 0."""
    rows = select_rows(torch.ones(32).bool(), torch.tensor([32]), torch.zeros(32).long(), 1)
    q, k, v, own_k, own_v = (torch.randn(n, 2, 8).to(dtype).requires_grad_() for n in (31, 32, 32, 31, 31))
    assert rows.segments[-1].stop == 30
    out = ttt_attention(q, k, v, [own_k], [own_v], rows.segments)
    assert torch.equal(out[30], own_v[30])
    assert not ttt_attention(q, k, v, [], [], rows.segments)[30].any()
    out[:30].sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, own_k, own_v)) and not own_v.grad[30].any()


def test_bf16_by_the_kernel():
    """What a GPU does in bf16, here by the CPU's kernel."""
    case = dict(heads=6, kv_heads=2, head_dim=64, lengths=[400], mask=[True] * 400, own_steps=2, seed=0)
    with patch.object(ttt, "_by_products", lambda _: False):
        check(case, torch.bfloat16)


@pytest.mark.parametrize("fast_fp32", [False, True])
def test_what_goes_to_products(fast_fp32):
    """Runs of more than a few queries, in a precision in which they are fast."""
    expected = {torch.float64: False, torch.float32: fast_fp32, torch.bfloat16: True}
    with patch.object(ttt, "fp32_by_onednn", lambda: fast_fp32):
        for dtype, many in expected.items():
            assert ttt._by_products(torch.empty(ttt._FEW + 1, 1, 1, dtype=dtype)) == many
            assert not ttt._by_products(torch.empty(ttt._FEW, 1, 1, dtype=dtype))


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_by_products_is_as_near_as_the_kernels_own(autocast):
    """Output and gradients of scores of up to ±30: rounded to bf16 before the exponential, a probability would be off by
    up to 6 %."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(300, heads, 64, generator=generator).bfloat16() for heads in (4, 2, 2, 4))
    q = q * 6
    rows = select_rows(torch.ones(302).bool(), torch.tensor([302]), torch.zeros(302).long(), 1)
    assert len(rows.index) == 300  # three blocks of products

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = ttt_attention(*leaves, [], [], rows.segments)
        return [x.double() for x in (out, *torch.autograd.grad(out, leaves, grad.to(dtype)))]

    exact = results(torch.float64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = results(torch.bfloat16)
    with patch.object(ttt, "_by_products", lambda _: False):
        kernels = results(torch.bfloat16)
    for wanted, our, kernel in zip(exact, ours, kernels, strict=True):
        assert (our - wanted).norm() <= 1.1 * (kernel - wanted).norm()


@pytest.mark.parametrize("runs", [1, 100])
def test_bf16_gradients_of_keys_that_many_runs_see(runs):
    """A sample of many turns: as near as the kernel that sees all of it at once."""
    mask = torch.tensor([False] * 8 + ([False] * 4 + [True] * 20) * runs)
    rows = select_rows(mask, torch.tensor([len(mask)]), torch.zeros(len(mask)).long(), 1)
    assert len(rows.segments) == runs
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(len(rows.index), 2, 64, generator=generator).bfloat16() for _ in range(2))
    k, v = (torch.randn(len(mask), 2, 64, generator=generator).bfloat16() for _ in range(2))

    def ours(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(ttt_attention(*leaves, [], [], rows.segments), leaves, grad.to(dtype))
        return [x.double() for x in found[1:]]

    everyone, grads = (x.new_zeros(k.shape).index_copy_(0, rows.index, x).transpose(0, 1)[None] for x in (q, grad))
    leaves = [x.transpose(0, 1)[None].requires_grad_() for x in (k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(everyone, *leaves, is_causal=True)
    kernels = [x[0].transpose(0, 1).double() for x in torch.autograd.grad(out, leaves, grads)]
    for our, kernel, wanted in zip(ours(torch.bfloat16), kernels, ours(torch.float64), strict=True):
        assert (our - wanted).norm() <= 1.1 * (kernel - wanted).norm()


def test_bf16_gradients_of_own_values_are_rounded_once():
    """Σ p · grad over the heads that read it, in fp32 until then."""
    generator = torch.Generator().manual_seed(0)
    rows = select_rows(torch.ones(102).bool(), torch.tensor([102]), torch.zeros(102).long(), 1)
    inputs = [torch.randn(n, heads, 64, generator=generator).bfloat16()
              for n, heads in ((100, 6), (102, 2), (102, 2), (100, 2), (100, 2), (100, 6))]  # fmt: skip

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        q, k, v, own_k, own_v, grad = (x.to(dtype) for x in inputs)
        own_v.requires_grad_()
        return torch.autograd.grad(ttt_attention(q, k, v, [own_k], [own_v], rows.segments), own_v, grad)[0].double()

    wanted = gradient(torch.float64)
    assert ((gradient(torch.bfloat16) - wanted).abs() <= 2**-8 * wanted.abs() + 1e-5).all()


def test_it_has_no_second_derivative():
    """Refused, since logsumexp and shares count as constants in the first."""
    q, k, v, own_k, own_v = (torch.randn(10, 1, 8).requires_grad_() for _ in range(5))
    rows = select_rows(torch.ones(12).bool(), torch.tensor([12]), torch.zeros(12).long(), 1)
    out = ttt_attention(q, k, v, [own_k], [own_v], rows.segments)
    (first,) = torch.autograd.grad(out.square().sum(), own_v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_large_scores_do_not_overflow():
    """Scores of several hundred: only differences to the logsumexp may be exponentiated."""
    q = torch.full((3, 1, 4), 20.0)
    k = torch.full((4, 1, 4), 20.0)
    v = torch.arange(4.0)[:, None, None].expand(4, 1, 4).contiguous()
    rows = select_rows(torch.tensor([False, True, True, True, True]), torch.tensor([5]), torch.zeros(5).long(), 1)
    out = ttt_attention(q, k, v, [k[:3] + 1], [v[:3] + 10], rows.segments)
    # The own key of step 1 scores 840 against 800 of all others: it takes everything.
    assert torch.allclose(out, v[:3] + 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gpu_kernels_take_these_arguments(dtype):
    """Without a GPU, the meta device runs the GPU branches up to argument order, shapes and dtypes."""
    rows = select_rows(torch.tensor([0, 1, 1, 1, 0, 1, 1, 1]).bool(), torch.tensor([8]), torch.zeros(8).long(), 1)

    def leaf(count: int, heads: int) -> torch.Tensor:
        return torch.empty(count, heads, 64, dtype=dtype, device="meta", requires_grad=True)

    n = len(rows.index)
    leaves = [leaf(n, 4), leaf(8, 2), leaf(8, 2), leaf(n, 2), leaf(n, 2)]
    out = ttt_attention(*leaves[:3], [leaves[3]], [leaves[4]], rows.segments)
    assert (out.shape, out.dtype) == (leaves[0].shape, dtype)
    for grad, x in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, dtype)
