"""Files of records read as a stream: JSON lines, a JSON array, text lines, tables (tables.py), plain or compressed.

A reader yields `(where, value)` for every record. A record that cannot be read is yielded as a `BadRecord` in its place,
so that the caller decides whether that ends the work; reading goes on behind it wherever the file allows.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO

import pyarrow

from pipeline.errors import PipelineError
from pipeline.prompts.refused import BadRecord
from pipeline.prompts.tables import read_arrow, read_parquet

MAX_RECORD = 1 << 26
"""bytes of one record; more is a missing end of line or quote, not a conversation"""

_CHUNK = 1 << 20  # bytes of an array looked at together
_BUFFER = 1 << 16  # what of a cut-off compressed file is lost before its end
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# Strings are taken whole, so that brackets and commas within them do not count. A lone quote opens one that does not end.
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["{}\[\],]', re.DOTALL)

Item = tuple[str, object]


def read_file(path: Path) -> Iterator[Item]:
    """Read a file record by record; `where` names the file and the line, record or row (counted from 1).

    Raises:
        PipelineError: the file cannot be opened or is of no known kind.
    """
    kind, compression = _kind(path)
    number = 0
    with _opened(path, compression) as stream:
        try:
            for number, item in enumerate(_READERS[kind](stream, str(path)), 1):
                yield item
        except (OSError, pyarrow.ArrowException) as e:  # a cut-off or altered compressed file, Parquet or Arrow file
            yield f"{path}: after record {number}", BadRecord(
                "file", f"cannot be read any further, {number} records of it were read: {e}",
                fix="write or download the file again")


def known_kind(path: Path) -> bool:
    """Whether `read_file` knows files of that name."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in _READERS


def _kind(path: Path) -> tuple[str, str | None]:
    if not known_kind(path):
        raise PipelineError(f"{path} is not of a known kind", field="prompts.source", value=str(path),
                            fix=f"files may be {', '.join(_READERS)}, each also with {' or '.join(_COMPRESSIONS)} behind it")
    compression = _COMPRESSIONS.get(path.suffix)
    return (path.with_suffix("").suffix if compression else path.suffix), compression


def _opened(path: Path, compression: str | None) -> BinaryIO:
    try:
        if compression is None:
            return open(path, "rb", buffering=_BUFFER)
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), compression), _BUFFER)
    except OSError as e:
        raise PipelineError(f"{path} cannot be opened: {e.strerror or e}", field="prompts.source", value=str(path),
                            fix="give a file that exists and that you may read") from e


def _json_lines(stream: BinaryIO, path: str) -> Iterator[Item]:
    for where, start, line in _lines(stream, path):
        yield where, line if isinstance(line, BadRecord) else _parsed(line, start)


def _text_lines(stream: BinaryIO, path: str) -> Iterator[Item]:
    for where, start, line in _lines(stream, path):
        if not isinstance(line, BadRecord):
            try:
                yield where, {"prompt": line.decode().rstrip("\r\n")}
                continue
            except UnicodeDecodeError as e:
                line = _not_utf8(e, line, start)
        yield where, line


def _lines(stream: BinaryIO, path: str) -> Iterator[tuple[str, int, bytes | BadRecord]]:
    """Place, first byte and content of every line that is not blank."""
    start = 0
    for number in count(1):
        line = stream.readline(MAX_RECORD)
        if not line:
            return
        where, size = f"{path}:{number}", len(line)
        if number == 1 and line.startswith(_UTF_16):
            yield where, 0, _utf16(line)
            return
        if number == 1 and line.startswith(_BYTE_ORDER_MARK):  # editors on Windows put it there
            line, start, size = line[3:], 3, size - 3
        if size >= MAX_RECORD - 3 and not line.endswith(b"\n"):
            head = line[:1000]
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_RECORD)
                size += len(line)
            yield where, start, BadRecord("too_large", f"is a line of {size:,} bytes from byte {start:,} on", head)
        elif line.strip():
            yield where, start, line
        start += size


def _json(stream: BinaryIO, path: str) -> Iterator[Item]:
    """An array of records or, as some write it, one record a line."""
    head = stream.peek(4096)[:4096]
    if head.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"[":
        return _json_array(stream, path)
    return _json_lines(stream, path)


