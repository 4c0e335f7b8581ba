"""The processes of `pipeline.launch`: rank 0 keeps lock and manifest, the others only help to train.

Rank 0 runs the stage as always. The others call `wait_for_rank_0`, which returns True once rank 0 has begun to train,
and False if there is nothing to do (the stage is up to date). If rank 0 fails, the launcher ends the others.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from accelerate import Accelerator

_announced = False


def is_main_process() -> bool:
    """False on the ranks other than 0."""
    return int(os.environ.get("RANK", "0")) == 0


def number_of_ranks() -> int:
    """Processes of this training, on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_accelerator(device: str) -> Accelerator:
    """The process's view of all ranks. `device`: "cpu" or "cuda"."""
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

    # The others wait while rank 0 checks its inputs, which can be terabytes.
    patience = InitProcessGroupKwargs(timeout=datetime.timedelta(hours=12))
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    return Accelerator(cpu=device == "cpu", kwargs_handlers=[patience, ddp])


def announce(accelerator: Accelerator) -> None:
    """Rank 0: tell the others that training begins. Once per process."""
    global _announced
    if accelerator.num_processes > 1 and accelerator.is_main_process and not _announced:
        _broadcast(accelerator, 1)
        _announced = True


def dismiss(device: str) -> None:
    """Rank 0, after the stage: let the others go if there was nothing to train."""
    if number_of_ranks() > 1 and not _announced:
        _broadcast(make_accelerator(device), 0)


def wait_for_rank_0(device: str) -> bool:
    """Ranks other than 0: whether there is training to take part in."""
    return bool(_broadcast(make_accelerator(device), 0))


@contextlib.contextmanager
def errors_said_once(ended: threading.Event, patience: float = 10.0) -> Iterator[None]:
    """Let one rank say what went wrong, and the others end without a word.

    An error on one rank shows on the others as a broken connection, or strikes all at once. Rank 0 says what it means
    for the user at once; in every other case a rank waits for the launcher to end it (`ended`, set by SIGTERM) because
    some rank has spoken, and speaks only if that does not happen within `patience` seconds.
    """
    try:
        yield
    except Exception as e:
        speaks_first = is_main_process() and isinstance(e, PipelineError)
        if number_of_ranks() > 1 and not speaks_first and ended.wait(patience):
            raise SystemExit(1) from None
        raise


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let one process of several end, however it ends, without taking the interpreter down under a process group.

    Its threads still run when an error cuts a collective short; destroying them then aborts the process now and then
    (SIGABRT), and the launcher would report that instead of what the rank has just said.
    """
    if number_of_ranks() == 1:
        yield
        return
    code = 0
    try:
        yield
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a closed pipe, a full disk
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def sigterm_noticed() -> Iterator[threading.Event]:
    """An event that SIGTERM sets instead of ending the process, so that a checkpoint can be saved first."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


def _broadcast(accelerator: Accelerator, value: int) -> int:
    message = torch.tensor([value], device=accelerator.device)
    torch.distributed.broadcast(message, src=0)
    return int(message)
