"""The CPU attention of EAGLE's verify, draft-extend and draft-decode steps, against dense attention in float64."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.test_sglang_cpu import OPS


@pytest.fixture(scope="module")
def eagle_backend():
    """The backend module. Its base class is SGLang's, so this process becomes one with the CPU engine."""
    from pipeline.engines.engine import prepare_environment

    prepare_environment("cpu")
    from pipeline.sglang_cpu import torch_native_eagle

    return torch_native_eagle


def _dense(query, key, value, visible, scale, sinks=None):
    """Attention as in the textbook, one head at a time, in float64. visible [n, T] bool; sinks [heads]."""
    group = query.shape[1] // key.shape[1]
    out = torch.empty(query.shape[0], query.shape[1], value.shape[2], dtype=torch.float64)
    for head in range(query.shape[1]):
        q, k, v = query[:, head].double(), key[:, head // group].double(), value[:, head // group].double()
        scores = (q @ k.T * scale).masked_fill(~visible, float("-inf"))
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].double().exp())
        out[:, head] = weights / total @ v
    return out


TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [0, 7])
@pytest.mark.parametrize("tree", [None, TREE])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_suffix_attention_equals_dense(eagle_backend, prefix, tree, window, sinks):
    torch.manual_seed(0)
    n, heads, kv_heads, d, d_v = 4, 4, 2, 8, 6
    query = torch.randn(n, heads, d)
    key, value = torch.randn(prefix + n, kv_heads, d), torch.randn(prefix + n, kv_heads, d_v)
    new = torch.ones(n, n, dtype=torch.bool).tril() if tree is None else tree
    visible = torch.cat([torch.ones(n, prefix, dtype=torch.bool), new], dim=1)
    if window is not None:
        depth = [0, 1, 2, 3] if tree is None else [0, 1, 1, 2]
        position = [*range(prefix), *(prefix + x for x in depth)]
        for i in range(n):
            for j in range(prefix + n):
                visible[i, j] &= position[j] >= position[prefix + i] - window
    out = eagle_backend.suffix_attention(query, key, value, tree, window=window, sinks=sinks, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out.double(), _dense(query, key, value, visible, 0.3, sinks), rtol=1e-5, atol=1e-6)


class _Pool:
    """The two pools a backend reads: where each token's keys and values are."""

    def __init__(self, table):
        self.req_to_token = table
        self.swa_layer_nums = 0


class _Runner:
    device = "cpu"

    def __init__(self, table):
        self.req_to_token_pool = self.token_to_kv_pool = _Pool(table)


class _Mode:
    def __init__(self, kind):
        self.kind = kind

    def is_decode_or_idle(self):
        return self.kind == "decode"

    def is_target_verify(self):
        return self.kind == "verify"


class _Batch:
    out_cache_loc = None

    def __init__(self, kind, seq_lens, **fields):
        self.forward_mode, self.seq_lens, self.batch_size = _Mode(kind), torch.tensor(seq_lens), len(seq_lens)
        vars(self).update(fields)


class _Tree:
    draft_token_num, tree_topk = 4, 2
    custom_mask = torch.stack([TREE, TREE.flip(0, 1).T]).flatten()  # a second, different tree


