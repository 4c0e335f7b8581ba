"""Serve check in vLLM: the vLLM export's text and counters, against the replay of the SGLang export.

The two exports come from one training, so vLLM must accept exactly what the replay of the other files accepts. vLLM runs
in an environment of its own (`vllm_env`) and counts every verification in full: also drafts that the target confirms past
the end of turn or the length limit, as SGLang does. `served.judge` compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.engines import vllm_env
from pipeline.engines.engine import resolve_device, tensor_parallel
from pipeline.errors import PipelineError
from pipeline.samples import samples_file
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.served import Served, heldout_prompts, judge

_SCRIPT = Path(__file__).with_name("vllm_serve.py")


def serve_vllm_check(subject: Subject) -> CheckResult:
    """Serve the vLLM export beside `subject.draft`, replay, compare.

    Raises:
        PipelineError: vLLM is not installed, the run has no export for it, or it failed.
    """
    if (reason := why_not(subject)) is not None:
        fix = vllm_env.INSTALL if not vllm_env.installed() else 'make export ARGS="export.engines=[sglang,vllm]"'
        raise PipelineError(reason, field="verify.checks", value="serve_vllm", fix=fix)
    config, target = subject.config, subject.target
    device = resolve_device(config.device)
    exact = device == "cpu"
    dtype = "float32" if exact else target.dtype
    prompts = heldout_prompts(samples_file(subject.run_dir), config.verify.serve_prompts)
    answer = vllm_env.ask(_SCRIPT, question(subject, prompts, device=device, dtype=dtype), device=device)
    result = judge(subject, served(prompts, answer), engine="vLLM", dtype=dtype, exact=exact)
    result.measured |= {"vllm_version": answer["version"], "vllm_metrics": answer["metrics"]}
    if answer["version"] not in vllm_env.TESTED_VLLM:
        result.notes.append(
            f"vLLM {answer['version']} was not tested with this pipeline; tested: {', '.join(vllm_env.TESTED_VLLM)}"
        )
    return result


def why_not(subject: Subject) -> str | None:
    """Why this check cannot run here, None if it can."""
    if not vllm_env.installed():
        return f"vLLM is not installed ({vllm_env.INSTALL})"
    if not export_beside(subject.draft).is_dir():
        return f"there is no vLLM export at {export_beside(subject.draft)}"
    return None


def export_beside(draft: Path) -> Path:
    """The vLLM export that belongs to an export in SGLang's form."""
    return draft.resolve().with_name("vllm")


def question(subject: Subject, prompts: list[list[int]], *, device: str, dtype: str) -> dict[str, Any]:
    """For `vllm_serve.answer`."""
    config, target = subject.config, subject.target
    engine = {
        "model": str(target.path),
        "dtype": dtype,
        "tensor_parallel_size": tensor_parallel(config, device),
        "quantization": config.target.quantization,
        "trust_remote_code": target.trust_remote_code,
        "gpu_memory_utilization": config.dump.mem_fraction_static,
        "seed": config.seed,
    }
    return {
        "engine": {name: value for name, value in engine.items() if value is not None},
        "draft": str(export_beside(subject.draft)),
        "draft_steps": config.verify.draft_steps,
        "prompts": prompts,
        "max_tokens": config.verify.serve_tokens,
        "stop": list(target.eos_token_ids),
    }


def served(prompts: list[list[int]], answer: dict[str, Any]) -> list[Served]:
    """Every request of an answer, with vLLM's counters of it."""
    requests = zip(prompts, answer["outputs"], answer["plain"], answer["beyond"], answer["histograms"], strict=True)
    return [
        Served(
            prompt=prompt,
            output=output,
            plain=plain,
            beyond=beyond,
            verifications=sum(histogram),
            correct=sum(accepted * times for accepted, times in enumerate(histogram)),
            histogram=histogram,
        )
        for prompt, output, plain, beyond, histogram in requests
    ]
