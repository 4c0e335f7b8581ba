"""What a diagnosis found, as one page."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.diagnose.foreign_drafter import ForeignDrafter
from pipeline.diagnose.wiring_verdict import Switch, Verdict
from pipeline.verify.states import short
from pipeline.verify.wiring import Difference

_LISTED = 8


def report(drafter: ForeignDrafter, map_problems: Sequence[str], verdict: Verdict) -> str:
    """The page."""
    shape = drafter.shape
    lines = [
        f"Drafter {drafter.folder} ({drafter.layout} form): {drafter.slots} slots of {shape.hidden_size}, "
        f"{shape.draft_vocab_size:,} draft tokens; layer ids in config.json: {drafter.ids or 'none'}",
        *(f"  note: {note}" for note in drafter.notes),
        f"Probe   {verdict.samples} samples, {verdict.rows:,} rows drafted from; a guess that reads nothing: "
        f"{verdict.guess['divergence']:.3f} nats per row from the target, accuracy {verdict.guess['accuracy']:.3f}",
        f"Maps    {verdict.reading.name} " + ("fit" if not map_problems else "fit best"),
        *(f"  problem: {p}" for p in [*map_problems, *_more(verdict, map_problems)]),
    ]
    if len(verdict.readings) > 1:
        lines.append("  nats per row if read as " + ", ".join(f"{n}: {x:.3f}" for n, x in verdict.readings.items()))
    lines += ["", "Wirings, best first (layer outputs, E: embedding, F: final hidden; nats per row from the target's "
              "distribution)", *_table(verdict), ""]
    for i, slot in enumerate(verdict.slots):
        known = slot.determined and not verdict.why_undetermined
        also = "" if slot.determined else f"; as good within the noise: {', '.join(map(short, slot.also_possible))}"
        lines.append(f"fc.{i}  {short(slot.best) if known else 'undetermined, best ' + short(slot.best)}{also}; next "
                     f"{short(slot.runner_up)}, worse by {_interval(slot.margin)} nats")
    lines += [f"{name}: {_switch(switch)}" for name, switch in verdict.switches.items()]
    lines += ["", *_conclusion(drafter, verdict)]
    return "\n".join(lines)


def _more(verdict: Verdict, said: Sequence[str]) -> list[str]:
    return [p for p in verdict.reading.problems if not any(p in s for s in said)]


def _table(verdict: Verdict) -> list[str]:
    width = max(11, max(len(_wiring(r.wiring)) for r in verdict.ranked[:_LISTED]))
    head = f"  {'wiring':{width}}  {'nats':>7}  accuracy  behind the best, 99.7 % interval"
    rows = []
    for r in verdict.ranked[:_LISTED]:
        best = r is verdict.ranked[0]
        behind = "" if best else _interval(r.behind) + ("" if r.worse else "  within the noise")
        rows.append(f"  {_wiring(r.wiring):{width}}  {r.divergence:7.3f}  {r.accuracy:8.3f}  {behind}".rstrip())
    return [head, *rows]


def _conclusion(drafter: ForeignDrafter, verdict: Verdict) -> list[str]:
    if not verdict.determined:
        return ["undetermined", *(f"  {reason}" for reason in verdict.why_undetermined)]
    states = [slot.best for slot in verdict.slots]
    lines = [f"The drafter was trained on layer outputs [{', '.join(map(short, states))}], in the order of fc's columns"]
    if all(s.startswith("layer_output.") for s in states) and drafter.ids:
        layers = [int(short(s)) for s in states]
        meanings = {"layer outputs": drafter.ids, "capture points (vLLM, speculators)": [i - 1 for i in drafter.ids]}
        fitting = [words for words, ids in meanings.items() if sorted(ids) == sorted(layers)]
        lines.append(f"  the ids {drafter.ids} in its config.json are right as {fitting[0]}" if fitting else
                     f"  the ids {drafter.ids} in its config.json are right neither as layer outputs nor as capture points")
    return lines


def _switch(switch: Switch) -> str:
    stated = "" if switch.stated is None else ", as its files are read" if switch.stated == switch.value else (
        f", though its files are read as {switch.stated}")
    if switch.margin is None:
        return f"{switch.value}{stated}"
    return (f"{switch.value}{stated}; {not switch.value} is worse by {_interval(switch.margin)} nats"
            + ("" if switch.determined else ": undetermined"))


def _interval(d: Difference) -> str:
    return f"{d.value:+.3f} ({d.low:+.3f} … {d.high:+.3f})"


def _wiring(wiring: Sequence[str]) -> str:
    return f"[{', '.join(map(short, wiring))}]"
