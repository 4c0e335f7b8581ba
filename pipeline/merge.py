"""Shards of stage 1 that several machines made (`prompts.shard=i/n`), as the run that one machine would have made.

Samples, lists and counts are those of the one machine, byte by byte: every shard chose from all conversations and says
which (`selected.txt`), so its own are put back into that order. What the choice counted is counted once, what encoding
or answering counted is summed. The target's answers are put together too, so that changed settings ask only what is
new. Hidden states are not joined: dump what was merged.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from pipeline.errors import PipelineError
from pipeline.files import atomic_path
from pipeline.manifest import Manifest, StageRecord, load_manifest
from pipeline.prompts import all_counts, by_source
from pipeline.prompts.account import QUARANTINE, SKIPPED
from pipeline.prompts.journal import RESPONSES
from pipeline.prompts.shard import SELECTED, owner, parsed
from pipeline.samples import read_batches, samples_file, write_batches
from pipeline.stage import StageResult, run_stage


@dataclass(frozen=True)
class _Shard:
    run_dir: Path
    manifest: Manifest

    @property
    def record(self) -> StageRecord:
        return self.manifest.stages["prompts"]

    @property
    def number(self) -> tuple[int, int]:
        return parsed(self.record.config["prompts"]["shard"])

    def file(self, name: str) -> Path:
        return self.run_dir / "prompts" / name


def merge(run_dirs: Sequence[Path], run_dir: Path) -> Manifest:
    """Join the shards in `run_dirs` into a new run.

    Raises:
        PipelineError: a shard is missing, unfinished, damaged or given twice; or target, settings or sources differ.
            The message names the field and both values.
    """
    if (known := load_manifest(run_dir)) is not None and known.stages:
        raise PipelineError(f"{run_dir} is a run of its own", field="RUN", value=run_dir.name, fix="name a new one")
    shards = sorted((_opened(path) for path in run_dirs), key=lambda shard: shard.number)
    for other in shards[1:]:
        _check_alike(shards[0], other)
    _check_all_there(shards)
    config = dict(shards[0].record.config)
    config["prompts"] = config["prompts"] | {"shard": None}
    return run_stage("prompts", run_dir, target=shards[0].manifest.target, config=config, seed=shards[0].record.seed,
                     work=lambda manifest, folder: _joined(shards, folder))


def _opened(run_dir: Path) -> _Shard:
    manifest = load_manifest(run_dir)
    again = f'make prompts RUN={run_dir.name} ARGS="prompts.shard=…"'
    if manifest is None or "prompts" not in manifest.stages:
        raise PipelineError(f"{run_dir} holds no finished stage 1", field=str(run_dir), fix=again)
    shard = _Shard(run_dir, manifest)
    if shard.record.config.get("prompts", {}).get("shard") is None:
        raise PipelineError(f"{run_dir} is no shard of a run", field=f"{run_dir}: prompts.shard", value="null",
                            fix=again)
    if "dump" in manifest.stages:
        raise PipelineError(
            f"{run_dir} has hidden states already, which cannot be joined", field=f"{run_dir}: stages.dump",
            fix="merge before dumping: make the shard in a new run, with the same settings and a copy of "
                f"{run_dir / RESPONSES}, so that nothing is asked twice; then merge that run")
    for file in shard.record.outputs:
        if (problem := file.problem(run_dir)) is not None:
            raise PipelineError(f"{run_dir / file.path} {problem}", field=str(run_dir / file.path), fix=again)
    return shard


def _check_alike(first: _Shard, other: _Shard) -> None:
    for name, (here, there) in _differences(first, other):
        raise PipelineError(
            f"the shards do not belong together: {name} is {here!r} in {first.run_dir}, {there!r} in {other.run_dir}",
            field=name, value=there, fix=f"make one of them anew, as the other: make prompts RUN={other.run_dir.name} "
                                         'ARGS="…"')


def _differences(first: _Shard, other: _Shard) -> Iterator[tuple[str, tuple[object, object]]]:
    """What must be equal and is not: name and both values."""
    names = {"context_length": "target.context_length", "source_sha256": "prompts.source, sha256 of its files"}
    facts = []
    for shard in (first, other):
        target = shard.manifest.target.model_dump(exclude={"path"})  # it may lie in another folder there
        metrics = {name: shard.record.metrics.get(name) for name in ("responses", "selected")}
        listed = {Path(file.path).name: file.sha256 for file in shard.record.outputs}
        config = {names.get(name, name): value for name, value in shard.record.config.items()}
        facts.append(_flat({"target": target, "number of shards": shard.number[1], **config, **metrics})
                     | {f"sha256 of {SELECTED}": listed[SELECTED]})
    for name in dict.fromkeys([*facts[0], *facts[1]]):
        values = facts[0].get(name), facts[1].get(name)
        if name != "prompts.shard" and values[0] != values[1]:
            yield name, values


def _flat(value: dict, prefix: str = "") -> dict[str, object]:
    out: dict[str, object] = {}
    for key, item in value.items():
        out |= _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return out


def _check_all_there(shards: list[_Shard]) -> None:
    numbers, count = [shard.number[0] for shard in shards], shards[0].number[1]
    if twice := [number for number, times in Counter(numbers).items() if times > 1]:
        raise PipelineError(f"shard {twice[0]}/{count} is given twice", field="prompts.shard",
                            value=f"{twice[0]}/{count}", fix="give each shard once")
    if missing := [f"{number}/{count}" for number in range(count) if number not in numbers]:
        raise PipelineError(f"shard {', '.join(missing)} is missing", field="prompts.shard", value=missing[0],
                            fix=f'give the runs of all {count} shards; or make it: make prompts RUN=<name> '
                                f'ARGS="prompts.shard={missing[0]}"')


def _joined(shards: list[_Shard], folder: Path) -> StageResult:
    write_batches(samples_file(folder.parent), _rows_in_order(shards))
    first_skips = sum(_skips(Counter(_counts(of))) for of in shards[0].record.metrics["selected"])
    with atomic_path(folder / SKIPPED) as tmp, open(tmp, "wb") as out:
        out.writelines(_skipped_in_order(shards, first_skips))
    with atomic_path(folder / QUARANTINE) as tmp:
        shutil.copyfile(shards[0].file(QUARANTINE), tmp)
    _join_answers(shards, folder.parent)
    sources = _sources_once(shards)
    total, counts = sum(sources, Counter()), Counter()
    for shard in shards:
        counts.update(shard.record.counts)
    if not total["kept"]:
        raise PipelineError("none of the shards holds a sample", field="prompts.source",
                            fix="look at their skipped.jsonl")
    metrics = {name: value for name, value in shards[0].record.metrics.items() if name not in ("sources", "selected")}
    paths = [of["path"] for of in shards[0].record.metrics["sources"]]
    return StageResult(outputs=[samples_file(folder.parent), folder / SKIPPED, folder / QUARANTINE],
                       counts=all_counts(total, counts), metrics={"sources": by_source(paths, sources), **metrics})


def _selected(shards: list[_Shard]) -> Iterator[tuple[str, int]]:
    """Ids of all chosen conversations in order, with the number of the shard that each belongs to."""
    with open(shards[0].file(SELECTED), encoding="utf-8") as lines:
        for line in lines:
            yield (id := line.rstrip("\n")), owner(id, len(shards))


def _rows_in_order(shards: list[_Shard]) -> Iterator[pa.RecordBatch]:
    """The samples of all shards as one machine writes them."""
    rows = [_Ahead((row["id"][0].as_py().partition("#")[0], row) for batch in read_batches(samples_file(shard.run_dir))
                   for row in (batch.slice(k, 1) for k in range(len(batch)))) for shard in shards]
    for id, number in _selected(shards):
        yield from rows[number].of(id)
    _check_used_up(rows, shards, "samples")


def _skipped_in_order(shards: list[_Shard], first: int) -> Iterator[bytes]:
    """Lines of skipped.jsonl: the `first` are the choice's and the same in all shards."""
    with open(shards[0].file(SKIPPED), "rb") as file:
        yield from (line for _, line in zip(range(first), file))
    own = [_Ahead(_own_skips(shard.file(SKIPPED), first)) for shard in shards]
    for id, number in _selected(shards):
        yield from own[number].of(id)
    _check_used_up(own, shards, "skipped records")


