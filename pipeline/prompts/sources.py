"""Where conversations come from: the built-in set, a file or a Hugging Face dataset, read as one kind of record."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import PipelineError
from pipeline.files import sha256_file, sha256_json, sha256_text

Split = Literal["train", "heldout"]

BUILTIN = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"
_SUFFIXES = (".jsonl", ".json", ".parquet")
_ACCEPTED = ("`messages` (list of role/content), `conversations` (list of from/value, ShareGPT), "
             "`prompt` or `text` (a string)")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
          "system": "system", "tool": "tool"}
_FIX = f"a record needs {_ACCEPTED}; set prompts.source to such a file or dataset"


@dataclass(frozen=True)
class Record:
    """A conversation as the source gives it.

    Attributes:
        id: the source's `id`, else a hash of the content, so that order and additions do not rename it.
        split: the source's `split`, else drawn by a hash of the id.
        where: file and line (or dataset and row), for messages.
    """

    id: str
    category: str | None
    split: Split
    messages: list[dict]
    where: str


def read_records(source: str, *, source_split: str, heldout_fraction: float, at_most: int | None = None
                 ) -> Iterator[Record]:
    """Read a source record by record.

    Args:
        source: `builtin`, a .jsonl/.json/.parquet file, or the name or folder of a Hugging Face dataset.
        source_split: split to read of a Hugging Face dataset.
        heldout_fraction: share of the records without a `split` of their own that is held out.
        at_most: stop after that many records of a dataset that has no categories to spread them over.

    Raises:
        PipelineError: no such source, an unreadable record (with file and line) or one of unknown form (with its keys).
    """
    for where, raw in _read_raw(source, source_split, at_most):
        yield _record(raw, where, heldout_fraction)


def file_of(source: str) -> Path | None:
    """The file behind `source`; None if it is a dataset."""
    if source == "builtin":
        return BUILTIN
    path = Path(source).expanduser()
    if path.suffix in _SUFFIXES or path.is_file():
        return path
    return None


def fingerprint(source: str) -> str | None:
    """Checksum of the file behind `source`, so that an edited file makes the stage run again; None for datasets."""
    path = file_of(source)
    return sha256_file(path) if path is not None and path.is_file() else None


def _read_raw(source: str, source_split: str, at_most: int | None) -> Iterator[tuple[str, object]]:
    path = file_of(source)
    if path is None:
        return _read_dataset(source, source_split, at_most)
    if not path.is_file():
        raise PipelineError(f"{path} does not exist", field="prompts.source", value=source,
                            fix="give an existing file, or leave the default: prompts.source=builtin")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".jsonl" or (path.suffix == ".json" and not _starts_with_bracket(path)):
        return _read_lines(path)
    if path.suffix == ".json":
        return _read_array(path)
    raise PipelineError(f"{path} is not of a known kind", field="prompts.source", value=source,
                        fix=f"files may be {', '.join(_SUFFIXES)}")


def _starts_with_bracket(path: Path) -> bool:
    with open(path, "rb") as f:
        return f.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _read_lines(path: Path) -> Iterator[tuple[str, object]]:
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            where = f"{path}:{number}"
            try:
                # Editors on Windows put a byte order mark before the first line.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield where, json.loads(text)
            except ValueError as e:
                raise PipelineError(f"{where} is not JSON: {e}", field="prompts.source", value=where,
                                    fix="repair or remove that line") from e


def _read_array(path: Path) -> Iterator[tuple[str, object]]:
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as e:
        where = f"{path}:{e.lineno}"
        raise PipelineError(f"{where} is not JSON: {e}", field="prompts.source", value=where,
                            fix="repair the file, or write one JSON object a line into a .jsonl file") from e
    except UnicodeDecodeError as e:
        raise PipelineError(f"{path} is not UTF-8: {e}", field="prompts.source", value=str(path),
                            fix="convert the file to UTF-8") from e
    for number, record in enumerate(records, 1):
        yield f"{path}: record {number}", record


def _read_parquet(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", record
    except (pyarrow.ArrowException, OSError) as e:
        raise PipelineError(f"{path} is not readable Parquet after row {number}: {e}", field="prompts.source",
                            value=str(path), fix="write or download the file again") from e


def _read_dataset(source: str, split: str, at_most: int | None) -> Iterator[tuple[str, object]]:
    path = Path(source).expanduser()
    if not path.is_dir() and (source.startswith(("/", ".", "~")) or source.count("/") > 1):
        raise PipelineError(f"{source} does not exist", field="prompts.source", value=source,
                            fix="give an existing file or folder, or leave the default: prompts.source=builtin")
    import datasets

    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            dataset = datasets.load_from_disk(str(path))
            dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            dataset = datasets.load_dataset(str(path) if path.is_dir() else source, split=split, streaming=True)
        if at_most is not None and "category" not in (dataset.features or {"category": None}):
            dataset = dataset.take(at_most)
        for number, record in enumerate(dataset, 1):
            yield f"{source}[{split}]: row {number}", record
    except Exception as e:  # a dozen types for "no network", "no such name", "no such split"
        first = (str(e).splitlines() or [""])[0]
        offline = " (the hub is switched off: HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise PipelineError(
            f"cannot read the dataset {source}, split {split}{offline}: {type(e).__name__}: {first}",
            field="prompts.source", value=source,
            fix="check its name, prompts.source_split and the network; without network give a folder or a .jsonl, "
                ".json or .parquet file, or leave the default: prompts.source=builtin") from e


def _record(raw: object, where: str, heldout_fraction: float) -> Record:
    if not isinstance(raw, dict):
        raise PipelineError(f"{where} holds a {type(raw).__name__}, not an object", field="prompts.source", value=where,
                            fix=_FIX)
    messages = _messages(raw, where)
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:  # half of a surrogate pair, as scraped text contains
        raise PipelineError(f"{where} holds text that is not valid Unicode: {e.reason}", field="prompts.source",
                            value=where, fix="repair or remove that record") from e
    given = raw.get("id")
    # The hash is over the content alone, so it does not depend on the file's format.
    identity = sha256_json(messages)[:16] if given in (None, "") else str(given)
    category = raw.get("category")
    split = raw.get("split")
    if split is None:
        # Another salt than the ids, which may themselves be hashes.
        draw = int(sha256_text(f"split:{identity}")[:8], 16) / 16**8
        split = "heldout" if draw < heldout_fraction else "train"
    elif split not in ("train", "heldout"):
        raise PipelineError(f"{where} says split = {split!r}", field="prompts.source", value=where,
                            fix='`split` is "train" or "heldout"; without it, prompts.heldout_fraction is held out')
    return Record(identity, None if category is None else str(category), split, messages, where)


def _messages(raw: dict, where: str) -> list[dict]:
    if raw.get("messages") is not None:
        return _turns(raw["messages"], "messages", "role", "content", where)
    if raw.get("conversations") is not None:
        return _turns(raw["conversations"], "conversations", "from", "value", where)
    for key in ("prompt", "text"):
        if isinstance(raw.get(key), str):
            return [{"role": "user", "content": raw[key]}]
    raise PipelineError(f"{where} is of unknown form: its keys are {', '.join(map(str, raw)) or '(none)'}",
                        field="prompts.source", value=where, fix=_FIX)


def _turns(turns: object, field: str, role_key: str, content_key: str, where: str) -> list[dict]:
    if not isinstance(turns, list):
        raise PipelineError(f"{where}: `{field}` is a {type(turns).__name__}, not a list", field="prompts.source",
                            value=where, fix=_FIX)
    messages = []
    for k, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise PipelineError(f"{where}: {field}[{k}] is not an object", field="prompts.source", value=where,
                                fix=_FIX)
        turn = {key: value for key, value in turn.items() if value is not None}  # Parquet fills absent keys with null
        role = _ROLES.get(str(turn.get(role_key)))
        content = turn.get(content_key, "" if "tool_calls" in turn else None)
        if role is None or not isinstance(content, str):
            raise PipelineError(
                f"{where}: {field}[{k}] has `{role_key}` = {turn.get(role_key)!r} and `{content_key}` of type "
                f"{type(content).__name__}; its keys are {', '.join(turn)}", field="prompts.source", value=where,
                fix=f"`{role_key}` is one of {', '.join(_ROLES)} and `{content_key}` a string")
        rest = {key: value for key, value in turn.items() if key not in (role_key, content_key)}
        messages.append({"role": role, "content": content, **(rest if field == "messages" else {})})
    return messages