@pytest.mark.slow
def test_verify_draft_extend_and_draft_decode_see_what_they_should(eagle_backend, monkeypatch):
    """Two requests with scattered KV slots, each mode against dense attention over exactly the keys it may see."""
    monkeypatch.setitem(sys.modules, "sgl_kernel", OPS)
    torch.manual_seed(1)
    table = torch.randperm(3 * 32).view(3, 32)
    keys, values = torch.randn(96, 2, 8), torch.randn(96, 2, 8)
    rows, seq_lens = torch.tensor([2, 0]), [9, 5]
    options = {"scaling": 0.35, "enable_gqa": True, "causal": True, "sliding_window_size": None}

    def at(row, length):
        slots = table[row, :length].long()
        return keys[slots], values[slots]

    backend = eagle_backend.EagleTorchNativeBackend(_Runner(table))
    query = torch.randn(8, 4, 8)

    backend.init_forward_metadata(_Batch("verify", seq_lens, spec_info=_Tree()))
    out = backend._run_sdpa_forward_extend(
        query, torch.empty_like(query), keys, values, table, rows, None, None, None, None, **options
    )
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens, strict=True)):
        new = _Tree.custom_mask.view(2, 4, 4)[i]
        visible = torch.cat([torch.ones(4, length, dtype=torch.bool), new], dim=1)
        expected = _dense(query[4 * i : 4 * i + 4], *at(row, length + 4), visible, 0.35)
        torch.testing.assert_close(out[4 * i : 4 * i + 4].double(), expected, rtol=1e-5, atol=1e-6)

    backend.init_forward_metadata(_Batch("extend", seq_lens, extend_seq_lens=torch.tensor([3, 5])))
    out = backend._run_sdpa_forward_extend(
        query, torch.empty_like(query), keys, values, table, rows, None, None, None, None, **options
    )
    for row, length, start, n in ((2, 9, 0, 3), (0, 5, 3, 5)):
        visible = torch.ones(n, length, dtype=torch.bool).tril(length - n)
        expected = _dense(query[start : start + n], *at(row, length), visible, 0.35)
        torch.testing.assert_close(out[start : start + n].double(), expected, rtol=1e-5, atol=1e-6)

    topk, steps = 2, 3
    multi = eagle_backend.MultiStepDraftBackend(_Runner(table), topk, steps)
    multi.init_forward_metadata(_Batch("decode", seq_lens, req_pool_indices=rows))
    for step, backend in enumerate(multi.attn_backends):
        query = torch.randn(2 * topk, 4, 8)
        out = backend._run_sdpa_forward_decode(
            query, torch.empty_like(query), keys, values, table, rows, torch.tensor(seq_lens), None, scaling=0.35,
            enable_gqa=True, causal=False,
        )  # fmt: skip
        for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens, strict=True)):
            for k in range(topk):
                own = [length + k * steps + j for j in range(step + 1)]
                slots = table[row, [*range(length), *own]].long()
                visible = torch.ones(1, len(slots), dtype=torch.bool)
                at_branch = query[i * topk + k][None]
                expected = _dense(at_branch, keys[slots], values[slots], visible, 0.35)
                torch.testing.assert_close(out[i * topk + k][None].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3])
def test_decode_with_sinks(eagle_backend, window):
    """Two requests, one token each; what is before the window and in other slots must not matter."""
    torch.manual_seed(2)
    table = torch.randperm(3 * 32).view(3, 32)
    keys, values, query = torch.randn(96, 2, 8), torch.randn(96, 2, 8), torch.randn(2, 4, 8)
    rows, seq_lens, sinks = torch.tensor([2, 0]), [9, 5], torch.tensor([0.5, -1.0, 2.0, 0.0])
    backend = eagle_backend.EagleTorchNativeBackend(_Runner(table))
    backend.init_forward_metadata(_Batch("decode", seq_lens))
    backend.sinks = sinks
    out = backend._run_sdpa_forward_decode(
        query, torch.empty_like(query), keys, values, table, rows, torch.tensor(seq_lens), None, scaling=0.35,
        enable_gqa=True, causal=False, sliding_window_size=window,
    )  # fmt: skip
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens, strict=True)):
        slots = table[row, :length].long()
        visible = torch.arange(length)[None] >= (length - 1 - window if window else 0)
        expected = _dense(query[i][None], keys[slots], values[slots], visible, 0.35, sinks)
        torch.testing.assert_close(out[i][None].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_gated_shared_expert_by_hand():
    from pipeline.sglang_cpu.spec_attention import add_gated

    hidden = torch.tensor([[1.0, 2.0], [0.0, -3.0]])
    shared, final = torch.tensor([[10.0, 20.0], [30.0, 40.0]]), torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    add_gated(hidden, torch.tensor([0.0, 1.0]), shared, final)
    gates = [1 / (1 + 2.718281828**-2), 1 / (1 + 2.718281828**3)]
    expected = torch.tensor([[1 + 10 * gates[0], 1 + 20 * gates[0]], [2 + 30 * gates[1], 2 + 40 * gates[1]]])
    torch.testing.assert_close(final, expected)
