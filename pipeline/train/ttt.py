"""TTT attention, exact and without a mask: flash attention over step 0's keys merged with single-key terms.

At TTT step j row i sees the keys of rows 0 … i of step 0 (causal) and, of every step t = 1 … j, only its own key.
With out_0 and the logsumexp lse_0 from flash attention over step 0, and s_t = q_i · k_{t,i} / sqrt(d),

    lse = logsumexp(lse_0, s_1, …, s_j)
    out = exp(lse_0 - lse) · out_0 + Σ_t exp(s_t - lse) · v_{t,i}

Flash attention's backward recomputes its probabilities from the logsumexp it is given. Called with the *merged* out and
lse it returns exactly step 0's share of the gradients, as ring attention does (Liu et al. 2023, arXiv 2310.01889).

Only rows that count have queries. `is_causal` with fewer queries than keys means different things in different kernels, so a
run of queries is split into two calls that mean the same everywhere: full attention over the keys before the run, and a
square causal block over the run itself.

On a CPU both directions are a few matrix products per block of queries instead, in bf16, and in fp32 where oneDNN multiplies
it (see `products`): torch 2.13's kernel takes one and a half times to twice as long (9 heads, 3 key heads of size 64, Zen
5), in bf16 its backward for 100 queries three times. A run of a few queries goes to the kernel there too, since every
product has its price.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.products import fp32_by_onednn, wide_dtype, wide_product
from pipeline.train.alignment import Segment
from pipeline.train.shapes import missing

_FEW = 16  # queries of a run that is left to the kernel
# Of a block's products: most queries (more are no faster, and make more shapes), what divides their number and that of the
# keys, and most scores of a head if _ALIGNMENT queries have no more.
_QUERIES, _ALIGNMENT, _SCORES = 128, 32, 128 * 2048


class _Call(NamedTuple):
    """One call of the flash kernel for a run of queries, as its backward repeats it."""

    keys: slice
    """rows whose keys it reads"""
    causal: bool
    state: tuple
    """what the kernel's backward wants besides inputs and results"""


