"""Serve check: the exported drafter in the real SGLang, its text and its counters against the replay.

Three runs over the same held-out prompts, greedy: without speculation, a few tokens past every end (SGLang verifies and
counts there), and with the drafter. The hidden states of the engine's own output are then dumped anew and replayed. In
fp32 the texts are identical and the replay accepts the same number of drafts in every verification.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.dump import dump
from pipeline.engine import engine, generate, resolve_device, tensor_parallel
from pipeline.errors import PipelineError
from pipeline.files import make_dir
from pipeline.manifest import Manifest
from pipeline.replay import ExportedDrafter, Walk, tau, walk
from pipeline.samples import Sample, read_samples, write_samples
from pipeline.serving import draft_arguments
from pipeline.store import HiddenStore, layer_output, shard_paths
from pipeline.target import Target, load_embedding

KNOWN_CAUSES = """accept length exactly 1.0: no draft was ever accepted. Causes that others met, most frequent first:
  - the launch line says --speculative-algorithm EAGLE, not EAGLE3 (sglang 21272)
  - eagle_aux_hidden_state_layer_ids are missing or in another engine's convention (sglang 25454, 32334, tokenspeed 526)
  - d2t is missing, so draft ids are taken for target ids (Automodel 2447)
  - rope_theta is not where this engine looks for it (SpecForge PR 270, Automodel 2920)
  - an opt-in norm (norm_before_fc, fc_norm) is trained but not served, or the other way round (sglang 32334)
  - or the drafter learned nothing: see its held-out accuracy in the summary"""


@dataclass(frozen=True)
class Served:
    """One request as the engine answered it with the drafter.

    Attributes:
        prompt, output: token ids; `plain` is the output without speculation, `beyond` the target's next greedy tokens.
        verifications, correct: SGLang's `spec_verify_ct` and `spec_num_correct_drafts`.
        histogram: entry a: verifications that accepted a drafts.
    """

    prompt: list[int]
    output: list[int]
    plain: list[int]
    beyond: list[int]
    verifications: int
    correct: int
    histogram: list[int]

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.output + self.beyond


def serve_check(
    config: Config, target: Target, manifest: Manifest, run_dir: Path, folder: Path
) -> tuple[dict, list[str]]:
    """Serve, replay, compare.

    Args:
        folder: of this stage, for hidden states that are deleted again.

    Returns:
        Results for verify.json and the manifest, and what failed (empty: the check holds).
    """
    device = resolve_device(config.device)
    # Greedy text is only reproducible in fp32, which is for targets of laptop size: a GPU serves the real dtype.
    exact = device == "cpu"
    dtype = "float32" if exact else target.dtype
    prompts = heldout_prompts(run_dir / "prompts" / "samples.jsonl", config.verify.serve_prompts)
    options = {
        "device": device,
        "dtype": dtype,
        "tp_size": tensor_parallel(config, device),
        "quantization": config.target.quantization,
        "trust_remote_code": target.trust_remote_code,
        "mem_fraction_static": config.dump.mem_fraction_static,
        "force_version": config.dump.allow_untested_engine,
        "random_seed": config.seed,
    }
    draft = run_dir / "export" / "sglang"
    steps = config.verify.draft_steps
    served = serve(
        target.path,
        draft,
        prompts,
        tokens=config.verify.serve_tokens,
        steps=steps,
        options=options,
        draft_options=draft_arguments(target, config.target.quantization, device),
    )
    identical = [s.output == s.plain for s in served]
    # A text that differs was drafted for from another point on: its walk says nothing about the wiring.
    comparable = [s for s, same in zip(served, identical) if same]
    features = (
        redump(comparable, config, target, manifest, manifest.fc_layers(), folder / "redump", exact=exact)
        if comparable
        else []
    )
    walks = replay_served(comparable, features, ExportedDrafter(draft, load_embedding(target), device), steps=steps)
    result = compare(comparable, walks, steps)
    result |= {
        "text_identical": all(identical),
        "texts_identical": sum(identical),
        "requests": len(served),
        "serve_dtype": dtype,
        "draft_steps": steps,
    }
    problems = []
    if exact and not all(identical):
        problems.append(
            f"{len(identical) - sum(identical)} of {len(identical)} greedy texts differ from the run without "
            "speculation"
        )
    if result["cycles_engine"] == 0:
        problems.append("the engine verified no draft: were the responses one token long?")
    elif abs(result["tau_engine"] / result["tau_replayed"] - 1) > config.verify.max_tau_gap:
        problems.append(
            f"τ of the engine is {result['tau_engine']:.3f}, replayed {result['tau_replayed']:.3f}: the engine does "
            "not give the drafter what it was trained on"
        )
    if result["tau_engine"] == 1.0:
        print(KNOWN_CAUSES)
    return result, problems


def heldout_prompts(path: Path, count: int) -> list[list[int]]:
    """The first `count` held-out samples up to where the target's last answer begins."""
    prompts = []
    for sample in read_samples(path):
        if sample.split == "heldout" and (start := last_answer(sample)) > 0:
            prompts.append(sample.input_ids[:start])
        if len(prompts) == count:
            break
    if not prompts:
        raise PipelineError(
            "no held-out sample to serve",
            field="prompts.heldout_fraction",
            value=str(path),
            fix='make prompts ARGS="prompts.heldout_fraction=0.1"',
        )
    return prompts


