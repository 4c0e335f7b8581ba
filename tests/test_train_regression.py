"""The linear drafter that training starts from: against lstsq, a planted relation, and what the drafter then guesses."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import rms_norm

from pipeline.errors import PipelineError
from pipeline.target import OutputHead
from pipeline.train.alignment import PackedBatch
from pipeline.train.drafter import Drafter, FrozenTarget
from pipeline.train.drafter_config import DrafterConfig
from pipeline.train.regression import _RIDGE, _reduced_rank, regression_samples, start_from_regression
from pipeline.train.start import start_weights
from tests.train_cases import base, run  # noqa: F401 (fixtures)

HIDDEN, VOCAB = 64, 96
SHAPE = DrafterConfig(
    hidden_size=HIDDEN, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=VOCAB,
    draft_vocab_size=VOCAB, max_position_embeddings=256, num_fc_inputs=3)


class Planted:
    """A target whose state at token i+1 is A · slots_i + B · embedding_{i+1}, up to noise."""

    def __init__(self, seed=0, noise=0.0, rank=HIDDEN, shape=SHAPE, scale=1.0, unit=False):
        self.draw = torch.Generator().manual_seed(seed)
        self.shape, self.noise, self.unit = shape, noise, unit
        self.gamma = self.normal(HIDDEN).abs() + 0.5
        self.head = OutputHead(self.normal(VOCAB, HIDDEN), self.gamma, 1e-5, logit_scale=scale)
        self.target = FrozenTarget(self.normal(VOCAB, HIDDEN), self.head)
        self.for_slots = self.normal(3 * HIDDEN, HIDDEN) / (3 * HIDDEN) ** 0.5 * 0.6
        self.for_embedding = self.normal(HIDDEN, rank) @ self.normal(rank, HIDDEN) / (HIDDEN * rank) ** 0.5 * 0.8

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.draw)

    def batch(self, lengths=(120, 90)):
        ids = torch.randint(0, VOCAB, (sum(lengths),), generator=self.draw)
        features = self.normal(len(ids), 3 * HIDDEN)
        state = self.normal(len(ids), HIDDEN)  # also of rows that follow from nothing
        state[1:] = features[:-1] @ self.for_slots + self.embedding(ids[1:]) @ self.for_embedding
        state += self.noise * self.normal(len(ids), HIDDEN)
        if self.unit:
            state = rms_norm(state, (HIDDEN,))
        final = state * self.gamma
        mask = torch.ones(len(ids), dtype=torch.bool)
        mask[:20] = False
        argmax = self.head.logits(final).argmax(-1).int()
        return PackedBatch(ids, features, final, mask, argmax, torch.tensor(lengths))

    def embedding(self, ids):
        return rms_norm(self.target.embedding[ids], (HIDDEN,), eps=self.shape.rms_norm_eps)

    def drafter(self, batches, seed=0):
        drafter = Drafter(self.shape, torch.arange(VOCAB))
        start_weights(drafter, seed, self.head.weight)
        return drafter, start_from_regression(drafter, batches, self.target, seed)


def embedding_map(drafter):
    """What an attention that sees its own token alone makes of the embedding: [H, H], x → x @ map."""
    c, attention = drafter.config, drafter.midlayer.self_attn
    values = attention.v_proj.weight[:, :HIDDEN].unflatten(0, (c.num_key_value_heads, c.head_dim))
    groups = c.num_attention_heads // c.num_key_value_heads
    heads = values.repeat_interleave(groups, 0).flatten(0, 1)  # [A·D, H]
    return (attention.o_proj.weight @ heads).T


def test_the_weights_are_those_of_a_least_squares_fit():
    """Against lstsq over the counted rows, with the ridge as further rows; gaps and sample borders left out by hand."""
    planted = Planted(noise=0.3)
    batches = [planted.batch(), planted.batch((70,))]
    drafter, fitted = planted.drafter(batches)
    x, y = [], []
    for batch in batches:
        first = 0
        for length in batch.sample_lengths.tolist():
            for i in range(first, first + length - 2):  # row i predicts token i+2, tokens i+1 and i+2 being generated
                if batch.loss_mask[i + 1] and batch.loss_mask[i + 2]:
                    x.append(torch.cat([batch.features[i], planted.embedding(batch.input_ids[i + 1])]))
                    y.append(batch.final_hidden[i + 1] / planted.gamma)
            first += length
    x, y = torch.stack(x).double(), torch.stack(y).double()
    assert fitted == len(x) == 100 - 2 + 1 + 88 + 49
    ridge = (_RIDGE * 4 * HIDDEN * x.square().mean()).sqrt()
    stacked = torch.cat([x, torch.eye(4 * HIDDEN, dtype=torch.float64) * ridge])
    best = torch.linalg.lstsq(stacked, torch.cat([y, y.new_zeros(4 * HIDDEN, HIDDEN)])).solution
    torch.testing.assert_close(drafter.fc.weight.T.double(), best[:3 * HIDDEN], rtol=1e-3, atol=1e-4)
    # K·D = H: nothing is cut off; what is left of the random weights is small.
    torch.testing.assert_close(embedding_map(drafter).double(), best[3 * HIDDEN:], rtol=0, atol=0.02)
    guess = x @ best
    size = guess.square().mean().sqrt()
    torch.testing.assert_close(drafter.norm.weight.double(), size * planted.gamma.double(), rtol=1e-3, atol=0)


def test_rank_that_heads_have_no_room_for_is_what_matters_least():
    """Eckart-Young: of unit inputs the error is the singular values that are cut; of others it is theirs whitened."""
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 24, generator=draw, dtype=torch.float64)
    spread = torch.randn(24, 24, generator=draw, dtype=torch.float64)
    x = torch.randn(500, 24, generator=draw, dtype=torch.float64) @ spread
    covariance = x.T @ x / len(x)
    into, out_of = _reduced_rank(weight, covariance, 5)
    error = (x @ (into @ out_of - weight)).square().sum() / len(x)
    u, s, v = torch.linalg.svd(x @ weight / len(x) ** 0.5, full_matrices=False)
    torch.testing.assert_close(error, s[5:].square().sum())
    into, out_of = _reduced_rank(weight, covariance, 30)  # more room than there is rank
    assert into.shape == (24, 30)
    torch.testing.assert_close(into @ out_of, weight)


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1, "head_dim": 64},
                                     {"head_dim": 128, "num_attention_heads": 2}, {"num_key_value_heads": 1},
                                     {"intermediate_size": 8192}, {"fc_norm": True}, {"norm_before_fc": True}])
def test_what_is_linear_is_guessed_before_any_training(changes):
    """Of rows that were not fitted on, through the drafter itself; from the identity nearly none is."""
    planted = Planted(shape=replace(SHAPE, **changes), rank=16)
    drafter, _ = planted.drafter([planted.batch((200, 200, 200)) for _ in range(8)])
    fresh = Drafter(planted.shape, torch.arange(VOCAB))
    start_weights(fresh, 0, planted.head.weight)
    assert planted.shape.num_key_value_heads * planted.shape.head_dim >= 16  # room for the planted rank
    batch, found = planted.batch((100, 150)), {}
    for name, model in (("regression", drafter.eval()), ("identity", fresh.eval())):
        metrics = model(batch, planted.target, torch.ones(1)).metrics
        found[name] = float(metrics["hits"][0] / metrics["gated"][0])
    assert found["regression"] > 0.6 and found["identity"] < 0.1, found


def test_logits_have_the_targets_scale():
    """A target that multiplies its logits: the drafter's head has no such factor, its norm takes it in."""
    one, three = (Planted(scale=scale).drafter([Planted().batch()])[0].norm.weight for scale in (1.0, 3.0))
    torch.testing.assert_close(three, 3 * one)


