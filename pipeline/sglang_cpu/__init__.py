"""What SGLang lacks on PyPI to run without a GPU, added from outside: no file of SGLang is edited.

* `shim/` goes on PYTHONPATH of the engine's processes: `sgl_kernel` (torch stand-ins for the C++ ops that SGLang
  imports on a CPU; PyPI carries only the CUDA build) and `sitecustomize` (makes torchvision importable there, see
  `pipeline.engines.torchvision_ops`).
* `spec_attention` is an SGLang plugin: EAGLE's verify, draft-extend and multi-step draft modes, attention sinks and DeepSeek's
  latent attention for the `torch_native` attention backend (the backend itself is in `torch_native_eagle`).

All of it is a way to run the real engine where no GPU is. It is never used where one is.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import PipelineError

SHIM_DIR = Path(__file__).resolve().parent / "shim"

# The stand-ins follow private signatures, which change between releases: only versions the tests ran with are here.
TESTED_SGLANG = ("0.5.23",)


def check_sglang_version(*, force: bool = False) -> str:
    """Return the installed SGLang version.

    Raises:
        PipelineError: SGLang is not installed, or (unless `force`) is a version the CPU pieces were not tested with.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("sglang")
    except PackageNotFoundError as e:
        raise PipelineError("SGLang is not installed", field="sglang", fix="make install") from e
    if found not in TESTED_SGLANG and not force:
        raise PipelineError(
            f"this SGLang was not tested with the CPU pieces (tested: {', '.join(TESTED_SGLANG)})",
            field="sglang",
            value=found,
            fix=f"pip install --no-deps sglang=={TESTED_SGLANG[-1]}",
        )
    return found
