"""What stage 6 found, for people: a table on the terminal and one HTML file that is readable without a network."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.states import short
from pipeline.verify.svg import Interval, grouped_bars, intervals, log_dots

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1d2330; --soft: #5d6675; --grid: #dfe3ea; --a: #3567b0;
  --b: #e08a2e; --good: #2e8b57; --bad: #c43b3b; --dim: #9aa4b2; --box: #f4f6f9 }
@media (prefers-color-scheme: dark) { :root { --paper: #14171d; --ink: #e6e9ef; --soft: #a2acba; --grid: #2e3540;
  --a: #78a6e8; --b: #f0a95b; --good: #5cc48a; --bad: #f07474; --dim: #687382; --box: #1d222b } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 900px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem } h3 { font-size: 1rem; margin-bottom: .3rem }
table { border-collapse: collapse; width: 100%; font-size: .9rem } td, th { text-align: left; padding: .25rem .7rem .25rem 0;
  border-bottom: 1px solid var(--grid); vertical-align: top }
.whole { white-space: nowrap }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.holds { color: var(--good); font-weight: 600 } .FAILS { color: var(--bad); font-weight: 600 } .not { color: var(--soft) }
.problem { border-left: 4px solid var(--bad) } .note { border-left: 4px solid var(--dim) }
.problem, .note { background: var(--box); padding: .4rem .8rem; margin: .5rem 0; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .9rem }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; margin: .4rem 0 }
svg .ink { fill: var(--ink) } svg .soft { fill: var(--soft) } .axis { stroke: var(--ink) } .grid { stroke: var(--grid) }
.whisker { stroke: var(--ink); stroke-width: 1.3 } rect.a, circle.a { fill: var(--a) } rect.b, circle.b { fill: var(--b) }
rect.good, circle.good { fill: var(--good) } rect.bad, circle.bad { fill: var(--bad) } rect.dim, circle.dim { fill: var(--dim) }
circle.ring { fill: none; stroke-width: 1.5; stroke: var(--dim) } circle.ring.good { stroke: var(--good) }
circle.ring.bad { stroke: var(--bad) }
"""
_VERDICT_STYLE = {"worse": "good", "better": "bad", "not distinguishable": "dim"}


def terminal(results: Mapping[str, CheckResult], left_out: Mapping[str, str]) -> str:
    """A row per check, then every problem and note in full."""
    rows = [(name, "holds" if r.holds else "FAILS", r.summary) for name, r in results.items()]
    rows += [(name, "not run", why) for name, why in left_out.items()]
    width = max(len(name) for name, *_ in rows)
    lines = [
        textwrap.fill(summary, 118, initial_indent=f"  {name:<{width}}  {state:<7}  ", subsequent_indent=" " * (width + 13))
        for name, state, summary in rows
    ]
    for name, result in results.items():
        for kind, texts in (("problem", result.problems), ("note", result.notes)):
            lines += [textwrap.indent(f"{kind}, {name}: {text}", "    ", lambda line: True)[2:] for text in texts]
    return "\n".join(lines)


def html(subject: Subject, results: Mapping[str, CheckResult], left_out: Mapping[str, str]) -> str:
    """The whole report as one page: everything inline, nothing is loaded."""
    manifest, failed = subject.manifest, [name for name, r in results.items() if not r.holds]
    title = f"Run {manifest.run}: " + (f"{', '.join(failed)} failed" if failed else "every check holds")
    wiring = ", ".join(f"fc.{i} = layer output {layer}" for i, layer in enumerate(manifest.fc_layers()))
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>Drafter <code>{escape(str(subject.draft))}</code> for {escape(manifest.target.path)} "
        f"({escape(manifest.target.architecture)}, {manifest.target.num_layers} layers, H = {manifest.target.hidden_size}). "
        f"Declared wiring: {escape(wiring)}, teacher = final hidden, {escape(str(manifest.slots['teacher'].norm))}-norm.</p>",
        _table(["check", "", "found"], [
            *((name, _state(r), escape(r.summary)) for name, r in results.items()),
            *((name, '<span class="not whole">not run</span>', escape(why)) for name, why in left_out.items())]),
    ]
    for name, result in results.items():
        body.append(f"<h2>{escape(name)}: {_state(result)}</h2>")
        body += [f'<div class="problem">{escape(text)}</div>' for text in result.problems]
        body += [f'<div class="note">{escape(text)}</div>' for text in result.notes]
        if result.measured and name in _PICTURES:
            body.append(_PICTURES[name](result.measured))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _replay(m: dict[str, Any]) -> str:
    steps = range(len(m["replayed_accuracy"]))
    rows = [(str(j), *(f"{m[k][j]:,}" for k in ("replayed_rows", "reached_rows", "replayed_accepted_prefixes")),
             *(f"{m[k][j]:.4f}" for k in ("replayed_conditional_accuracy", "trainer_conditional_accuracy"))) for j in steps]
    return (
        "<p>Accuracy per draft step on held-out samples, against the target's argmax.</p>"
        + grouped_bars([f"step {j}" for j in steps], {"replayed from the exported files": m["replayed_accuracy"],
                                                      "the trainer's validation": m["trainer_accuracy"]}, digits=4)
        + "<p>Accepted prefixes: rows right at a step and at every step before it.</p>"
        + _table(["step", "rows", "reached", "accepted", "replayed share", "trainer's share"], rows, numbers=True)
    )


