"""From shards to packed batches: which samples go together, read by memory map, a few steps ahead of training.

The order depends on seed and epoch only. Samples are packed one after the other (no padding) up to a token budget. An
optimizer step takes the next `ranks · accumulation` batches of that order, so what it learns from does not depend on how
many ranks share it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.drafter import PackedBatch
from pipeline.errors import PipelineError
from pipeline.manifest import Slot
from pipeline.store import HiddenStore, SampleRef
from pipeline.target import OutputHead


def pack(lengths: list[int], order: list[int], batch_tokens: int) -> list[list[int]]:
    """Cut `order` (indices into `lengths`) into runs of at most `batch_tokens` tokens; a longer sample stays alone."""
    batches: list[list[int]] = []
    room = 0
    for i in order:
        if lengths[i] > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(i)
        room -= lengths[i]
    return batches


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward of one rank."""

    samples: tuple[int, ...]
    counts: bool
    """False: a filler with weight 0, since every rank must take part in every backward"""


def plan_epoch(lengths: list[int], *, batch_tokens: int, seed: int, epoch: int, ranks: int = 1,
               accumulation: int = 1) -> list[list[list[MicroBatch]]]:
    """The optimizer steps of an epoch: `plan[step][rank]` is that rank's list of micro-batches.

    Every sample occurs once. All ranks have equally many micro-batches in a step; the last step may have fewer, and
    where its batches do not divide among the ranks, fillers (`counts` False) stand in.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = pack(lengths, order, batch_tokens)
    steps = []
    for start in range(0, len(batches), ranks * accumulation):
        group = [MicroBatch(tuple(b), True) for b in batches[start:start + ranks * accumulation]]
        group += [MicroBatch(group[0].samples, False)] * (-len(group) % ranks)
        steps.append([group[rank::ranks] for rank in range(ranks)])
    return steps


class TrainingData:
    """The samples of a part of the split, as packed batches.

    Args:
        shards: the dump's shards.
        aligned: folder with stage 3's file of the same name for each.
        slots: the run's slots, which name the tensors to read.
        sample_ids: the samples of the part, e.g. split["train"].
        head: the target's output head, whose norm is applied where the teacher slot holds pre-norm states.
        dtype: type of features and final hidden in the batches.

    Raises:
        PipelineError: a file is missing or damaged, or a sample is not in the shards.
    """

    def __init__(self, shards: list[Path], aligned: Path, slots: dict[str, Slot], sample_ids: list[str],
                 head: OutputHead, dtype: torch.dtype):
        self._store = HiddenStore(shards)
        self._aligned = [_Aligned(aligned / path.name) for path in shards]
        refs = {ref.id: ref for ref in self._store.samples}
        if missing := [i for i in sample_ids if i not in refs]:
            raise PipelineError(f"{len(missing)} samples of split.json are not in the shards, e.g. {missing[0]!r}",
                                field="standardize/split.json", fix='make standardize ARGS="force=true"')
        self.refs = [refs[i] for i in sample_ids]
        self.lengths = [ref.length for ref in self.refs]
        names = sorted((n for n in slots if n.startswith("fc.")), key=lambda n: int(n.split(".")[1]))
        self._features = [slots[n].tensor for n in names]
        self._teacher, self._head, self._dtype = slots["teacher"], head, dtype

    def ids(self, samples: tuple[int, ...]) -> list[str]:
        return [self.refs[i].id for i in samples]

    def load(self, samples: tuple[int, ...], *, pin: bool = False) -> PackedBatch:
        """Read some samples (indices into `refs`) as one batch on the CPU, in page-locked memory if `pin`."""
        refs = [self.refs[i] for i in samples]
        features = torch.cat([torch.cat([self._store.rows(ref, name) for name in self._features], -1)
                              for ref in refs]).to(self._dtype)
        final_hidden = torch.cat([self._store.rows(ref, self._teacher.tensor) for ref in refs])
        if self._teacher.norm == "pre":
            final_hidden = self._head.norm(final_hidden)
        final_hidden = final_hidden.to(self._dtype)
        if pin:
            features, final_hidden = features.pin_memory(), final_hidden.pin_memory()
        return PackedBatch(
            input_ids=torch.cat([self._store.input_ids(ref) for ref in refs]),
            features=features,
            final_hidden=final_hidden,
            loss_mask=torch.cat([self._aligned[ref.shard].rows(ref, "loss_mask") for ref in refs]).bool(),
            teacher_argmax=torch.cat([self._aligned[ref.shard].rows(ref, "teacher_argmax") for ref in refs]),
            sample_lengths=torch.tensor([ref.length for ref in refs]),
        )


class _Aligned:
    """One of stage 3's files, read by slices."""

    def __init__(self, path: Path):
        self._path = path
        try:
            self._file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as e:
            raise self._damaged(e) from e

    def rows(self, ref: SampleRef, name: str) -> Tensor:
        try:
            return self._file.get_slice(name)[ref.start:ref.start + ref.length]
        except SafetensorError as e:
            raise self._damaged(e) from e

    def _damaged(self, why: Exception) -> PipelineError:
        return PipelineError(f"{self._path} cannot be read: {why}", field=str(self._path),
                             fix='make standardize ARGS="force=true"')


class Prefetcher:
    """Loads the micro-batches of the coming steps in a thread, at most `ahead` steps before they are used.

    Iterating gives one list of batches per step. Use as a context manager: leaving it ends the thread.
    """

    def __init__(self, data: TrainingData, steps: list[list[MicroBatch]], *, ahead: int = 2, pin: bool = False):
        self._waited = 0.0
        self._data, self._steps, self._pin = data, steps, pin
        self._queue: queue.Queue = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetcher:
        self._thread.start()
        return self

    def __exit__(self, *_exception) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        for _ in self._steps:
            started = time.perf_counter()
            item = self._queue.get()
            self._waited += time.perf_counter() - started
            if isinstance(item, BaseException):
                raise item
            yield item

    def take_wait(self) -> float:
        """Seconds that training stood still for data since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _work(self) -> None:
        for step in self._steps:
            try:
                item = [self._data.load(micro.samples, pin=self._pin) for micro in step]
            except BaseException as e:  # raised again where the step is used
                item = e
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if self._stop.is_set() or isinstance(item, BaseException):
                return
