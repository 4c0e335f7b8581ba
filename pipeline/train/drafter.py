"""The EAGLE-3 drafter, exactly as SGLang's `llama_eagle3.py` serves it, and its training-time test (TTT).

    g = fc([slot 0 | slot 1 | slot 2])                          three layer outputs of the target → one hidden
    x = [input_layernorm(embedding) | hidden_norm(g)]           embedding first
    h = g + o_proj(attention(x))                                the residual is the raw g
    h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h));  the next step is fed h, before the norm

Li et al. 2025, "EAGLE-3" (arXiv 2503.01840). Parameter names are the names of the exported file. The embedding is the
target's, frozen and passed in. Symbols: R packed rows, N rows that count (see `alignment`), T steps, H hidden,
n slots, A heads, K key/value heads, D head size, F MLP size, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import PipelineError
from pipeline.target import OutputHead
from pipeline.train.alignment import PackedBatch, Rows, select_rows
from pipeline.train.drafter_config import DrafterConfig
from pipeline.train.loss import Objective, vocabulary_loss
from pipeline.train.norm_and_gate import rms_norm, swiglu
from pipeline.train.rope import Rope, rotate
from pipeline.train.shapes import missing, pad_rows
from pipeline.train.ttt import ttt_attention


@dataclass(frozen=True)
class FrozenTarget:
    """What training needs of the target: two frozen matrices.

    Attributes:
        embedding: [V, H] input embedding.
        head: output head, rows of the draft vocabulary only (`load_output_head(target, rows=draft_token_ids)`).
    """

    embedding: Tensor
    head: OutputHead

    def to(self, device: torch.device) -> FrozenTarget:
        return FrozenTarget(self.embedding.to(device), replace(self.head, weight=self.head.weight.to(device)))


@dataclass(frozen=True)
class TTTOutput:
    """Result of one TTT unroll.

    Attributes:
        loss: scalar, Σ_j step_weights[j] · loss_sums[j], ready for backward.
        metrics: [T] tensors, sums to be added over batches and ranks before any ratio is taken:
            `loss_sum` the objective, `loss_rows` rows it is over, `gated` rows the accuracy is over, `hits` rows whose
            argmax is right, `prefix_hits` rows right at this and every earlier step
            (τ_row@K = 1 + Σ_{j<K} prefix_hits[j] / gated[j]), `reached` gated rows right at every earlier step.
        n_rows: N, rows that went through the layer at every step.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    n_rows: int


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Projections of the drafter's attention: q, k, v read x = [embedding | hidden] of width 2H.

    A product with [e | h] is the sum of one with e and one with h. Every step but the first reads the same tokens
    again, so the embedding's term is worked out once per token: `halves` splits the weights, `Drafter.unroll` adds.
    """

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.heads, self.head_dim = (c.num_attention_heads, c.num_key_value_heads), c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def halves(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Weights of q, k and v, one below the other, for the embedding and for the hidden: [(A + 2K)·D, H] twice."""
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]).to(dtype)
        return weight.tensor_split(2, 1)

    def split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, (A + 2K)·D] → q [N, A, D] and k, v [N, K, D], q and k rotated. Without A·D in front, q is empty."""
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        keys = self.heads[1]
        turned = rotate(qkv[:, :-keys], cos, sin)
        return turned[:, :-keys], turned[:, -keys:], qkv[:, -keys:]


class MLP(nn.Module):
    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class MidLayer(nn.Module):
    """The drafter's one decoder layer."""

    def __init__(self, c: DrafterConfig, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = SelfAttention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def outputs(self, attended: Tensor, residual: Tensor) -> Tensor:
        """[N, A, D], [N, H] → [N, H]"""
        h = residual + self.dropout(self.self_attn.o_proj(attended.flatten(1)))
        return h + self.dropout(self.mlp(self.post_attention_layernorm(h)))


class Drafter(nn.Module):
    """EAGLE-3 drafter.

    Args:
        config: shapes.
        draft_token_ids: [Vd] ascending target ids of the draft vocabulary.
        dropout: in training mode, share of fc's input, of the normed embeddings and of what attention and MLP add that
            is set to 0 (Srivastava et al. 2014); drawn from torch's own generator.
    """

    def __init__(self, config: DrafterConfig, draft_token_ids: Tensor, dropout: float = 0.0):
        super().__init__()
        c = self.config = config
        ids = draft_token_ids.to(torch.int64).cpu()
        if len(ids) != c.draft_vocab_size or (ids.diff() <= 0).any() or ids[0] < 0 or ids[-1] >= c.vocab_size:
            raise PipelineError(
                f"the draft vocabulary must be {c.draft_vocab_size} ascending target ids below {c.vocab_size}",
                field="drafter.draft_vocab_size",
                value=f"{len(ids)} ids",
                fix="make standardize",
            )
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(c.num_fc_inputs * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer = MidLayer(c, dropout)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.norm_before_fc:
            self.input_norm = RMSNorm(c.num_fc_inputs * c.hidden_size, c.rms_norm_eps)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(c.num_fc_inputs))
        self.register_buffer("d2t", ids - torch.arange(len(ids)))  # target id = draft id + d2t[draft id]
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool).index_fill_(0, ids, True))
        self.rope = Rope(c.head_dim, c.rope_parameters, c.max_position_embeddings)
        # Target id → draft id, -1 outside. On the CPU and no buffer: it serves the bookkeeping only.
        self._draft_id = torch.full((c.vocab_size,), -1).index_copy_(0, ids, torch.arange(len(ids)))

    @torch.no_grad()
    def init_weights(self, seed: int, lm_head_rows: Tensor | None = None) -> None:
        """Matrices from N(0, 0.02²), norms 1; lm_head from the target's rows [Vd, H] of the draft vocabulary if given.

        The values depend on the seed only, not on the device or on what was drawn before.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name == "lm_head.weight" and lm_head_rows is not None:
                parameter.copy_(lm_head_rows)
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))

    def select_rows(self, batch: PackedBatch, steps: int) -> Rows:
        """The rows of a batch that count; `.loss_rows` [T] are the denominators of its loss.

        They are known without a forward: to average over several batches or ranks, add up `.loss_rows` first and pass
        `step_weights = decay ** j / total_loss_rows[j]` to each forward; the losses (and gradients) then simply add.

        Raises:
            PipelineError: a row that counts has no teacher argmax.
        """
        argmax = batch.teacher_argmax.cpu().long()
        answer = torch.where(argmax >= 0, self._draft_id[argmax], -1)
        rows = select_rows(batch.loss_mask.cpu(), batch.sample_lengths.cpu(), answer, steps)
        unknown = rows.index[argmax[rows.index + 1] < 0]
        if len(unknown):
            raise PipelineError(
                "rows that count have no teacher argmax",
                field="teacher_argmax",
                value=f"-1 at {len(unknown)} of {len(rows.index)} rows, first at packed row {int(unknown[0]) + 1}",
                fix="make standardize ARGS=force=true",
            )
        return rows

    def fc_input(self, features: Tensor) -> Tensor:
        """The slots as fc reads them. [R, n·H] → [R, n·H]"""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            chunks = features.chunk(self.config.num_fc_inputs, -1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        return features

    def forward(
        self,
        batch: PackedBatch,
        target: FrozenTarget,
        step_weights: Tensor,
        rows: Rows | None = None,
        objective: Objective = Objective(),
    ) -> TTTOutput:
        """Unroll T steps over a packed batch and score each against the target.

        Args:
            batch: the samples; `features` and `final_hidden` on the drafter's device.
            target: frozen parts of the target, on the drafter's device.
            step_weights: [T] factor of each step's summed loss; its length says how many steps to unroll.
            rows: `select_rows(batch, T)` if already worked out.
            objective: the loss of one row.

        Run under `torch.autocast` for bf16; parameters stay fp32 and so does the loss.
        """
        steps = len(step_weights)
        rows = rows if rows is not None else self.select_rows(batch, steps)
        hidden = self.unroll(batch, target, steps, rows)  # [T, N, H]
        device = hidden.device
        result = vocabulary_loss(
            self.norm(hidden).to(self._compute_dtype(device)),
            self.lm_head.weight,
            target.head,
            batch.final_hidden[rows.tokens.to(device)],
            rows.answer.to(device),
            rows.row_of,
            rows.used,
            step_weights.to(device),
            objective=objective,
        )
        # From tokens to rows. What is not used is no hit and adds 0 to row 0.
        hits = torch.zeros(max(len(rows.index), 1), steps, dtype=torch.long, device=device)
        hits.scatter_add_(0, rows.row_of.to(device), result.hits.long())
        prefix_hits = hits.cumprod(1)
        gates = rows.gates.to(device)
        reached = gates.sum(0)
        reached[1:] = (gates[:, 1:] * prefix_hits[: len(gates), :-1]).sum(0)
        return TTTOutput(
            loss=result.loss,
            metrics={
                "loss_sum": result.loss_sums,
                "loss_rows": rows.loss_rows.to(device),
                "gated": gates.sum(0),
                "reached": reached,
                "hits": hits.sum(0),
                "prefix_hits": prefix_hits.sum(0),
            },
            n_rows=len(rows.index),
        )

    def unroll(self, batch: PackedBatch, target: FrozenTarget, steps: int, rows: Rows) -> Tensor:
        """The hidden states of all steps, before the final norm: [T, N, H] for the N rows that count."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        device, count = batch.features.device, len(rows.index)
        lengths = batch.sample_lengths.cpu()
        queries = self.config.num_attention_heads * self.config.head_dim

        # From here on R, N and the number of tokens are rounded up (see `shapes`). Nobody reads the padding; it is rows that are
        # there already, since the gradient of a norm of zeros is not a number where its eps is 0.
        packed = len(batch.features)
        every = torch.arange(packed + missing(packed)).clamp_(max=packed - 1)  # [R] packed rows, the last one again
        features = batch.features[every.to(device)] if missing(packed) else batch.features
        length = lengths.repeat_interleave(lengths)[every]  # [R]
        index, position = pad_rows(rows.index), pad_rows(rows.position)  # [N]

        fused = self.fc(self.dropout(self.fc_input(features)))  # [R, H]
        for_embedding, for_hidden = attention.halves(fused.dtype)  # [(A + 2K)·D, H] twice

        def embedded(token: Tensor) -> Tensor:
            return self.dropout(layer.input_layernorm(self.embed(batch, target, token).to(fused.dtype)))

        # Step 0: keys and values for every row, since later rows attend to them; queries only for rows that count.
        begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)[every]
        keys_values = F.linear(embedded(every + 1), for_embedding[queries:])
        keys_values = keys_values + F.linear(layer.hidden_norm(fused), for_hidden[queries:])  # [R, 2K·D]
        _, k0, v0 = attention.split(keys_values, *self.rope.cos_sin(every - begins, length, device))  # [R, K, D]

        ahead = torch.arange(steps)[:, None]  # step j reads the token j further on, at the position j further on
        tokens, token = (index + 1 + ahead).unique(return_inverse=True)
        of_embedding = F.linear(embedded(pad_rows(tokens)), for_embedding)  # [tokens, (A + 2K)·D]
        token = token.to(device)  # [T, N] rows of `of_embedding`
        cos, sin = self.rope.cos_sin(position + ahead, length[index], device)  # [T, N, D]
        h = fused[index.to(device)]  # [N, H]
        hidden, own_k, own_v = [], [], []
        for step in range(steps):
            qkv = of_embedding.index_select(0, token[step]) + F.linear(layer.hidden_norm(h), for_hidden)
            q, k, v = attention.split(qkv, cos[step], sin[step])  # [N, A, D], [N, K, D] twice
            if step:
                own_k.append(k)
                own_v.append(v)
            attended = ttt_attention(q, k0, v0, own_k, own_v, rows.segments)  # [N, A, D]
            h = layer.outputs(attended, residual=h)  # [N, H]
            hidden.append(h)
            if self.config.norm_output:
                h = self.norm(h)
        return torch.stack(hidden)[:, :count]

    def embed(self, batch: PackedBatch, target: FrozenTarget, token: Tensor) -> Tensor:
        """Embeddings of the tokens at packed indices. [...] → [..., H]"""
        # A row that looks past the end is not gated at that step; which embedding it reads does not matter.
        ids = batch.input_ids.cpu()[token.clamp(max=len(batch.input_ids) - 1)]
        return F.embedding(ids.to(target.embedding.device), target.embedding)

    def _compute_dtype(self, device: torch.device) -> torch.dtype:
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return self.lm_head.weight.dtype
