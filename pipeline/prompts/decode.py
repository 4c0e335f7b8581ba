"""Batched decoding with transformers: how the target writes its responses where no engine is started.

Written as a loop of our own because `model.generate` keeps finished rows in the batch, concatenates the whole cache
at every step, reads a system prompt that all prompts share once for each of them, and draws a sampled batch from one
random stream, so that a resumed run would answer differently. `benchmarks/generate.py` times both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from transformers import DynamicCache

# Rows that have ended cost as much as live ones, but dropping them copies the cache: drop when this share has ended.
_DROP_SHARE = 1 / 8


@dataclass(frozen=True)
class Response:
    """What the target generated after a prompt.

    Attributes:
        ids: generated token ids, with the end-of-turn token if it was generated.
        finish_reason: "stop" (the last id ends the turn) or "length" (cut at max_new_tokens).
    """

    ids: list[int]
    finish_reason: Literal["stop", "length"]


@torch.inference_mode()
def generate_batch(model, prompts: list[list[int]], *, max_new_tokens: int, eos_token_ids: list[int],
                   temperature: float = 0.0, top_p: float = 1.0, seeds: list[int] | None = None) -> list[Response]:
    """Continue every prompt by at most `max_new_tokens` tokens.

    Args:
        model: a transformers causal language model in eval mode.
        prompts: token ids; prompts of similar length waste least, since shorter ones are padded on the left.
        temperature: 0 is greedy.
        seeds: one per prompt, needed when sampling. A row's random numbers depend on its seed alone.
    """
    device = model.device
    width = max(len(p) for p in prompts)
    cache, plain = _cache(model, width + max_new_tokens)
    # Padding lies between the shared tokens and the others, and a sliding window counts it.
    shared = _shared_prefix(prompts) if plain else 0
    pad = eos_token_ids[0]  # never attended to
    ids = torch.tensor([[pad] * (width - len(p)) + p[shared:] for p in prompts], device=device)
    mask = torch.tensor([[1] * shared + [0] * (width - len(p)) + [1] * (len(p) - shared) for p in prompts], device=device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, shared:]
    if shared:
        model(input_ids=torch.tensor([prompts[0][:shared]], device=device), past_key_values=cache, use_cache=True,
              logits_to_keep=1)
        cache.batch_select_indices(torch.zeros(len(prompts), dtype=torch.long, device=device))
    uniforms = _uniforms(seeds, max_new_tokens) if temperature > 0 else None

    written: list[list[int]] = [[] for _ in prompts]
    stopped = [False] * len(prompts)
    rows = list(range(len(prompts)))  # prompt behind each row that is still in the batch
    ends = torch.tensor(eos_token_ids, device=device)
    for step in range(max_new_tokens):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                       use_cache=True, logits_to_keep=1).logits[:, -1]
        if uniforms is None:
            ids = logits.max(-1, keepdim=True).indices  # argmax, which takes four times as long in bf16 on a CPU
        else:
            ids = _sample(logits, uniforms[rows, step].to(device), temperature, top_p)
        for row, token, end in zip(rows, ids[:, 0].tolist(), torch.isin(ids[:, 0], ends).tolist()):
            if not stopped[row]:
                written[row].append(token)
                stopped[row] = end
        live = [i for i, row in enumerate(rows) if not stopped[row]]
        if not live:
            break
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=-1)
        if len(rows) - len(live) >= max(1, _DROP_SHARE * len(rows)):
            keep = torch.tensor(live, device=device)
            ids, mask, positions = ids[keep], mask[keep], positions[keep]
            cache.batch_select_indices(keep)
            rows = [rows[i] for i in live]
    return [Response(ids, "stop" if end else "length") for ids, end in zip(written, stopped)]


def _shared_prefix(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with (the system prompt, most often); at least one is left of each."""
    first, last = min(prompts), max(prompts)  # whatever these two share, those between them share too
    longest = min(len(p) for p in prompts) - 1
    same = 0
    while same < longest and first[same] == last[same]:
        same += 1
    return same if len(prompts) > 1 else 0


def use_grouped_attention(model) -> None:
    """Let `model` decode with an attention that reads each cached key and value head once.

    With a padding mask, transformers' sdpa first copies the cache once per query head of a group, which took a third
    of a decoding step on a CPU. The queries of a group see the same keys, so they can be the rows of one attention.
    """
    if model.config._attn_implementation != "sdpa":
        return
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def grouped(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        batch, heads, length, _ = query.shape
        groups = key.shape[1]
        # Plain cases only: one new token, one mask for all heads, and nothing that changes the scores.
        if (length != 1 or heads == groups or attention_mask is None or attention_mask.shape[1] != 1
                or kwargs.get("position_bias") is not None):
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        out = torch.nn.functional.scaled_dot_product_attention(
            query.reshape(batch, groups, heads // groups, -1), key, value,
            attn_mask=attention_mask.expand(-1, -1, heads // groups, -1), scale=scaling)
        return out.reshape(batch, 1, heads, -1), None

    AttentionInterface.register("grouped_sdpa", grouped)
    AttentionMaskInterface.register("grouped_sdpa", sdpa_mask)
    model.set_attn_implementation("grouped_sdpa")


def _uniforms(seeds: list[int], steps: int) -> torch.Tensor:
    """[rows, steps] uniform random numbers, each row from its own seed."""
    return torch.stack([torch.rand(steps, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def _sample(logits: torch.Tensor, uniform: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Draw one token per row by inverting the cumulative distribution of the top-p tokens.

    Args:
        logits: [rows, V]; uniform: [rows] in [0, 1).

    Returns:
        [rows, 1] token ids.
    """
    probs, tokens = (logits.float() / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    cumulative = probs.cumsum(-1)
    # A token is in the nucleus iff the tokens above it hold less than top_p; the first one always is.
    nucleus = (cumulative - probs < top_p).sum(-1, keepdim=True)
    total = cumulative.gather(-1, nucleus - 1)
    rank = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    return tokens.gather(-1, rank.minimum(nucleus - 1))


def _cache(model, length: int) -> tuple[DynamicCache, bool]:
    """The model's own kind of cache, whose plain layers write into buffers of `length` tokens, not concatenating.

    Also whether all its layers are plain: each token sees every token before it.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    class PreallocatedLayer(DynamicLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.buffers = tuple(x.new_empty(*x.shape[:2], length, x.shape[3]) for x in (key_states, value_states))
            start = self.get_seq_length()
            end = start + key_states.shape[2]
            for buffer, new in zip(self.buffers, (key_states, value_states)):
                buffer[:, :, start:end] = new
            self.keys, self.values = (b[:, :, :end] for b in self.buffers)
            return self.keys, self.values

        def batch_select_indices(self, indices):
            end = self.get_seq_length()
            self.buffers = tuple(b[indices] for b in self.buffers)
            self.keys, self.values = (b[:, :, :end] for b in self.buffers)

    cache = DynamicCache(config=model.config)
    plain = [type(layer) is DynamicLayer for layer in cache.layers]
    cache.layers = [PreallocatedLayer() if p else layer for p, layer in zip(plain, cache.layers)]
    return cache, all(plain)
