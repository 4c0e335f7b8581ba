"""The `torch_native` attention backend, taught EAGLE's forward modes and attention sinks.

Imports SGLang, so import it inside functions.

| forward mode | queries of a request | keys they see |
|---|---|---|
| prefill, chunk, draft extend | its last `extend_seq_lens` tokens | causal |
| target verify | the n nodes of its draft tree | the prefix, and among the nodes their ancestors |
| draft decode, step s | one per branch | the prefix and the branch's own first s + 1 tokens |
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


def suffix_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree_mask: torch.Tensor | None = None,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention of a sequence's last n tokens over all T of its tokens.

    Args:
        query: [n, heads, d]. key: [T, kv heads, d]. value: [T, kv heads, d_v].
        tree_mask: [n, n] bool, which of the last n tokens each of them sees; None: causal.
        window: how many positions back a token sees, itself not counted; None: all.
        sinks: [heads], a score per head that takes part in the softmax and has no value (gpt-oss).
    Returns:
        [n, heads, d_v]
    """
    n, total = query.shape[0], key.shape[0]
    prefix = total - n
    key, value = key.to(query.dtype), value.to(query.dtype)
    plain_causal = prefix == 0 and tree_mask is None and window is None and sinks is None
    mask = None
    if not plain_causal:
        among_new = torch.ones(n, n, dtype=torch.bool).tril() if tree_mask is None else tree_mask
        mask = torch.cat([torch.ones(n, prefix, dtype=torch.bool), among_new], dim=1)
        if window is not None:
            new = prefix + among_new.sum(-1) - 1  # a node's position is its depth, not its place in the tree
            mask &= torch.cat([torch.arange(prefix), new]) >= new[:, None] - window
    if sinks is not None:  # one more key, whose score is only what the mask adds
        key, value = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (key, value))
        scores = query.new_zeros(mask.shape).masked_fill(~mask, float("-inf")).expand(query.shape[1], -1, -1)
        mask = torch.cat([scores, sinks.to(query.dtype)[:, None, None].expand(-1, n, 1)], dim=2)[None]
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=plain_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out[0].transpose(0, 1)


class EagleTorchNativeBackend(TorchNativeAttnBackend):
    """For the target (prefill, decode, verify) and for the drafter (draft extend, and one step of draft decode)."""

    def __init__(self, model_runner):
        super().__init__(model_runner)
        self.lengths: list[tuple[int, int]] | None = None  # per request (n, T) of `suffix_attention`; None: decode
        self.tree_masks: torch.Tensor | None = None  # [bs, n, n]
        self.draft_branches: tuple[torch.Tensor, torch.Tensor] | None = None  # set by MultiStepDraftBackend
        self.sinks: torch.Tensor | None = None  # of the layer that runs now

    def forward_extend(self, *args, sinks=None, **kwargs):
        self.sinks = sinks
        return super().forward_extend(*args, **kwargs)

    def forward_decode(self, *args, sinks=None, **kwargs):
        self.sinks = sinks
        return super().forward_decode(*args, **kwargs)

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        self.lengths = self.tree_masks = None
        seq_lens = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode_or_idle():
            return
        if not forward_batch.forward_mode.is_target_verify():
            self.lengths = list(zip(forward_batch.extend_seq_lens.tolist(), seq_lens, strict=True))
            return
        tree = forward_batch.spec_info
        n, bs = tree.draft_token_num, len(seq_lens)
        self.lengths = [(n, length + n) for length in seq_lens]  # seq_lens does not count the nodes yet
        if tree.tree_topk > 1:  # one branch is a chain, i.e. causal
            self.tree_masks = tree.custom_mask[: bs * n * n].view(bs, n, n).bool()

    def _run_sdpa_forward_extend(
        self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, *args, causal=False, **kwargs
    ):
        """See the base class for shapes; the lengths come from `init_forward_metadata` instead of the arguments."""
        if not causal:  # encoders and cross attention have no draft modes
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, *args, causal=causal, **kwargs
            )
        start = 0
        for i, (n, total) in enumerate(self.lengths):
            slots = req_to_token[req_pool_indices[i], :total]
            output[start : start + n] = suffix_attention(
                query[start : start + n],
                k_cache[slots],
                v_cache[slots],
                None if self.tree_masks is None else self.tree_masks[i],
                window=kwargs["sliding_window_size"],
                sinks=self.sinks,
                scale=kwargs["scaling"],
                enable_gqa=kwargs["enable_gqa"],
            )
            start += n
        return output

    def _run_sdpa_forward_decode(
        self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *args, **kwargs
    ):
        if self.draft_branches is not None:  # query has bs·topk rows, one per branch
            req_to_token, seq_lens = self.draft_branches
            req_pool_indices = torch.arange(seq_lens.numel())
        if self.sinks is None:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *args, **kwargs
            )
        for i, total in enumerate(seq_lens.tolist()):
            slots = req_to_token[req_pool_indices[i], :total]
            output[i] = suffix_attention(
                query[i : i + 1],
                k_cache[slots],
                v_cache[slots],
                window=kwargs["sliding_window_size"],
                sinks=self.sinks,
                scale=kwargs["scaling"],
                enable_gqa=kwargs["enable_gqa"],
            )[0]
        return output


class MultiStepDraftBackend:
    """One backend per draft step after the first token, which comes from draft extend (SGLang's container protocol)."""

    def __init__(self, model_runner, topk: int, num_steps: int):
        self.topk, self.speculative_num_steps = topk, num_steps
        self.attn_backends = [EagleTorchNativeBackend(model_runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch):
        from sgl_kernel import build_draft_decode_metadata_cpu

        table = self.attn_backends[0].req_to_token_pool.req_to_token
        seq_lens = forward_batch.seq_lens
        branches = build_draft_decode_metadata_cpu(
            table, forward_batch.req_pool_indices, seq_lens, self.topk, self.speculative_num_steps, table.shape[1]
        )
        for step, backend in enumerate(self.attn_backends):
            backend.draft_branches = (branches, seq_lens.repeat_interleave(self.topk) + step + 1)