def ttt_attention(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Sequence[Tensor], own_v: Sequence[Tensor], segments: Sequence[Segment]
) -> Tensor:
    """Attention of one TTT step.

    Args:
        q: [N, heads, head_dim] queries of the compact rows.
        k0, v0: [R, kv_heads, head_dim] step 0's keys and values of all packed rows; kv_heads divides heads.
        own_k, own_v: j tensors [N, kv_heads, head_dim], the rows' own keys and values of steps 1 … j.
        segments: how compact rows lie in packed rows; a row that none covers sees no key of step 0.

    Returns:
        [N, heads, head_dim]
    """
    return _TTTAttention.apply(q, k0, v0, tuple(segments), *own_k, *own_v)


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k0, v0, segments, *own):
        steps, groups = len(own) // 2, q.shape[1] // k0.shape[1]
        own_k, own_v = own[:steps], own[steps:]
        scale = q.shape[-1] ** -0.5
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide_dtype(q))
        ctx.runs = []
        for s in segments:
            queries, run = slice(s.start, s.stop), slice(s.first_row, s.first_row + s.stop - s.start)
            q_run, visible, calls = q[queries], slice(s.first_key, run.stop), []
            if _by_products(q_run):  # no calls
                part_out, part_lse = _forward_by_products(q_run, k0[visible], v0[visible], scale)
            else:
                part_out, part_lse, state = _flash_forward(q_run, k0[run], v0[run], True, scale)
                calls.append(_Call(run, True, state))
                if s.first_key < s.first_row:
                    past = slice(s.first_key, s.first_row)
                    past_out, past_lse, state = _flash_forward(q_run, k0[past], v0[past], False, scale)
                    calls.append(_Call(past, False, state))
                    part_out, part_lse = _merge(part_out, part_lse, past_out, past_lse)
            out[queries], lse[queries] = part_out, part_lse
            ctx.runs.append((queries, visible, calls))
        p = lse.new_ones(1, *lse.shape)  # [1 + j, N, heads] probability of step 0's keys together, and of each own key
        if steps:
            wide = q.to(lse.dtype)
            scores = torch.stack([lse, *(_dot(wide, k, groups).mul_(scale) for k in own_k)])
            lse = scores.logsumexp(0)
            p = scores.sub_(lse).exp_()
            first, *rest = p[..., None].to(out.dtype)
            out *= first
            for share, v in zip(rest, own_v, strict=True):
                _grouped(out, groups).addcmul_(_grouped(share, groups), v[:, :, None])
        ctx.save_for_backward(q, k0, v0, out, lse, p, *own)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k0, v0, out, lse, p, *own = ctx.saved_tensors
        steps, groups = len(own) // 2, q.shape[1] // k0.shape[1]
        own_k, own_v = own[:steps], own[steps:]
        scale = q.shape[-1] ** -0.5
        grad = grad.contiguous()
        # Every later run of a sample adds to a key: rounded each time, the sum would drift.
        dq, dk0, dv0 = torch.zeros_like(q), *(torch.zeros_like(x, dtype=lse.dtype) for x in (k0, v0))
        wide_q, wide_grad = q.to(lse.dtype), grad.to(lse.dtype)
        delta = (wide_grad * out.to(lse.dtype)).sum(-1)  # [N, heads]: Σ_t p_t dp_t over all keys
        for queries, visible, calls in ctx.runs:
            grad_run, q_run = grad[queries], q[queries]
            if calls:
                out_run, lse_run = out[queries], lse[queries]
                parts = [(c.keys, _flash_backward(grad_run, q_run, k0[c.keys], v0[c.keys], out_run, lse_run, c.causal,
                                                  scale, c.state)) for c in calls]  # fmt: skip
            else:
                rest = (k0[visible], v0[visible], delta[queries], p[0, queries], scale)
                parts = [(visible, _backward_by_products(grad_run, q_run, *rest))]
            for keys, (part_q, part_k, part_v) in parts:
                dq[queries] += part_q
                dk0[keys] += part_k
                dv0[keys] += part_v
        dks, dvs = [], []
        for share, k, v in zip(p[1:], own_k, own_v, strict=True):
            ds = (_dot(wide_grad, v, groups) - delta).mul_(share).mul_(scale)  # [N, heads]
            _grouped(dq, groups).addcmul_(_grouped(ds[..., None].to(q.dtype), groups), k[:, :, None])
            dks.append(_dot_of_heads(ds, wide_q, groups).to(k.dtype))
            dvs.append(_dot_of_heads(share, wide_grad, groups).to(v.dtype))
        return dq, dk0.to(k0.dtype), dv0.to(v0.dtype), None, *dks, *dvs


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each."""
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((part - lse).exp_()[..., None].to(out_a.dtype) for part in (lse_a, lse_b))
    return out_a * share_a + out_b * share_b, lse


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[N, heads, ·] → [N, kv_heads, groups, ·], a view: head h reads key head h // groups."""
    return x.unflatten(1, (-1, groups))


def _dot(x: Tensor, kv: Tensor, groups: int) -> Tensor:
    """Row-wise x · kv in x's precision, which is the logsumexp's: [N, heads, d] with [N, kv_heads, d] → [N, heads]."""
    return (_grouped(x, groups) * kv.to(x.dtype)[:, :, None]).sum(-1).flatten(1)


def _dot_of_heads(weight: Tensor, x: Tensor, groups: int) -> Tensor:
    """Σ weight · x over the heads that read one key head: [N, heads] with [N, heads, d] → [N, kv_heads, d].

    Head by head: a sum over the second last dimension takes a CPU twice as long.
    """
    weights, parts = _grouped(weight[..., None], groups).unbind(2), _grouped(x, groups).unbind(2)
    total = weights[0] * parts[0]
    for w, part in zip(weights[1:], parts[1:], strict=True):
        total.addcmul_(w, part)
    return total


