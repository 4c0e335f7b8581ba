"""Torch stand-ins for the ten CPU ops that SGLang 0.5.23 imports from `sgl_kernel` at start.

PyPI carries only the CUDA build of that package (sglang-kernel). Names and argument order follow its
`speculative.py` and `kvcacheio.py`; what each op computes follows the Triton or CUDA kernel that SGLang runs in its
place on a GPU (`sglang/kernels/ops/speculative`, `kvcache`, `srt/mem_cache/allocation.py`). Every op writes into an
argument, as the originals do.

Names used below: bs requests; `req_to_token` [pool rows, context] maps a request's token position to its KV slot;
`req_pool_indices` [bs] picks the rows; a draft tree has n nodes per request, node 0 being the verified root, and
`topk` children per expanded node.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

__version__ = "0.0.0+torch"

_QLEN_ONLY = 1  # SGLang's TreeMaskMode: n × n per request, the only one it uses on a CPU


def _segments(starts: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flatten the ranges [starts[i], ends[i]) → (i of each element, its position in the range's own numbering)."""
    starts, lengths = starts.long(), (ends - starts).long()
    owner = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    first = (lengths.cumsum(0) - lengths)[owner]
    return owner, torch.arange(owner.numel()) - first + starts[owner]


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """out_cache_loc [≥ Σ(end-start)] = KV slots of positions [start_offset, end_offset) (both [bs]), packed."""
    owner, position = _segments(start_offset, end_offset)
    slots = req_to_token[req_pool_indices.long()[owner], position]
    out_cache_loc[: slots.numel()] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """out_cache_loc [bs·topk·num_steps] = KV slots of the topk·num_steps positions that follow seq_lens [bs]."""
    end = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, end, out_cache_loc, pool_len)


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """The reverse of `assign_extend_cache_locs_cpu`: req_to_token at [start, end) = the packed out_cache_loc."""
    owner, position = _segments(start_offset, end_offset)
    rows = req_pool_indices.long()[owner]
    req_to_token[rows, position] = out_cache_loc[: owner.numel()].to(req_to_token.dtype)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """A req_to_token table with one row per branch: [bs·topk, pool_len].

    Row i·topk + k holds request i's slots up to seq_lens[i], then branch k's own num_steps slots, which lie at
    seq_lens[i] + k·num_steps in `req_to_token`, so that a branch attends to a contiguous range.
    """
    request = torch.arange(req_pool_indices.numel()).repeat_interleave(topk)
    branch = torch.arange(topk).repeat(req_pool_indices.numel())
    source_rows = req_to_token[req_pool_indices.long()[request]]
    to = seq_lens.long()[request, None] + torch.arange(num_steps)
    return source_rows.scatter(1, to, source_rows.gather(1, to + branch[:, None] * num_steps))


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """bonus_tokens [≥ bs] = the last accepted token of each row of accept_tokens [bs, accept_stride].

    accept_lens [bs] counts the bonus token.
    """
    bs = accept_lens.numel()
    last = torch.arange(bs) * accept_stride + accept_lens.long() - 1
    bonus_tokens[:bs] = accept_tokens.flatten()[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Pack out_cache_loc [bs·n] at the accepted nodes: accept_index holds their flat indices, -1 elsewhere."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    """Shift each request's segment of input_ids [tokens] one to the left and write its next token at the end.

    extend_start_loc, extend_seq_lens [bs] give the segments, topk_index [bs] or [bs, 1] the next tokens. With
    select_index [bs] (flat indices) the next token goes there instead of to the segment's last place.
    """
    ends = extend_start_loc + extend_seq_lens
    nonempty = extend_seq_lens > 0
    _, position = _segments(extend_start_loc[nonempty], ends[nonempty] - 1)
    input_ids[position] = input_ids[position + 1]  # the right side is a copy, so the overlap does no harm
    last = ends - 1 if select_index is None else select_index
    input_ids[last[nonempty].long()] = topk_index.flatten()[nonempty].to(input_ids.dtype)


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """Lay out the draft tree that the target verifies in one forward.

    Reads selected_index [bs, n-1], for nodes 1…n-1 the candidate's index among all drafted ones, grouped by expanded
    node (so index // topk is the group; group 0 hangs from the root), parent_list [bs, groups], the candidate index
    of the node that each group was expanded from, and verified_seq_len [bs].

    Writes tree_mask [bs·n·n]: node attends to its ancestors and itself; positions [bs·n]: sequence length + depth of
    the node; retrive_index [bs, n]: flat index of each node; retrive_next_token [bs, n]: first child, and
    retrive_next_sibling [bs, n]: next child of the same parent, both as node numbers, -1 for none.
    """
    if int(tree_mask_mode) != _QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {tree_mask_mode}: on a CPU SGLang uses QLEN_ONLY")
    n, bs = draft_token_num, verified_seq_len.numel()

    group = selected_index // topk
    if parent_list.shape[1] == 0:  # one draft step: every candidate hangs from the root
        parent = torch.zeros_like(selected_index)
    else:
        expanded_from = parent_list.gather(1, group)
        found = (selected_index[:, None, :] == expanded_from[:, :, None]).int().argmax(-1) + 1
        parent = torch.where(group == 0, 0, found)  # [bs, n-1], a node number

    child_of = parent[:, None, :] == torch.arange(n)[None, :, None]  # [bs, n, n-1]
    retrive_next_token[:] = torch.where(child_of.any(-1), child_of.int().argmax(-1) + 1, -1)
    later_sibling = (parent[:, :, None] == parent[:, None, :]).triu(1)  # [bs, n-1, n-1]
    retrive_next_sibling[:, 0] = -1
    retrive_next_sibling[:, 1:] = torch.where(later_sibling.any(-1), later_sibling.int().argmax(-1) + 1, -1)
    retrive_index[:] = torch.arange(bs * n).view(bs, n)

    parent = torch.cat([parent.new_zeros(bs, 1), parent], dim=1)
    mask = torch.eye(n, dtype=torch.bool).repeat(bs, 1, 1)
    node = torch.arange(n).repeat(bs, 1)
    for _ in range(depth):
        node = parent.gather(1, node)
        mask.scatter_(2, node[:, :, None], True)
    tree_mask[: bs * n * n] = mask.flatten().to(tree_mask.dtype)
    positions[: bs * n] = (verified_seq_len[:, None] + mask.sum(-1) - 1).flatten().to(positions.dtype)


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk each tree from its root along the children that equal the target's argmax.

    candidates [bs, n] are the nodes' tokens, target_predict [bs·n] or [bs, n] the target's argmax after each node.
    Writes predicts [bs·n] at the visited nodes, accept_index [bs, max depth + 1]: flat indices of the visited nodes
    (the rest stays as it is), and accept_token_num [bs]: visited nodes without the root, i.e. without the bonus token.
    """
    target = target_predict.flatten().tolist()
    flat_index, tokens = retrive_index.tolist(), candidates.tolist()
    first_child, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for b in range(candidates.shape[0]):
        node, visited = 0, []
        while node != -1:
            visited.append(flat_index[b][node])
            wanted = target[visited[-1]]
            predicts[visited[-1]] = wanted
            if len(visited) == accept_index.shape[1]:
                break
            node = first_child[b][node]
            while node != -1 and tokens[b][node] != wanted:
                node = next_sibling[b][node]
        accept_index[b, : len(visited)] = torch.tensor(visited, dtype=accept_index.dtype)
        accept_token_num[b] = len(visited) - 1


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """In every KV buffer copy row src_loc[i] to row tgt_loc[i], as if all reads came first.

    data_ptrs [buffers] are addresses, strides [buffers] the bytes per row; src_loc, tgt_loc [rows].
    """
    if src_loc.numel() == 0:
        return
    source, target = src_loc.numpy(), tgt_loc.numpy()
    rows = int(max(source.max(), target.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = np.frombuffer(memory, dtype=np.uint8).reshape(rows, stride)
        buffer[target] = buffer[source]
