"""The vocabulary-sized half of a training step: loss and gradients together in one pass over the logits.

p is the softmax of the target's logits restricted to the draft vocabulary, so it sums to 1 there, and q the softmax of
the drafter's logits z. Every objective's gradient in z follows from p and q alone, so one pass over a chunk of rows
gives loss, hits and both gradients, and no [rows, vocab] tensor outlives its chunk.

Rows are taken in the order of the *token* they learn from: up to T rows (one per TTT step) share one, and its teacher
distribution is computed once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.products import wide_dtype
from pipeline.target import OutputHead
from pipeline.train.shapes import ROWS, missing, pad_rows

# Bytes of the logits of one matmul: enough rows that adding to the head's gradient (a pass over [Vd, H]) costs little
# beside it.
CHUNK_BYTES = {"cpu": 48_000_000, "cuda": 240_000_000}
# Logits that softmax and the objective work on at a time: in fp32 they and their temporaries stay in a CPU's cache.
BLOCK_LOGITS = {"cpu": 400_000, "cuda": 40_000_000}
# Rows of the head whose bf16 gradient is added to the fp32 sum at a time; a temporary of the whole costs page faults.
HEAD_ROWS = {"cpu": 4096, "cuda": 1 << 20}


@dataclass(frozen=True)
class Objective:
    """The loss of one row. α = Σ_v min(p_v, q_v) is the share of drafts that rejection sampling accepts (Leviathan et
    al. 2023, arXiv 2211.17192), for a target held to the draft vocabulary: without that restriction it is at most α.

    Attributes:
        kind: what is summed over rows, in nats except for `tv`
            "ce": -Σ p log q, cross entropy against the target's distribution
            "kl": (1-h) · KL(p ‖ q) - h · log q_answer, the answer being the target's argmax
            "tv": 1 - α, the total variation distance; vanishing gradients where p and q hardly overlap
            "lk": -log α
            "lk_hybrid": λ · KL(p ‖ q) + (1-λ) · (1-α) with λ = exp(-η α), a constant for the gradient
            The last two are the LK losses of Samarin et al. 2026 (arXiv 2602.23881); λ is each row's own, so that a
            loss does not depend on what a sample is batched with.
        hard_weight: h of "kl".
        eta: η of "lk_hybrid".
    """

    kind: Literal["ce", "kl", "tv", "lk", "lk_hybrid"] = "ce"
    hard_weight: float = 0.0
    eta: float = 3.0


@dataclass(frozen=True)
class VocabLoss:
    """Result of `vocabulary_loss`. T steps, P tokens.

    Attributes:
        loss: scalar, Σ_j step_weights[j] · loss_sums[j]; the only differentiable part.
        loss_sums: [T] the objective summed over the used rows of each step.
        hits: [P, T] bool, whether the drafter's argmax is the target's; False where not used.
    """

    loss: Tensor
    loss_sums: Tensor
    hits: Tensor


def vocabulary_loss(
    hidden: Tensor,
    lm_head: Tensor,
    head: OutputHead,
    final_hidden: Tensor,
    answer: Tensor,
    row_of: Tensor,
    used: Tensor,
    step_weights: Tensor,
    *,
    objective: Objective = Objective(),
    chunk_logits: int | None = None,
) -> VocabLoss:
    """The objective over T TTT steps against the target, without ever holding [rows, vocab].

    Matmuls run in `hidden`'s dtype, softmax and sums in fp32 (fp64 for fp64 input).

    Args:
        hidden: [T, N, H] the drafter's hidden after its final norm, for every step and compact row.
        lm_head: [Vd, H] the drafter's head (master weights).
        head: the target's output head, rows of the draft vocabulary [Vd, H] only.
        final_hidden: [P, H] the target's final hidden at the teacher tokens.
        answer: [P] draft-vocabulary id of the target's argmax.
        row_of, used: [P, T] as in `alignment.Rows`; on the CPU, so that nothing waits for a device to count rows.
        step_weights: [T] factor of each step's sum in `loss`, known before the forward so that the gradients can be
            accumulated in the same pass.
        objective: the loss of one row.
        chunk_logits: bound on rows × vocabulary of one chunk, by default what suits the device.
    """
    grad = torch.is_grad_enabled() and (hidden.requires_grad or lm_head.requires_grad)
    chunk_logits = chunk_logits or CHUNK_BYTES[hidden.device.type] // hidden.element_size()
    chunk = max(1, chunk_logits // len(lm_head))
    chunk -= chunk % ROWS if chunk > ROWS else 0  # a full one needs no padding
    args = (hidden, lm_head, head, final_hidden, answer, row_of, used, step_weights, objective, chunk, grad)
    return VocabLoss(*_VocabularyLoss.apply(*args))


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, lm_head, head, final_hidden, answer, row_of, used, step_weights, objective, chunk, grad):
        dtype = hidden.dtype
        acc = wide_dtype(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            flat = hidden.flatten(0, 1)  # [T·N, H]
            weight = lm_head.to(dtype)
            target_weight = head.weight.to(dtype)
            token, step = used.cpu().nonzero(as_tuple=True)  # of every row that is used, by token
            rows = step * hidden.shape[1] + row_of.cpu()[token, step]  # of `flat`, none twice
            bounds, (rows, token, step) = token, (i.to(hidden.device) for i in (rows, token, step))
            row_weight = step_weights.to(acc)[step]
            losses = torch.zeros(used.shape, dtype=acc, device=hidden.device)
            hits = torch.zeros(used.shape, dtype=torch.bool, device=hidden.device)
            grad_hidden = torch.zeros_like(flat) if grad else None
            grad_head = torch.empty_like(lm_head, dtype=acc) if grad else None
            block = max(1, BLOCK_LOGITS[hidden.device.type] // len(lm_head))
            # Written over by every chunk: fresh memory would cost a page fault per 4 KiB each time.
            most = min(chunk, len(rows))
            logits = torch.empty(most + missing(most), len(lm_head), dtype=dtype, device=hidden.device)
            for a in range(0, len(rows), chunk):
                stop = min(a + chunk, len(rows))
                part = slice(a, stop)
                x = pad_rows(flat[rows[part]])  # [n, H]; where x is 0, so are z and the gradients
                z = torch.mm(x, weight.t(), out=logits[: len(x)])  # [n, Vd]
                first = int(bounds[a])
                final = pad_rows(final_hidden[first : int(bounds[part][-1]) + 1])
                target_logits = final.to(dtype) @ target_weight.t()
                for b in range(a, stop, block):
                    at = slice(b, min(b + block, stop))
                    low, high = int(bounds[at][0]), int(bounds[at][-1]) + 1  # tokens of this block
                    wide = head.finish(target_logits[low - first : high - first].to(acc))
                    teacher, entropy = _teacher(wide, answer[low:high], objective)
                    of, logit_rows = token[at] - low, z[at.start - a : at.stop - a]
                    p, logits_wide = teacher.index_select(0, of), logit_rows.to(acc)
                    loss, right, dz = _score(logits_wide, p, entropy[of], answer[token[at]], objective)
                    losses[token[at], step[at]], hits[token[at], step[at]] = loss, right
                    if grad:
                        logit_rows.copy_(dz)  # before the row's weight
                if grad:
                    factor = row_weight[part][:, None].to(dtype)
                    grad_hidden.index_copy_(0, rows[part], (z @ weight)[: stop - a] * factor)
                    x[: stop - a] *= factor
                    _add_product(grad_head, z, x, first=a == 0)
            loss_sums = losses.sum(0)
            if grad and not len(rows):
                grad_head.zero_()
        if grad:
            ctx.save_for_backward(grad_hidden.view_as(hidden), grad_head.to(lm_head.dtype))
        ctx.mark_non_differentiable(loss_sums, hits)
        return (loss_sums * step_weights.to(acc)).sum(), loss_sums, hits

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _sums, _hits):
        grad_hidden, grad_head = ctx.saved_tensors
        # In place, so a graph has one backward: another [Vd, H] would cost as much memory and a page fault per 4 KiB.
        return grad_hidden.mul_(grad_loss.to(grad_hidden.dtype)), grad_head.mul_(grad_loss), *[None] * 9


def _teacher(target_logits: Tensor, answer: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """[c, Vd] → per token the distribution to learn [c, Vd], and what its cross entropy is to be reduced by [c]."""
    teacher = torch.softmax(target_logits, -1)
    if objective.kind not in ("kl", "lk_hybrid"):
        return teacher, teacher.new_zeros(len(teacher))
    entropy = target_logits.logsumexp(-1) - (teacher * target_logits).sum(-1)
    if objective.kind == "kl" and objective.hard_weight:
        # Cross entropy is linear in p: mixing the label into p is mixing the losses.
        entropy *= 1 - objective.hard_weight
        teacher *= 1 - objective.hard_weight
        teacher[torch.arange(len(teacher), device=teacher.device), answer] += objective.hard_weight
    return teacher, entropy


def _score(
    z: Tensor, p: Tensor, teacher_entropy: Tensor, answer: Tensor, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits z and teacher p [n, Vd] → per row the loss, whether the argmax is the answer [n], and dloss/dz [n, Vd]."""
    best = z.amax(-1)
    right = _is_argmax(z, best, answer)
    expected = (z * p).sum(-1)
    q = torch.softmax(z, -1)
    # logsumexp(z) = best - log q_best: cross entropy without another pass of exponentials.
    kl = best - q.amax(-1).log() - expected - teacher_entropy
    if objective.kind in ("ce", "kl"):
        return kl, right, q.sub_(p)
    # dα/dz_v = q_v (1[q_v < p_v] - Σ_u q_u 1[q_u < p_u])
    below = q * (q < p)
    inside = below.sum(-1, keepdim=True)
    acceptance = torch.minimum(q, p).sum(-1, keepdim=True)
    slope = below.sub_(q * inside)
    if objective.kind == "tv":
        return (1 - acceptance).squeeze(-1), right, slope.neg_()
    if objective.kind == "lk":
        acceptance.clamp_(min=torch.finfo(q.dtype).tiny)
        return -acceptance.log().squeeze(-1), right, slope.div_(-acceptance)
    weight = torch.exp(-objective.eta * acceptance)
    loss = weight * kl[:, None] + (1 - weight) * (1 - acceptance)
    return loss.squeeze(-1), right, slope.mul_(weight - 1).add_(q.sub_(p).mul_(weight))


def _is_argmax(z: Tensor, best: Tensor, answer: Tensor) -> Tensor:
    """[n] whether the first of the largest logits is the answer. z: [n, Vd]; best, answer: [n]."""
    if z.is_cuda:
        return z.argmax(-1) == answer
    # A CPU's argmax is as slow as a softmax: it decides only among logits that tie, which in bf16 is not rare.
    candidate = z.gather(-1, answer[:, None]).squeeze(-1) == best
    row = candidate.nonzero().squeeze(-1)
    candidate[row] = z[row].argmax(-1) == answer[row]
    return candidate


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add aᵀ b to total [Vd, H], or put it there if it is the `first`. a [n, Vd] and b [n, H] may be of a narrower type."""
    if a.dtype == total.dtype:
        total.addmm_(a.t(), b, beta=0 if first else 1)
        return
    step = HEAD_ROWS[a.device.type]
    for v in range(0, len(total), step):
        part, product = total[v : v + step], a[:, v : v + step].t() @ b
        if first:
            part.copy_(product)
        else:
            part.add_(product)
