"""The target's states over given sequences, such as what an engine answered, computed anew by the dump stage's machinery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import Config
from pipeline.dump.dump import dump
from pipeline.files import make_dir
from pipeline.manifest import Manifest
from pipeline.samples import Sample, samples_file, write_samples
from pipeline.stage import StageResult
from pipeline.target import Target, load_output_head
from pipeline.verify.checks import Subject
from pipeline.verify.states import EMBEDDING, NORMED


@dataclass(frozen=True)
class TargetStates:
    """Every state of the target at every token of some sequences; read from the disk as they are asked for."""

    target: Target
    path: Path
    """safetensors: `<sequence>/layer_output.<l>`, `<sequence>/final_hidden`, `<sequence>/input_ids`"""
    source: str
    dtype: torch.dtype

    def rows(self, sequence: str, key: str, positions: Tensor) -> Tensor:
        """The state `key` [R, H] at these positions."""
        from safetensors import safe_open

        if key.startswith(NORMED):
            return self._norm(self.rows(sequence, key.removeprefix(NORMED), positions))
        with safe_open(self.path, framework="pt") as file:
            first, last = int(positions.min()), int(positions.max())
            name = f"{sequence}/{'input_ids' if key == EMBEDDING else key}"
            found = file.get_slice(name)[first:last + 1][positions - first]
        return self.target.load_tensor("embedding", rows=found.long()) if key == EMBEDDING else found

    def _norm(self, hidden: Tensor) -> Tensor:
        return load_output_head(self.target, rows=torch.zeros(1, dtype=torch.long)).norm(hidden)


def record_states(subject: Subject, sequences: Mapping[str, Sequence[int]], folder: Path, device: str) -> TargetStates:
    """Compute every state of the target over these sequences, by the dump stage's own machinery."""
    manifest, config = subject.manifest, subject.config
    source = state_source(manifest, exact=device == "cpu")
    record = dump_sequences(config, subject.target, manifest, sequences, folder, manifest.fc_layers(), **source,
                            probe_samples=len(sequences)).dump
    return TargetStates(subject.target, folder / "dump" / "probes.safetensors", source["engine"], getattr(torch, record.dtype))


def state_source(manifest: Manifest, *, exact: bool) -> dict[str, str]:
    """What computes the states that the drafter was trained on, as changes of the configuration's section `dump`.

    With transformers, independently of the engine, where that is known to equal what was dumped; else in the engine.

    Args:
        exact: in fp32; else in the target's dtype, which only the engine computes as it served.
    """
    dumped = manifest.dump.engine if manifest.dump else None
    same = dumped == "transformers" or all(slot.equals_transformers for slot in manifest.fc_slots())
    return {"engine": "transformers" if exact and same else "sglang", "dtype": "fp32" if exact else "target"}


def dump_sequences(config: Config, target: Target, manifest: Manifest, sequences: Mapping[str, Sequence[int]], folder: Path,
                   layers: list[int], **changes: Any) -> StageResult:
    """Stage 2 on these sequences, in a folder of its own: `folder`/dump.

    Args:
        sequences: id → token ids.
        layers: layer outputs to keep.
        changes: of the configuration's section `dump`.
    """
    write_samples(samples_file(folder), (
        Sample(id=i, split="heldout", category=None, messages=[], input_ids=list(ids), finish_reason=None,
               loss_mask=[1] * len(ids)) for i, ids in sequences.items()))
    config = config.model_copy(update={
        "dump": config.dump.model_copy(update=changes),
        "target": config.target.model_copy(update={"context_length": max(map(len, sequences.values()))})})
    return dump(config, target, manifest, folder, make_dir(folder / "dump"), slot_layers=layers, layers=layers)
