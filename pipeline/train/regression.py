"""Start as the linear drafter that fits the target best.

Of all drafters that guess the target's state at token i+1 as A · (slots at i) + B · (embedding of i+1), the best one is
the solution of a least-squares problem over the training rows. Every part of it has a place in the drafter:

* A is fc, whose output the residual carries to the head; the MLP adds nothing yet;
* the embedding reaches the residual through attention only, so attention starts by looking at its own token: a key head
  and its query heads start as one random projection of the normed embedding, which nearly keeps lengths and angles
  (Johnson-Lindenstrauss): a token's score with itself is about _SHARPNESS · √D, with unlike tokens it is small;
* value heads and o_proj hold the K·D directions of B that matter most, weighted by how far embeddings spread (as in
  reduced-rank regression, Izenman 1975, with A left as it is);
* the final norm is the target's, times the size of the guess relative to what is guessed: least squares shrinks a guess
  by what is unknown, and a norm would undo it.

The target's state is its final hidden without the norm's weight, which is what a residual stream holds up to scale. Only
the first TTT step is fitted, and a softcap of the logits is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pipeline.train.alignment import PackedBatch
from pipeline.train.batches import pack
from pipeline.train.drafter import Drafter, FrozenTarget
from pipeline.train.start import first_samples

# Tokens of training samples that are read, and how many at a time.
_TOKENS, _BATCH_TOKENS = 131_072, 4096
# Added to every square, relative to their mean and to the number of unknowns per row: what few rows tell is noise.
_RIDGE = 0.25
# Of attention's random weights beside what is put in; scores with oneself in units of √D.
_NOISE, _SHARPNESS = 0.1, 2.0


def regression_samples(lengths: list[int]) -> list[tuple[int, ...]]:
    """Batches of training samples (indices) to fit on; `lengths`: tokens of each."""
    return [tuple(batch) for batch in pack(lengths, first_samples(lengths, _TOKENS), _BATCH_TOKENS)]


@torch.no_grad()
def start_from_regression(drafter: Drafter, batches: Iterable[PackedBatch], target: FrozenTarget, seed: int) -> int:
    """Put the fit into a drafter that has its first weights (`start.start_weights`, lm_head from the target).

    In fp64, so that the number of threads and the device hardly matter. Takes about three matrices of ((n+1)·H)² such
    numbers: 130 MB for SmolLM2, 6 GB at H=4096, 20 GB at H=7168.

    Args:
        batches: samples to fit on, with features as fc reads them while it trains. Rows that are not finite are left
            out: training names their sample when it comes to it.

    Returns:
        The number of rows fitted on; without any the drafter is left as it is.
    """
    c, attention = drafter.config, drafter.midlayer.self_attn
    gamma = target.head.norm_weight.to(drafter.fc.weight.device, torch.float64)
    hidden, rows = c.hidden_size, 0
    gram, cross = (gamma.new_zeros((c.num_fc_inputs + 1) * hidden, n) for n in ((c.num_fc_inputs + 1) * hidden, hidden))
    for batch in batches:
        x, y = _rows(drafter, batch, target, gamma)
        gram.addmm_(x.T, x)
        cross.addmm_(x.T, y)
        rows += len(x)
    if not rows:
        return 0
    gram /= rows
    cross /= rows
    ridge = _RIDGE * len(gram) / rows * gram.diagonal().mean()
    gram.diagonal().add_(ridge)
    best = torch.cholesky_solve(cross, torch.linalg.cholesky(gram))  # [(n+1)·H, H]
    for_slots, for_embedding = best.split([len(best) - hidden, hidden])

    drafter.fc.weight.copy_(for_slots.T)
    drafter.midlayer.mlp.down_proj.weight.zero_()
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        linear.weight.mul_(_NOISE)
    heads, kv_heads, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    projection = torch.randn(kv_heads, size, hidden, generator=torch.Generator().manual_seed(seed)).to(gamma)
    projection *= (_SHARPNESS / hidden) ** 0.5
    attention.k_proj.weight[:, :hidden] += projection.flatten(0, 1)
    attention.q_proj.weight[:, :hidden] += projection.repeat_interleave(heads // kv_heads, 0).flatten(0, 1)
    into, out_of = _reduced_rank(for_embedding, gram[-hidden:, -hidden:], kv_heads * size)
    attention.v_proj.weight[:, :hidden] += into.T
    per_head = out_of.unflatten(0, (kv_heads, size)).repeat_interleave(heads // kv_heads, 0)  # [A, D, H]
    attention.o_proj.weight += per_head.flatten(0, 1).T * (kv_heads / heads)  # the heads of a group add up
    # Mean square of a guess over its channels; of the target's state it is 1.
    guessed = ((best * cross).sum() - ridge * best.square().sum()) / hidden
    drafter.norm.weight.copy_(gamma * guessed.sqrt() * target.head.logit_scale)
    return rows


def _rows(drafter: Drafter, batch: PackedBatch, target: FrozenTarget, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Of the rows that count: slots and normed embedding [N, (n+1)·H], and the target's state [N, H]."""
    row = drafter.select_rows(batch, 1).index
    embedded = drafter.midlayer.input_layernorm(drafter.embed(batch, target, row + 1).float()).to(gamma)
    row = row.to(gamma.device)
    x = torch.cat([drafter.fc_input(batch.features[row].float()).to(gamma), embedded], 1)
    y = torch.where(gamma != 0, batch.final_hidden[row + 1].to(gamma) / gamma, 0.0)
    finite = x.isfinite().all(1) & y.isfinite().all(1)
    return x[finite], y[finite]


def _reduced_rank(weight: Tensor, spread: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors [H, rank] and [rank, H] whose product is nearest `weight` for inputs of covariance `spread` [H, H]."""
    root = torch.linalg.cholesky(spread).T  # spread = rootᵀ root
    u, s, v = torch.linalg.svd(root @ weight, full_matrices=False)
    kept = min(rank, len(s))
    share = s[:kept].sqrt() * u[:, :kept].gather(0, u[:, :kept].abs().argmax(0)[None])[0].sign()  # else any sign will do
    into, out_of = weight.new_zeros(len(weight), rank), weight.new_zeros(rank, len(weight))
    into[:, :kept] = torch.linalg.solve_triangular(root, u[:, :kept] * share, upper=True)
    out_of[:kept] = share[:, None] * v[:kept]  # the sign of both factors
    return into, out_of
