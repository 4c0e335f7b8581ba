"""Serve check: the exported drafter in the real SGLang, its text and its counters against the replay.

Three runs over the same held-out prompts, greedy: without speculation, a few tokens past every end (SGLang verifies and
counts there), and with the drafter. `served.judge` compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.engines.engine import engine, generate, resolve_device, tensor_parallel
from pipeline.export.serving import draft_arguments
from pipeline.samples import samples_file
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.served import Served, heldout_prompts, judge


def serve_check(subject: Subject) -> CheckResult:
    """Serve `subject.draft` in SGLang, replay, compare."""
    config, target = subject.config, subject.target
    options = engine_options(subject)
    served = serve(
        target.path,
        subject.draft,
        heldout_prompts(samples_file(subject.run_dir), config.verify.serve_prompts),
        tokens=config.verify.serve_tokens,
        steps=config.verify.draft_steps,
        options=options,
        draft_options=draft_arguments(target, config.target.quantization, options["device"]),
    )
    return judge(subject, served, engine="SGLang", dtype=options["dtype"], exact=options["device"] == "cpu")


def engine_options(subject: Subject) -> dict[str, Any]:
    """For `engine.engine`, as every check of this stage starts SGLang: in fp32 on a CPU, in the target's dtype on a GPU.

    Greedy text is only reproducible in fp32, which is for targets of laptop size: a GPU serves the real dtype.
    """
    config, target = subject.config, subject.target
    device = resolve_device(config.device)
    return {
        "device": device,
        "dtype": "float32" if device == "cpu" else target.dtype,
        "tp_size": tensor_parallel(config, device),
        "quantization": config.target.quantization,
        "trust_remote_code": target.trust_remote_code,
        "mem_fraction_static": config.dump.mem_fraction_static,
        "force_version": config.dump.allow_untested_engine,
        "random_seed": config.seed,
    }


def serve(
    model: Path,
    draft: Path,
    prompts: list[list[int]],
    *,
    tokens: int,
    steps: int,
    options: dict[str, Any],
    draft_options: dict[str, Any] | None = None,
) -> list[Served]:
    """Answer the prompts greedily without and with the drafter, each in an engine of its own.

    Args:
        tokens: most tokens of an answer.
        steps: draft steps of a chain (topk 1).
        options: for `engine.engine`, of both runs.
    """
    greedy = {"temperature": 0, "max_new_tokens": tokens}
    with engine(model, **options) as llm:
        plain = [out["output_ids"] for out in generate(llm, prompts, greedy)]
        beyond = generate(
            llm,
            [p + o for p, o in zip(prompts, plain)],
            {"temperature": 0, "max_new_tokens": steps + 1, "ignore_eos": True},
        )
    with engine(model, draft_path=draft, draft_steps=steps, topk=1, extra=draft_options, **options) as llm:
        outputs = generate(llm, prompts, greedy)
    return [
        Served(
            prompt=prompt,
            output=out["output_ids"],
            plain=p,
            beyond=b["output_ids"],
            # An answer of one token ends before the first verification, and then the counters are absent.
            verifications=out["meta_info"].get("spec_verify_ct", 0),
            correct=out["meta_info"].get("spec_num_correct_drafts", 0),
            histogram=list(out["meta_info"].get("spec_correct_drafts_histogram", [])),
        )
        for prompt, p, b, out in zip(prompts, plain, beyond, outputs)
    ]
