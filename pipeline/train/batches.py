"""From shards to packed batches: which samples go together, read by memory map, a few steps ahead of training.

The order depends on seed and epoch only. Samples are packed one after the other (no padding) up to a token budget. An
optimizer step takes the next `ranks · accumulation` batches of that order, so what it learns from does not depend on
how many ranks share it.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import PipelineError
from pipeline.manifest import Slot
from pipeline.standardize import layout, layout_of
from pipeline.store import HiddenStore, SampleRef
from pipeline.target import OutputHead
from pipeline.train.alignment import PackedBatch


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
        store, aligned: the dump's shards and stage 3's files, shared by both parts.
        slots: the run's slots, which name the tensors to read.
        sample_ids: the samples of the part, e.g. split["train"].
        head: the target's output head, whose norm is applied where the teacher slot holds pre-norm states.
        dtype: type of features and final hidden in the batches.

    Raises:
        PipelineError: a sample is not in the shards.
    """

    def __init__(self, store: HiddenStore, aligned: AlignedFiles, slots: dict[str, Slot], sample_ids: list[str],
                 head: OutputHead, dtype: torch.dtype):
        self._store, self._aligned = store, aligned
        refs = {ref.id: ref for ref in store.samples}
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
        rows = sum(ref.length for ref in refs)
        width = self._head.weight.shape[1]
        # Shards are views of mapped files: each row is copied once, from the page cache to where it is used from.
        features = _room(rows, len(self._features) * width, self._dtype, pin)
        final_hidden = _room(rows, width, self._dtype, pin)
        start = 0
        for ref in refs:
            here = slice(start, start := start + ref.length)
            for slot, name in enumerate(self._features):
                features[here, slot * width:(slot + 1) * width] = self._store.rows(ref, name)
            state = self._store.rows(ref, self._teacher.tensor)
            final_hidden[here] = self._head.norm(state) if self._teacher.norm == "pre" else state
        return PackedBatch(
            input_ids=torch.cat([self._store.input_ids(ref) for ref in refs]),
            features=features,
            final_hidden=final_hidden,
            loss_mask=torch.cat([self._aligned.rows(ref, "loss_mask") for ref in refs]).bool(),
            teacher_argmax=torch.cat([self._aligned.rows(ref, "teacher_argmax") for ref in refs]),
            sample_lengths=torch.tensor([ref.length for ref in refs]),
        )


def _room(rows: int, width: int, dtype: torch.dtype, pin: bool) -> Tensor:
    """Memory for a batch, page-locked if `pin`; else numpy's, which asks for huge pages: fewer have to be mapped."""
    if pin:
        return torch.empty(rows, width, dtype=dtype, pin_memory=True)
    return torch.from_numpy(np.empty(rows * width * dtype.itemsize, np.uint8)).view(dtype).view(rows, width)


class AlignedFiles:
    """Stage 3's files, which go row by row with the dump's shards. Read by slices, at most `OPEN` mapped at a time.

    Raises:
        PipelineError: a file is missing or damaged, or it was made for other samples or rows than the shard holds now.
    """

    OPEN = 64

    def __init__(self, folder: Path, store: HiddenStore):
        self._paths = [folder / path.name for path in store.paths]
        self._open = functools.lru_cache(self.OPEN)(self._open)
        for shard, group in groupby(store.samples, key=lambda ref: ref.shard):
            self._check(shard, list(group))

    def rows(self, ref: SampleRef, name: str) -> Tensor:
        """One sample's rows, [length]."""
        return self._open(ref.shard)[name][ref.start:ref.start + ref.length]

    def _open(self, shard: int) -> dict[str, Tensor]:
        return self._read(shard)[1]

    def _read(self, shard: int) -> tuple[dict[str, str] | None, dict[str, Tensor]]:
        try:
            with safe_open(self._paths[shard], framework="pt") as file:
                return file.metadata(), {name: file.get_tensor(name) for name in ("loss_mask", "teacher_argmax")}
        except (OSError, SafetensorError) as e:
            raise self._refused(shard, f"cannot be read: {e}") from e

    def _check(self, shard: int, refs: list[SampleRef]) -> None:
        (metadata, tensors), rows = self._read(shard), refs[-1].start + refs[-1].length
        if layout_of(metadata) != layout(refs) or any(list(t.shape) != [rows] for t in tensors.values()):
            raise self._refused(shard, f"was made for another dump than the shard of {rows} rows beside it")

    def _refused(self, shard: int, why: str) -> PipelineError:
        return PipelineError(f"{self._paths[shard]} {why}", field=str(self._paths[shard]),
                             fix='make standardize ARGS="force=true"')


class Prefetcher:
    """Loads the micro-batches of the coming steps in a thread, at most `ahead` steps before they are used.

    Iterating gives one list of batches per step. Use as a context manager: leaving it ends the thread.

    The thread computes alone. With a pool of OpenMP threads of its own it would fight with training's for the cores, and
    every parallel operation of both waits at its end for the slowest thread: on two cores a step takes a quarter longer.
    """

    def __init__(self, data: TrainingData, steps: list[list[MicroBatch]], *, ahead: int = 2, pin: bool = False):
        self._waited = 0.0
        self._data, self._steps, self._pin = data, steps, pin
        self._queue: queue.Queue = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetcher:
        # A thread settles its own number where it first needs one: later than the loader's, it would be the loader's 1.
        self._threads = torch.get_num_threads()
        self._thread.start()
        return self

    def __exit__(self, *_exception) -> None:
        self._stop.set()
        self._thread.join()
        torch.set_num_threads(self._threads)  # the loader's 1 is what new threads would start with

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
        torch.set_num_threads(1)
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