def last_answer(sample: Sample) -> int:
    """Index of the first token of the last run of generated tokens."""
    end = max(i for i, m in enumerate(sample.loss_mask) if m)
    while end > 0 and sample.loss_mask[end - 1]:
        end -= 1
    return end


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


def redump(
    served: list[Served],
    config: Config,
    target: Target,
    manifest: Manifest,
    layers: list[int],
    folder: Path,
    *,
    exact: bool,
) -> list[Tensor]:
    """fc's input [T, n·H] over prompt, output and what follows, of every request, by the dump stage.

    Args:
        folder: for the samples and shards, emptied before and after.
        exact: in fp32 with transformers, independently of the engine; else in the target's dtype, as configured.
    """
    shutil.rmtree(folder, ignore_errors=True)
    sequences = [r.sequence for r in served]
    write_samples(
        folder / "prompts" / "samples.jsonl",
        (
            Sample(
                id=f"served-{i:05d}",
                split="heldout",
                category=None,
                messages=[],
                input_ids=ids,
                finish_reason=None,
                loss_mask=[0] * len(r.prompt) + [1] * (len(ids) - len(r.prompt)),
            )
            for i, (r, ids) in enumerate(zip(served, sequences))
        ),
    )
    changes = {"engine": "transformers", "dtype": "fp32"} if exact else {"dtype": "target"}
    config = config.model_copy(
        update={
            "dump": config.dump.model_copy(update=changes | {"probe_samples": 0}),
            "target": config.target.model_copy(update={"context_length": max(map(len, sequences))}),
        }
    )
    dump(config, target, manifest, folder, make_dir(folder / "dump"), slot_layers=layers, layers=layers)
    store = HiddenStore(shard_paths(folder / "dump"))
    refs = sorted(store.samples, key=lambda ref: ref.id)
    features = [torch.cat([store.rows(ref, layer_output(layer)) for layer in layers], -1) for ref in refs]
    shutil.rmtree(folder)
    return features


def replay_served(served: list[Served], features: list[Tensor], drafter: ExportedDrafter, *, steps: int) -> list[Walk]:
    """Drafts of the exported files along every request, and the engine's walk over them."""
    walks = []
    for request, states in zip(served, features, strict=True):
        first, end = len(request.prompt) - 1, len(request.prompt) + len(request.output) - 1
        drafts = drafter.draft(torch.tensor(request.sequence), states, torch.arange(first, end), steps, forced=False)
        walks.append(walk(drafts, request.sequence, first, end))
    return walks


def compare(served: list[Served], walks: list[Walk], steps: int) -> dict[str, Any]:
    """The engine's counters next to the replay's.

    `tau_engine` and `tau_replayed` follow the engine's own counting rule: a draft that the target confirms past the end of
    turn or the length limit counts, though no user gets it. `tau_walk@<steps>` is the replay by definition: clipped there.
    """
    differing = [i for i, (s, w) in enumerate(zip(served, walks)) if _histogram(w) != _trim(s.histogram)]
    cycles, correct = sum(s.verifications for s in served), sum(s.correct for s in served)
    return {
        "tau_engine": 1.0 + correct / max(cycles, 1),
        "tau_replayed": tau(a for w in walks for a in w.accepted),
        f"tau_walk@{steps}": tau(a for w in walks for a in w.clipped),
        "cycles_engine": cycles,
        "cycles_replayed": sum(w.cycles for w in walks),
        "accepted_engine": correct,
        "accepted_replayed": sum(sum(w.accepted) for w in walks),
        "counters_identical": not differing,
        "requests_with_other_counters": differing,
    }


def _histogram(w: Walk) -> list[int]:
    return [w.accepted.count(a) for a in range(max(w.accepted, default=-1) + 1)]


def _trim(histogram: list[int]) -> list[int]:
    return histogram[: max((i + 1 for i, n in enumerate(histogram) if n), default=0)]