def _json_array(stream: BinaryIO, path: str) -> Iterator[Item]:
    """The elements of an array, found by their commas and brackets and parsed one by one."""
    mark = stream.peek(3)[:3] == _BYTE_ORDER_MARK
    base = len(stream.read(3 if mark else 0))  # byte of the file at which the buffer begins
    buffer = stream.read(_CHUNK)
    line = number = 1
    depth, at, begin = 0, 0, 0  # at: next byte to look at; begin: first byte behind the last comma
    while True:
        again = None  # where to look again when more of the file is there
        for token in _JSON_TOKEN.finditer(buffer, at):
            symbol = token[0]
            at = token.end()
            if symbol == b'"':
                again = token.start()
                break
            if symbol in b"{[":
                depth += 1
                if depth == 1:
                    begin = at
            elif symbol in b"}]":
                depth -= 1
            if symbol == b"," and depth == 1 or depth == 0:
                element = buffer[begin:token.start()]
                content = element.lstrip()
                blank = len(element) - len(content)
                line += element.count(b"\n", 0, blank)
                if content or symbol == b"," or number > 1:
                    start = base + begin + blank
                    where = f"{path}:{line}"
                    yield where, _parsed(content, start) if content else BadRecord(
                        "json", f"is not JSON at byte {start:,}: no record behind a comma")
                line += content.count(b"\n")
                begin, number = at, number + 1
                if depth == 0:
                    rest = buffer[at:] + stream.read(_CHUNK)
                    if rest.strip():
                        yield f"{path}:{line}", BadRecord(
                            "json", f"goes on behind the end of the array, at byte {base + at:,}", rest.lstrip())
                    return
        # Nothing before `begin` is needed any more.
        at = (len(buffer) if again is None else again) - begin
        buffer, base, begin = buffer[begin:], base + begin, 0
        more = stream.read(_CHUNK) if len(buffer) < MAX_RECORD else b""
        if not more:
            yield _unfinished(buffer, base, line, path)
            return
        buffer += more


def _unfinished(rest: bytes, base: int, line: int, path: str) -> Item:
    content = rest.lstrip()
    start, line = base + len(rest) - len(content), line + rest.count(b"\n", 0, len(rest) - len(content))
    if len(rest) >= MAX_RECORD:
        what = f"does not end within {MAX_RECORD:,} bytes: a quote or bracket is missing"
    elif content:
        what = f"does not end: the file is cut off at byte {base + len(rest):,}, or a quote or bracket is missing"
    else:
        return f"{path}:{line}", BadRecord("truncated", f"ends at byte {base + len(rest):,} without the closing bracket",
                                           fix="write or download the file again")
    found = _parsed(content, start)
    hint = f" ({found.detail})" if isinstance(found, BadRecord) else ""
    return f"{path}:{line}", BadRecord("truncated", f"holds a record, from byte {start:,} on, that {what}{hint}", content,
                                       fix="write or download the file again, or repair it there")


def _parsed(data: bytes, start: int) -> object:
    """A JSON value, or what is wrong with it. `start` is the byte of the file at which `data` begins."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError as e:
        return _not_utf8(e, data, start)
    except json.JSONDecodeError as e:
        byte = start + len(e.doc[:e.pos].encode())
        return BadRecord("json", f"is not JSON at byte {byte:,}: {e.msg}", data)
    except RecursionError:
        return BadRecord("json", "is nested too deeply", data)
    except ValueError as e:  # from the two hooks, or a number of thousands of digits
        return BadRecord("json", f"is not JSON to rely on: {e}", data)


def _object(pairs: list[tuple[str, object]]) -> dict:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return made


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _not_utf8(e: UnicodeDecodeError, data: bytes, start: int) -> BadRecord:
    return BadRecord("encoding", f"is not UTF-8 at byte {start + e.start:,} (0x{data[e.start]:02x}): {e.reason}", data,
                     fix="convert the file to UTF-8, or repair that record")


def _utf16(data: bytes) -> BadRecord:
    return BadRecord("encoding", "is UTF-16, not UTF-8", data, fix="convert the file: iconv -f UTF-16 -t UTF-8")


_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_READERS: dict[str, Callable[[BinaryIO, str], Iterator[Item]]] = {
    ".jsonl": _json_lines, ".json": _json, ".txt": _text_lines, ".parquet": read_parquet, ".arrow": read_arrow}
