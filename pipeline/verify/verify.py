"""Stage 6: prove the export. Every check runs, also when another one fails; the stage succeeds only if all hold.

    files       the files as an engine reads them, against the manifest and the trained drafter   seconds
    replay      accuracy and accepted prefixes by an independent forward, against the trainer's   seconds
    wiring      the weights under the declared wiring and under the mistakes people make          seconds
    live        what the drafter's fc receives inside the real engine, slot by slot               one engine start
    serve       text and counters of the real SGLang, against the replay                          two engine starts
    serve_vllm  the same in the real vLLM                                                         two engine starts

A check is a function `(Subject) -> CheckResult`; they share no result with one another.
"""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.files import sha256_file, write_json, write_text
from pipeline.manifest import Manifest
from pipeline.stage import StageResult
from pipeline.target import Target
from pipeline.verify import verify_report
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.vllm_check import export_beside
from pipeline.verify.vllm_check import why_not as why_not_vllm

CHECKS = {
    "files": "pipeline.verify.files_check:files_check",
    "replay": "pipeline.verify.replay_check:replay_check",
    "wiring": "pipeline.verify.wiring:wiring_check",
    "live": "pipeline.verify.live_probe:live_probe_check",
    "serve": "pipeline.verify.serve_check:serve_check",
    "serve_vllm": "pipeline.verify.vllm_check:serve_vllm_check",
}
"""Name → module:function. Imported when it runs: an engine's packages are large, and not every machine has every one."""


def verify(config: Config, target: Target, manifest: Manifest, run_dir: Path, folder: Path) -> StageResult:
    """Run the checks; what they found goes to `verify.json` and `verify.html`, also when one fails.

    Raises:
        PipelineError: there is nothing to verify, or a check failed.
    """
    subject = Subject(config, target, manifest, run_dir, folder, draft_folder(config, run_dir))
    if not subject.draft.is_dir():
        raise PipelineError(
            "there is no SGLang export to verify" + (": this is a file" if subject.draft.is_file() else ""),
            field="verify.draft", value=str(subject.draft),
            fix='make export ARGS="export.engines=[sglang,vllm]", or name another folder: ARGS="verify.draft=…"')
    names, left_out = _selected(subject)
    results, seconds = {}, {}
    for number, name in enumerate(names, 1):
        print(f"verify: {name} ({number} of {len(names)})", flush=True)
        started = time.monotonic()
        results[name] = run_check(name, subject)
        seconds[name] = round(time.monotonic() - started, 1)
    outputs = [folder / "verify.json", folder / "verify.html"]
    write_json(outputs[0], as_json(subject, results, left_out, seconds))
    write_text(outputs[1], verify_report.html(subject, results, left_out))
    print(verify_report.terminal(results, left_out), flush=True)
    print(f"verify: pictures and numbers in {outputs[1]}", flush=True)
    if failed := [name for name, result in results.items() if not result.holds]:
        raise PipelineError(
            f"the export did not pass: {', '.join(failed)} failed of {', '.join(results)}; "
            f"first problem: {results[failed[0]].problems[0]}",
            field=str(subject.draft), value=f"{sum(len(r.problems) for r in results.values())} problems, listed above",
            fix=f"open {outputs[1]}")
    return StageResult(outputs=outputs, **_recorded(results))


def draft_folder(config: Config, run_dir: Path) -> Path:
    """The export to verify."""
    return Path(config.verify.draft) if config.verify.draft else run_dir / "export" / "sglang"


def draft_contents(config: Config) -> dict[str, str] | None:
    """Checksums of an export from elsewhere; the run's own is an input of the stage anyway."""
    if config.verify.draft is None:
        return None
    draft = Path(config.verify.draft)
    read = [*draft.glob("*"), draft.parent / "launch_sglang.sh", *export_beside(draft).glob("*")]
    return {str(p.relative_to(draft.parent)): sha256_file(p) for p in sorted(read) if p.is_file()}


def _selected(subject: Subject) -> tuple[list[str], dict[str, str]]:
    """Names of the checks to run, and why others are not. What was asked for by name runs, or fails."""
    if subject.config.verify.checks is not None:
        asked = subject.config.verify.checks
        return [n for n in CHECKS if n in asked], {n: "not asked for" for n in CHECKS if n not in asked}
    left_out = {} if (reason := why_not_vllm(subject)) is None else {"serve_vllm": reason}
    return [n for n in CHECKS if n not in left_out], left_out


def run_check(name: str, subject: Subject) -> CheckResult:
    """One check; what stops it is its problem, and the others still run."""
    module, function = CHECKS[name].split(":")
    try:
        check: Callable[[Subject], CheckResult] = getattr(importlib.import_module(module), function)
        return check(subject)
    except PipelineError as e:
        return CheckResult(measured={}, summary=e.what.splitlines()[0], problems=[str(e)])
    except Exception as e:
        traceback.print_exc()
        what = f"the check broke off: {type(e).__name__}: {e}"
        return CheckResult(measured={}, summary=what.splitlines()[0], problems=[what])
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the engine that comes next sizes its memory by what is free


def as_json(subject: Subject, results: dict[str, CheckResult], left_out: dict[str, str],
            seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "run": subject.manifest.run,
        "draft": str(subject.draft),
        "layers": subject.manifest.fc_layers(),
        "holds": all(r.holds for r in results.values()),
        "checks": {
            name: {"holds": r.holds, "seconds": seconds[name], "summary": r.summary, "problems": r.problems,
                   "notes": r.notes, "measured": r.measured}
            for name, r in results.items()
        },
        "not_run": left_out,
    }


def _recorded(results: dict[str, CheckResult]) -> dict[str, dict[str, Any]]:
    """What the manifest keeps: every plain number as `<check>.<name>`."""
    flat = {f"{name}.{key}": value for name, r in results.items() for key, value in r.measured.items()}
    return {
        "counts": {k: v for k, v in flat.items() if type(v) is int},
        "metrics": {k: v for k, v in flat.items() if type(v) in (float, bool, str) or _is_floats(v)},
    }


def _is_floats(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, float) for v in value)
