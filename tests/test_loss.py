"""The chunked vocabulary loss equals cross entropy written out over full [T·N, V] tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.loss import vocabulary_loss
from pipeline.target import OutputHead

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}


def make(seed: int, steps: int, tokens: int, vocab: int, dtype: torch.dtype, size: int = 12) -> dict:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    used = torch.rand(tokens, steps, generator=g) < 0.8
    row_of = torch.stack([torch.randperm(tokens + 2, generator=g)[:tokens] for _ in range(steps)], 1)
    return dict(
        hidden=normal(steps, tokens + 2, size).requires_grad_(),
        lm_head=normal(vocab, size).requires_grad_(),
        target_weight=normal(vocab, size),
        final_hidden=normal(tokens, size),
        answer=torch.randint(0, vocab, (tokens,), generator=g),
        row_of=torch.where(used, row_of, 0),
        used=used,
        step_weights=torch.rand(steps, generator=g, dtype=torch.float64).to(dtype),
    )


def dense(c: dict, logit_scale: float, softcap: float | None):
    target_logits = c["final_hidden"] @ c["target_weight"].T * logit_scale
    if softcap:
        target_logits = softcap * torch.tanh(target_logits / softcap)
    teacher = target_logits.softmax(-1)
    tokens, steps = c["used"].shape
    sums = [c["hidden"].new_zeros(()) for _ in range(steps)]
    hits = torch.zeros(tokens, steps, dtype=torch.bool)
    for token in range(tokens):
        for step in range(steps):
            if c["used"][token, step]:
                logits = c["hidden"][step, c["row_of"][token, step]] @ c["lm_head"].T
                sums[step] = sums[step] - (teacher[token] * logits.log_softmax(-1)).sum()
                hits[token, step] = logits.argmax() == c["answer"][token]
    return torch.stack(sums), hits


def run(c: dict, chunk_logits: int, logit_scale: float = 1.0, softcap: float | None = None):
    head = OutputHead(c["target_weight"], torch.ones(12), 1e-5, logit_scale, softcap)
    rest = (c[k] for k in ("final_hidden", "answer", "row_of", "used", "step_weights"))
    return vocabulary_loss(c["hidden"], c["lm_head"], head, *rest, chunk_logits=chunk_logits)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert (found - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max().clamp(min=1e-2)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 4),
    tokens=st.integers(1, 9),
    vocab=st.integers(2, 40),
    chunk_logits=st.integers(1, 2000),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    finish=st.sampled_from([(1.0, None), (0.25, None), (1.0, 3.0), (2.0, 5.0)]),
)
def test_equals_dense(seed, steps, tokens, vocab, chunk_logits, dtype, finish):
    c = make(seed, steps, tokens, vocab, dtype)
    found = run(c, chunk_logits, *finish)
    sums, hits = dense(c, *finish)
    assert_close(found.loss_sums, sums.detach(), dtype)
    assert torch.equal(found.hits, hits)
    weighted = (sums * c["step_weights"]).sum()
    assert_close(found.loss.detach(), weighted.detach(), dtype)
    leaves = [c["hidden"], c["lm_head"]]
    # Scaled as gradient accumulation does it. Added zeros keep a case without any used row differentiable.
    weighted = weighted + 0 * (c["hidden"].sum() + c["lm_head"].sum())
    wanted = torch.autograd.grad(3.0 * weighted, leaves)
    for a, b in zip(torch.autograd.grad(3.0 * found.loss, leaves), wanted, strict=True):
        assert_close(a, b, dtype)


def test_a_uniform_teacher_and_a_uniform_drafter_cost_log_v():
    c = make(0, 2, 5, 16, torch.float32)
    c["target_weight"].zero_()
    with torch.no_grad():
        c["lm_head"].zero_()
    found = run(c, 10**6)
    assert torch.allclose(found.loss_sums, c["used"].sum(0) * torch.log(torch.tensor(16.0)))


def test_huge_logits_stay_finite():
    c = make(0, 2, 5, 16, torch.float32)
    with torch.no_grad():
        c["lm_head"].mul_(1e4)
    found = run(c, 10**6)
    found.loss.backward()
    assert found.loss.isfinite() and c["hidden"].grad.isfinite().all() and c["lm_head"].grad.isfinite().all()


def test_no_gradient_is_computed_without_need():
    c = make(0, 2, 5, 16, torch.float32)
    with torch.no_grad():
        found = run(c, 10**6)
    assert not found.loss.requires_grad
    assert torch.equal(found.loss_sums, run(c, 10**6).loss_sums)


def test_no_used_row_gives_zero_loss_and_gradients():
    c = make(0, 2, 5, 16, torch.float32)
    empty = {"final_hidden": 0, "answer": 0, "row_of": 0, "used": 0}
    found = run(c | {k: c[k][:0] for k in empty}, 10**6)
    found.loss.backward()
    assert found.loss == 0 and not c["hidden"].grad.any() and not c["lm_head"].grad.any()


@pytest.mark.parametrize("chunk_logits", [1, 10**6])
def test_bf16_stays_near_fp32(chunk_logits):
    """Only the products are rounded: the loss moves by parts in a thousand, whatever the chunk."""
    c = make(0, 3, 40, 64, torch.float32)
    wanted = run(c, 10**6).loss_sums
    found = run(c | {"hidden": c["hidden"].bfloat16()}, chunk_logits).loss_sums
    assert found.dtype == torch.float32
    assert torch.allclose(found, wanted, rtol=1e-2)
