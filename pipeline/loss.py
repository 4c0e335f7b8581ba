"""The vocabulary-sized half of a training step: soft cross entropy in one pass, loss and gradients together.

Per row the loss is  -Σ_v p_v log softmax(z)_v,  with p the softmax of the target's logits restricted to the draft
vocabulary and z the drafter's logits. Its gradient in z is softmax(z) - p, so one pass over a chunk of rows gives loss,
hits and both gradients, and no [rows, vocab] tensor outlives its chunk.

Chunks run over *tokens*, not rows: up to T rows (one per TTT step) learn from the same token, and its teacher
distribution is computed once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.target import OutputHead

# Largest number of logits at a time. Below 32 MiB of fp32 glibc keeps freed blocks instead of unmapping them, which
# otherwise costs a page fault per 4 KiB at every use. A GPU has no such bound and wants larger products (480 MB).
CHUNK_LOGITS = {"cpu": 7_500_000, "cuda": 120_000_000}


@dataclass(frozen=True)
class VocabLoss:
    """Result of `vocabulary_loss`. T steps, P tokens.

    Attributes:
        loss: scalar, Σ_j step_weights[j] · loss_sums[j]; the only differentiable part.
        loss_sums: [T] cross entropy summed over the used rows of each step, in nats.
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
    chunk_logits: int | None = None,
) -> VocabLoss:
    """Soft cross entropy of T TTT steps against the target, without ever holding [rows, vocab].

    Matmuls run in `hidden`'s dtype, softmax and sums in fp32 (fp64 for fp64 input).

    Args:
        hidden: [T, N, H] the drafter's hidden after its final norm, for every step and compact row.
        lm_head: [Vd, H] the drafter's head (master weights).
        head: the target's output head, rows of the draft vocabulary [Vd, H] only.
        final_hidden: [P, H] the target's final hidden at the teacher tokens.
        answer: [P] draft-vocabulary id of the target's argmax.
        row_of, used: [P, T] as in `alignment.Rows`.
        step_weights: [T] factor of each step's sum in `loss`, known before the forward so that the gradients can be
            accumulated in the same pass.
        chunk_logits: bound on rows × vocabulary of one chunk, by default what suits the device.
    """
    grad = torch.is_grad_enabled() and (hidden.requires_grad or lm_head.requires_grad)
    chunk_logits = chunk_logits or CHUNK_LOGITS[hidden.device.type]
    chunk = max(1, chunk_logits // (lm_head.shape[0] * row_of.shape[1]))
    args = (hidden, lm_head, head, final_hidden, answer, row_of, used, step_weights, chunk, grad)
    return VocabLoss(*_VocabularyLoss.apply(*args))


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, lm_head, head, final_hidden, answer, row_of, used, step_weights, chunk, grad):
        dtype = hidden.dtype
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        with torch.autocast(hidden.device.type, enabled=False):
            flat = hidden.flatten(0, 1)  # [T·N, H]
            weight = lm_head.to(dtype)
            target_weight = head.weight.to(dtype)
            tokens, steps = row_of.shape
            index = row_of + hidden.shape[1] * torch.arange(steps, device=row_of.device)  # rows of `flat`
            row_weight = used * step_weights.to(acc)  # [P, T]
            loss_sums = torch.zeros(steps, dtype=acc, device=hidden.device)
            hits = torch.zeros_like(used)
            grad_hidden = torch.zeros_like(flat) if grad else None
            grad_head = torch.zeros_like(lm_head, dtype=acc) if grad else None
            # Written over by every chunk: fresh memory would cost a page fault per 4 KiB each time.
            logits = torch.empty(min(chunk, tokens) * steps, len(lm_head), dtype=acc, device=hidden.device)
            product = torch.empty_like(lm_head, dtype=dtype) if grad and dtype != acc else None
            for a in range(0, tokens, chunk):
                part = slice(a, a + chunk)
                rows = index[part].flatten()
                x = flat[rows]  # [c·T, H]
                z = _product(x, weight.t(), logits[: len(rows)])  # [c·T, Vd]
                by_token = z.unflatten(0, (-1, steps))  # [c, T, Vd]
                target_logits = (final_hidden[part].to(dtype) @ target_weight.t()).to(acc)
                teacher = torch.softmax(head.finish(target_logits), -1)  # [c, Vd]
                best, choice = z.max(-1)
                expected = torch.bmm(by_token, teacher[..., None]).squeeze(-1)  # [c, T]
                total = z.sub_(best[:, None]).exp_().sum(-1)  # z now holds softmax(z) · total
                lse = (best + total.log()).unflatten(0, (-1, steps))
                loss_sums += ((lse - expected) * used[part]).sum(0)
                hits[part] = (choice.unflatten(0, (-1, steps)) == answer[part, None]) & used[part]
                if grad:
                    z.mul_(total.reciprocal_()[:, None])
                    dz = by_token.sub_(teacher[:, None]).flatten(0, 1).to(dtype)  # before the row's weight
                    factor = row_weight[part].flatten()[:, None].to(dtype)
                    grad_hidden.index_add_(0, rows, (dz @ weight) * factor)
                    if product is None:
                        grad_head.addmm_(dz.t(), x * factor)
                    else:  # the sum over chunks stays in fp32
                        grad_head += torch.mm(dz.t(), x * factor, out=product)
        if grad:
            ctx.save_for_backward(grad_hidden.view_as(hidden), grad_head.to(lm_head.dtype))
        ctx.mark_non_differentiable(loss_sums, hits)
        return (loss_sums * step_weights.to(acc)).sum(), loss_sums, hits

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _sums, _hits):
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_loss.to(grad_hidden.dtype), grad_head * grad_loss, *[None] * 8


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a @ b, where out may be wider than a and b."""
    return torch.mm(a, b, out=out) if a.dtype == out.dtype else out.copy_(a @ b)
