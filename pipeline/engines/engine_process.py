"""Keep SGLang's `Engine` from doing to this process what only a server's own process should suffer.

SGLang's `Engine` assumes that it owns the process: when a scheduler dies it kills the whole process tree without a
word, at shutdown it kills every child process (wandb's included), and it replaces the root logger's handlers and the
signal handlers. Here only the engine's own processes end, and what they printed is kept for the error message.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from typing import IO, Any


class EngineDied(SystemExit):
    """Raised in the main thread by SIGQUIT, which SGLang's processes send when they fail.

    A SystemExit because the engine waits in a uvloop event loop, which lets only that and KeyboardInterrupt out of a
    signal handler; it logs any other exception and waits on, for a process that is gone.
    """


def raise_engine_died(signum: int, frame: object) -> None:
    raise EngineDied("one of the engine's processes failed")


class EngineProcess:
    """One `sglang.Engine` and the processes it started.

    Args:
        log: binary file that takes the output of the engine's processes, for as long as they live.
    """

    def __init__(self, log: IO[bytes]):
        self.log = log
        self.llm: Any = None
        self._before = set(multiprocessing.active_children())
        self._contexts_before = _zmq_contexts()
        self._signals = {number: signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM)}

    def start(self, arguments: dict[str, Any]) -> Any:
        """Construct and return the engine. On any exception `stop` must still be called."""
        with _output_to(self.log), _keep_root_logger():
            self.llm = llm = self._engine_class()(custom_sigquit_handler=raise_engine_died, **arguments)
            # The first request would put handlers into the event loop that kill this process, and that an idle loop
            # never calls: let it happen now and take them out again.
            llm.loop.run_until_complete(_call(llm.tokenizer_manager.auto_create_handle_loop))
            llm.loop.remove_signal_handler(signal.SIGTERM)
            llm.loop.remove_signal_handler(signal.SIGQUIT)
        signal.signal(signal.SIGTERM, self._signals[signal.SIGTERM])
        signal.signal(signal.SIGQUIT, raise_engine_died)
        logging.getLogger("sglang").setLevel(logging.WARNING)
        return llm

    def _engine_class(self) -> type:
        from sglang.srt.entrypoints import engine as sglang_engine

        owner = self

        class Engine(sglang_engine.Engine):
            def shutdown(self) -> None:
                kill_process_tree = sglang_engine.kill_process_tree
                sglang_engine.kill_process_tree = lambda *args, **kwargs: owner._kill()
                try:
                    super().shutdown()
                finally:
                    sglang_engine.kill_process_tree = kill_process_tree

        return Engine

    def stop(self) -> None:
        """End the engine's processes and give the signals back. Safe to call at any point of a start that failed."""
        with contextlib.suppress(EngineDied):  # a report that arrives right now is no news
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        try:
            if self.llm is not None:
                atexit.unregister(self.llm.shutdown)
                self.llm.shutdown()
        finally:
            self._kill()
            self._forget_messages()
            for number, handler in self._signals.items():
                signal.signal(number, handler)

    def tail(self, lines: int) -> str:
        """The last lines that the engine's processes printed."""
        self.log.seek(0)
        return "\n".join(self.log.read().decode(errors="replace").splitlines()[-lines:])

    def _forget_messages(self) -> None:
        """Close the sockets of processes that are gone. Left to the garbage collector, ZeroMQ would wait for ever for
        them to read what was sent last, in whatever this process does at that time."""
        for context in _zmq_contexts():
            if not any(context is known for known in self._contexts_before):
                context.destroy(linger=0)

    def _kill(self) -> None:
        import psutil

        started = [p for p in multiprocessing.active_children() if p not in self._before]
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for descendant in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        descendant.kill()
            process.kill()
        for process in started:
            process.join()


def _zmq_contexts() -> list[Any]:
    """The open ZeroMQ contexts of this process: SGLang keeps no name for its own."""
    if (zmq := sys.modules.get("zmq")) is None:
        return []
    # Not isinstance: it asks objects for their class, and deprecated stand-ins warn when asked.
    found = (o for o in gc.get_objects() if issubclass(type(o), zmq.Context))
    return [context for context in found if not context.closed and not context._shadow]


async def _call(function) -> None:
    function()


@contextlib.contextmanager
def _output_to(log: IO[bytes]) -> Iterator[None]:
    """Send file descriptors 1 and 2 of this process to `log`; children started meanwhile keep them."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    for fd, _ in saved:
        os.dup2(log.fileno(), fd)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)


@contextlib.contextmanager
def _keep_root_logger() -> Iterator[None]:
    """SGLang calls basicConfig with force=True, which closes the handlers it finds: hide them from it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
