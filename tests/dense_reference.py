"""Plain references for the training core, written for reading: explicit masks, explicit loops, full [T, V] tensors.

Nothing here is shared with `pipeline`, so an error of alignment or algebra there shows as a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """x: [rows, heads, d]. Entry n and n + d/2 of a head form a point that is turned by position · theta^(-2n/d)."""
    d = x.shape[-1]
    # The angles in float32, as every engine computes them.
    angle = position[:, None].float() * (1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float) / d))
    point = torch.complex(x[..., : d // 2], x[..., d // 2 :])
    turn = torch.complex(angle.cos().to(x.dtype), angle.sin().to(x.dtype))
    turned = point * turn[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """TTT attention over (j+1)·S keys with an explicit mask, for one sample of S rows.

    q: [S, heads, d]; keys, values: step 0 … j, each [S, kv_heads, d]. Row i sees rows 0 … i of step 0 and row i alone
    of every later step.
    """
    size, heads, d = q.shape
    groups = heads // keys[0].shape[1]
    k = torch.cat(keys).repeat_interleave(groups, 1)  # [(j+1)·S, heads, d]
    v = torch.cat(values).repeat_interleave(groups, 1)
    mask = torch.zeros(size, len(k), dtype=torch.bool)
    for i in range(size):
        mask[i, : i + 1] = True
        for step in range(1, len(keys)):
            mask[i, step * size + i] = True
    scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def row_loss(p: Tensor, logits: Tensor, answer: int, kind: str = "ce", hard: float = 0.0, eta: float = 3.0) -> Tensor:
    """One row's objective as `pipeline.train.loss.Objective` defines it. p, logits: [Vd]."""
    log_q = logits.log_softmax(-1)
    overlap = torch.minimum(p, log_q.exp()).sum()
    divergence = (p * (p.log() - log_q)).sum()
    if kind == "ce":
        return -(p * log_q).sum()
    if kind == "kl":
        return (1 - hard) * divergence - hard * log_q[answer]
    if kind == "tv":
        return 1 - overlap
    if kind == "lk":
        return -overlap.log()
    share = torch.exp(-eta * overlap.detach())
    return share * divergence + (1 - share) * (1 - overlap)


def is_gated(mask: list[int], row: int, step: int) -> bool:
    """All of l_{i+1} … l_{i+2+j} are generated tokens that exist."""
    return row + 2 + step <= len(mask) - 1 and all(mask[row + 1 : row + 3 + step])


@dataclass
class Reference:
    loss_sums: list[Tensor]
    loss_rows: list[int]
    gated: list[int]
    hits: list[int]
    prefix_hits: list[int]
    reached: list[int]
    logits: list[Tensor]
    """per step [S, Vd]"""


def ttt(weights: dict[str, Tensor], config, sample: dict, embedding: Tensor, lm_head: Tensor, draft_ids: Tensor,
        steps: int, **objective) -> Reference:  # fmt: skip
    """The TTT unroll of one sample with every row at every step.

    Args:
        weights: the drafter's parameters by exported name.
        sample: input_ids [S], features [S, nH], final_hidden [S, H], loss_mask [S].
        embedding, lm_head: the target's, [V, H] both.
        draft_ids: [Vd] target ids of the draft vocabulary.
        objective: of `row_loss`.
    """
    ids, mask = sample["input_ids"], [int(m) for m in sample["loss_mask"]]
    size, eps, theta = len(ids), config.rms_norm_eps, config.rope_parameters["rope_theta"]
    w = weights

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, config.head_dim))

    features = sample["features"]
    if config.norm_before_fc:
        features = rms_norm(features, w["input_norm.weight"], eps)
    if config.fc_norm:
        chunks = features.chunk(config.num_fc_inputs, -1)
        features = torch.cat([rms_norm(c, w[f"fc_norm.{n}.weight"], eps) for n, c in enumerate(chunks)], -1)
    hidden = features @ w["fc.weight"].T
    target_logits = sample["final_hidden"] @ lm_head.T  # [S, V]: row p predicts x_{p+1}
    teacher = target_logits[:, draft_ids].softmax(-1)
    keys, values, all_logits = [], [], []
    for step in range(steps):
        shifted = [ids[i + 1 + step] if i + 1 + step < size else 0 for i in range(size)]
        embedded = embedding[torch.tensor(shifted)]
        x = torch.cat([rms_norm(embedded, w["midlayer.input_layernorm.weight"], eps),
                       rms_norm(hidden, w["midlayer.hidden_norm.weight"], eps)], -1)  # fmt: skip
        position = torch.arange(size) + step
        q = rope(heads(x @ w["midlayer.self_attn.q_proj.weight"].T), position, theta)
        keys.append(rope(heads(x @ w["midlayer.self_attn.k_proj.weight"].T), position, theta))
        values.append(heads(x @ w["midlayer.self_attn.v_proj.weight"].T))
        hidden = hidden + attention(q, keys, values).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
        x = rms_norm(hidden, w["midlayer.post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(x @ w["midlayer.mlp.gate_proj.weight"].T)
        hidden = hidden + (gate * (x @ w["midlayer.mlp.up_proj.weight"].T)) @ w["midlayer.mlp.down_proj.weight"].T
        normed = rms_norm(hidden, w["norm.weight"], eps)
        all_logits.append(normed @ w["lm_head.weight"].T)
        if config.norm_output:
            hidden = normed

    result = Reference([], [], [], [], [], [], all_logits)
    right_so_far = [True] * size
    for step, logits in enumerate(all_logits):
        loss, rows, gated, hits, prefix, reached = logits.new_zeros(()), 0, 0, 0, 0, 0
        for i in range(size):
            if not is_gated(mask, i, step):
                continue
            gated += 1
            token = i + 1 + step
            argmax = int(target_logits[token].argmax())
            right = int(draft_ids[logits[i].argmax()]) == argmax
            reached += right_so_far[i]
            right_so_far[i] &= right
            hits += right
            prefix += right_so_far[i]
            if argmax in draft_ids.tolist():
                rows += 1
                answer = draft_ids.tolist().index(argmax)
                loss = loss + row_loss(teacher[token], logits[i], answer, **objective)
        result.loss_sums.append(loss)
        result.loss_rows.append(rows)
        result.gated.append(gated)
        result.hits.append(hits)
        result.prefix_hits.append(prefix)
        result.reached.append(reached)
    return result
