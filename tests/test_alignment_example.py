"""Which row reads, learns and counts when: one conversation of eight tokens, worked by hand.

    token     0       1      2    3    4      5      6      7
             <user>  <asst>  A    B   <end>  <user>  C    <end>
    l         0       0      1    1    1      0      1      1        1: the target generated it

(The second turn's header is one token here.) Row i holds the target's features at token i. At step j it reads the
embedding of x_{i+1+j}, sits at RoPE position i+j, and learns from the target's logits at token i+1+j, which predict
x_{i+2+j}. It counts iff every token from x_{i+1} to x_{i+2+j} was generated.

    step 0    row 1   has <asst>, reads A,     predicts B          first row the engine drafts from
              row 2   has A,      reads B,     predicts <end>
              row 5   has <user>, reads C,     predicts <end>      first row of the second turn
    step 1    row 1               reads B,     predicts <end>
    step 2    no row: the turn's three tokens are used up

Row 0 does not count: it reads <asst>, which the template wrote. Row 3 does not count: it would read <end> and predict
the next user's header. Row 6 does not count: it would read <end> and predict a token that does not exist.
"""

from __future__ import annotations

import pytest
import torch

from pipeline.target import OutputHead
from pipeline.train.alignment import Segment, gate, select_rows
from pipeline.train.drafter import Drafter, DrafterConfig, FrozenTarget, PackedBatch

MASK = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
LENGTHS = torch.tensor([8])
STEPS = 3
HIDDEN = 8


def test_gate():
    assert gate(MASK, LENGTHS, 0).nonzero().flatten().tolist() == [1, 2, 5]
    assert gate(MASK, LENGTHS, 1).nonzero().flatten().tolist() == [1]
    assert gate(MASK, LENGTHS, 2).nonzero().flatten().tolist() == []


def test_gate_stops_at_the_end_of_a_sample():
    """Packed after each other, the last rows of one sample do not look into the next."""
    mask, lengths = torch.ones(7, dtype=torch.bool), torch.tensor([3, 4])
    assert gate(mask, lengths, 0).nonzero().flatten().tolist() == [0, 3, 4]
    assert gate(mask, lengths, 1).nonzero().flatten().tolist() == [3]


def test_rows_and_their_teachers():
    answer = torch.arange(8)  # pretend that the target's argmax at token p is draft id p
    rows = select_rows(MASK, LENGTHS, answer, STEPS)
    assert rows.index.tolist() == [1, 2, 5]
    assert rows.gates.sum(0).tolist() == rows.loss_rows.tolist() == [3, 1, 0]
    # Rows 1 and 2 are one run and see row 0's key besides their own; row 5 is a run that sees rows 0 … 4.
    assert rows.segments == (Segment(0, 2, 0, 1), Segment(2, 3, 0, 5))
    # Teacher tokens: 2 (row 1 at step 0), 3 (row 2 at step 0 and row 1 at step 1), 6 (row 5 at step 0).
    assert rows.tokens.tolist() == [2, 3, 6]
    assert rows.used.tolist() == [[True, False, False], [True, True, False], [True, False, False]]
    found = {(int(rows.tokens[p]), j): int(rows.index[rows.row_of[p, j]]) for p, j in rows.used.nonzero().tolist()}
    assert found == {(2, 0): 1, (3, 0): 2, (3, 1): 1, (6, 0): 5}


def test_an_argmax_outside_the_draft_vocabulary_is_gated_but_not_in_the_loss():
    answer = torch.arange(8)
    answer[3] = -1  # rows 2 (step 0) and 1 (step 1) learn from token 3
    rows = select_rows(MASK, LENGTHS, answer, STEPS)
    assert rows.gates.sum(0).tolist() == [3, 1, 0]
    assert rows.loss_rows.tolist() == [2, 0, 0]


# -- the same, seen from outside: what a row's hidden state really depends on --


@pytest.fixture
def drafter() -> Drafter:
    config = DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        vocab_size=8, draft_vocab_size=8, max_position_embeddings=32,
    )  # fmt: skip
    drafter = Drafter(config, torch.arange(8))
    torch.manual_seed(0)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter)
    return drafter


def batch() -> PackedBatch:
    torch.manual_seed(1)
    return PackedBatch(
        input_ids=torch.arange(8),  # token i has id i, so an id says which token was read
        features=torch.randn(8, 3 * HIDDEN),
        final_hidden=torch.randn(8, HIDDEN),
        loss_mask=MASK,
        teacher_argmax=torch.zeros(8, dtype=torch.int32),
        sample_lengths=LENGTHS,
    )


def target() -> FrozenTarget:
    torch.manual_seed(2)
    return FrozenTarget(torch.randn(8, HIDDEN), OutputHead(torch.randn(8, HIDDEN), torch.ones(HIDDEN), 1e-5))


@pytest.mark.parametrize(
    ("row", "step", "features_of", "embeddings_of"),
    [
        # step 0: keys of rows 0 … i, each of which read the embedding one to its right
        (1, 0, {0, 1}, {1, 2}),
        (2, 0, {0, 1, 2}, {1, 2, 3}),
        (5, 0, {0, 1, 2, 3, 4, 5}, {1, 2, 3, 4, 5, 6}),
        # step 1: the same keys, and one more embedding
        (1, 1, {0, 1}, {1, 2, 3}),
    ],
)
def test_what_a_row_depends_on(drafter, row, step, features_of, embeddings_of):
    b, t = batch(), target()
    b.features.requires_grad_()
    t.embedding.requires_grad_()
    rows = drafter.select_rows(b, STEPS)
    hidden = drafter.unroll(b, t, STEPS, rows)
    compact = rows.index.tolist().index(row)
    by_features, by_embedding = torch.autograd.grad(hidden[step, compact].sum(), [b.features, t.embedding])
    assert set(by_features.abs().sum(1).nonzero().flatten().tolist()) == features_of
    assert set(by_embedding.abs().sum(1).nonzero().flatten().tolist()) == embeddings_of


def test_rope_positions(drafter, monkeypatch):
    """Row i sits at i+j: shifting the ids does not shift the positions."""
    asked = []
    cos_sin = drafter.rope.cos_sin
    monkeypatch.setattr(
        drafter.rope, "cos_sin", lambda position, *rest: asked.append(position.tolist()) or cos_sin(position, *rest)
    )
    b = batch()
    drafter.unroll(b, target(), STEPS, drafter.select_rows(b, STEPS))
    keys, steps = asked
    assert keys[:8] == [0, 1, 2, 3, 4, 5, 6, 7]  # then padding
    assert [positions[:3] for positions in steps] == [[1, 2, 5], [2, 3, 6], [3, 4, 7]]


@pytest.mark.parametrize(
    ("token", "steps"), [(0, []), (1, []), (2, [0]), (3, [0, 1]), (4, []), (5, []), (6, [0]), (7, [])]
)
def test_which_teacher_token_reaches_which_step(drafter, token, steps):
    before = drafter(batch(), target(), torch.ones(STEPS)).metrics["loss_sum"]
    changed = batch()
    changed.final_hidden[token] += 1.0
    after = drafter(changed, target(), torch.ones(STEPS)).metrics["loss_sum"]
    assert (before != after).nonzero().flatten().tolist() == steps
