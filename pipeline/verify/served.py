"""What an engine answered with the drafter, against the replay of the exported files over the same tokens.

The engine-specific checks (`serve_check`: SGLang, `vllm_check`: vLLM) serve; `judge` dumps the hidden states of the
engine's own output anew, replays the drafter over them and compares. In fp32 the texts are those without speculation,
and the replay accepts the same number of drafts in every verification.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.dump.target_states import dump_sequences, state_source
from pipeline.engines.engine import resolve_device
from pipeline.errors import PipelineError
from pipeline.manifest import Manifest
from pipeline.samples import Sample, read_samples
from pipeline.store import HiddenStore, layer_output, shard_paths
from pipeline.target import Target, load_embedding
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.replay import ExportedDrafter, Walk, tau, walk

KNOWN_CAUSES = """accept length exactly 1.0: no draft was ever accepted. Causes that others met, most frequent first:
  - the launch line asks for EAGLE, not EAGLE3 (sglang 21272)
  - the layer ids are missing, hard-coded or in another engine's convention (sglang 25454, 32334, tokenspeed 526)
  - d2t is missing, so draft ids are taken for target ids (Automodel 2447)
  - rope_theta is not where this engine looks for it (SpecForge PR 270, Automodel 2920)
  - an opt-in norm (norm_before_fc, fc_norm) is trained but not served, or the other way round (sglang 32334)
  - or the drafter learned nothing: see its held-out accuracy in the summary"""
"""Rows 8-10, 19, 22 and 26 of the public reports that this project collected."""
_COMPARABLE = 0.25  # share of the requests whose text must be the same for their counters to say anything


@dataclass(frozen=True)
class Served:
    """One request as the engine answered it with the drafter.

    Attributes:
        prompt, output: token ids; `plain` is the output without speculation, `beyond` the target's next greedy tokens.
        verifications, correct: the engine's own counts of verifications and of drafts it accepted.
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


def judge(subject: Subject, served: list[Served], *, engine: str, dtype: str, exact: bool) -> CheckResult:
    """Replay `subject.draft` over what the engine answered, and compare texts and counters.

    Args:
        engine: its name, for messages.
        dtype: what the engine computed in.
        exact: it computed in fp32, where texts and counters are reproducible and must be equal. Else the two τ may
            differ by `verify.max_tau_gap`, and texts may differ.
    """
    config, steps = subject.config, subject.config.verify.draft_steps
    identical = [s.output == s.plain for s in served]
    # A text that differs was drafted for from another point on: its walk says nothing about the wiring.
    comparable = [s for s, same in zip(served, identical) if same]
    walks: list[Walk] = []
    if comparable:
        features = redump(
            comparable,
            config,
            subject.target,
            subject.manifest,
            subject.manifest.fc_layers(),
            subject.folder / "redump",
            exact=exact,
        )
        drafter = ExportedDrafter(subject.draft, load_embedding(subject.target), resolve_device(config.device))
        walks = replay_served(comparable, features, drafter, steps=steps)
    few = len(comparable) < _COMPARABLE * len(served)
    measured = compare(comparable, walks, steps) | {
        "requests_compared": len(comparable),
        "text_identical": all(identical),
        "texts_identical": sum(identical),
        "requests": len(served),
        "serve_dtype": dtype,
        "draft_steps": steps,
    }
    problems = []
    if exact and not all(identical):
        problems.append(
            f"{len(identical) - sum(identical)} of {len(identical)} greedy texts differ from the run without speculation"
        )
    if few:
        problems.append(
            f"the texts with and without the drafter are the same for {len(comparable)} of {len(served)} requests only, too "
            f"few to judge {engine}'s counters by; shorter answers differ less often: "
            'make verify ARGS="verify.serve_tokens=…"'
        )
    elif measured["cycles_engine"] == 0:
        problems.append(f"{engine} verified no draft: were the responses one token long?")
    elif exact and not measured["counters_identical"]:
        problems.append(
            f"{engine} accepted {_counts(measured, 'engine')}; replayed over the same tokens it is "
            f"{_counts(measured, 'replayed')}: the engine does not give the drafter what it was trained on, or does not "
            "compute the same"
        )
    elif abs(measured["tau_engine"] / measured["tau_replayed"] - 1) > config.verify.max_tau_gap:
        problems.append(
            f"τ of {engine} is {measured['tau_engine']:.3f}, replayed {measured['tau_replayed']:.3f}: the engine does "
            "not give the drafter what it was trained on"
        )
    notes = [KNOWN_CAUSES] if measured["cycles_engine"] and measured["tau_engine"] == 1.0 else []
    if len(comparable) < len(served):
        notes.append(f"counters of {len(comparable)} of {len(served)} requests compared: the texts of the others differ")
    return CheckResult(
        measured=measured,
        summary=f"{len(served)} prompts in {dtype}: {sum(identical)} greedy texts identical; τ "
        f"{measured['tau_engine']:.3f} in {engine} ({_counts(measured, 'engine')}), {measured['tau_replayed']:.3f} "
        f"replayed ({_counts(measured, 'replayed')})",
        problems=problems,
        notes=notes,
    )


