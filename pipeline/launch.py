"""Start a stage on one process or on several: one per GPU, or that many CPU processes where there is no GPU.

    python -m pipeline.launch 8 stages/04_train.py run.name=llama gpus=8

One process is the script itself. Several are accelerate's launcher on a free port, so that two trainings on one machine
do not meet. The launcher says nothing of its own where a rank has said what went wrong, and SIGTERM goes to the ranks,
which save and exit with 0.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys


def main(arguments: list[str]) -> int | str:
    """Run `arguments` = [processes, script, its arguments …]; returns what to exit with."""
    processes, *script = arguments
    if not processes.isdigit() or int(processes) < 1:
        return f"error: GPUS={processes}: a positive number is needed"
    if int(processes) == 1:
        os.execv(sys.executable, [sys.executable, *script])
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # --multi_gpu means one process per rank; without a GPU the stage itself asks for the CPU.
    options = launch_command_parser().parse_args(
        ["--multi_gpu", "--num_machines", "1", "--num_processes", processes, "--main_process_port", "0",
         "--mixed_precision", "no", "--dynamo_backend", "no", *script])
    # By itself the launcher would kill ranks that take more than 30 s to save, and report a failure.
    options.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
    signal.signal(signal.SIGTERM, _terminate_ranks)
    logging.disable(logging.CRITICAL)
    try:
        launch_command(options)
    except SignalException as e:
        return 128 + e.sigval
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        return f"error: rank {rank} was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return 0


def _terminate_ranks(signum: int, frame: object) -> None:
    import psutil

    for rank in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
            rank.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