def _own_skips(path: Path, first: int) -> Iterator[tuple[str, bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if number >= first:
                yield json.loads(line)["id"], line


class _Ahead:
    """Things that belong to ids, in the ids' order."""

    def __init__(self, pairs: Iterator[tuple[str, object]]):
        self._pairs = pairs
        self.next = next(pairs, None)

    def of(self, id: str) -> Iterator:
        while self.next is not None and self.next[0] == id:
            yield self.next[1]
            self.next = next(self._pairs, None)


def _check_used_up(streams: list[_Ahead], shards: list[_Shard], what: str) -> None:
    for stream, shard in zip(streams, shards):
        if stream.next is not None:
            raise PipelineError(
                f"{shard.run_dir} holds {what} in another order than chosen, or not chosen: {stream.next[0]}",
                field=str(shard.file(SELECTED)), fix=f'make prompts RUN={shard.run_dir.name} ARGS="force=true …"')


def _join_answers(shards: list[_Shard], run_dir: Path) -> None:
    for name in sorted({path.name for shard in shards for path in (shard.run_dir / RESPONSES).glob("*.jsonl")}):
        with atomic_path(run_dir / RESPONSES / name) as tmp, open(tmp, "wb") as out:
            for shard in shards:
                if (path := shard.run_dir / RESPONSES / name).is_file():
                    with open(path, "rb") as file:
                        out.writelines(line for line in file if line.endswith(b"\n"))


def _sources_once(shards: list[_Shard]) -> list[Counter[str]]:
    """Counts of each source: of the choice once, of each shard's own work all."""
    sources = []
    for number, chosen in enumerate(shards[0].record.metrics["selected"]):
        total = Counter(_counts(chosen))
        for shard in shards:
            total.update(Counter(_counts(shard.record.metrics["sources"][number])) - Counter(_counts(chosen)))
        del total["other_shards"]
        sources.append(+total)
    return sources


def _counts(of_source: dict[str, int | str]) -> dict[str, int]:
    return {name: n for name, n in of_source.items() if name != "path"}


def _skips(counts: Counter[str]) -> int:
    """Lines that the choice wrote to skipped.jsonl; damaged records are in quarantine.jsonl."""
    return sum(n for name, n in counts.items() if name.startswith("skipped_") and not name.startswith("skipped_bad_"))
