"""Stage 2: the hidden states of every sample, in shards, exactly once each.

A sample ends up in a shard or, with the reason, in quarantine.jsonl; the stage ends in success only if these two make
up the samples of stage 1 exactly. What lies in a shard is never computed again, so a killed dump goes on where it was.
"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import torch
from safetensors.torch import load_file

from pipeline.config import Config
from pipeline.dump.capture_plan import PROBE, CapturePlan, capture_folder
from pipeline.dump.capture_writer import take_over
from pipeline.dump.dump_checks import check_probes, compare_with_transformers, mark_known_deviation
from pipeline.dump.dump_job import Job, Survey
from pipeline.engines.engine import resolve_device
from pipeline.errors import PipelineError
from pipeline.files import save_safetensors, sha256_file, sha256_json, write_text
from pipeline.manifest import DumpRecord, Fingerprint, Manifest, bind_slots
from pipeline.samples import read_samples, samples_file
from pipeline.stage import StageResult, put_aside
from pipeline.store import HiddenStore, sample_ids, shard_paths
from pipeline.target import DTYPES, Target

PROBE_TOKENS = 256  # a probe keeps N + 1 states per token: 870 KiB in Kimi-K2.5
_MAX_QUARANTINED = 0.5
GIB = 1 << 30


def dump(config: Config, target: Target, manifest: Manifest, run_dir: Path, folder: Path, *, slot_layers: list[int],
         layers: list[int]) -> StageResult:
    """Write the hidden states of all samples of stage 1.

    Args:
        slot_layers: layer outputs that fill the fc slots.
        layers: layer outputs to dump, ascending, a superset of `slot_layers`.

    Raises:
        PipelineError: no room on the disk, the engine failed or is wired differently than derived, samples are missing
            at the end, or more than half of them had to be quarantined.
    """
    samples = samples_file(run_dir)
    dtype = getattr(torch, DTYPES.get(config.dump.dtype, target.dtype))
    plan = CapturePlan(attempt=uuid.uuid4().hex[:12], folder=str(folder), layers=list(layers),
                       num_layers=target.num_layers, dtype=str(dtype).removeprefix("torch."),
                       shard_tokens=config.dump.shard_tokens)
    take_over(folder, plan.attempt)
    survey = _survey(samples, config.target.context_length)
    done = {i for path in shard_paths(folder) for i in sample_ids(path)}
    todo_tokens = sum(n for i, n in survey.tokens.items() if i not in done)
    probes = _choose_probes(survey, config.dump.probe_samples)
    _check_room(config, target, survey, done, probes, len(layers), dtype.itemsize, folder)

    job = Job(config, target, plan, todo_tokens, samples, done, set(survey.too_long), probes)
    if config.dump.engine == "sglang":
        from pipeline.dump.dump_sglang import run
    else:
        from pipeline.dump.dump_transformers import run
    backend = run(job)

    store = HiddenStore(shard_paths(folder))
    quarantine = [{"id": i, "reason": f"{n} tokens, more than target.context_length = {config.target.context_length}",
                   "tokens": n} for i, n in survey.too_long.items()] + _reported_quarantine(plan, store)
    _check_complete(survey, store, quarantine)
    quarantine_file = folder / "quarantine.jsonl"
    write_text(quarantine_file, "".join(json.dumps(q, ensure_ascii=False) + "\n" for q in quarantine))
    probe_states = _collect_probes(plan, probes)
    check_probes(store, probe_states, plan.states)
    probes_file = folder / "probes.safetensors"
    save_safetensors(probes_file, probe_states, {"probe_ids": json.dumps(probes)})
    slots = bind_slots(slot_layers, target.hidden_size)
    if backend.engine != "transformers":
        device = resolve_device(config.device)
        compare_with_transformers(slots, target, probe_states, probes, dtype=dtype, device=device)
        mark_known_deviation(slots, backend.deviation)
    record = DumpRecord(
        engine=backend.engine, engine_version=backend.engine_version, model_class=backend.model_class,
        layers=list(layers), requested_ids=backend.requested_ids, capture_points=backend.capture_points,
        dtype=plan.dtype, plugin_sha256=plugin_sha256(), probe_ids=probes,
        fingerprints=_fingerprints(store, plan.states, probes))
    shutil.rmtree(capture_folder(folder))
    outputs = [*store.paths, probes_file, quarantine_file]
    counts = {"samples": len(store.samples), "tokens": sum(r.length for r in store.samples),
              "quarantined": len(quarantine), "shards": len(store.paths),
              "bytes": sum(p.stat().st_size for p in outputs)}
    return StageResult(outputs=outputs, counts=counts, slots=slots, dump=record)


def plugin_sha256() -> str:
    """Hash of the files that decide what is captured."""
    parts = ("dump/capture.py", "dump/capture_plan.py", "dump/capture_writer.py", "store.py")
    return sha256_json([sha256_file(Path(__file__).parents[1] / part) for part in parts])


def _survey(samples: Path, context_length: int) -> Survey:
    survey = Survey()
    for sample in read_samples(samples):
        length = len(sample.input_ids)
        if length > context_length:
            survey.too_long[sample.id] = length
            continue
        survey.tokens[sample.id] = length
        if sample.split == "heldout":
            survey.heldout.append(sample.id)
    if not survey.tokens:
        raise PipelineError("no sample fits into the target's context", field="target.context_length",
                            value=context_length,
                            fix='ARGS="target.context_length=…", or shorter conversations for make prompts')
    return survey


def _choose_probes(survey: Survey, count: int) -> list[str]:
    """The first held-out samples of at most 256 tokens, else the shortest ones; the same for the same samples."""
    candidates = survey.heldout or list(survey.tokens)
    return sorted(candidates, key=lambda i: max(0, survey.tokens[i] - PROBE_TOKENS))[:count]


def _check_room(config: Config, target: Target, survey: Survey, done: set[str], probes: list[str], layers: int,
                itemsize: int, folder: Path) -> None:
    """Print what the dump will take on the disk; refuse, saying how many samples fit, if there is not that much."""
    per_token = (layers + 1) * target.hidden_size * itemsize + 4
    for_probes = sum(survey.tokens[i] for i in probes) * (target.num_layers + 1) * target.hidden_size * itemsize
    needed = for_probes + sum(n * per_token for i, n in survey.tokens.items() if i not in done)
    free = shutil.disk_usage(folder).free - int(config.dump.disk_reserve_gib * GIB)
    print(f"dump: {len(survey.tokens)} samples ({len(done)} are done), {sum(survey.tokens.values())} tokens x "
          f"{per_token} bytes ({layers} layer outputs + final hidden, H = {target.hidden_size}, {itemsize} bytes); "
          f"{needed / GIB:.2f} GiB to write, {free / GIB:.2f} GiB free beside a reserve of "
          f"{config.dump.disk_reserve_gib:g} GiB", flush=True)
    if needed <= free:
        return
    # Fewer samples are another plan, which starts anew: what the shards take now is room then.
    room = free - for_probes + sum(survey.tokens[i] for i in done & survey.tokens.keys()) * per_token
    per_sample = sum(survey.tokens.values()) / len(survey.tokens) * per_token
    fit = max(0, int(room / per_sample))
    fix = f"free {(needed - free) / GIB:.2f} GiB, put the runs on another disk (ARGS=\"run.root=…\")"
    if aside := put_aside(folder.parent, folder.name):
        fix += f", or give up what {', '.join(map(str, aside))} still holds (force=true deletes it)"
    if fit:
        fix += f', or use fewer samples, about {fit}: make prompts ARGS="prompts.limit={fit}", then make dump'
    raise PipelineError(f"the disk has no room for the hidden states: {needed / GIB:.2f} GiB are needed, "
                        f"{max(free, 0) / GIB:.2f} GiB are free beside the reserve; about {fit} of "
                        f"{len(survey.tokens)} samples would fit",
                        field="dump.disk_reserve_gib", value=config.dump.disk_reserve_gib, fix=fix)


def _reported_quarantine(plan: CapturePlan, store: HiddenStore) -> list[dict]:
    """What plugin and backend refused, each sample once.

    A sample that the engine aborted after its last row was captured is stored, and not listed.
    """
    stored = {ref.id for ref in store.samples}
    found: dict[str, dict] = {}
    for path in sorted(plan.control.glob("quarantine-*.jsonl"), reverse=True):  # the stage's own reasons first
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry.pop("kind") == PROBE:
                raise PipelineError(f"probe sample {entry['id']!r} could not be captured: {entry['reason']}",
                                    field="dump.probe_samples", fix="make dump, or ARGS=\"dump.probe_samples=0\"")
            if entry["id"] not in stored:
                found.setdefault(entry["id"], entry)
    return list(found.values())


def _check_complete(survey: Survey, store: HiddenStore, quarantine: list[dict]) -> None:
    """Shards and quarantine make up the samples exactly, each once. (The store itself refuses duplicates.)"""
    refused = {q["id"]: q["reason"] for q in quarantine}
    stored = {ref.id: ref.length for ref in store.samples}
    asked = survey.tokens.keys() | survey.too_long.keys()
    missing = asked - stored.keys() - refused.keys()
    foreign = (stored.keys() | refused.keys()) - asked
    wrong = [i for i, n in stored.items() if i in survey.tokens and survey.tokens[i] != n]
    for what, ids in (("missing", missing), ("not among the samples of stage 1", foreign),
                      ("stored with another number of tokens", wrong)):
        if ids:
            raise PipelineError(f"{len(ids)} samples are {what} after the dump, e.g. {sorted(ids)[0]!r}",
                                field="dump/shard-*",
                                fix="make dump (goes on with what is missing), or make dump ARGS=\"force=true\"")
    if len(refused) > _MAX_QUARANTINED * len(asked):
        example, reason = next(iter(refused.items()))
        raise PipelineError(f"{len(refused)} of {len(asked)} samples had to be quarantined, e.g. {example!r}: {reason}",
                            field="dump/quarantine.jsonl", value=len(refused),
                            fix="mend the cause; for numbers that are not finite try ARGS=\"dump.dtype=bf16\"")


def _collect_probes(plan: CapturePlan, probes: list[str]) -> dict[str, torch.Tensor]:
    """The tensors of all probes: `<sample id>/input_ids`, `…/layer_output.<l>` for every layer, `…/final_hidden`."""
    from safetensors import safe_open

    tensors = {}
    for path in sorted(plan.control.glob("probe-*.safetensors")):
        sample_id = safe_open(path, framework="pt").metadata()["sample_id"]
        tensors |= {f"{sample_id}/{name}": tensor for name, tensor in load_file(path).items()}
    if missing := [p for p in probes if f"{p}/final_hidden" not in tensors]:
        raise PipelineError(f"probe sample {missing[0]!r} was not captured", field="dump.probe_samples",
                            fix="make dump")
    return tensors


def _fingerprints(store: HiddenStore, states: list[str], probes: list[str]) -> dict[str, Fingerprint]:
    """Of the rows as they lie in the shards: norms over all probe rows, five floats at first, middle and last row."""
    refs = [ref for ref in store.samples if ref.id in set(probes)]
    prints = {}
    for name in states if refs else []:
        rows = {ref: store.rows(ref, name).float() for ref in refs}
        norms = torch.cat([r.norm(dim=-1) for r in rows.values()])
        prints[name] = Fingerprint(
            row_norm_mean=norms.mean().item(), row_norm_std=norms.std(correction=0).item(),
            first_five={f"{ref.id}[{i}]": r[i, :5].tolist() for ref, r in rows.items()
                        for i in sorted({0, ref.length // 2, ref.length - 1})})
    return prints
