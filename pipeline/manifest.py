"""The run manifest: the one thing stages share besides data files.

`runs/<name>/manifest.json` records the target, which hidden state fills which slot, what every finished stage read, wrote
and counted, and which ids were derived for which engine. It is typed, versioned and written atomically; readers refuse
unknown versions and unknown fields.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import PipelineError
from pipeline.files import sha256_file, sha256_json, write_json

VERSION = 1
STAGES = ("prompts", "dump", "standardize", "train", "export", "verify")
StageName = Literal["prompts", "dump", "standardize", "train", "export", "verify"]


class Strict(BaseModel):
    """A model that refuses fields it does not know, so that a typo or a newer file is an error and not a silence."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class FileRecord(Strict):
    """A file of the run, as it was when the stage that wrote it finished."""

    path: str
    """relative to the run folder, with / separators"""
    size: int
    """bytes"""
    mtime_ns: int
    """with `size` the fast check: equal means unchanged"""
    sha256: str

    @classmethod
    def of(cls, run_dir: Path, path: Path) -> FileRecord:
        stat = os.stat(path)
        # Not resolve(): a stage's folder may be a link to another disk.
        relative = Path(os.path.abspath(path)).relative_to(os.path.abspath(run_dir)).as_posix()
        return cls(path=relative, size=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=sha256_file(path))

    def problem(self, run_dir: Path, *, full: bool = False) -> str | None:
        """None if the file is as recorded, else what is wrong. `full` reads the file even if size and mtime agree."""
        path = Path(run_dir) / self.path
        try:
            stat = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return "is missing"
        if path.is_dir():
            return "is a folder"
        if stat.st_size != self.size:
            return f"has {stat.st_size} bytes, the manifest says {self.size}: truncated or altered"
        if not full and stat.st_mtime_ns == self.mtime_ns:
            return None
        if (found := sha256_file(path)) != self.sha256:
            return f"has sha256 {found[:12]}…, the manifest says {self.sha256[:12]}…: altered"
        return None


class TargetRecord(Strict):
    """The target model a run belongs to."""

    path: str
    """local folder or hub id, as configured"""
    revision: str | None = None
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    quantization: str | None = None
    config_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str


class Slot(Strict):
    """One named input of the drafter (`fc.0`, `fc.1`, …) or of its loss (`teacher`)."""

    kind: Literal["layer_output", "final_hidden"]
    layer: int | None = None
    """for `layer_output`: 0-based decoder layer whose output (residual stream after it) fills the slot"""
    norm: Literal["post", "pre"] | None = None
    """for `final_hidden`: whether the final norm has been applied"""
    tensor: str
    """name of the tensor in the dump's shards, e.g. `layer_output.14`"""
    columns: tuple[int, int] | None = None
    """for fc slots: the half-open range of fc input columns"""
    equals_transformers: bool | None = None
    """whether the dumped tensor agreed with transformers'; False also where it was not compared and the engine's class is known
    to capture something else; None: not known"""
    relative_error: float | None = None
    """of that comparison: mean over rows of |found - expected| / |expected|"""

    @model_validator(mode="after")
    def _kind_fields(self) -> Slot:
        if self.kind == "layer_output" and (self.layer is None or self.norm is not None or self.columns is None):
            raise ValueError("a layer_output slot needs `layer` and `columns` and has no `norm`")
        if self.kind == "final_hidden" and (self.norm is None or self.layer is not None or self.columns is not None):
            raise ValueError("a final_hidden slot needs `norm` and has neither `layer` nor `columns`")
        return self


class Fingerprint(Strict):
    """What a dumped state looks like, for comparison with what an engine feeds live."""

    row_norm_mean: float
    row_norm_std: float
    first_five: dict[str, list[float]]
    """`<probe sample id>[<row>]` → the first five floats of that row"""


class DumpRecord(Strict):
    """How the hidden states were captured."""

    engine: Literal["sglang", "transformers"]
    engine_version: str
    model_class: str
    """class of the live model object in the engine"""
    layers: list[int]
    """layer outputs in the shards, ascending"""
    requested_ids: list[int]
    """ids given to the engine"""
    capture_points: list[int]
    """read back from the live model: layer output l is capture point l + 1"""
    dtype: str
    plugin_sha256: str
    probe_ids: list[str]
    """sample ids whose every layer output was kept in dump/probes.safetensors"""
    fingerprints: dict[str, Fingerprint]
    """tensor name → fingerprint"""


class EngineExport(Strict):
    """The ids derived for one engine, and why they are believed."""

    version: str
    ids: list[int]
    capture_points: list[int]
    model_class: str | None = None
    rule_source: str
    proven: bool
    validated_by: list[str] = Field(default_factory=list)