# -- the kernels of PyTorch that return a logsumexp. All take and give [rows, heads, head_dim]; lse is [rows, heads]. --


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, tuple]:
    """out, lse and what the kernel's own backward wants besides."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_bhsd(q, k, v), 0.0, causal, scale=scale)
        state = ()
    elif q.dtype in (torch.float16, torch.bfloat16):
        out, lse, *state = aten._scaled_dot_product_flash_attention(
            *_bhsd(q, k, v), 0.0, causal, False, scale=scale
        )
        state = tuple(state[:6])  # cum_seq_q, cum_seq_k, max_q, max_k, rng state and offset
    else:
        k, v = _expand(k, q.shape[1]), _expand(v, q.shape[1])
        out, lse, *state = aten._scaled_dot_product_efficient_attention(
            *_bhsd(q, k, v), None, True, 0.0, causal, scale=scale
        )
        lse = lse[..., : len(q)]  # the kernel pads its rows to a multiple of 32
    return out[0].transpose(0, 1), lse[0].transpose(0, 1), tuple(state)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, state: tuple
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the keys given, for an out and lse that may have been merged with other keys."""
    aten = torch.ops.aten
    kv_heads = k.shape[1]
    lse = lse.transpose(0, 1).contiguous()[None]  # [1, heads, rows]
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_bhsd(grad, q, k, v, out), lse, 0.0, causal, scale=scale
        )
    elif q.dtype in (torch.float16, torch.bfloat16):
        cum_q, cum_k, max_q, max_k, seed, offset = state
        grads = aten._scaled_dot_product_flash_attention_backward(
            *_bhsd(grad, q, k, v, out), lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
        )
    else:
        k, v = _expand(k, q.shape[1]), _expand(v, q.shape[1])
        # +inf makes the padded rows' probabilities exp(s - lse) vanish.
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        grads = aten._scaled_dot_product_efficient_attention_backward(
            *_bhsd(grad, q, k, v), None, *_bhsd(out), lse, *state, 0.0, [True, True, True, False], causal, scale=scale
        )
    dq, dk, dv = (g[0].transpose(0, 1) for g in grads[:3])
    if dk.shape[1] != kv_heads:
        dk, dv = (g.unflatten(1, (kv_heads, -1)).sum(2) for g in (dk, dv))
    return dq, dk, dv


def _by_products(q: Tensor) -> bool:
    """Whether a run of queries goes to products: where they were faster on Zen 5 (see the top)."""
    fast = q.dtype == torch.bfloat16 or (q.dtype == torch.float32 and fp32_by_onednn())
    return fast and q.device.type == "cpu" and len(q) > _FEW


def _aligned(past: int, rows: int) -> tuple[int, int]:
    """How many keys of zeros to put before a run that sees `past` keys of others, and rows of zeros behind it, so that
    the shapes of its products recur (see `shapes`)."""
    return missing(past, _ALIGNMENT), missing(rows, _ALIGNMENT)


