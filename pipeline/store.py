"""Hidden-state shards on disk: whole samples, one safetensors tensor per captured state.

`shard-00000.safetensors` holds the concatenated rows of several samples (`rows` = their tokens):

    input_ids         int32 [rows]
    offsets           int64 [samples + 1]   sample i has rows offsets[i] … offsets[i + 1] - 1
    layer_output.<l>  [rows, H]             residual stream after decoder layer l
    final_hidden      [rows, H]             after the final norm

and the sample ids in its metadata. A shard is written to a temporary file and renamed, so a shard that exists is whole,
and a sample is done if and only if it lies in one. Reading maps the file and copies only the rows asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pipeline.errors import PipelineError
from pipeline.files import save_safetensors

FORMAT, VERSION = "eagle3-hidden-states", "1"
FINAL_HIDDEN = "final_hidden"
_OPEN_SHARDS = 64  # a mapped file costs two of the 65,530 maps that Linux allows a process


def layer_output(layer: int) -> str:
    """Tensor name of layer output `layer`."""
    return f"layer_output.{layer}"


def shard_path(folder: Path, number: int) -> Path:
    return Path(folder) / f"shard-{number:05d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder in the order of their numbers."""
    return sorted(Path(folder).glob("shard-*.safetensors"), key=shard_number)


def next_shard_path(folder: Path) -> Path:
    """Where the next shard goes: after the highest number, so that a resumed dump overwrites nothing."""
    existing = shard_paths(folder)
    return shard_path(folder, shard_number(existing[-1]) + 1 if existing else 0)


def shard_number(path: Path) -> int:
    return int(Path(path).stem.removeprefix("shard-"))


class ShardBuilder:
    """Collects whole samples until they fill a shard.

    Args:
        states: tensor names, e.g. `["layer_output.1", "layer_output.14", "final_hidden"]`.
        shard_tokens: most rows of a shard. A longer sample gets a shard of its own, since samples are never cut.
    """

    def __init__(self, states: list[str], shard_tokens: int):
        self.states, self.shard_tokens = states, shard_tokens
        self._reset()

    def _reset(self) -> None:
        self.sample_ids: list[str] = []
        self.rows = 0
        self._input_ids: list[torch.Tensor] = []
        self._states: dict[str, list[torch.Tensor]] = {name: [] for name in self.states}

    def has_room(self, rows: int) -> bool:
        return self.rows == 0 or self.rows + rows <= self.shard_tokens

    def add(self, sample_id: str, input_ids: torch.Tensor, states: dict[str, torch.Tensor]) -> None:
        """Add a sample: `input_ids` [rows], every state [rows, H]. The tensors are kept until `write`."""
        if set(states) != set(self.states) or any(len(s) != len(input_ids) for s in states.values()):
            raise ValueError(f"sample {sample_id}: states do not fit {self.states} with {len(input_ids)} rows")
        self.sample_ids.append(sample_id)
        self.rows += len(input_ids)
        self._input_ids.append(input_ids.to(torch.int32))
        for name, state in states.items():
            self._states[name].append(state)

    def write(self, path: Path) -> None:
        """Write the collected samples as one shard and start anew."""
        lengths = [len(ids) for ids in self._input_ids]
        tensors = {
            "input_ids": torch.cat(self._input_ids),
            "offsets": torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
        }
        for name in self.states:  # popped one by one: at most one state lies in memory twice
            tensors[name] = torch.cat(self._states.pop(name))
        save_safetensors(path, tensors, {"format": FORMAT, "version": VERSION,
                                         "sample_ids": json.dumps(self.sample_ids)})
        self._reset()


@dataclass(frozen=True)
class SampleRef:
    """Where a sample's rows lie."""

    id: str
    shard: int
    """index into `HiddenStore.paths`"""
    start: int
    length: int


class HiddenStore:
    """Random access to the samples of a list of shards.

    Args:
        paths: shard files; `samples` follows their order.

    Raises:
        PipelineError: a file is missing, truncated, not a shard, or two shards hold the same sample.
    """

    def __init__(self, paths: list[Path]):
        self.paths = [Path(p) for p in paths]
        self.samples: list[SampleRef] = []
        # safetensors gives views of the mapped file; asking it for each sample's rows would cost more than to copy them.
        self._tensors = lru_cache(maxsize=_OPEN_SHARDS)(lambda shard: _views(self.paths[shard]))
        self._names: set[str] | None = None
        seen: dict[str, Path] = {}
        for shard, path in enumerate(self.paths):
            ids, offsets, names = _index(path, _open(path))
            self._names = names if self._names is None else self._names & names
            for sample_id, start, end in zip(ids, offsets, offsets[1:]):
                if sample_id in seen:
                    raise _damaged(path, f"sample {sample_id!r} lies in {seen[sample_id].name} as well")
                seen[sample_id] = path
                self.samples.append(SampleRef(sample_id, shard, start, end - start))

    @property
    def state_names(self) -> list[str]:
        """Names of the hidden states every shard holds, layer outputs ascending, then `final_hidden`."""
        names = self._names or set()
        layers = sorted(int(n.removeprefix("layer_output.")) for n in names if n.startswith("layer_output."))
        return [layer_output(layer) for layer in layers] + ([FINAL_HIDDEN] if FINAL_HIDDEN in names else [])

    def rows(self, ref: SampleRef, name: str) -> torch.Tensor:
        """Rows of one sample: [length, H] of a hidden state, or [length] of `input_ids`."""
        path = self.paths[ref.shard]
        try:
            return self._tensors(ref.shard)[name][ref.start:ref.start + ref.length]
        except KeyError as e:
            raise _damaged(path, f"tensor {name!r} is not there") from e

    def input_ids(self, ref: SampleRef) -> torch.Tensor:
        """Token ids [length], int64."""
        return self.rows(ref, "input_ids").long()


def sample_ids(path: Path) -> list[str]:
    """Ids of the samples in one shard; nothing but the file's header and offsets is read."""
    return _index(path, _open(path))[0]


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as e:
        raise _damaged(path, "the file is missing") from e
    except (SafetensorError, OSError) as e:
        raise _damaged(path, f"the file is truncated or altered ({e})") from e


def _views(path: Path) -> dict[str, torch.Tensor]:
    file = _open(path)
    try:
        return {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as e:
        raise _damaged(path, f"its tensors cannot be read ({e})") from e


def _index(path: Path, file) -> tuple[list[str], list[int], set[str]]:
    """Sample ids, offsets and tensor names, checked against the shapes of all tensors."""
    metadata = file.metadata() or {}
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise _damaged(path, f"it is not a {FORMAT} file of version {VERSION}: {metadata.get('format')!r}, "
                             f"{metadata.get('version')!r}")
    try:
        ids = json.loads(metadata["sample_ids"])
        offsets = file.get_tensor("offsets").tolist()
        rows = {name: file.get_slice(name).get_shape()[0] for name in file.keys() if name != "offsets"}
    except (KeyError, ValueError, SafetensorError) as e:
        raise _damaged(path, f"its index cannot be read ({e})") from e
    ascending = all(a <= b for a, b in zip(offsets, offsets[1:]))
    if len(offsets) != len(ids) + 1 or offsets[0] != 0 or not ascending or set(rows.values()) != {offsets[-1]}:
        raise _damaged(path, "ids, offsets and rows do not fit together")
    return ids, offsets, rows.keys() | {"offsets"}


def _damaged(path: Path, why: str) -> PipelineError:
    return PipelineError(f"hidden-state shard {path}: {why}", field=str(path),
                         fix=f"rm {path}, then: make dump (only its samples are dumped again)")
