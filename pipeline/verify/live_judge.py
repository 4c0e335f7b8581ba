"""What was observed in the running engine, held against the manifest, the dump and every state of the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pipeline.dump.dump_checks import relative_error, rounding_bound
from pipeline.dump.target_states import TargetStates
from pipeline.export.drafter_files import read_config, read_tensors
from pipeline.standardize import dump_shards
from pipeline.store import HiddenStore, layer_output
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.observe import NORMS, PREFILL, Observation, Rows
from pipeline.verify.slot_match import (
    Piece,
    SlotScores,
    Verdict,
    applied_norms,
    as_json,
    judge_slot,
    score_slots,
    sentence,
    two_digits,
)
from pipeline.verify.states import candidates, describe

_PIECE = 256  # rows compared at a time


def judge_observation(subject: Subject, observation: Observation, prompt_lengths: Mapping[str, int],
                      sequences: Mapping[str, Sequence[int]], states: TargetStates,
                      dtype: torch.dtype) -> CheckResult:
    """Hold what was observed against the manifest.

    Args:
        prompt_lengths, sequences: per request: tokens of the prompt; prompt and answer.
        states: of the target over the sequences.
        dtype: what the engine computed in.
    """
    observation = _within(observation, sequences)
    target = subject.target
    declared = [layer_output(layer) for layer in subject.manifest.fc_layers()]
    bound = rounding_bound(dtype, states.dtype)
    problems, notes = wiring_problems(subject, observation), []
    measured: dict[str, Any] = {
        "live_target": observation.target, "live_drafter": observation.drafter, "fc_calls": observation.fc_calls,
        "forwards": observation.forwards, "dtype": str(dtype).removeprefix("torch."), "prompts": len(sequences),
        "states_by": f"{states.source} {states.dtype}".replace("torch.", ""), "relative_error_bound": bound,
        "slots": {f"fc.{i}": {"declared": describe(key, target.num_layers)} for i, key in enumerate(declared)}}
    if not observation.drafter:
        return CheckResult(measured, problems[0], problems)
    problems += [*_fc_problems(observation), *row_problems(observation, prompt_lengths, sequences,
                                                           draft_steps=subject.config.verify.draft_steps)]
    problems += _slot_problems(subject, observation, declared, states, bound, measured["slots"], notes)
    problems += _compare_with_dump(subject, observation, declared, dtype, measured["slots"], notes)
    problems += _norm_problems(subject, observation, bound, measured)
    return CheckResult(measured, _summary(measured, problems), problems, notes)


def _slot_problems(subject: Subject, observation: Observation, declared: Sequence[str], states: TargetStates, bound: float,
                   slots_measured: dict[str, dict], notes: list[str]) -> list[str]:
    """Every slot in every phase against every state of the target; a slot that is wrong in both is named once."""
    num_layers, width = subject.target.num_layers, subject.manifest.target.hidden_size
    keys, problems = candidates(num_layers, subject.manifest.fc_layers()), []
    said: dict[tuple[int, str | None, str], list[tuple[str, Verdict, SlotScores]]] = {}
    for phase, of_phase in observation.rows.items():
        if not of_phase or observation.drafter["received"] % width:
            continue  # named above
        slots = score_slots(_pieces(of_phase, states), keys, width)
        if len(slots) != len(declared):
            received = ", ".join(describe(s.nearest(), num_layers) for s in slots)
            problems.append(f"{phase}: the drafter receives {received}; the manifest binds {len(declared)} slots")
            continue
        for i, (key, scores) in enumerate(zip(declared, slots)):
            verdict = judge_slot(scores, key, bound)
            said.setdefault((i, verdict.found, verdict.nearest if verdict.found is None else ""), []).append(
                (phase, verdict, scores))
            slots_measured[f"fc.{i}"][phase] = as_json(scores, verdict, num_layers) | {
                "first_five": _first_five(of_phase, states, key, i, width)}
            if verdict.right and verdict.alike:
                notes.append(f"{phase}: slot fc.{i} is within rounding of {describe(key, num_layers)}, and as near "
                             f"to {', '.join(describe(k, num_layers) for k in verdict.alike)}")
    for (i, _, _), group in said.items():
        phase, verdict, scores = max(group, key=lambda entry: entry[2].states[entry[1].nearest].error)
        if (text := sentence(f"fc.{i}", verdict, scores, num_layers)) is not None:
            problems.append(f"{' and '.join(name for name, _, _ in group)}: {text}")
    return problems


def _within(observation: Observation, sequences: Mapping[str, Sequence[int]]) -> Observation:
    """Without rows past the end of an answer: the engine accepts drafts there that nobody gets."""
    def cut(request: str, rows: Rows) -> Rows:
        inside = rows.positions < len(sequences[request])
        return Rows(rows.positions[inside], rows.tokens[inside], rows.received[inside], rows.fc_input[inside])

    return replace(observation, rows={phase: {request: cut(request, rows) for request, rows in of_phase.items()}
                                      for phase, of_phase in observation.rows.items()})


def _pieces(of_phase: Mapping[str, Rows], states: TargetStates) -> Iterator[Piece]:
    for request, rows in of_phase.items():
        for received, positions in zip(rows.received.split(_PIECE), rows.positions.split(_PIECE)):
            yield received, lambda key, request=request, positions=positions: states.rows(request, key, positions)


def wiring_problems(subject: Subject, observation: Observation) -> list[str]:
    """The live models against the manifest, before any number is looked at."""
    problems = [f"observing failed inside the engine: {trace.strip().splitlines()[-1]}" for trace in observation.errors]
    manifest, live = subject.manifest, observation.target
    recorded = dict(zip(manifest.dump.layers, manifest.dump.capture_points)) if manifest.dump else {}
    wanted = [recorded.get(layer, layer + 1) for layer in manifest.fc_layers()]
    if live and live["capture_points"] != wanted:
        why = f" ({live['problem']})" if "problem" in live else ""
        problems.append(f"the live {live['model_class']} captures points {live['capture_points']}{why}; the manifest's "
                        f"slots are points {wanted}")
    if manifest.dump and manifest.dump.engine == "sglang" and live and live["model_class"] != manifest.dump.model_class:
        problems.append(f"the live target is a {live['model_class']}; the dump was made by {manifest.dump.model_class}")
    drafter, width = observation.drafter, manifest.target.hidden_size
    if not live and not drafter:
        return [*problems, "nothing was observed: the plugin eagle3_observe is not active in the engine; pip install -e . "
                + "registers it, and SGLANG_PLUGINS must not leave it out"]
    if not drafter:
        return [*problems, "the live drafter could not be described, so that nothing it received can be judged"
                if any(observation.forwards.values()) else
                "the drafter was given no state of the target: no forward of it was observed"]
    if drafter["fc"] is None:
        return [*problems, f"the live drafter is a {drafter['class']}, which has no fc"]
    if drafter["received"] != drafter["fc"][0] or drafter["received"] != width * len(manifest.fc_slots()):
        problems.append(f"the drafter receives {drafter['received']} columns ({drafter['received'] / width:g} x {width}), its "
                        f"fc takes {drafter['fc'][0]}; the manifest binds {len(manifest.fc_slots())} slots of {width}")
    return problems


def _fc_problems(observation: Observation) -> list[str]:
    problems = []
    for phase, forwards in observation.forwards.items():
        if not forwards:
            problems.append(f"{phase}: no forward of the drafter with the target's states was observed")
        elif observation.fc_calls[phase] != forwards:
            problems.append(f"{phase}: fc was called in {observation.fc_calls[phase]} of {forwards} forwards: SGLang skips "
                            "it where the drafter receives a state as wide as its own")
    return problems


def row_problems(observation: Observation, prompt_lengths: Mapping[str, int],
                  sequences: Mapping[str, Sequence[int]], *, draft_steps: int) -> list[str]:
    """A row for every token, once, that reads the token after it; only what the last verification accepts has none."""
    problems = []
    for phase, of_phase in observation.rows.items():
        if of_phase and (missing := sorted(prompt_lengths.keys() - of_phase.keys())):
            problems.append(f"{phase}: no row of {len(missing)} of {len(prompt_lengths)} requests, such as {missing[0]!r}")
        for request, rows in of_phase.items():
            tokens, start = sequences[request], prompt_lengths[request]
            positions = rows.positions.tolist()
            wanted = range(start) if phase == PREFILL else range(
                start, max(start + len(positions), len(tokens) - draft_steps - 1))
            if positions != list(wanted):
                where = f" at positions {positions[0]} to {positions[-1]}" if positions else ""
                problems.append(f"{phase}: request {request!r} has {len(positions)} rows{where}; {wanted.start} to "
                                f"{wanted.stop - 1} are its tokens")
            wrong = [p for p, t in zip(positions, rows.tokens.tolist()) if p + 1 < len(tokens) and tokens[p + 1] != t]
            if wrong:
                problems.append(f"{phase}: {len(wrong)} of {len(positions)} rows of request {request!r} read another token "
                                f"than the next one, the first at position {wrong[0]}")
    return problems


def _first_five(of_phase: Mapping[str, Rows], states: TargetStates, key: str, slot: int, width: int) -> dict[str, Any]:
    """The first five floats of one fixed row, received and declared, side by side."""
    request, rows = next(iter(of_phase.items()))
    at = len(rows.positions) // 2
    return {"row": f"{request}[{rows.positions[at]}]",
            "received": rows.received[at, slot * width:slot * width + 5].tolist(),
            "declared": states.rows(request, key, rows.positions[at:at + 1])[0, :5].tolist()}


def _compare_with_dump(subject: Subject, observation: Observation, declared: Sequence[str], dtype: torch.dtype,
                       slots: dict[str, dict], notes: list[str]) -> list[str]:
    """Prompt rows against the dump: the rows the drafter was trained on, and the manifest's fingerprints of them."""
    record, width, problems = subject.manifest.dump, subject.manifest.target.hidden_size, []
    of_phase = observation.rows[PREFILL]
    if record is None or not of_phase or observation.drafter["received"] != width * len(declared):
        return problems
    bound = rounding_bound(dtype, getattr(torch, record.dtype))
    store = HiddenStore(dump_shards(subject.manifest, subject.run_dir))
    refs = {ref.id: ref for ref in store.samples if ref.id in of_phase}
    for i, key in enumerate(declared):
        columns = slice(i * width, (i + 1) * width)
        if key not in store.state_names or not refs:
            notes.append(f"slot fc.{i}: the dump holds no {key} of the prompts that were served")
            continue
        error = count = 0.0
        for request, ref in refs.items():
            rows = of_phase[request]
            stored = store.rows(ref, key)[rows.positions]
            error += relative_error(rows.received[:, columns], stored) * len(stored)
            count += len(stored)
        prints = _fingerprints(record.fingerprints.get(key), of_phase, columns)
        slots[f"fc.{i}"]["dump"] = {"rows": int(count), "relative_error": error / count, "bound": bound} | prints
        if not slots[f"fc.{i}"][PREFILL]["holds"]:
            continue  # named already
        for what, found in (("the rows that were dumped", error / count),
                            ("the manifest's fingerprints", prints.get("fingerprint_error", 0.0))):
            if not found <= bound:
                problems.append(f"prefill: slot fc.{i} differs from {what} of {key} (relative error {two_digits(found)}, "
                                f"rounding is at most {bound:g})")
    return problems


