"""Where conversations come from: the built-in set, a file, a folder of shards or a Hugging Face dataset.

    read_source(SourceConfig(path="shards/"), "train")  →  (where, raw record or BadRecord), …
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import PromptsConfig, SourceConfig
from pipeline.errors import PipelineError
from pipeline.files import sha256_file, sha256_json
from pipeline.prompts.containers import Item, known_kind, read_file
from pipeline.prompts.tables import without_nulls

BUILTIN = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"


def sources(prompts: PromptsConfig) -> list[SourceConfig]:
    """`prompts.source` as a list."""
    return [SourceConfig(path=prompts.source)] if isinstance(prompts.source, str) else prompts.source


def read_source(source: SourceConfig, split: str) -> Iterator[Item]:
    """Read a source record by record, in the order of its files' names and of the records in them.

    Args:
        split: of a dataset or folder, where the source names none.

    Raises:
        PipelineError: there is no such source.
    """
    split = source.split or split
    files = files_of(source.path, split)
    if files is None:
        yield from _read_dataset(source.path, split)
    for path in files or []:
        yield from read_file(path)


def files_of(path: str, split: str) -> list[Path] | None:
    """The files behind a source; None if `datasets` reads it (a name on the hub, or what `save_to_disk` wrote)."""
    if path == "builtin":
        return [BUILTIN]
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        return None if _saved_dataset(place) else _shards(place, split)
    if known_kind(place) or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise PipelineError(f"{path} does not exist", field="prompts.source", value=path,
                            fix="give an existing file or folder, or leave the default: prompts.source=builtin")
    return None


def fingerprint(prompts: PromptsConfig) -> str:
    """Checksum of all files that the selection reads, so that an edited file makes the stage run again.

    Datasets of the hub count by their names.
    """
    files = [files_of(source.path, source.split or prompts.source_split) or [] for source in sources(prompts)]
    files += [files_of(path, prompts.source_split) or [] for path in prompts.decontaminate_against]
    return sha256_json([[sha256_file(file) for file in part if file.is_file()] for part in files])


def _saved_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _shards(folder: Path, split: str) -> list[Path]:
    """Files of a split by the rules of `datasets`: names or folders with "train", "test" …; without any all are "train"."""
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    base = str(folder.resolve())
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    except (EmptyDatasetError, FileNotFoundError):
        found = {}
    parts = {str(name): files for name, paths in found.items() if (files := sorted({*map(Path, paths)} & _readable(folder)))}
    if not parts:
        raise PipelineError(f"{folder} holds no file of a known kind", field="prompts.source", value=str(folder),
                            fix="give a folder with .jsonl, .json, .txt, .parquet or .arrow files")
    if split not in parts:
        raise PipelineError(f"{folder} has no files of the split {split}; it has {', '.join(parts)}",
                            field="prompts.source_split", value=split, fix=f"prompts.source_split={next(iter(parts))}")
    outside = _readable(folder) - {file for files in parts.values() for file in files}
    if outside:
        print(f"prompts: {len(outside)} files of {folder} belong to no split by their names and are not read, "
              f"for example {min(outside)}")
    return parts[split]


def _readable(folder: Path) -> set[Path]:
    files = (path for path in folder.resolve().rglob("*") if known_kind(path) and path.is_file())
    return {path for path in files if not any(part.startswith((".", "_")) for part in path.relative_to(folder.resolve()).parts)}


def _read_dataset(name: str, split: str) -> Iterator[Item]:
    import datasets

    place, number = Path(name).expanduser(), 0
    try:
        if place.is_dir():
            dataset = datasets.load_from_disk(str(place))
            dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            dataset = datasets.load_dataset(name, split=split, streaming=True)
        for number, record in enumerate(dataset, 1):
            yield f"{name}[{split}]: row {number}", without_nulls(record)
    except Exception as e:  # a dozen types for "no network", "no such name", "no such split"
        first = (str(e).splitlines() or [""])[0]
        offline = " (the hub is switched off: HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise PipelineError(
            f"cannot read the dataset {name}, split {split}, after row {number}{offline}: {type(e).__name__}: {first}",
            field="prompts.source", value=name,
            fix="check its name, prompts.source_split and the network; without network give a folder or a .jsonl, "
                ".json, .txt, .parquet or .arrow file, or leave the default: prompts.source=builtin") from e
