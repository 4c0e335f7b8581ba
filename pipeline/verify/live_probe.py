"""Live probe: what the drafter really receives in the running engine, slot by slot, in prefill and in decoding.

Accept length does not show an off-by-one in the layers; numbers held against numbers do. The export is served in the
real SGLang with the plugin `observe` switched on, on prompts of the dump's probe samples. Then the target's states of
every layer are computed anew over the engine's own tokens (`record_states`), and every slot is held against all of them
(`slot_match`) and against the rows and fingerprints of the dump, which the drafter was trained on. A slot that is not
what the manifest says is named by what it is.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.dump.capture_plan import PROBE, RequestTag
from pipeline.dump.dump import PROBE_TOKENS
from pipeline.dump.target_states import record_states
from pipeline.engines.engine import engine, plugin_switched_on
from pipeline.errors import PipelineError
from pipeline.export.serving import draft_arguments
from pipeline.files import make_dir, write_json
from pipeline.samples import samples_file
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.live_judge import judge_observation, wiring_problems
from pipeline.verify.observe import PLAN_ENV, Observation, ObservePlan, read_observation
from pipeline.verify.serve_check import engine_options
from pipeline.verify.served import prompts_of


def live_probe_check(subject: Subject) -> CheckResult:
    """Serve `subject.draft`, observe, compare."""
    folder = subject.folder / "live"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return _observe_and_judge(subject, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _observe_and_judge(subject: Subject, folder: Path) -> CheckResult:
    options, prompts = engine_options(subject), probe_prompts(subject)
    observed = make_dir(folder / "observed")
    try:
        outputs = serve_observed(subject, prompts, observed, options)
    except PipelineError as e:
        return _not_served(subject, read_observation(observed), e)
    sequences = {i: [*prompt, *output] for (i, prompt), output in zip(prompts.items(), outputs)}
    states = record_states(subject, sequences, folder / "states", options["device"])
    return judge_observation(subject, read_observation(observed), {i: len(p) for i, p in prompts.items()}, sequences,
                             states, getattr(torch, options["dtype"]))


def probe_prompts(subject: Subject) -> dict[str, list[int]]:
    """Sample id → its first tokens, up to where the target's last answer begins.

    The dump's probe samples, or held-out ones where it has none.
    """
    probes = subject.manifest.dump.probe_ids if subject.manifest.dump else []
    return prompts_of(samples_file(subject.run_dir), subject.config.verify.live_prompts,
                      among=set(probes), most_tokens=PROBE_TOKENS)


def serve_observed(subject: Subject, prompts: Mapping[str, Sequence[int]], folder: Path,
                   options: dict[str, Any]) -> list[list[int]]:
    """Answer the prompts with the drafter in SGLang, observed; returns the generated tokens.

    Args:
        folder: for what the plugin writes.
        options: for `engine.engine`.
    """
    plan = ObservePlan(attempt=uuid.uuid4().hex[:12], folder=str(folder))
    write_json(folder / "plan.json", vars(plan))
    # A row must be computed to be seen: no prefix from the cache, and no CUDA graph, which replays without Python. What
    # is wired where is decided when the model is loaded; a graph records the same forward.
    extra = {"disable_radix_cache": True, "skip_tokenizer_init": True}
    if options["device"] == "cuda":
        extra |= {"disable_prefill_cuda_graph": True, "disable_decode_cuda_graph": True}
    extra |= draft_arguments(subject.target, subject.config.target.quantization, options["device"])
    with plugin_switched_on(PLAN_ENV, folder / "plan.json"), engine(
            subject.target.path, draft_path=subject.draft, draft_steps=subject.config.verify.draft_steps, topk=1,
            extra=extra, **options) as llm:
        answers = llm.generate(
            input_ids=[list(ids) for ids in prompts.values()],
            rid=[str(RequestTag.of(plan.attempt, PROBE, i, ids)) for i, ids in prompts.items()],
            sampling_params={"temperature": 0, "max_new_tokens": subject.config.verify.live_tokens, "ignore_eos": True})
    return [list(answer["output_ids"]) for answer in answers]


def _not_served(subject: Subject, observation: Observation, error: PipelineError) -> CheckResult:
    first, _, rest = error.what.partition("\n")
    return CheckResult(
        measured={"live_target": observation.target, "live_drafter": observation.drafter, "engine_said": rest},
        summary="the engine did not serve this export",
        problems=[*wiring_problems(subject, observation), f"the export was not served: {first}"])