@pytest.mark.parametrize("noise", [0.1, 0.7])
def test_the_start_is_as_sure_of_itself_as_it_may_be(noise):
    """Cross entropy on other rows is lower than with a final norm twice or half as large, however much is unknown."""
    planted = Planted(noise=noise, unit=True, scale=0.2)
    drafter, _ = planted.drafter([planted.batch((200, 200, 200)) for _ in range(8)])
    batch, loss = planted.batch((200, 200)), {}
    for factor in (0.5, 1.0, 2.0):
        again = copy.deepcopy(drafter).eval()
        again.norm.weight.data.mul_(factor)
        loss[factor] = again(batch, planted.target, torch.ones(1)).loss.item()
    assert loss[1.0] < min(loss[0.5], loss[2.0]), loss


def test_rows_that_are_not_finite_are_left_out():
    planted = Planted()
    batch = planted.batch()
    _, all_rows = planted.drafter([batch])
    batch.features[50, 7], batch.final_hidden[121] = float("nan"), float("inf")
    drafter, rows = planted.drafter([batch])
    assert rows == all_rows - 2 and all(p.isfinite().all() for p in drafter.parameters())


def test_without_a_row_that_counts_the_start_stays():
    planted = Planted()
    batch = replace(planted.batch(), loss_mask=torch.zeros(210, dtype=torch.bool))
    drafter, rows = planted.drafter([batch])
    fresh = Drafter(SHAPE, torch.arange(VOCAB))
    start_weights(fresh, 0, planted.head.weight)
    assert rows == 0 and all(torch.equal(a, b) for a, b in zip(drafter.parameters(), fresh.parameters(), strict=True))


def test_samples_to_fit_on():
    assert regression_samples([3000, 2000, 2000, 5000]) == [(0,), (1, 2), (3,)]
    assert sum(len(batch) for batch in regression_samples([1000] * 500)) == 131


def test_the_stage_says_how_it_starts(run, capsys):
    run.stage("train", **{"train.epochs": 1, "drafter.init": "regression"})
    assert "starting from what fits" in capsys.readouterr().out
    run.stage("train", **{"train.epochs": 1, "force": True})
    assert "linear drafter" not in capsys.readouterr().out  # nor with a drafter to start from: test_train_start.py
    with pytest.raises(PipelineError, match="init=identity goes with lm_head_init=random"):
        run.stage("train", **{"drafter.init": "regression", "drafter.lm_head_init": "random"})