class ExportRecord(Strict):
    engines: dict[str, EngineExport] = Field(default_factory=dict)


class StageRecord(Strict):
    """A finished stage."""

    config: dict
    """the resolved part of the configuration this stage depends on"""
    config_sha256: str
    inputs: dict[str, str]
    """stage read from → digest of its outputs at that time"""
    outputs: list[FileRecord]
    counts: dict[str, int | float] = Field(default_factory=dict)
    metrics: dict[str, float | list[float] | bool | str | None | list[dict[str, int | str]] | dict[
        str, int | float | str | list[int]]] = Field(default_factory=dict)
    versions: dict[str, str]
    git_commit: str | None
    seed: int
    wall_seconds: float
    peak_memory_gib: float = 0.0
    """largest resident size of any one process of the stage"""
    finished_at: str

    def digest(self) -> str:
        """Hash of what the stage did; a later stage keeps it to notice that its input was redone.

        The configuration is part of it: slots can be re-bound without a byte of any file changing.
        """
        return sha256_json([self.config_sha256, sorted((f.path, f.sha256) for f in self.outputs)])


class Manifest(Strict):
    version: int = VERSION
    run: str
    target: TargetRecord
    slots: dict[str, Slot] = Field(default_factory=dict)
    dump: DumpRecord | None = None
    export: ExportRecord | None = None
    stages: dict[StageName, StageRecord] = Field(default_factory=dict)

    def fc_slots(self) -> list[Slot]:
        """The fc slots in the order of the fc input's columns."""
        names = sorted((n for n in self.slots if n.startswith("fc.")), key=lambda n: int(n.split(".")[1]))
        return [self.slots[n] for n in names]

    def fc_layers(self) -> list[int]:
        """The layer outputs behind the fc input, in column order."""
        return [slot.layer for slot in self.fc_slots()]


def manifest_path(run_dir: Path) -> Path:
    return Path(run_dir) / "manifest.json"


def load_manifest(run_dir: Path) -> Manifest | None:
    """The run's manifest, None if there is none yet.

    Raises:
        PipelineError: unreadable JSON, an unknown version, or an unknown or malformed field.
    """
    path = manifest_path(run_dir)
    fix = "restore the file from a backup, or start a new run: make run RUN=<new name>"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise PipelineError(f"the manifest is not readable JSON: {e}", field=str(path), fix=fix) from e
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != VERSION:
        raise PipelineError(f"this pipeline reads manifest version {VERSION}", field=f"{path}: version", value=version,
                            fix="use the pipeline version that wrote it, or start a new run")
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise PipelineError(f"the manifest does not fit its format: {first['msg']}", field=f"{path}: {where}",
                            value=first.get("input"), fix=fix) from e
    _check_wiring(manifest, path)
    return manifest


def _check_wiring(manifest: Manifest, path: Path) -> None:
    """Refuse slots that contradict themselves or the dump: everything that is served is derived from them."""
    layers, width = manifest.fc_layers(), manifest.target.hidden_size
    wrong = None
    for i, slot in enumerate(manifest.fc_slots()):
        if slot.tensor != f"layer_output.{slot.layer}":
            wrong = (f"fc.{i}", f"layer output {slot.layer} from tensor {slot.tensor}")
        elif slot.columns != (i * width, (i + 1) * width):
            wrong = (f"fc.{i}", f"columns {slot.columns} of slots that are {width} wide")
        elif manifest.dump is not None and slot.layer not in manifest.dump.layers:
            wrong = (f"fc.{i}", f"layer output {slot.layer}, of which the dump holds none: {manifest.dump.layers}")
    if layers != sorted(set(layers)):
        wrong = ("fc.*", f"layer outputs {layers}, which do not ascend")
    if wrong:
        raise PipelineError(f"the manifest's slot {wrong[0]} holds {wrong[1]}", field=f"{path}: slots.{wrong[0]}",
                            value=wrong[1], fix='undo the edit, or bind the slots anew: make dump ARGS="force=true"')


def save_manifest(run_dir: Path, manifest: Manifest) -> None:
    write_json(manifest_path(run_dir), manifest.model_dump(mode="json"))


def bind_slots(layers: list[int], hidden_size: int) -> dict[str, Slot]:
    """Slots for an ascending list of layer outputs, the teacher being the final hidden state after the norm."""
    slots = {
        f"fc.{i}": Slot(kind="layer_output", layer=layer, tensor=f"layer_output.{layer}",
                        columns=(i * hidden_size, (i + 1) * hidden_size))
        for i, layer in enumerate(layers)
    }
    slots["teacher"] = Slot(kind="final_hidden", norm="post", tensor="final_hidden")
    return slots