def _counts(measured: dict[str, Any], who: str) -> str:
    per_position = ", ".join(map(str, measured[f"accepted_per_position_{who}"]))
    return f"{measured[f'accepted_{who}']} drafts in {measured[f'cycles_{who}']} verifications, per position {per_position}"


def heldout_prompts(path: Path, count: int) -> list[list[int]]:
    """The first `count` held-out samples up to where the target's last answer begins."""
    return list(prompts_of(path, count).values())


def prompts_of(path: Path, count: int, *, among: Collection[str] = (), most_tokens: int | None = None) -> dict[str, list[int]]:
    """Sample id → its tokens up to where the target's last answer begins, of the first `count` samples that have any.

    Args:
        among: ids to choose from; empty: the held-out samples.
        most_tokens: longer prompts are cut there.
    """
    prompts: dict[str, list[int]] = {}
    for sample in read_samples(path):
        if (sample.id in among if among else sample.split == "heldout") and (start := last_answer(sample)) > 0:
            prompts[sample.id] = sample.input_ids[:start][:most_tokens]
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
        exact: what computes them, see `state_source`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    changes = state_source(manifest, exact=exact)
    sequences = {f"served-{i:05d}": r.sequence for i, r in enumerate(served)}
    dump_sequences(config, target, manifest, sequences, folder, layers, **changes, probe_samples=0)
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
    differing = [
        i
        for i, (s, w) in enumerate(zip(served, walks))
        if (s.verifications, s.correct, _trim(s.histogram)) != (w.cycles, sum(w.accepted), _histogram(w.accepted))
    ]
    cycles, correct = sum(s.verifications for s in served), sum(s.correct for s in served)
    return {
        "tau_engine": 1.0 + correct / max(cycles, 1),
        "tau_replayed": tau(a for w in walks for a in w.accepted),
        f"tau_walk@{steps}": tau(a for w in walks for a in w.clipped),
        "cycles_engine": cycles,
        "cycles_replayed": sum(w.cycles for w in walks),
        "accepted_engine": correct,
        "accepted_replayed": sum(sum(w.accepted) for w in walks),
        "accepted_per_position_engine": _per_position([s.histogram for s in served], steps),
        "accepted_per_position_replayed": _per_position([_histogram(w.accepted) for w in walks], steps),
        "counters_identical": bool(served) and not differing,
        "requests_with_other_counters": differing,
    }


def _histogram(accepted: list[int]) -> list[int]:
    return [accepted.count(a) for a in range(max(accepted, default=-1) + 1)]


def _trim(histogram: list[int]) -> list[int]:
    return histogram[: max((i + 1 for i, n in enumerate(histogram) if n), default=0)]


def _per_position(histograms: list[list[int]], steps: int) -> list[int]:
    """Entry j: verifications that accepted more than j drafts."""
    return [sum(sum(h[j + 1 :]) for h in histograms) for j in range(steps)]
