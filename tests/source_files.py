"""Files of records in every container that stage 1 reads, and the selection from them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import yaml

from pipeline.config import PromptsConfig
from pipeline.prompts.account import Account, open_account
from pipeline.prompts.records import Record
from pipeline.prompts.select import select
from pipeline.prompts.sources import sources
from pipeline.prompts.spool import open_spool

CONF = Path(__file__).parent.parent / "conf" / "prompts" / "default.yaml"


def settings(source, **overrides) -> PromptsConfig:
    """The repository's own default settings with another source."""
    given = source if isinstance(source, list) else str(source)
    return PromptsConfig.model_validate(yaml.safe_load(CONF.read_text()) | {"source": given} | overrides)


def selected(source, folder: Path, *, seed: int = 0, decode=None, **overrides) -> tuple[list[Record], Account]:
    """The records that stage 1 would use, and the account of the others; its files lie in `folder`."""
    prompts = settings(source, **overrides)
    with open_account(folder, len(sources(prompts))) as account, open_spool(folder) as spool:
        return list(select(prompts, seed=seed, account=account, spool=spool, decode=decode)), account


def skipped(folder: Path, name: str = "skipped.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").split("\n")[:-1]]


def jsonl(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def array(path: Path, *records: object) -> Path:
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return path


def parquet(path: Path, *records: dict) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    return path


def arrow_file(path: Path, *records: dict) -> Path:
    table = pyarrow.Table.from_pylist(list(records))
    with pyarrow.OSFile(str(path), "wb") as f, pyarrow.ipc.new_file(f, table.schema) as writer:
        writer.write_table(table)
    return path


def arrow_stream(path: Path, *records: dict) -> Path:
    table = pyarrow.Table.from_pylist(list(records))
    with pyarrow.OSFile(str(path), "wb") as f, pyarrow.ipc.new_stream(f, table.schema) as writer:
        writer.write_table(table)
    return path


def compressed(path: Path, suffix: str) -> Path:
    """The file packed in two pieces, as tools that append do; the plain one is removed."""
    data = path.read_bytes()
    pack = gzip.compress if suffix == ".gz" else lambda d: pyarrow.Codec("zstd").compress(d, asbytes=True)
    packed = path.with_name(path.name + suffix)
    packed.write_bytes(pack(data[:len(data) // 2]) + pack(data[len(data) // 2:]))
    path.unlink()
    return packed


CONTAINERS = {"lines.jsonl": jsonl, "array.json": array, "lines.json": jsonl, "table.parquet": parquet,
              "file.arrow": arrow_file, "stream.arrow": arrow_stream}
