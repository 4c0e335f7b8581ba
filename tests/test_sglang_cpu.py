"""The CPU stand-ins for SGLang's ops, against loops written from what each op is for, and by hand."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import sglang_cpu
from pipeline.errors import PipelineError

QLEN_ONLY = 1


def _load_ops():
    """The stand-in package, loaded from its file: an installed CUDA `sgl_kernel` must not be taken for it."""
    file = sglang_cpu.SHIM_DIR / "sgl_kernel" / "__init__.py"
    spec = importlib.util.spec_from_file_location("ops_under_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OPS = _load_ops()


@pytest.fixture
def ops():
    return OPS


def test_every_op_that_sglang_imports_at_start_is_there(ops):
    """Read from its source: each `from sgl_kernel import …_cpu`, but for the linear-attention models' submodule."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    wanted = set()
    for file in [*root.glob("srt/**/*.py"), *root.glob("kernels/**/*.py")]:
        text = file.read_text(encoding="utf-8")
        if "from sgl_kernel import" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module == "sgl_kernel":
                wanted |= {alias.name for alias in node.names if alias.name.endswith("_cpu")}
    assert len(wanted) == 10
    assert wanted <= set(vars(ops))


@st.composite
def request_ranges(draw, max_len=6, context=24):
    """A req_to_token table with distinct slots, rows picked from it, and a range of positions per request."""
    pool = draw(st.integers(1, 6))
    bs = draw(st.integers(1, pool))
    rows = torch.tensor(draw(st.permutations(range(pool)))[:bs])
    starts = torch.tensor(draw(st.lists(st.integers(0, context - max_len), min_size=bs, max_size=bs)))
    lengths = torch.tensor(draw(st.lists(st.integers(0, max_len), min_size=bs, max_size=bs)))
    table = torch.randperm(pool * context).view(pool, context).to(torch.int32)
    return rows, table, starts, starts + lengths


@given(request_ranges())
@settings(deadline=None)
def test_assign_extend_cache_locs_reads_and_assign_req_to_token_pool_writes(case):
    rows, table, starts, ends = case
    expected = [int(table[r, p]) for r, s, e in zip(rows, starts, ends, strict=True) for p in range(s, e)]
    out = torch.full((len(expected) + 3,), -7)
    OPS.assign_extend_cache_locs_cpu(rows, table, starts, ends, out, table.shape[1])
    assert out.tolist() == expected + [-7] * 3

    new = torch.arange(1000, 1000 + len(expected))
    written = table.clone()
    OPS.assign_req_to_token_pool_cpu(rows, written, starts, ends, new, table.shape[1])
    by_hand, values = table.clone(), iter(new.tolist())
    for r, s, e in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        for p in range(s, e):
            by_hand[r, p] = next(values)
    assert torch.equal(written, by_hand)


@given(request_ranges(), st.integers(1, 3), st.integers(1, 2))
@settings(deadline=None)
def test_draft_slots_and_branch_tables(case, topk, num_steps):
    rows, table, seq_lens, _ = case
    out = torch.empty(rows.numel() * topk * num_steps, dtype=torch.int64)
    OPS.assign_draft_cache_locs_contiguous_cpu(rows, table, seq_lens, out, table.shape[1], topk, num_steps)
    expected = [int(table[r, s + j]) for r, s in zip(rows, seq_lens, strict=True) for j in range(topk * num_steps)]
    assert out.tolist() == expected

    before = table.clone()
    branches = OPS.build_draft_decode_metadata_cpu(table, rows, seq_lens, topk, num_steps, table.shape[1])
    assert branches.shape == (rows.numel() * topk, table.shape[1])
    assert torch.equal(table, before)
    for i, (r, s) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        for k in range(topk):
            row = branches[i * topk + k].tolist()
            assert row[:s] == table[r, :s].tolist()  # the shared prefix
            own = out.view(rows.numel(), topk, num_steps)[i, k].tolist()
            assert row[s : s + num_steps] == own  # then the slots that this branch writes to


def test_fill_bonus_tokens_takes_the_last_accepted_one(ops):
    bonus = torch.zeros(2, dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0]]), torch.tensor([3, 1]), bonus, 4)
    assert bonus.tolist() == [7, 8]


def test_fill_accept_out_cache_loc_packs_accepted_slots_in_order(ops):
    out = torch.full((8,), -1)
    accept = torch.tensor([[0, 2, -1], [4, -1, -1]])
    ops.fill_accept_out_cache_loc_cpu(accept, torch.tensor([10, 11, 12, 13, 14, 15, 16, 17]), out)
    assert out.tolist() == [10, 12, 14] + [-1] * 5


