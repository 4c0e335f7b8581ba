"""The draft vocabulary: the subset of the target's tokens that the drafter can propose, and the two maps between them.

`d2t` and `t2d` have the form that SGLang and vLLM load: `d2t` holds offsets (target id = draft id + d2t[draft id]) and
`t2d` marks the target ids that are inside. Draft ids ascend with target ids, so both maps follow from the set alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.errors import PipelineError


@dataclass(frozen=True)
class DraftVocab:
    """Both maps. Invariant: `target_ids()` ascends and is exactly the set that `t2d` marks."""

    d2t: Tensor
    """int64 [Vd], offsets"""
    t2d: Tensor
    """bool [V]"""

    @property
    def size(self) -> int:
        return self.d2t.numel()

    def target_ids(self) -> Tensor:
        """Target id of every draft id, int64 [Vd], ascending."""
        return torch.arange(self.size) + self.d2t

    def coverage(self, counts: Tensor) -> float:
        """Share of the counted tokens (`counts` [V]) that lie inside; 1.0 where nothing was counted."""
        total = int(counts.sum())
        return int(counts[self.t2d].sum()) / total if total else 1.0


def build_vocab(trained: Tensor, corpus: Tensor, size: int, *, always: list[int] = ()) -> DraftVocab:
    """Choose `size` target tokens.

    `always` (end-of-turn tokens: a drafter that cannot propose them misses the end of every turn) come first, then the
    most frequent trained tokens. A corpus may hold fewer distinct trained tokens than `size` (SpecForge PR 76): the
    rest is filled up with what the whole corpus (prompts included) uses most, then with the lowest ids. Ties go to the
    lowest id.

    Args:
        trained: int64 [V], how often each token is a trained one (loss mask 1) in the training split.
        corpus: int64 [V], how often each token occurs at all in the training split.
        size: wanted draft vocabulary; clamped to V, where the maps become the identity.

    Raises:
        PipelineError: `size` has no room for the tokens of `always`.
    """
    vocab_size = trained.numel()
    if size < len(set(always)):
        enough = max(32, len(set(always)))
        raise PipelineError("the draft vocabulary has no room for the end-of-turn tokens", value=size,
                            field="drafter.draft_vocab_size",
                            fix=f'make standardize ARGS="drafter.draft_vocab_size={enough}"')
    if size >= vocab_size:
        return DraftVocab(torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool))
    forced = torch.zeros(vocab_size, dtype=torch.int64)
    forced[list(always)] = 1
    # Stable sorts from the least to the most important key leave the lowest id first among equals.
    order = torch.arange(vocab_size)
    for key in (corpus, trained, forced):
        order = order[torch.sort(key[order], descending=True, stable=True).indices]
    chosen = order[:size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return DraftVocab(chosen - torch.arange(size), t2d)


def check_vocab(d2t: Tensor, t2d: Tensor, *, where: str) -> DraftVocab:
    """The maps as a `DraftVocab` if they agree with each other.

    Raises:
        PipelineError: wrong types, or `d2t` and `t2d` describe different sets.
    """
    fix = "make standardize ARGS=\"force=true\""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool or d2t.dim() != 1 or t2d.dim() != 1:
        raise PipelineError("d2t must be int64 [Vd] and t2d bool [V]", field=where,
                            value=f"d2t {d2t.dtype} {list(d2t.shape)}, t2d {t2d.dtype} {list(t2d.shape)}", fix=fix)
    if not torch.equal(torch.arange(d2t.numel()) + d2t, t2d.nonzero().flatten()):
        raise PipelineError("d2t and t2d do not describe the same ascending set of tokens", field=where,
                            value=f"{d2t.numel()} draft ids, {int(t2d.sum())} marked target ids", fix=fix)
    return DraftVocab(d2t, t2d)


def read_vocab(path: Path) -> DraftVocab:
    """Read `standardize/vocab.safetensors`.

    Raises:
        PipelineError: the file is absent, damaged, or lacks `d2t` or `t2d`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    fix = "make standardize ARGS=\"force=true\""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as e:
        raise PipelineError(f"the draft vocabulary cannot be read: {e}", field=str(path), fix=fix) from e
    if missing := {"d2t", "t2d"} - set(tensors):
        raise PipelineError(f"the draft vocabulary lacks {' and '.join(sorted(missing))}", field=str(path),
                            value=f"holds {', '.join(sorted(tensors)) or 'nothing'}", fix=fix)
    return check_vocab(tensors["d2t"], tensors["t2d"], where=str(path))
