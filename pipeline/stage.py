"""What every stage does around its own work: check inputs, skip what is done, record what was made."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.files import clear_disk_errors, make_dir, remove_leftovers, sha256_json, write_text
from pipeline.manifest import (
    DumpRecord,
    ExportRecord,
    FileRecord,
    Manifest,
    Slot,
    StageName,
    StageRecord,
    TargetRecord,
    load_manifest,
    save_manifest,
)

# What each stage reads. verify also reads the samples and hidden states it replays.
INPUTS: dict[str, tuple[str, ...]] = {
    "prompts": (),
    "dump": ("prompts",),
    "standardize": ("prompts", "dump"),
    "train": ("prompts", "dump", "standardize"),
    "export": ("standardize", "train"),
    "verify": ("prompts", "dump", "standardize", "train", "export"),
}
_PACKAGES = ("torch", "transformers", "sglang", "speculators", "datasets", "accelerate", "safetensors")


@dataclass
class StageResult:
    """What a stage's work hands back to be recorded."""

    outputs: list[Path]
    counts: dict[str, int | float] = field(default_factory=dict)
    metrics: dict = field(default_factory=dict)
    slots: dict[str, Slot] | None = None
    dump: DumpRecord | None = None
    export: ExportRecord | None = None


def run_stage(name: StageName, run_dir: Path, *, target: TargetRecord, config: dict, seed: int,
              work: Callable[[Manifest, Path], StageResult], force: bool = False,
              full_check: bool = False, when_current: Callable[[Manifest], bool] | None = None) -> Manifest:
    """Run one stage unless its inputs and configuration are unchanged and its outputs are complete.

    Args:
        run_dir: `runs/<name>`.
        target: facts of the configured target; another target's manifest is refused.
        config: the resolved part of the configuration this stage depends on (plain JSON values).
        work: does the work, given the manifest of the finished earlier stages and the stage's folder
            `runs/<name>/<stage>/`. What lies in that folder was left by an interrupted run of the same configuration
            on the same inputs, so it can be resumed from; anything else is gone from it.
        full_check: compare checksums of all input files instead of size and mtime.
        when_current: called instead of `work` if there is nothing to do; may change the manifest, and then returns True.

    Raises:
        PipelineError: an input is missing, altered or of another target; the run is in use; the folder is not writable.
    """
    make_dir(run_dir)
    with _lock(run_dir):
        manifest = load_manifest(run_dir) or Manifest(run=run_dir.name, target=target)
        check_target(manifest, target, run_dir, name)
        inputs = {upstream: _checked_input(manifest, run_dir, upstream, name, full_check) for upstream in INPUTS[name]}
        config_sha256 = sha256_json(config)
        record = manifest.stages.get(name)
        if record and not force and _is_current(record, config_sha256, inputs, run_dir, full_check):
            print(f"{name}: up to date ({len(record.outputs)} files, made {record.finished_at}); force=true redoes it")
            if when_current is not None and when_current(manifest):
                save_manifest(run_dir, manifest)
            return manifest
        remove_leftovers(run_dir)
        folder = _stage_folder(run_dir, name, record, plan=sha256_json([config_sha256, inputs]), force=force,
                               full_check=full_check)
        started = time.monotonic()
        # From here on the old outputs may be overwritten, so the old record no longer holds: a crash must not leave it.
        if record:
            del manifest.stages[name]
            save_manifest(run_dir, manifest)
        result = work(manifest, folder)
        # A stage may run for days: merge into what is on disk, which the lock kept as it was.
        for key in ("slots", "dump", "export"):
            if (value := getattr(result, key)) is not None:
                setattr(manifest, key, value)
        with clear_disk_errors(run_dir):
            outputs = [FileRecord.of(run_dir, p) for p in result.outputs]
        manifest.stages[name] = StageRecord(
            config=config, config_sha256=config_sha256, inputs=inputs, outputs=outputs, counts=result.counts,
            metrics=result.metrics, versions=package_versions(_PACKAGES), git_commit=_git_commit(), seed=seed,
            wall_seconds=round(time.monotonic() - started, 1), peak_memory_gib=_peak_memory_gib(),
            finished_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )
        save_manifest(run_dir, manifest)
        _remove_asides(run_dir, name)
        return manifest