def test_rotate_input_ids_by_hand(ops):
    """Three requests, the middle one without tokens: ids move left by one, the new token comes last."""
    start, lengths = torch.tensor([0, 3, 3]), torch.tensor([3, 0, 2])
    ids = torch.tensor([1, 2, 3, 4, 5])
    ops.rotate_input_ids_cpu(ids, start, lengths, torch.tensor([[91], [92], [93]]))
    assert ids.tolist() == [2, 3, 91, 5, 93]
    ids = torch.tensor([1, 2, 3, 4, 5])
    ops.rotate_input_ids_cpu(ids, start, lengths, torch.tensor([91, 92, 93]), torch.tensor([1, 0, 3]))
    assert ids.tolist() == [2, 91, 3, 93, 5]


def _new_tree(bs, n):
    return {
        "tree_mask": torch.ones(bs * n * n, dtype=torch.bool),
        "positions": torch.zeros(bs * n, dtype=torch.int64),
        "retrive_index": torch.full((bs, n), -1),
        "retrive_next_token": torch.full((bs, n), -1),
        "retrive_next_sibling": torch.full((bs, n), -1),
    }


def test_tree_with_two_branches_by_hand(ops):
    """topk 2, three steps. Candidates 0,1 hang from the root; 2,3 from candidate 0, 4,5 from 1; 6,7 from 2, 8,9 from 4.

    Kept: 0 (a), 1 (b), 2 (c, child of a), 4 (d, child of b), 6 (e, child of c). Nodes: 0 root, 1 a, 2 b, 3 c, 4 d, 5 e.
    """
    tree = _new_tree(1, 6)
    ops.build_tree_kernel_efficient_cpu(
        torch.tensor([[-1, 0, 1, 2, 4]]),
        torch.tensor([[0, 1, 2, 4, 6]]),
        torch.tensor([10]),
        *tree.values(),
        2,
        3,
        6,
        QLEN_ONLY,
    )
    assert tree["positions"].tolist() == [10, 11, 11, 12, 12, 13]
    assert tree["retrive_index"].tolist() == [[0, 1, 2, 3, 4, 5]]
    assert tree["retrive_next_token"].tolist() == [[1, 3, 4, 5, -1, -1]]
    assert tree["retrive_next_sibling"].tolist() == [[-1, 2, -1, -1, -1, -1]]
    assert tree["tree_mask"].view(6, 6).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


