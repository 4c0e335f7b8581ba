"""Start the real SGLang engine on a GPU or, with `pipeline.sglang_cpu`, without one.

    prepare_environment(device)           # before anything imports sglang
    with engine(target, device=device, dtype="float32") as llm:
        outputs = generate(llm, input_ids, {"temperature": 0, "max_new_tokens": 48})

A failure, at start or later, is a `PipelineError` that ends with the engine's own last lines.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.engines.engine_process import EngineDied, EngineProcess
from pipeline.engines.torchvision_ops import declare_on_import
from pipeline.errors import PipelineError
from pipeline.sglang_cpu import SHIM_DIR, check_sglang_version

CPU_MAX_TOTAL_TOKENS = 16384  # SGLang sizes its KV pool by free memory, which took 13 GB for a 135M model
LOG_TAIL_LINES = 30


def resolve_device(device: str) -> str:
    """"auto" → "cuda" where there is one, else "cpu". Asking for "cuda" where there is none is a `PipelineError`."""
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise PipelineError("unknown device", field="device", value=device, fix="device=auto, cpu or cuda")
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise PipelineError("no CUDA device was found", field="device", value=device, fix="device=cpu, or device=auto")
    return ("cuda" if found else "cpu") if device == "auto" else device


def tensor_parallel(config: Config, device: str, *, check: bool = True) -> int:
    """GPUs of one engine on `device` ("cpu" or "cuda"): `GPUS=n` if given, else the target's own number; 1 on a CPU.

    Args:
        check: refuse more GPUs than this machine has. An export is served elsewhere and does not ask for that.
    Raises:
        PipelineError: `check`, and there are too few GPUs.
    """
    if device == "cpu":
        if check and config.gpus > 1:
            raise PipelineError(f"GPUS={config.gpus} asked for, this machine has no GPU", field="device", value=device,
                                fix="leave GPUS out, or run on a machine with GPUs")
        return 1
    wanted = config.gpus if config.gpus > 1 else config.target.tp_size
    if check:
        import torch

        if wanted > (found := torch.cuda.device_count()):
            field = "gpus" if config.gpus > 1 else "target.tp_size"
            raise PipelineError(f"the engine is to use {wanted} GPUs, this machine has {found}", field=field,
                                value=wanted, fix=f'GPUS={found}' if found > 1 else 'ARGS="target.tp_size=1"')
    return wanted


def prepare_environment(device: str, *, threads: int | None = None) -> None:
    """Set for this process and its children what SGLang needs on `device` ("cpu" or "cuda"). Idempotent.

    Call it before anything imports sglang, which decides at import which platform it runs on.

    Args:
        threads: OpenMP threads of every process; None leaves the environment's value.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be resolved to cpu or cuda first, got {device!r}")
    loaded = sys.modules.get("sglang.srt.utils.common")
    if loaded is not None and loaded.is_cpu() != (device == "cpu"):
        raise RuntimeError(f"sglang was imported before prepare_environment({device!r})")

    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)

    shim = str(SHIM_DIR)
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != shim]
    sys.path[:] = [p for p in sys.path if p != shim]
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # device=cpu on a machine with a GPU: SGLang must not see both
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # saves compiling for some 10 s at start
        inherited.insert(0, shim)
        sys.path.insert(0, shim)
        declare_on_import()
    else:
        os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
    if inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join(inherited)
    else:
        os.environ.pop("PYTHONPATH", None)


