"""Which row reads what, and which rows count: the alignment of training-time test (TTT), in one place.

For a sequence x_0 … x_{T-1} row i holds the target's features at i. At TTT step j row i

* reads the embedding of x_{i+1+j} at RoPE position i+j,
* learns from the target's logits at token p = i+1+j, which predict x_{i+2+j},
* counts (is *gated*) iff the target generated all of x_{i+1} … x_{i+2+j} and x_{i+2+j} exists.

The first row that counts therefore reads the first response token and predicts the second: it is the first row the
engine drafts from. A row gated at step j is gated at every earlier step, so the rows of step 0 are all that need a
query, an MLP or a later step; every other row only supplies its step-0 key and value.

Everything here is integers on the CPU: sizes are known before the first kernel starts and no step waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Samples packed one after the other. R tokens, B samples.

    Attributes:
        input_ids: [R] int64.
        features: [R, n·H] the fc slots of every token, in slot order.
        final_hidden: [R, H] the target's final hidden, after its norm.
        loss_mask: [R] bool, True where the target generated the token.
        teacher_argmax: [R] int32, argmax over the full vocabulary of the target's logits at this token (it predicts
            the next one); -1 where not computed, which must not be on a gated row's teacher token.
        sample_lengths: [B] int64, summing to R.

    The last three, and input_ids, are bookkeeping and stay on the CPU; `to` moves the two large ones.
    """

    input_ids: Tensor
    features: Tensor
    final_hidden: Tensor
    loss_mask: Tensor
    teacher_argmax: Tensor
    sample_lengths: Tensor

    def to(self, device: torch.device) -> PackedBatch:
        move = {name: getattr(self, name).to(device, non_blocking=True) for name in ("features", "final_hidden")}
        return replace(self, **move)


def gate(loss_mask: Tensor, lengths: Tensor, step: int) -> Tensor:
    """Rows that count at a TTT step.

    Args:
        loss_mask: [R] bool, True where the target generated the token; samples packed one after the other.
        lengths: [B] tokens per sample, summing to R.
        step: TTT step, from 0.

    Returns:
        [R] bool: row i of a sample is True iff l_{i+1} · … · l_{i+2+step} = 1 and i+2+step ≤ T-1.
    """
    generated = torch.zeros(len(loss_mask) + 1, dtype=torch.long)
    generated[1:] = loss_mask.long().cumsum(0)  # generated[n] = l_0 + … + l_{n-1}
    row = torch.arange(len(loss_mask))
    last = row + 2 + step  # the token that is predicted
    ends = lengths.cumsum(0).repeat_interleave(lengths)  # one past the last token of the row's sample
    inside = last < ends
    last = last.clamp(max=len(loss_mask) - 1)
    return inside & (generated[last + 1] - generated[(row + 1).clamp(max=len(loss_mask))] == step + 2)


@dataclass(frozen=True)
class Segment:
    """A run of consecutive gated rows of one sample: queries [start, stop) of the compact rows.

    Their keys at step 0 are the sample's rows before the run (`first_key` … `first_row`-1, all visible) and the run
    itself (causal). All of `first_key`, `first_row` index the packed rows.
    """

    start: int
    stop: int
    first_key: int
    first_row: int


@dataclass(frozen=True)
class Rows:
    """The rows of a packed batch that count, and where each finds its inputs. N rows, P teacher tokens, T steps.

    Attributes:
        index: [N] packed index of every row gated at step 0, ascending ("compact" order).
        position: [N] position of that row in its sample.
        segments: the runs of consecutive rows in compact order.
        tokens: [P] packed index of every token whose target logits some gated row learns from and whose
            full-vocabulary argmax is inside the draft vocabulary.
        answer: [P] draft-vocabulary id of that argmax.
        row_of: [P, T] compact row that learns from token p at step j (p = i+1+j); 0 where there is none.
        used: [P, T] bool, whether there is such a row and it is gated at step j.
        gates: [N, T] bool, whether the row is gated at step j. Accuracy is over these; an argmax outside the draft
            vocabulary is a miss.
        loss_rows: [T] gated rows per step whose argmax is inside the draft vocabulary. The loss is over these.
    """

    index: Tensor
    position: Tensor
    segments: tuple[Segment, ...]
    tokens: Tensor
    answer: Tensor
    row_of: Tensor
    used: Tensor
    gates: Tensor
    loss_rows: Tensor


def select_rows(loss_mask: Tensor, lengths: Tensor, answer: Tensor, steps: int) -> Rows:
    """Work out `Rows` for a packed batch.

    Args:
        loss_mask: [R] bool on the CPU.
        lengths: [B] tokens per sample.
        answer: [R] draft-vocabulary id of the target's argmax at every token, -1 where it is outside (or unknown).
        steps: TTT steps T.
    """
    total = len(loss_mask)
    gates = torch.stack([gate(loss_mask, lengths, j) for j in range(steps)], 1)  # [R, T]
    index = gates[:, 0].nonzero().squeeze(1)
    begins = lengths.cumsum(0) - lengths
    sample = torch.arange(len(lengths)).repeat_interleave(lengths)
    compact = torch.zeros(total, dtype=torch.long)
    compact[index] = torch.arange(len(index))

    # Token p at step j is the teacher of row p-1-j, if that row is of the same sample and gated.
    token = torch.arange(total)
    row = token[:, None] - 1 - torch.arange(steps)  # [R, T]
    used = (row >= 0) & gates.gather(0, row.clamp(min=0)) & (answer >= 0)[:, None]
    tokens = used.any(1).nonzero().squeeze(1)
    used, row = used[tokens], row[tokens]
    return Rows(
        index=index,
        position=index - begins[sample[index]],
        segments=_segments(index, sample, begins),
        tokens=tokens,
        answer=answer[tokens],
        row_of=compact[row.clamp(min=0)].where(used, torch.zeros((), dtype=torch.long)),
        used=used,
        gates=gates[index],
        loss_rows=used.sum(0),
    )


def _segments(index: Tensor, sample: Tensor, begins: Tensor) -> tuple[Segment, ...]:
    if not len(index):
        return ()
    new_run = (index.diff() != 1) | (sample[index].diff() != 0)
    starts = [0, *(new_run.nonzero().squeeze(1) + 1).tolist()]
    stops = [*starts[1:], len(index)]
    rows = index[starts].tolist()
    keys = begins[sample[index[starts]]].tolist()
    return tuple(Segment(*parts) for parts in zip(starts, stops, keys, rows, strict=True))