@st.composite
def drafted_trees(draw):
    """A batch of drafted trees as SGLang's `organize_draft_results` hands them over, with each node's true parent.

    Step 0 gives topk candidates under the root. Each later step expands topk of the newest candidates, giving topk²
    more. The n-1 kept ones are closed under ancestors and in ascending candidate order.
    """
    topk, steps = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    n = draw(st.integers(2, 1 + topk + (steps - 1) * topk))  # no more than there are candidates
    bs = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 50), min_size=bs, max_size=bs))
    groups, selected, parents = [], [], []
    for _ in range(bs):
        parent_of = dict.fromkeys(range(topk), -1)  # candidate → candidate, -1 the root
        expanded, newest = [-1], list(range(topk))
        for step in range(1, steps):
            chosen = draw(st.permutations(newest))[:topk]
            expanded += chosen
            first = topk + (step - 1) * topk * topk
            newest = list(range(first, first + topk * topk))
            parent_of |= {c: chosen[(c - first) // topk] for c in newest}
        kept: set[int] = set()
        while len(kept) < n - 1:
            kept.add(draw(st.sampled_from([c for c, p in parent_of.items() if c not in kept and (p in kept or p < 0)])))
        groups.append(expanded if steps > 1 else [])  # with one step SGLang hands over an empty list
        selected.append(sorted(kept))
        parents.append(parent_of)
    return topk, steps, n, lengths, groups, selected, parents


@given(drafted_trees())
@settings(deadline=None, max_examples=60)
def test_tree_layout_against_following_parents(case):
    topk, steps, n, lengths, groups, selected, parent_of = case
    bs = len(lengths)
    tree = _new_tree(bs, n)
    OPS.build_tree_kernel_efficient_cpu(
        torch.tensor(groups).view(bs, -1).long(),
        torch.tensor(selected),
        torch.tensor(lengths),
        *tree.values(),
        topk,
        steps,
        n,
        QLEN_ONLY,
    )
    for b in range(bs):
        node_of = {-1: 0} | {c: i + 1 for i, c in enumerate(selected[b])}
        parent = {node_of[c]: node_of[parent_of[b][c]] for c in selected[b]}
        for node in range(n):
            path = [node]
            while path[-1] != 0:
                path.append(parent[path[-1]])
            mask = tree["tree_mask"].view(bs, n, n)[b, node]
            assert set(mask.nonzero().flatten().tolist()) == set(path)
            assert tree["positions"].view(bs, n)[b, node] == lengths[b] + len(path) - 1
            children, child = [], int(tree["retrive_next_token"][b, node])
            while child != -1:
                children.append(child)
                child = int(tree["retrive_next_sibling"][b, child])
            assert children == [c for c in range(1, n) if parent[c] == node]


def test_verify_walks_the_branch_that_the_target_agrees_with(ops):
    """The hand tree above, twice: once the target follows b → d, once it agrees with nothing."""
    first_child = torch.tensor([[1, 3, 4, 5, -1, -1]] * 2)
    sibling = torch.tensor([[-1, 2, -1, -1, -1, -1]] * 2)
    index = torch.arange(12).view(2, 6)
    tokens = torch.tensor([[50, 11, 12, 13, 14, 15]] * 2)
    target = torch.tensor([[12, 0, 14, 0, 77, 0], [99, 0, 0, 0, 0, 0]])
    predicts = torch.full((12,), -1, dtype=torch.int32)
    accept_index = torch.full((2, 4), -1, dtype=torch.int32)
    accepted = torch.zeros(2, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(predicts, accept_index, accepted, tokens, index, first_child, sibling, target)
    assert accepted.tolist() == [2, 0]
    assert accept_index.tolist() == [[0, 2, 4, -1], [6, -1, -1, -1]]
    assert predicts.tolist() == [12, -1, 14, -1, 77, -1, 99, -1, -1, -1, -1, -1]


@given(st.integers(1, 3), st.integers(1, 4), st.data())
@settings(deadline=None)
def test_verify_of_a_chain_is_the_longest_agreeing_prefix(bs, steps, data):
    n = steps + 1
    draw = st.lists(st.integers(0, 1), min_size=bs * n, max_size=bs * n)
    tokens = torch.tensor(data.draw(draw)).view(bs, n)
    target = torch.tensor(data.draw(draw)).view(bs, n)
    chain = torch.tensor([[*range(1, n), -1]] * bs)
    accept_index, accepted = torch.full((bs, n), -1), torch.zeros(bs, dtype=torch.int64)
    predicts = torch.zeros(bs * n, dtype=torch.int64)
    none = torch.full((bs, n), -1)
    index = torch.arange(bs * n).view(bs, n)
    OPS.verify_tree_greedy_cpu(predicts, accept_index, accepted, tokens, index, chain, none, target)
    for b in range(bs):
        count = 0
        while count < steps and tokens[b, count + 1] == target[b, count]:
            count += 1
        assert accepted[b] == count
        assert accept_index[b, : count + 1].tolist() == [b * n + j for j in range(count + 1)]
        assert predicts.view(bs, n)[b, : count + 1].tolist() == target[b, : count + 1].tolist()


def test_copy_kv_rows_reads_before_it_writes(ops):
    buffers = [torch.arange(24, dtype=torch.float32).view(6, 4), torch.arange(12, dtype=torch.bfloat16).view(6, 2)]
    source, target = torch.tensor([1, 3, 2]), torch.tensor([0, 1, 3])  # 3 and 1 are both read and written
    expected = [b.clone() for b in buffers]
    for want, have in zip(expected, buffers, strict=True):
        want[target] = have[source].clone()
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b.stride(0) * b.element_size() for b in buffers])
    ops.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    assert all(torch.equal(have, want) for have, want in zip(buffers, expected, strict=True))


# ------------------------------------------------------------------------------------------------- versions, processes


def test_untested_sglang_version_is_refused_unless_forced(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(PipelineError, match="0.6.0") as e:
        sglang_cpu.check_sglang_version()
    assert e.value.field == "sglang"
    assert "0.5.23" in e.value.fix
    assert sglang_cpu.check_sglang_version(force=True) == "0.6.0"


def test_plugin_does_nothing_without_the_cpu_engine(monkeypatch):
    from pipeline.sglang_cpu import spec_attention

    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)  # importing it would fail
    spec_attention.register()


@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_engine_processes_multiply_fp32_by_onednn_where_that_keeps_it(monkeypatch, child, kept):
    """The caller's own process, which registers the plugin too, keeps torch's setting."""
    from pipeline import products
    from pipeline.sglang_cpu import spec_attention

    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    caches = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv(caches[0], "9")
    monkeypatch.setenv(caches[1], "")  # so that monkeypatch restores it
    del os.environ[caches[1]]

    def trial() -> bool:
        """It multiplies, so the caches must be bounded by now."""
        assert all(cache in os.environ for cache in caches)
        return kept

    monkeypatch.setattr(products, "_onednn_keeps_fp32", trial)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if child else None)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.attention_registry", None)  # the rest is of no interest
    try:
        with pytest.raises(ImportError):
            spec_attention.register()
        assert settings.fp32_precision == ("bf16" if child and kept else before) and before != "bf16"
        assert [os.environ.get(cache) for cache in caches] == ["9", "128" if child else None]
    finally:
        settings.fp32_precision = before


@pytest.mark.slow
def test_a_new_process_can_import_torchvision_and_runs_the_next_sitecustomize(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.ran_the_next_one = True\n")
    path = f"{sglang_cpu.SHIM_DIR}:{tmp_path}"
    code = "import sys, torchvision; print(sys.ran_the_next_one, torchvision.__version__)"
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path, "PATH": ""}, capture_output=True, text=True, check=False
    )
    assert run.stdout.startswith("True "), run.stderr