def _wiring(m: dict[str, Any]) -> str:
    def bars(what: str) -> list[Interval]:
        return [Interval(label=row["mistake"], **_interval(row[f"{what}_difference"]), text=f"{row[what]:.4f}",
                         style=_VERDICT_STYLE[row["verdict"]]) for row in m["table"][1:]]

    declared = m["table"][0]
    share = f"{m['coverage']:.1%}"
    rows = [(escape(r["mistake"]), escape(r["wiring"]), f"{r['accuracy']:.4f}", f"{r['loss']:.4f}",
             f'<span class="whole">{r["verdict"]}</span>')
            for r in m["table"]]
    return (
        f"<p>The drafter on {m['probe_rows']:,} rows of {m['probe_samples']} probe samples under the declared wiring and under "
        f"the mistakes people make. Green: significantly worse than declared in accuracy or loss, as it should be; grey: not "
        f"distinguishable; red: better, so the declared wiring is wrong. Whiskers: {share} intervals of resampled samples.</p>"
        + intervals(bars("accuracy"), title=f"accuracy less that of the declared wiring, {declared['accuracy']:.4f}; "
                                            "right: accuracy")
        + intervals(bars("loss"), title=f"loss (nats) less that of the declared wiring, {declared['loss']:.4f}; right: loss")
        + _table(["mistake", "wiring", "accuracy", "loss", "against declared"], rows)
    )


def _live(m: dict[str, Any]) -> str:
    """A slot per picture: how far what fc received is from every state that it could be."""
    parts = ["<p>What the drafter received inside the running engine, against every state of the target at the same tokens. E: "
             "the embedding; numbers: layer outputs; F: the final hidden after the norm; n: that layer output after the final "
             "norm. Green: the declared one. Red: what arrived, where that is another one.</p>"]
    for name, slot in m.get("slots", {}).items():
        phases = {phase: slot[phase] for phase in ("prefill", "decode") if phase in slot}
        parts.append(f"<h3>{escape(name)}: {escape(slot['declared'])}</h3>")
        if not phases:
            continue
        states = {c["key"]: c["name"] for c in next(iter(phases.values()))["candidates"]}
        found = {p["found"] or p["nearest"] for p in phases.values()} - {slot["declared"]}
        marks = {n: "good" if s == slot["declared"] else "bad" for n, s in enumerate(states.values())
                 if s in {slot["declared"], *found}}
        errors = {p: [c["relative_error"] for c in s["candidates"]] for p, s in phases.items()}
        parts.append(log_dots([short(key) for key in states], errors, marks, title="relative error to every state"))
        parts.append(_table(["", "row", "first five received", "first five declared"], [
            (phase, escape(s["first_five"]["row"]), _floats(s["first_five"]["received"]), _floats(s["first_five"]["declared"]))
            for phase, s in phases.items()]))
        parts.append(_table(["", "rows", "cosine", "row norms received", "row norms declared"], [
            (phase, f"{s['rows']:,}", f"{s['cosine']:.6f}",
             *(f"{s[k]['mean']:.2f} ± {s[k]['std']:.2f}" for k in ("norm_received", "norm_declared")))
            for phase, s in phases.items()]))
    return "".join(parts)


def _serve(m: dict[str, Any]) -> str:
    positions = range(len(m["accepted_per_position_engine"]))
    return (
        grouped_bars(["τ"], {"engine": [m["tau_engine"]], "replayed": [m["tau_replayed"]]})
        + "<p>Drafts accepted at every position of the chain.</p>"
        + grouped_bars([f"draft {j + 1}" for j in positions], {"engine": m["accepted_per_position_engine"],
                                                               "replayed": m["accepted_per_position_replayed"]}, digits=0)
    )


_PICTURES = {"replay": _replay, "wiring": _wiring, "live": _live, "serve": _serve, "serve_vllm": _serve}


def _interval(difference: dict[str, float]) -> dict[str, float]:
    return {key: difference[key] for key in ("value", "low", "high")}


def _floats(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{v:.4f}" for v in values) + "]"


def _state(result: CheckResult) -> str:
    state = "holds" if result.holds else "FAILS"
    return f'<span class="{state}">{state}</span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """Cells are HTML."""
    kind = ' class="n"' if numbers else ""
    lines = ["".join(f"<th{kind}>{escape(h)}</th>" for h in head)]
    lines += ["".join(f"<td{kind}>{cell}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
