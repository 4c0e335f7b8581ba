"""Encoding in several processes. For any number of them, and without any, the same rows come in the same order.

A worker is a Python process of its own that reads records from the spool by their places and answers with finished
rows: JSON and Arrow over its standard input and output, each message behind its length. It never imports torch, which
would take half a GB in each; it ends when its standard input does, also if the stage was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import pyarrow as pa

from pipeline.errors import PipelineError
from pipeline.prompts.chat import ChatEncoder
from pipeline.prompts.encode import Outcome, RowEncoder, Skipped
from pipeline.samples import SCHEMA

_CHUNK = 64  # records of one message
_AHEAD = 2  # chunks that a worker has: one in work, one to go on with
_WORTH_IT = 2000  # conversations; reading the tokenizer takes a worker as long as encoding these
_START = "from pipeline.prompts.workers import serve; serve()"


def workers_for(asked: int | None, conversations: int) -> int:
    """Processes to encode with: `prompts.workers`, by default one for each core where there is enough to do."""
    return asked or max(1, min(len(os.sched_getaffinity(0)), conversations // _WORTH_IT))


def encode_here(encoder: RowEncoder, places: Sequence[int]) -> Iterator[Outcome]:
    """What became of the records at these places of the spool, encoded in this process."""
    return map(encoder.encode, _chunks(places))


def encode_in_workers(count: int, setup: dict, places: Sequence[int]) -> Iterator[Outcome]:
    """The same by `count` processes.

    Args:
        setup: JSON values: the `tokenizer`'s folder and whether to `trust_remote_code` there, and the arguments of
            `ChatEncoder` ("chat") and `RowEncoder` ("rows") besides.

    Raises:
        PipelineError: a worker died.
    """
    chunks = _chunks(places)
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_Worker(setup)) for _ in range(count)]
        ahead = _AHEAD * count
        for k in range(len(chunks) + ahead):
            worker = workers[k % count]
            if 0 <= k - ahead < len(chunks):
                yield worker.receive()
            if k < len(chunks):
                worker.send(chunks[k])


def _chunks(places: Sequence[int]) -> list[Sequence[int]]:
    return [places[i:i + _CHUNK] for i in range(0, len(places), _CHUNK)]


class _Worker:
    def __init__(self, setup: dict):
        environment = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen([sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         env=os.environ | environment)
        with contextlib.suppress(OSError):  # room for some answers, so that a worker need not wait until one is read
            fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.send(setup)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()  # it has nothing to lose
        self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def send(self, message: object) -> None:
        try:
            _write(self._process.stdin, json.dumps(message).encode())
        except BrokenPipeError as e:
            raise self._died() from e

    def receive(self) -> Outcome:
        said, rows = _read(self._process.stdout), _read(self._process.stdout)
        if said is None or rows is None:
            raise self._died()
        kept, skipped, counts = json.loads(said)
        return Outcome(kept, [Skipped(*one) for one in skipped], counts,
                       pa.ipc.read_record_batch(pa.py_buffer(rows), SCHEMA))

    def _died(self) -> PipelineError:
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        return PipelineError(
            f"a worker process that encodes conversations {how}", field="prompts.workers",
            fix="see what it said above; if the machine ran out of memory, take fewer: "
                'make prompts ARGS="prompts.workers=1"')


def serve() -> None:
    """The worker's side: set up, then chunk by chunk until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the stage, which ends this process
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a tokenizer prints must not come between the replies
    setup = json.loads(_read(requests))
    if not setup["trust_remote_code"]:
        sys.modules["torch"] = None  # transformers then does as where torch is not installed: tokenizers need none
    from pipeline.target import load_tokenizer

    tokenizer = load_tokenizer(setup["tokenizer"], setup["trust_remote_code"])
    encoder = RowEncoder(ChatEncoder(tokenizer, **setup["chat"]), **setup["rows"])
    while (message := _read(requests)) is not None:
        outcome = encoder.encode(json.loads(message))
        _write(replies, json.dumps([outcome.kept, outcome.skipped, outcome.counts]).encode())
        _write(replies, outcome.rows.serialize())


def _write(stream: BinaryIO, message: bytes | pa.Buffer) -> None:
    stream.write(len(message).to_bytes(8, "little"))
    stream.write(message)
    stream.flush()


def _read(stream: BinaryIO) -> bytes | None:
    """A message; None if the other side has ended."""
    head = stream.read(8)
    size = int.from_bytes(head, "little")
    message = stream.read(size) if len(head) == 8 else b""
    return message if len(head) == 8 and len(message) == size else None
