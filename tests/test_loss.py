"""The chunked vocabulary loss equals each objective written out over full [T·N, V] tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.target import OutputHead
from pipeline.train.loss import Objective, vocabulary_loss

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
OBJECTIVES = [
    Objective(), Objective("kl"), Objective("kl", hard_weight=0.3), Objective("kl", hard_weight=1.0), Objective("tv"),
    Objective("lk"), Objective("lk_hybrid"), Objective("lk_hybrid", eta=0.5),
]  # fmt: skip


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


def row_loss(p: torch.Tensor, z: torch.Tensor, answer: int, objective: Objective) -> torch.Tensor:
    """The objective's definition, from torch's own losses."""
    log_q = z.log_softmax(-1)
    kl = torch.nn.functional.kl_div(log_q, p, reduction="sum")
    acceptance = torch.minimum(p, log_q.exp()).sum()
    hard = torch.nn.functional.cross_entropy(z, torch.tensor(answer))
    weight = torch.exp(-objective.eta * acceptance.detach())
    return {
        "ce": torch.nn.functional.cross_entropy(z, p),
        "kl": (1 - objective.hard_weight) * kl + objective.hard_weight * hard,
        "tv": 0.5 * (p - log_q.exp()).abs().sum(),
        "lk": -acceptance.log(),
        "lk_hybrid": weight * kl + (1 - weight) * (1 - acceptance),
    }[objective.kind]


def dense(c: dict, logit_scale: float, softcap: float | None, objective: Objective):
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
                sums[step] = sums[step] + row_loss(teacher[token], logits, int(c["answer"][token]), objective)
                hits[token, step] = logits.argmax() == c["answer"][token]
    return torch.stack(sums), hits


def run(c: dict, chunk_logits: int, logit_scale: float = 1.0, softcap: float | None = None, objective=Objective()):
    head = OutputHead(c["target_weight"], torch.ones(12), 1e-5, logit_scale, softcap)
    rest = (c[k] for k in ("final_hidden", "answer", "row_of", "used", "step_weights"))
    return vocabulary_loss(c["hidden"], c["lm_head"], head, *rest, objective=objective,
                           chunk_logits=chunk_logits)  # fmt: skip


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, floor: float = 1e-2) -> None:
    assert (found - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max().clamp(min=floor)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 4),
    tokens=st.integers(1, 9),
    vocab=st.integers(2, 40),
    chunk_logits=st.integers(1, 2000),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    finish=st.sampled_from([(1.0, None), (0.25, None), (1.0, 3.0), (2.0, 5.0)]),
    objective=st.sampled_from(OBJECTIVES),
)
def test_equals_dense(seed, steps, tokens, vocab, chunk_logits, dtype, finish, objective):
    c = make(seed, steps, tokens, vocab, dtype)
    found = run(c, chunk_logits, *finish, objective)
    sums, hits = dense(c, *finish, objective)
    assert_close(found.loss_sums, sums.detach(), dtype)
    assert torch.equal(found.hits, hits)
    weighted = (sums * c["step_weights"]).sum()
    assert_close(found.loss.detach(), weighted.detach(), dtype)
    leaves = [c["hidden"], c["lm_head"]]
    # Scaled as gradient accumulation does it. Added zeros keep a case without any used row differentiable.
    weighted = weighted + 0 * (c["hidden"].sum() + c["lm_head"].sum())
    wanted = torch.autograd.grad(3.0 * weighted, leaves)
    for a, b in zip(torch.autograd.grad(3.0 * found.loss, leaves), wanted, strict=True):
        # Of "tv" the terms of a gradient, about 1, can cancel almost wholly: fp32 rounds them, not the rest.
        assert_close(a, b, dtype, 0.1 if objective.kind == "tv" else 1e-2)


def test_a_uniform_teacher_and_a_uniform_drafter_cost_log_v():
    c = make(0, 2, 5, 16, torch.float32)
    c["target_weight"].zero_()
    with torch.no_grad():
        c["lm_head"].zero_()
    found = run(c, 10**6)
    assert torch.allclose(found.loss_sums, c["used"].sum(0) * torch.log(torch.tensor(16.0)))


@pytest.mark.parametrize("objective", [o for o in OBJECTIVES if o.kind != "ce" and not o.hard_weight])
def test_a_drafter_that_equals_the_target_has_no_loss(objective):
    c = make(0, 1, 6, 16, torch.float64)
    c["hidden"] = torch.cat([c["final_hidden"], c["final_hidden"][:2]])[None].requires_grad_()
    c["lm_head"] = c["target_weight"].clone().requires_grad_()
    c |= {"row_of": torch.arange(6)[:, None], "used": torch.ones(6, 1, dtype=torch.bool)}
    found = run(c, 100, objective=objective)
    assert abs(float(found.loss.detach())) < 1e-12
    if objective.kind == "kl":  # the others have a kink there
        assert torch.autograd.grad(found.loss, c["hidden"])[0].abs().max() < 1e-12


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_huge_logits_stay_finite(objective):
    c = make(0, 2, 5, 16, torch.float32)
    with torch.no_grad():
        c["lm_head"].mul_(1e4)
    found = run(c, 10**6, objective=objective)
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