def _blocks(past: int, rows: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of a run of queries, and the keys that each sees some of: `past` ones before the run and its own."""
    few = _SCORES // (past + rows) // _ALIGNMENT * _ALIGNMENT
    size = max(_ALIGNMENT, min(_QUERIES, few))
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        yield slice(start, stop), slice(past + stop)


def _masked_scores(q: Tensor, k: Tensor, scale: float, groups: int, front: int) -> Tensor:
    """Of each query with each key, -inf where it does not see it, in fp32 at least.

    q: [kv_heads, groups · rows, d], the last `rows` of the keys [kv_heads, keys, d] being the queries' own and the first
    `front` nobody's.
    """
    scores = wide_product(q, k.mT, scale)
    scores[..., :front] = -torch.inf
    own = scores.unflatten(1, (groups, -1))[..., -(q.shape[1] // groups) :]
    own += own.new_full(own.shape[-2:], -torch.inf).triu_(1)  # several times as fast as masked_fill_ on a CPU
    return scores


def _without_autocast(function: Callable) -> Callable:
    """It would narrow what is wide on purpose."""

    @functools.wraps(function)
    def wide(q: Tensor, *args):
        with torch.autocast(q.device.type, enabled=False):
            return function(q, *args)

    return wide


@_without_autocast
def _forward_by_products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse of a run of queries by matrix products over blocks of them.

    The run's own keys are the last of m: query i of n sees keys 0 … m - n + i.
    """
    groups, past, count = q.shape[1] // k.shape[1], len(k) - len(q), len(q)
    front, behind = _aligned(past, count)
    q, k, v = _padded(q, 0, behind), _padded(k, front, behind), _padded(v, front, behind)
    q = _grouped(q, groups).movedim(0, 2)  # [kv_heads, groups, rows, d]
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    for rows, seen in _blocks(front + past, q.shape[2]):
        scores = _masked_scores(q[:, :, rows].flatten(1, 2), k[:, seen], scale, groups, front)
        p = scores.softmax(-1)
        top = p.amax(-1, keepdim=True)  # exp(greatest score - lse)
        lse[:, :, rows] = (scores.amax(-1) - top.squeeze(-1).log()).unflatten(1, (groups, -1))
        # Relative to the greatest, which then is no rounded number: it decides where attention is sharp.
        out[:, :, rows] = wide_product(p.div_(top), v[:, seen]).mul_(top).unflatten(1, (groups, -1))
    return out.movedim(2, 0).flatten(1, 2)[:count], lse.movedim(2, 0).flatten(1, 2)[:count]


@_without_autocast
def _backward_by_products(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, share: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a run whose forward was `_forward_by_products`; dk and dv are in lse's precision.

    share: [rows, heads] of these keys in the probability. As in the kernels, q·k and grad·v stay in lse's precision, since
    what is subtracted from them nearly cancels them.
    """
    groups, past, count = q.shape[1] // k.shape[1], len(k) - len(q), len(q)
    front, behind = _aligned(past, count)
    q, grad, delta, share = (_padded(x, 0, behind) for x in (q, grad, delta[..., None], share[..., None]))
    q, grad, delta, share = (_grouped(x, groups).movedim(0, 2) for x in (q, grad, delta, share))
    k, v = (_padded(x, front, behind).transpose(0, 1).contiguous() for x in (k, v))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=delta.dtype), torch.zeros_like(v, dtype=delta.dtype)
    for rows, seen in _blocks(front + past, q.shape[2]):
        q_rows, grad_rows, delta_rows, share_rows = (x[:, :, rows].flatten(1, 2) for x in (q, grad, delta, share))
        p = _masked_scores(q_rows, k[:, seen], scale, groups, front).softmax(-1).mul_(share_rows)
        ds = wide_product(grad_rows, v[:, seen].mT, scale).sub_(delta_rows * scale).mul_(p)
        p, ds = p.to(q.dtype), ds.to(q.dtype)
        dq[:, :, rows] = (ds @ k[:, seen]).unflatten(1, (groups, -1))
        dk[:, seen] += ds.mT @ q_rows
        dv[:, seen] += p.mT @ grad_rows
    dk, dv = (x.transpose(0, 1)[front : front + past + count] for x in (dk, dv))
    return dq.movedim(2, 0).flatten(1, 2)[:count], dk, dv


def _padded(x: Tensor, front: int, behind: int) -> Tensor:
    """x [rows, heads, ·] with rows of zeros before and behind it."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, front, behind)) if front or behind else x


def _bhsd(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[rows, heads, d] → [1, heads, rows, d], a view."""
    return tuple(t.transpose(0, 1)[None] for t in tensors)


def _expand(kv: Tensor, heads: int) -> Tensor:
    return kv if kv.shape[1] == heads else kv.repeat_interleave(heads // kv.shape[1], 1)