def _stage_folder(run_dir: Path, name: str, record: StageRecord | None, *, plan: str, force: bool,
                  full_check: bool) -> Path:
    """The stage's folder, holding nothing but what an interrupted run of the same plan left.

    Work of another plan is put aside until the stage has finished, under the plan's own name: a command that is refused
    (no room, an engine that does not start) or a slip of the keyboard costs nothing, and typing the old command brings
    it back. `force` deletes it at once.
    """
    folder = run_dir / name
    with clear_disk_errors(folder):
        if force:
            _remove_asides(run_dir, name)
        if _plan_of(folder) != plan or (force and record):  # without a record: the same forced command going on
            if force:
                _clear(folder)
            else:
                _put_aside(folder, name)
        place, back = folder.resolve(), _aside(folder, plan)
        if back.exists() and not (place.exists() and any(place.iterdir())):  # the settings of before
            os.replace(back, place)  # over an empty folder, if any
        make_dir(folder)
        remove_leftovers(folder)
        for output in record.outputs if record else []:  # resuming must not take a damaged file for a finished one
            path = run_dir / output.path
            if path.exists() and output.problem(run_dir, full=full_check):
                path.unlink()
    write_text(folder / ".plan", plan)
    return folder


def _put_aside(folder: Path, name: str) -> None:
    if not folder.exists() or all(p.name == ".plan" for p in folder.iterdir()):
        return _clear(folder)
    aside = _aside(folder, _plan_of(folder) or "unknown")
    if aside.exists():
        shutil.rmtree(aside)
    # A link to another disk stays where it is; what it points to is put aside over there.
    place = folder.resolve()
    os.replace(place, aside)
    if folder.is_symlink():
        make_dir(place)
    print(f"{name}: what {folder} holds was made with other settings or inputs; it is kept in {aside} until the stage "
          "has finished", flush=True)


def _aside(folder: Path, plan: str) -> Path:
    place = folder.resolve()
    return place.with_name(f".replaced-{folder.name}-{plan[:12]}")


def put_aside(run_dir: Path, name: str) -> list[Path]:
    """Folders in which work of other settings waits until the stage has finished; they take disk space."""
    return sorted((run_dir / name).resolve().parent.glob(f".replaced-{name}-*"))


def _remove_asides(run_dir: Path, name: str) -> None:
    for folder in put_aside(run_dir, name):
        shutil.rmtree(folder)


def _clear(folder: Path) -> None:
    """Remove what is in a folder, but not the folder: it can be a link to another disk."""
    for path in folder.iterdir() if folder.exists() else []:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _plan_of(folder: Path) -> str | None:
    marker = folder / ".plan"
    return marker.read_text() if marker.is_file() else None


def check_target(manifest: Manifest, target: TargetRecord, run_dir: Path, stage: str) -> None:
    """Refuse a manifest that was made with another target, tokenizer or chat template."""
    for key, asked in target.model_dump(exclude={"path"}).items():  # the same target may lie in another folder now
        if (found := getattr(manifest.target, key)) != asked:
            raise PipelineError(
                f"{run_dir / 'manifest.json'} belongs to another target ({manifest.target.path}): {key} is {found!r} there, "
                f"{asked!r} is configured ({target.path})", field=f"target.{key}", value=asked,
                fix=f"make {stage} ARGS=\"target=<the one of this run>\", or start a new run: make run RUN=<new name>")


def _checked_input(manifest: Manifest, run_dir: Path, upstream: str, stage: str, full: bool) -> str:
    record = manifest.stages.get(upstream)
    fix = f"make {upstream} RUN={run_dir.name}" + (' ARGS="check_inputs=full"' if full else "")
    if record is None:
        raise PipelineError(f"stage {stage} needs stage {upstream}, which has not finished in {run_dir}",
                            field=f"{run_dir / 'manifest.json'}: stages.{upstream}", value="absent", fix=fix)
    for f in record.outputs:
        if (problem := f.problem(run_dir, full=full)) is not None:
            raise PipelineError(f"{run_dir / f.path} {problem}", field=f"stages.{upstream}.outputs: {f.path}", fix=fix)
    for source, digest in record.inputs.items():
        now = manifest.stages.get(source)
        if now is None or now.digest() != digest:
            raise PipelineError(f"stage {upstream} was made from another {source} than {run_dir} holds now",
                                field=f"stages.{upstream}.inputs.{source}", value=digest[:12], fix=fix)
    return record.digest()


def _is_current(record: StageRecord, config_sha256: str, inputs: dict[str, str], run_dir: Path, full: bool) -> bool:
    return (record.config_sha256 == config_sha256 and record.inputs == inputs
            and all(f.problem(run_dir, full=full) is None for f in record.outputs))


@contextlib.contextmanager
def _lock(run_dir: Path) -> Iterator[None]:
    path = run_dir / ".lock"
    with clear_disk_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise PipelineError(f"another stage is running in {run_dir}", field=str(path),
                                fix="wait for it, or use another run: RUN=<new name>") from e
        yield
    finally:
        os.close(fd)


def _peak_memory_gib() -> float:
    """Of this process and of the children that have ended, engines included; Linux counts in KiB."""
    peaks = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round(max(peaks) / 2**20, 2)


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Version of each of `packages` that is installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _git_commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        out = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() if out.returncode == 0 else None