def _fingerprints(fingerprint: Any, of_phase: Mapping[str, Rows], columns: slice) -> dict[str, Any]:
    """First five floats of the fingerprint's rows, received and recorded; the error is relative to a typical five.

    The fingerprint's mean and spread of row norms are over every row of every probe, answers included. Of these only
    prompts are served again, and so there is nothing to hold them against.
    """
    seen, errors = [], []
    for name, recorded in (fingerprint.first_five if fingerprint else {}).items():
        request, _, row = name.removesuffix("]").rpartition("[")
        at = (of_phase[request].positions == int(row)).nonzero().flatten().tolist() if request in of_phase else []
        if at:
            state = of_phase[request].received[at[0], columns].float()
            typical = state.norm() * (len(recorded) / len(state)) ** 0.5
            expected = torch.tensor(recorded)
            errors.append(((state[:len(recorded)] - expected).norm() / torch.maximum(expected.norm(), typical)).item())
            seen.append({"row": name, "received": state[:len(recorded)].tolist(), "recorded": recorded})
    return {"fingerprints": seen, "fingerprint_error": sum(errors) / len(errors)} if errors else {}


def _norm_problems(subject: Subject, observation: Observation, bound: float, measured: dict[str, Any]) -> list[str]:
    """The opt-in norms: what the drafter's weights were trained with, what the live drafter is made of, what fc read."""
    weights, config = read_tensors(subject.draft), read_config(subject.draft)[0]
    names = {name.partition(".")[0] for name in weights}
    trained = tuple(name for name in NORMS if name in names)
    problems, live, width = [], observation.drafter, subject.manifest.target.hidden_size
    if tuple(live["norms"]) != trained:
        problems.append(f"the live drafter has {_list(live['norms'])} before fc; its weights were trained with "
                        f"{_list(trained)}")
    stage = subject.manifest.stages.get("train")
    if stage and (wanted := stage.config.get("drafter", {}).get("norm_output")) not in (None, live["norm_output"]):
        problems.append(f"the live drafter has norm_output {live['norm_output']}; it was trained with {wanted}")
    measured["norms"] = {"trained": list(trained), "live": live["norms"], "fc_input": {}}
    for phase, of_phase in observation.rows.items():
        if not observation.fc_calls[phase] or live["received"] % width:
            continue
        errors = applied_norms(((r.received, r.fc_input) for r in of_phase.values()), weights, width,
                               config["rms_norm_eps"])
        measured["norms"]["fc_input"][phase] = [{"norms": list(n), "relative_error": e} for n, e in errors.items()]
        nearest = min(errors, key=errors.get)
        if errors[trained] > bound or nearest != trained:
            problems.append(f"{phase}: fc reads its input after {_list(nearest)} (relative error "
                            f"{two_digits(errors[nearest])}); it was trained after {_list(trained)} (relative error "
                            f"{two_digits(errors[trained])})")
    return problems


def _list(norms: Sequence[str]) -> str:
    return " and ".join(norms) or "no norm"


def _summary(measured: dict[str, Any], problems: Sequence[str]) -> str:
    slots = measured["slots"]
    phases = list(measured["forwards"])
    if wrong := [name for name, s in slots.items() if any(not s[phase]["holds"] for phase in phases if phase in s)]:
        return f"{', '.join(wrong)}: not what the manifest says"
    if problems:
        return problems[0]
    found = [f"{phase} ({max(s[phase]['rows'] for s in slots.values())} rows, relative error at most "
             f"{two_digits(max(s[phase]['relative_error'] for s in slots.values()))})" for phase in phases]
    return f"fc receives {', '.join(s['declared'] for s in slots.values())} in {' and in '.join(found)}"