def engine_arguments(
    model_path: str | Path,
    *,
    device: str,
    dtype: str,
    tp_size: int = 1,
    context_length: int | None = None,
    max_total_tokens: int | None = None,
    chunked_prefill_size: int | None = None,
    capture_ids: Sequence[int] | None = None,
    draft_path: str | Path | None = None,
    draft_steps: int = 3,
    topk: int = 1,
    draft_tokens: int | None = None,
    quantization: str | None = None,
    trust_remote_code: bool = False,
    mem_fraction_static: float | None = None,
    random_seed: int = 0,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The keyword arguments of `sglang.Engine` (fields of its `ServerArgs`) for what the pipeline asks of it.

    Args:
        capture_ids: engine ids of the layers whose hidden states every forward returns
            (`LogitsProcessorOutput.hidden_states`, [tokens, n·H]). Excludes `draft_path`.
        draft_path: EAGLE-3 drafter to speculate with: `draft_steps` steps, `topk` branches per step, `draft_tokens`
            tree nodes verified including the root (draft_steps + 1 for a chain; must be given for a tree).
        extra: further `ServerArgs` fields; they win.
    """
    if capture_ids is not None and draft_path is not None:
        raise ValueError("SGLang captures hidden states only without a drafter: give capture_ids or draft_path")
    arguments = {
        "model_path": str(model_path),
        "device": device,
        "dtype": dtype,
        "tp_size": tp_size,
        "context_length": context_length,
        "max_total_tokens": max_total_tokens,
        "chunked_prefill_size": chunked_prefill_size,
        "quantization": quantization,
        "trust_remote_code": trust_remote_code,
        "mem_fraction_static": mem_fraction_static,
        "random_seed": random_seed,
        "log_level": "warning",
    }
    if device == "cpu":
        # Without AMX kernels SGLang replaces this one by torch_native, but only after the models that refuse torch_native
        # by its name (gpt-oss) have had their say.
        arguments["attention_backend"] = "intel_amx"
        arguments["disable_hybrid_swa_memory"] = True  # torch_native reads layers with a sliding window from the full pool
        if max_total_tokens is None:
            arguments["max_total_tokens"] = CPU_MAX_TOTAL_TOKENS
    if capture_ids is not None:
        arguments |= {
            "enable_return_aux_hidden_states": True,
            "speculative_algorithm": "EAGLE3",  # with the flag above it only names whose layer-id convention holds
            "return_aux_hidden_state_layer_ids": list(capture_ids),
            "disable_radix_cache": True,  # a cached prefix has no forward, hence no rows
        }
        if device == "cuda":  # a graph replays into buffers that a Python hook does not see
            arguments |= {"disable_prefill_cuda_graph": True, "disable_decode_cuda_graph": True}
    if draft_path is not None:
        if draft_tokens is None:
            if topk > 1:
                raise PipelineError(
                    "a draft tree needs its size", field="draft_tokens", fix="set the number of nodes to verify"
                )
            draft_tokens = draft_steps + 1
        arguments |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(draft_path),
            "speculative_num_steps": draft_steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": draft_tokens,
        }
    arguments |= extra or {}
    return {name: value for name, value in arguments.items() if value is not None}


@contextlib.contextmanager
def engine(
    model_path: str | Path, *, device: str, dtype: str, force_version: bool = False, **options: Any
) -> Iterator[Any]:
    """A live `sglang.Engine`; its processes end with the block, also after an exception.

    Must be entered from the main thread of a process whose main module guards its work with `__name__ == "__main__"`
    (SGLang spawns its schedulers). The engine's own output is kept back and its tail shown if it fails.

    Args:
        device: "cpu" or "cuda", see `resolve_device`.
        dtype: "float32", "bfloat16", "float16" or "auto".
        force_version: run with an SGLang version that was not tested.
        options: see `engine_arguments`.
    Raises:
        PipelineError: SGLang is missing or another version, the start failed, or the engine died inside the block.
    """
    arguments = engine_arguments(model_path, device=device, dtype=dtype, **options)
    check_sglang_version(force=force_version)
    prepare_environment(device)
    with tempfile.TemporaryFile(prefix="sglang-") as log:
        process = EngineProcess(log)
        try:
            try:
                with _offline_for(model_path):
                    llm = process.start(arguments)
            except (Exception, EngineDied) as e:
                process.stop()  # first, so that the dying processes' last words are in the log
                raise _failure("SGLang did not start", arguments, process, e) from e
            try:
                yield llm
            except EngineDied as e:
                raise _failure("SGLang died while it was running", arguments, process, e) from e
        finally:
            process.stop()


def generate(llm: Any, input_ids: list[list[int]], sampling: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the requests as one batch.

    Args:
        input_ids: token ids per request.
        sampling: SGLang sampling parameters, e.g. {"temperature": 0, "max_new_tokens": 48}.
    Returns:
        In the order of `input_ids`: `output_ids` (list of int, with the end-of-turn token where one was generated),
        `finish_reason` ("stop" or "length") and `meta_info` (SGLang's; the `spec_*` counters with a drafter).
    """
    if not input_ids:
        return []
    outputs = llm.generate(input_ids=input_ids, sampling_params=sampling)
    return [
        {
            "output_ids": list(out["output_ids"]),
            "finish_reason": out["meta_info"]["finish_reason"]["type"],
            "meta_info": out["meta_info"],
        }
        for out in outputs
    ]


@contextlib.contextmanager
def plugin_switched_on(variable: str, plan_file: Path) -> Iterator[None]:
    """Engines that are started within the block load the plugin that reads `variable`: they inherit the environment."""
    os.environ[variable] = str(plan_file)
    try:
        yield
    finally:
        del os.environ[variable]


@contextlib.contextmanager
def _offline_for(model_path: str | Path) -> Iterator[None]:
    """Processes that load a local model have nothing to ask the hub."""
    saved = os.environ.get("HF_HUB_OFFLINE")
    if Path(model_path).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if saved is None:
            os.environ.pop("HF_HUB_OFFLINE", None)
        else:
            os.environ["HF_HUB_OFFLINE"] = saved


def _failure(what: str, arguments: dict[str, Any], process: EngineProcess, cause: BaseException) -> PipelineError:
    shown = textwrap.indent(process.tail(LOG_TAIL_LINES) or "(nothing)", "  | ")
    return PipelineError(
        f"{what}: {cause}\nThe last it printed:\n{shown}",
        field="model_path",
        value=arguments["model_path"],
        fix="see the lines above; often too little memory, or a model or setting that SGLang does not take",
    )
