"""Engine runs forked from one process that has imported SGLang: the import takes 15 s, and an engine does it three times.

    host = EngineHost()
    host.dump(target_dir, root, "slots.layers=[1,2,4]")     # a whole dump stage with the real engine
    host.close()

The engine's processes are forked as well, where SGLang would spawn them; nothing else differs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def import_engine() -> None:
    """What a dump and the engine's processes import, and no more: no thread may run when the host forks."""
    from pipeline.engines.engine import prepare_environment

    prepare_environment("cpu", threads=1)
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler
    import sglang.srt.model_executor.model_runner  # noqa: F401

    import pipeline.dump.dump_sglang
    import pipeline.dump.reference  # noqa: F401
    from pipeline.layers.sglang_models import sglang_classes

    sglang_classes()


def report_last_point(file: Path) -> None:
    """Make the capture plugin try the capture point behind the last layer too, which a dump never asks for.

    After the first probe its forward runs once more, with capture points 1 and N. `file` receives whether layer output N-1
    arrived, and its relative error against what the final norm adds up.
    """
    from pipeline.dump import capture
    from pipeline.dump.capture_plan import PROBE
    from pipeline.dump.dump_checks import relative_error
    from pipeline.store import layer_output

    around_forward = capture.Capture.around_forward

    def wrapped(self, forward, runner, batch, *args, **kwargs):
        result = around_forward(self, forward, runner, batch, *args, **kwargs)
        if not file.exists() and any(span.tag.kind == PROBE for span in capture._spans(batch, self.plan.attempt)):
            inner = capture.inner_model(runner.model)
            n = len(inner.layers)
            with capture.every_layer(runner.model) as last:
                inner.layers_to_capture = [1, n]
                for layer in inner.layers[2:]:
                    layer._is_layer_to_capture = False
                try:
                    output = forward(runner, batch, *args, **kwargs).logits_output
                    states = output.hidden_states.split(output.last_hidden_states.shape[-1], dim=-1)
                except RuntimeError as e:  # DeepSeek's collector counts
                    assert "captured 1 of 2" in str(e)
                    states = [None]
            error = relative_error(states[1], last[layer_output(n - 1)]) if len(states) == 2 else None
            file.write_text(json.dumps({"reached": len(states) == 2, "error": error}))
        return result

    capture.Capture.around_forward = wrapped


def fork_from_here(log: Path) -> None:
    """Send this process's output to `log`, and make an engine fork its processes."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # the engine asks for "spawn"


def run_and_answer(function: Callable, args: tuple, log: Path, answer: Connection) -> None:
    """In a fork of the host: call, and send back what it returns."""
    fork_from_here(log)
    try:
        answer.send(function(*args))
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def run_dump(target_dir: Path, root: Path, log: Path, overrides: tuple[str, ...]) -> None:
    """In a fork of the host: stage 2 on the run below `root`; ends with exit code 0 or 1, `log` says why."""
    from dump_cases import make_config

    from pipeline.dump.dump import dump
    from pipeline.stage import run_stage
    from pipeline.target import open_target

    fork_from_here(log)
    report_last_point(root / "last_point.json")
    try:
        target, config = open_target(make_config(target_dir, root, *overrides))
        layers = config.slots.layers
        run_stage("dump", root / config.run.name, target=target.record, seed=0, config={"layers": layers},
                  work=lambda manifest, folder: dump(config, target, manifest, root / config.run.name, folder,
                                                     slot_layers=layers, layers=layers))
    except Exception:
        traceback.print_exc()
        sys.exit(1)


class EngineHost:
    """The process that has imported SGLang: Python's fork server."""

    def __init__(self):
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([f"{__name__}_imports"])
        inherited = os.environ.get("PYTHONPATH")
        tests = Path(__file__).resolve().parent
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(tests), str(tests.parent), inherited)))
        try:  # it takes the environment of now, and its sys.path only from there
            forkserver.ensure_running()
        finally:
            os.environ.pop("PYTHONPATH") if inherited is None else os.environ.update(PYTHONPATH=inherited)

    def close(self) -> None:
        """End the process; nothing else in Python does before this one ends, and it holds 1 GiB."""
        forkserver._forkserver._stop()

    def dump(self, target_dir: Path, root: Path, *overrides: str) -> tuple[int, str]:
        """Run stage 2 on the run below `root`: exit code and output."""
        log = root / "dump.log"
        process = self.context.Process(target=run_dump, args=(target_dir, root, log, overrides))
        process.start()
        process.join(300)
        return process.exitcode, log.read_text()

    def call(self, function: Callable, *args: Any, log: Path) -> Any:
        """`function(*args)` in a fork of the host, where it may start one engine; returns what it returns."""
        receiver, sender = self.context.Pipe(duplex=False)
        process = self.context.Process(target=run_and_answer, args=(function, args, log, sender))
        process.start()
        sender.close()
        try:
            return receiver.recv()
        except EOFError:
            raise AssertionError(f"{function.__name__} failed:\n{log.read_text()}") from None
        finally:
            process.join(300)
