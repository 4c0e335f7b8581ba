"""The half of the capture plugin that puts samples together and writes them, in a thread of the scheduler process.

    hook ──put()──▶ bounded queue ──▶ chunks merged per request ──▶ checks ──▶ shard │ probe │ quarantine list

A sample is whole when rows 0 … T-1 have arrived; it is stored only if its token ids are the ones asked for and every
number is finite. The stage learns through small files in `<stage folder>/.capture/<attempt>/`
(beside them, `.capture/attempt` names the start of the stage that may write, and is the lock that writing takes):

    wiring-<pid>.json       model class and capture points of the live model; says that this process will write
    quarantine-<pid>.jsonl  samples that were not stored, and why
    probe-<n>-<pid>.safetensors  a probe sample, every layer
    error-<pid>.json        why writing stopped
    finish                  from the stage: no further requests will come
    finished-<pid>.json     the answer: all that was captured is on disk
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from pipeline.dump.capture_plan import CHECK, PROBE, Captured, CapturePlan, RequestTag, Span, capture_folder, digest_ids
from pipeline.errors import PipelineError
from pipeline.files import clear_disk_errors, remove_leftovers, save_safetensors, write_json
from pipeline.store import ShardBuilder, next_shard_path

_QUEUED_FORWARDS = 4  # bounds memory: 4 x chunked_prefill_size rows wait at most
_ERROR_BYTES = 8192
_POLL_SECONDS = 0.2


def take_over(folder: Path, attempt: str) -> None:
    """Make `attempt` the only one that may write below `folder`, and clear away what others left unfinished.

    A scheduler that outlived its stage may be writing a shard right now: the lock waits until it is whole, and
    afterwards that scheduler finds another attempt's name and stops.
    """
    top = capture_folder(folder)
    with clear_disk_errors(top):
        top.mkdir(parents=True, exist_ok=True)
        with _locked(folder) as lock:
            lock.seek(0)
            lock.truncate()
            lock.write(attempt)
            lock.flush()
            for old in top.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            remove_leftovers(folder)
        (top / attempt).mkdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator:
    with open(capture_folder(folder) / "attempt", "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


class OpenSample:
    """A request of which not all rows have arrived yet."""

    def __init__(self, tag: RequestTag):
        self.tag = tag
        self.done = 0
        self.input_ids = torch.empty(tag.length, dtype=torch.int32)
        self.states: dict[str, torch.Tensor] = {}

    def add(self, span: Span, captured: Captured, dtype: torch.dtype) -> None:
        end = span.start + span.length
        if span.start > self.done or end > self.tag.length:
            raise RuntimeError(f"rows {span.start}…{end - 1} of {self.tag.sample_id} came after {self.done} of "
                               f"{self.tag.length}")
        if span.start == 0:  # the first chunk, or the engine started the request anew
            self.states = {name: torch.empty(self.tag.length, state.shape[-1], dtype=dtype)
                           for name, state in captured.states.items()}
        rows = slice(span.row, span.row + span.length)
        self.input_ids[span.start:end] = captured.input_ids[rows]
        for name, state in self.states.items():
            state[span.start:end] = captured.states[name][rows]
        self.done = end

    def problem(self) -> str | None:
        """Why the sample may not be stored, None if it may."""
        if self.done != self.tag.length:
            return f"{self.done} of {self.tag.length} rows arrived"
        if digest_ids(self.input_ids.tolist()) != self.tag.digest:
            return "the engine computed other token ids than were asked for"
        # Unlike a sum, the minimum and maximum of finite numbers are finite, and they carry every nan and inf.
        bad = [name for name, state in self.states.items()
               if not all(torch.isfinite(m) for m in torch.aminmax(state))]
        return f"not finite: {', '.join(bad)}" if bad else None


class CaptureWriter(threading.Thread):
    """Stores what the hook captures. Nothing is raised into the engine: errors go to the stage through a file."""

    def __init__(self, plan: CapturePlan):
        super().__init__(name="capture-writer", daemon=True)
        self._plan, self._folder, self._control = plan, Path(plan.folder), plan.control
        self._dtype = getattr(torch, plan.dtype)
        self._queue: queue.Queue[Captured] = queue.Queue(maxsize=_QUEUED_FORWARDS)
        self._open: dict[str, OpenSample] = {}
        self._shard = ShardBuilder(plan.states, plan.shard_tokens)
        self._probes = self._samples = 0
        self._failed = threading.Event()
        self._error_path = self._file("error", "json")
        # Written now so that overwriting it needs no space later, when the error may be that there is none.
        with clear_disk_errors(self._error_path):
            self._error_path.write_text(" " * _ERROR_BYTES, encoding="utf-8")

    def report(self, wiring: dict) -> None:
        """Tell the stage what the live model captures."""
        write_json(self._file("wiring", "json"), wiring)

    def put(self, captured: Captured) -> None:
        """Hand over a forward; waits while the disk is slower than the engine."""
        while not self._failed.is_set():
            with contextlib.suppress(queue.Full):
                return self._queue.put(captured, timeout=_POLL_SECONDS)

    def fail(self, error: BaseException) -> None:
        """Stop storing and tell the stage why."""
        if self._failed.is_set():
            return
        self._failed.set()
        if isinstance(error, PipelineError):
            value = error.value and str(error.value)
            said = {"what": error.what, "field": error.field, "value": value, "fix": error.fix}
        else:
            said = {"what": f"the capture plugin failed: {error!r}", "trace": traceback.format_exc()[-4000:]}
        with open(self._error_path, "r+b", buffering=0) as file:
            file.write(json.dumps(said).encode()[:_ERROR_BYTES])

    def run(self) -> None:
        try:
            while not self._failed.is_set():
                try:
                    self.take(self._queue.get(timeout=_POLL_SECONDS))
                except queue.Empty:
                    # The stage asks to finish when every answer is there; a forward is queued before it is answered.
                    if (self._control / "finish").exists() and self._queue.empty():
                        return self.finish()
        except BaseException as e:
            self.fail(e)

    def take(self, captured: Captured) -> None:
        """Merge one forward into its samples and store those that are whole."""
        captured.ready()
        for span in captured.spans:
            if span.tag.kind == CHECK:
                continue
            key = str(span.tag)
            sample = self._open.setdefault(key, OpenSample(span.tag))
            sample.add(span, captured, self._dtype)
            if sample.done == span.tag.length:
                self._store(self._open.pop(key))

    def _store(self, sample: OpenSample) -> None:
        tag = sample.tag
        if (problem := sample.problem()) is not None:
            self._quarantine(tag, problem)
        elif tag.kind == PROBE:
            with self._turn_to_write():
                save_safetensors(self._file(f"probe-{self._probes}", "safetensors"),
                                 {"input_ids": sample.input_ids} | sample.states, {"sample_id": tag.sample_id})
            self._probes += 1
        else:
            if not self._shard.has_room(tag.length):
                self._flush()
            self._shard.add(tag.sample_id, sample.input_ids, sample.states)
            self._samples += 1
            if self._shard.rows >= self._plan.shard_tokens:
                self._flush()

    def _quarantine(self, tag: RequestTag, reason: str) -> None:
        path = self._file("quarantine", "jsonl")
        with clear_disk_errors(path), open(path, "a", encoding="utf-8") as file:
            entry = {"id": tag.sample_id, "reason": reason, "tokens": tag.length, "kind": tag.kind}
            file.write(json.dumps(entry) + "\n")

    def _flush(self) -> None:
        if self._shard.rows:
            with self._turn_to_write():
                self._shard.write(next_shard_path(self._folder))

    def finish(self) -> None:
        """Put everything on disk and say so."""
        for sample in self._open.values():
            self._quarantine(sample.tag, sample.problem() or "incomplete")
        self._flush()
        write_json(self._file("finished", "json"), {"samples": self._samples, "probes": self._probes})

    @contextlib.contextmanager
    def _turn_to_write(self) -> Iterator[None]:
        """Hold the lock that serialises writers, as long as this attempt is the one that may write."""
        with _locked(self._folder) as lock:
            lock.seek(0)
            if lock.read() != self._plan.attempt:
                raise RuntimeError("another start of the stage has taken over this folder")
            yield

    def _file(self, what: str, suffix: str) -> Path:
        return self._control / f"{what}-{os.getpid()}.{suffix}"
