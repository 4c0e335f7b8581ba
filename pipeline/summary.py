"""One page about a run, read from its manifest: `python -m pipeline.summary runs/demo`."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.manifest import STAGES, Manifest, load_manifest
from pipeline.target import EMBEDDED


def summary(run_dir: Path) -> str:
    """The page. Lines about stages that have not finished say which command is next.

    Raises:
        PipelineError: no manifest in `run_dir`.
    """
    manifest = load_manifest(run_dir)
    if manifest is None:
        raise PipelineError("this run has no manifest", field=str(run_dir), fix=f"make run RUN={run_dir.name}")
    parts = [_target(manifest), _data(manifest), _wiring(manifest), _accept(manifest), _next(manifest, run_dir)]
    return "\n\n".join(p for p in parts if p)


def _target(m: Manifest) -> str:
    t = m.target
    wall = sum(s.wall_seconds for s in m.stages.values())
    return (f"Run {m.run}: drafter for {t.path} ({t.architecture}, {t.num_layers} layers, H={t.hidden_size}, {t.dtype})\n"
            f"Stages: {', '.join(f'{n} {s.wall_seconds:.0f} s' for n, s in m.stages.items())}; together {wall / 60:.1f} min, "
            f"at most {max((s.peak_memory_gib for s in m.stages.values()), default=0):.1f} GiB in one process")


def _data(m: Manifest) -> str:
    lines = []
    if (s := m.stages.get("prompts")) is not None:
        c = s.counts
        skipped = "".join(f", {v:,} {k.removeprefix('skipped_').replace('_', ' ')}" for k, v in c.items()
                          if k.startswith("skipped_") and v)
        lines.append(f"Samples     {c.get('kept', 0):,} of {c.get('read', 0):,} conversations "
                     f"({c.get('train_samples', 0):,} to train on, {c.get('heldout_samples', 0):,} held out{skipped}); "
                     f"{c.get('tokens', 0):,} tokens, {c.get('trained_tokens', 0):,} of them trained")
    if (s := m.stages.get("dump")) is not None:
        c = s.counts
        lines.append(f"Hidden      {c['samples']:,} samples, {c['tokens']:,} tokens in {c['shards']} shards, "
                     f"{c['bytes'] / 2**30:.2f} GiB; {c['quarantined']} quarantined")
    if (s := m.stages.get("standardize")) is not None:
        share = {k: f"{v:.1%}" for k, v in s.metrics.items() if isinstance(v, float)}
        lines.append(f"Vocabulary  {s.counts['draft_vocab']:,} of {m.target.vocab_size:,} tokens; covers "
                     f"{share.get('train_token_coverage')} of the trained tokens, {share.get('heldout_token_coverage')} "
                     "of the held-out ones")
    return "\n".join(lines)


def _wiring(m: Manifest) -> str:
    """Which layer output fills which slot, and what each system calls it."""
    if not m.slots:
        return ""
    engines = m.export.engines if m.export else {}
    rows = [["slot", "layer output", "transformers", *(f"{name} id" for name in engines), "fc columns"]]
    # Engines concatenate in ascending layer order whatever the order of their ids, and every rule is monotone.
    by_point = {name: dict(zip(sorted(e.capture_points), sorted(e.ids))) for name, e in engines.items()}
    for name, slot in m.slots.items():
        if slot.kind == "layer_output":
            ids = [str(points.get(slot.layer + 1, "?")) for points in by_point.values()]
            rows.append([name, str(slot.layer), f"hidden_states[{slot.layer + 1}]", *ids,
                         f"{slot.columns[0]}:{slot.columns[1]}"])
        else:
            rows.append([name, f"final hidden, {slot.norm}-norm", "last_hidden_state", *("" for _ in engines), ""])
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "Wiring\n" + "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(r, widths)).rstrip() for r in rows)


def _accept(m: Manifest) -> str:
    lines = []
    if (s := m.stages.get("train")) is not None:
        accuracy = s.metrics.get("heldout_accuracy")
        if isinstance(accuracy, list):
            lines.append("  held-out accuracy per draft step  " + "  ".join(f"{a:.3f}" for a in accuracy))
        if (tau := s.metrics.get("heldout_tau_row@3")) is not None:
            lines.append(f"  τ_row@3  held-out, teacher-forced       {tau:.3f}   (1.0: learned nothing)")
    if (s := m.stages.get("verify")) is not None:
        for key, text in (("serve.tau_engine", "τ counted by SGLang                     "),
                          ("serve.tau_replayed", "τ replayed over SGLang's own tokens     "),
                          ("serve.tau_walk@3", "τ_walk@3 (clipped at the end of a turn) "),
                          ("serve_vllm.tau_engine", "τ counted by vLLM                       "),
                          ("serve_vllm.tau_replayed", "τ replayed over vLLM's own tokens       ")):
            if isinstance(tau := s.metrics.get(key), float):
                lines.append(f"  {text}{tau:.3f}")
        if "serve.text_identical" in s.metrics:
            same = "yes" if s.metrics["serve.text_identical"] else "NO"
            lines.append(f"  greedy text with and without the drafter identical: {same}")
    return "Accept length (tokens per target forward, bonus token included)\n" + "\n".join(lines) if lines else ""


def _next(m: Manifest, run_dir: Path) -> str:
    root = "" if run_dir.parent == Path("runs") else f" ROOT={run_dir.parent}"
    target = _target_override(m)
    todo = next((s for s in STAGES if s not in m.stages), None)
    if todo is not None:
        return f"Next: make {todo} RUN={m.run}{root}" + (f' ARGS="{target} …"' if target else "")
    export = run_dir / "export"
    lines = [f"Serving config  {export / 'serving.yaml'}", f"Manifest        {run_dir / 'manifest.json'}", "Type next",
             *(f"  {script}" for script in sorted(export.glob("launch_*.sh"))),
             f"  make show-sample RUN={m.run}{root}   # samples with the trained tokens marked"]
    others = [layer + 1 for layer in m.fc_layers()]
    if others[-1] < m.target.num_layers - 1:
        wish = f"{target} slots.layers={others}".replace(", ", ",").strip()
        lines.append(f'  make run RUN={m.run}-b{root} ARGS="{wish}"   # the same with other layers')
    lines.append('  make run RUN=mine ARGS="target=local target.path=/models/my-model prompts.source=my.jsonl"')
    return "\n".join(lines)


def _target_override(m: Manifest) -> str:
    """How the run's target is chosen on the command line; empty for the default one."""
    if m.target.path == EMBEDDED:
        return ""
    exported = m.stages["export"].config["target"] if "export" in m.stages else {}
    return f"target={exported.get('name', 'local')} target.path={m.target.path}"


def main(argv: list[str]) -> None:
    if len(argv) != 1:
        sys.exit("usage: python -m pipeline.summary runs/<name>")
    try:
        print(summary(Path(argv[0])))
    except PipelineError as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main(sys.argv[1:])
