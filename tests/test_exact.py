"""The whole step, the vocabulary loss and the choice of rows equal the dense reference, for whatever comes."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from dense_cases import lengths_and_masks, objectives
from dense_reference import is_gated, row_loss, ttt
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafter import DECAY, HIDDEN, draft_ids, frozen, make_drafter, make_samples, pack, target_matrices

import pipeline.train.drafter
import pipeline.train.loss
from pipeline.target import OutputHead
from pipeline.train.alignment import PackedBatch, select_rows
from pipeline.train.drafter import Drafter, FrozenTarget
from pipeline.train.loss import Objective, vocabulary_loss

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}


def objective_of(arguments: dict) -> Objective:
    return Objective(arguments["kind"], arguments.get("hard", 0.0), arguments.get("eta", 3.0))


def in_pieces(patch: pytest.MonkeyPatch, chunk_logits: int, block_logits: int):
    """`vocabulary_loss` over chunks and blocks of these sizes."""
    patch.setattr(pipeline.train.loss, "BLOCK_LOGITS", {"cpu": block_logits}, raising=False)
    return functools.partial(vocabulary_loss, chunk_logits=chunk_logits)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, floor: float) -> None:
    """Relative to the largest entry, or to `floor` where everything cancels."""
    assert (found - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max().clamp(min=floor)


# -- which rows count, and what they learn from --


@settings(max_examples=60, deadline=None)
@given(lengths_and_masks(), st.integers(1, 4), st.data())
def test_rows_equal_loops(samples, steps, data):
    """Every pair of row and step, walked through in plain Python."""
    lengths, masks = samples
    total = sum(lengths)
    answer = data.draw(st.lists(st.sampled_from([-1, 0, 7]), min_size=total, max_size=total))
    rows = select_rows(
        torch.tensor([bit for mask in masks for bit in mask]), torch.tensor(lengths), torch.tensor(answer), steps
    )
    found = {
        (int(rows.tokens[p]), step): int(rows.index[rows.row_of[p, step]]) for p, step in rows.used.nonzero().tolist()
    }
    gated, learns = [], {}
    for begin, mask in zip([sum(lengths[:b]) for b in range(len(lengths))], masks, strict=True):
        for row in range(len(mask)):
            for step in range(steps):
                if is_gated(mask, row, step):
                    gated.append((begin + row, step))
                    if answer[begin + row + 1 + step] >= 0:
                        learns[begin + row + 1 + step, step] = begin + row
    assert found == learns
    assert [(int(rows.index[n]), step) for n, step in rows.gates.nonzero().tolist()] == gated
    assert rows.loss_rows.tolist() == [sum(step == j for _, step in learns) for j in range(steps)]
    assert rows.answer.tolist() == [answer[p] for p in rows.tokens.tolist()]
    # Every compact row is in one segment, which says the packed row and the first key of its sample.
    walked = [
        (segment.first_row + n, segment.first_key) for segment in rows.segments
        for n in range(segment.stop - segment.start)
    ]  # fmt: skip
    begins = [sum(lengths[:b]) for b in range(len(lengths)) for _ in range(lengths[b])]
    assert walked == [(row, begins[row]) for row in rows.index.tolist()]
    assert rows.position.tolist() == [row - begins[row] for row in rows.index.tolist()]


# -- the vocabulary loss --


@settings(max_examples=60, deadline=None)
@given(
    objective=objectives,
    seed=st.integers(0, 10_000),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(2, 40)),
    chunk_logits=st.integers(1, 2000),
    block_logits=st.integers(1, 500),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    finish=st.sampled_from([(1.0, None), (0.25, None), (2.0, 5.0)]),
)
def test_vocabulary_loss_equals_rows_one_by_one(objective, seed, shape, chunk_logits, block_logits, dtype, finish):
    """Loss and both gradients of every objective, for chunks and blocks that leave something over."""
    steps, tokens, vocab = shape
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype)

    hidden, lm_head = normal(steps, tokens + 2, 8).requires_grad_(), normal(vocab, 8).requires_grad_()
    target_weight, final_hidden = normal(vocab, 8), normal(tokens, 8)
    used = torch.rand(tokens, steps, generator=g) < 0.7
    row_of = torch.stack([torch.randperm(tokens + 2, generator=g)[:tokens] for _ in range(steps)], 1) * used
    answer = torch.randint(0, vocab, (tokens,), generator=g)
    step_weights = torch.rand(steps, generator=g, dtype=torch.float64).to(dtype)
    scale, softcap = finish
    head = OutputHead(target_weight, torch.ones(8), 1e-5, scale, softcap)
    with pytest.MonkeyPatch.context() as patch:
        found = in_pieces(patch, chunk_logits, block_logits)(
            hidden, lm_head, head, final_hidden, answer, row_of, used, step_weights, objective=objective_of(objective)
        )

    target_logits = final_hidden @ target_weight.T * scale
    teacher = (softcap * torch.tanh(target_logits / softcap) if softcap else target_logits).softmax(-1)
    loss_sums = [hidden.sum() * 0 + lm_head.sum() * 0 for _ in range(steps)]
    for token, step in used.nonzero().tolist():
        logits = hidden[step, row_of[token, step]] @ lm_head.T
        loss_sums[step] = loss_sums[step] + row_loss(teacher[token], logits, int(answer[token]), **objective)
        assert found.hits[token, step] == (logits.argmax() == answer[token])
    loss_sums = torch.stack(loss_sums)
    assert found.hits.sum() == (found.hits & used).sum()
    assert_close(found.loss_sums, loss_sums.detach(), dtype, 0.1)
    wanted = torch.autograd.grad((loss_sums * step_weights).sum(), [hidden, lm_head])
    for a, b in zip(torch.autograd.grad(found.loss, [hidden, lm_head]), wanted, strict=True):
        assert_close(a, b, dtype, 0.1)


# -- the whole step --


@st.composite
def steps_of_training(draw):
    kv_heads = draw(st.integers(1, 2))
    changes = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([2, 4, 10])),  # times heads is HIDDEN in few cases
        "num_fc_inputs": draw(st.sampled_from([2, 3, 5])),
        "rms_norm_eps": draw(st.sampled_from([1e-5, 0.0])),  # with 0 the norm of a row of zeros is not a number
        **{switch: draw(st.booleans()) for switch in ("fc_norm", "norm_before_fc", "norm_output")},
    }
    return dict(
        samples=draw(lengths_and_masks()), changes=changes, steps=draw(st.integers(1, 4)), objective=draw(objectives),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        pieces=draw(st.tuples(st.integers(30, 1500), st.integers(30, 500))),
    )  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(steps_of_training())
def test_loss_counts_and_every_gradient_equal_the_dense_reference(case):
    dtype, steps, objective = case["dtype"], case["steps"], case["objective"]
    drafter = make_drafter(dtype, **case["changes"])
    samples = make_samples(*case["samples"], case["changes"]["num_fc_inputs"], dtype)
    weights = {name: p.detach().clone().requires_grad_() for name, p in drafter.named_parameters()}
    embedding, lm_head = target_matrices(dtype)
    parts = [
        ttt(weights, drafter.config, s, embedding, lm_head, draft_ids(drafter), steps, **objective) for s in samples
    ]
    loss_rows = [sum(part.loss_rows[step] for part in parts) for step in range(steps)]
    step_weights = torch.tensor([DECAY**step / max(rows, 1) for step, rows in enumerate(loss_rows)], dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.train.drafter, "vocabulary_loss", in_pieces(patch, *case["pieces"]))
        found = drafter(pack(samples), frozen(drafter), step_weights, objective=objective_of(objective))
    found.loss.backward()

    loss_sums = torch.stack([torch.stack([part.loss_sums[step] for part in parts]).sum() for step in range(steps)])
    assert found.metrics["loss_rows"].tolist() == loss_rows
    for count in ("gated", "hits", "prefix_hits", "reached"):
        assert found.metrics[count].tolist() == [sum(getattr(p, count)[step] for p in parts) for step in range(steps)]
    assert_close(found.metrics["loss_sum"], loss_sums.detach(), dtype, 0.1)
    loss = (step_weights * loss_sums).sum()
    assert_close(found.loss.detach(), loss.detach(), dtype, 0.1)
    # The added zeros keep a case without any counting row differentiable.
    loss = loss + 0 * sum(w.sum() for w in weights.values())
    wanted = torch.autograd.grad(loss, weights.values())
    # With few visible keys the gradients of q and k are differences of much larger terms, as large as those of v: each
    # parameter is compared at its own scale, but not below a twentieth of the largest.
    floor = max(1e-2, 0.05 * max(float(g.abs().max()) for g in wanted))
    for parameter, gradient in zip(drafter.parameters(), wanted, strict=True):
        assert_close(parameter.grad, gradient, dtype, floor)


# -- counts before ratios --


def test_ratios_are_of_sums_over_ranks():
    """A rank with a long answer and one with a short: the mean of their ratios is another loss than that of both."""
    drafter, steps = make_drafter(), 3
    samples = make_samples([30, 8], [[True] * 30, [False] * 5 + [True] * 3], 3)
    halves = [pack([sample]) for sample in samples]
    counts = [drafter.select_rows(half, steps).loss_rows for half in halves]
    assert counts[1][2] == 0 < counts[1][0] < counts[0][0]  # the short one has no row at the last step

    def losses(denominators: list[torch.Tensor]) -> torch.Tensor:
        weights = [DECAY ** torch.arange(steps) / rows.clamp(min=1) for rows in denominators]
        return sum(drafter(half, frozen(drafter), w).loss for half, w in zip(halves, weights, strict=True))

    both = pack(samples)
    rows = drafter.select_rows(both, steps).loss_rows
    whole = drafter(both, frozen(drafter), DECAY ** torch.arange(steps) / rows).loss
    assert torch.isclose(losses([sum(counts)] * 2), whole, rtol=1e-5)
    assert not torch.isclose(losses(counts) / 2, whole, rtol=0.02)


# -- what a step must not hold --


def test_a_step_never_holds_rows_times_vocabulary():
    """Of T·N rows × Vd logits neither what is saved for backward nor any one tensor comes near one step's share."""
    steps, size, vocab = 7, 160, 8192
    config = dataclasses.replace(make_drafter().config, vocab_size=vocab, draft_vocab_size=vocab)
    drafter = Drafter(config, torch.arange(vocab))
    drafter.init_weights(0)
    g = torch.Generator().manual_seed(0)
    embedding, lm_head = (torch.randn(vocab, HIDDEN, generator=g) for _ in range(2))
    target = FrozenTarget(embedding, OutputHead(lm_head, torch.ones(HIDDEN), 1e-5))
    sample = make_samples([size], [[True] * size], 3)[0]
    argmax = (sample["final_hidden"] @ lm_head.T).argmax(-1).int()
    batch = PackedBatch(**sample, teacher_argmax=argmax, sample_lengths=torch.tensor([size]))
    chunk_logits = 8 * steps * vocab

    parameters = {p.untyped_storage().data_ptr() for p in drafter.parameters()}
    saved: dict[int, int] = {}

    def pack_hook(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    largest = _Largest()
    with pytest.MonkeyPatch.context() as patch, largest:
        patch.setattr(pipeline.train.drafter, "vocabulary_loss", in_pieces(patch, chunk_logits, chunk_logits))
        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda x: x):
            out = drafter(batch, target, torch.ones(steps))
        out.loss.backward()
    one_step = 4 * out.n_rows * vocab  # bytes of [N, Vd] in fp32
    assert largest.elements <= max(chunk_logits, vocab * HIDDEN)
    heads = config.num_attention_heads + config.num_key_value_heads
    widths = heads * config.head_dim + config.intermediate_size + HIDDEN
    # The head's weight and gradient, for every row and step three tensors of each of the layer's widths, and attention's
    # probabilities of step 0's keys together and of each own key.
    probabilities = config.num_attention_heads * sum(1 + step for step in range(steps))
    allowed = 4 * (2 * vocab * HIDDEN + size * (steps * 3 * widths + probabilities))
    assert sum(saved.values()) <= allowed <= 0.6 * one_step


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest storage that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(found):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return found
