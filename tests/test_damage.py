"""Damaged files: what is wrong is named with file and line or byte, and what is whole before and behind it is used."""

from __future__ import annotations

import gzip
import json

import pyarrow
import pytest

from pipeline.errors import PipelineError
from pipeline.prompts import containers
from pipeline.prompts.containers import read_file
from tests.source_files import arrow_file, arrow_stream, compressed, jsonl, parquet, selected, skipped

A, B = b'{"prompt": "Hi"}\n', b'{"prompt": "ok"}\n'
OTHER = {"prompt": "other"}

# Name, bytes, message, number of records that are whole, reason counted.
DAMAGE = {
    "cut-off line": ("a.jsonl", A + b'{"prompt": "o', r"a.jsonl:2 is not JSON at byte 28: Unterminated string", 1, "json"),
    "broken line": ("a.jsonl", A + b'{"prompt" "x"}\n' + B, r"a.jsonl:2 is not JSON at byte 27: Expecting ':'", 2, "json"),
    "latin-1": ("a.jsonl", A + '{"prompt": "é"}\n'.encode("latin-1") + B,
                r"a.jsonl:2 is not UTF-8 at byte 29 \(0xe9\): invalid continuation byte", 2, "encoding"),
    "utf-16": ("a.jsonl", (A + B).decode().encode("utf-16"), r"a.jsonl:1 is UTF-16, not UTF-8", 0, "encoding"),
    "utf-16 array": ("a.json", '[{"prompt": "Hi"}]'.encode("utf-16"), r"a.json:1 is UTF-16, not UTF-8", 0, "encoding"),
    "CRLF": ("a.jsonl", A.replace(b"\n", b"\r\n") + b"{\r\n" + B, r"a.jsonl:2 is not JSON at byte 21: Expecting property", 2,
             "json"),
    "duplicate key": ("a.jsonl", A + b'{"prompt": "x", "prompt": "y"}\n' + B, r"a.jsonl:2 .* the key 'prompt' occurs twice", 2,
                      "json"),
    "zeros": ("a.jsonl", A + b"\0" * 50, r"a.jsonl:2 is not JSON at byte 17: Expecting value", 1, "json"),
    "NUL character": ("a.jsonl", A + b'{"prompt": "a\\u0000"}\n' + B, r"a.jsonl:2 holds a NUL character in prompt", 2, "text"),
    "lone surrogate": ("a.jsonl", A + b'{"prompt": "\\ud83d"}\n' + B, r"a.jsonl:2 holds text that is not valid Unicode", 2,
                       "text"),
    "not a number": ("a.jsonl", A + b'{"prompt": "x", "score": NaN}\n' + B, r"a.jsonl:2 .*NaN is no JSON number", 2, "json"),
    "nested": ("a.jsonl", A + b"[" * 100_000 + b"\n" + B, r"a.jsonl:2 is nested too deeply", 2, "json"),
    "long broken line": ("a.jsonl", A + b'{"prompt": "' + b"x" * 10_000_000 + b'" }}\n' + B,
                         r"a.jsonl:2 is not JSON at byte 10,000,032: Extra data", 2, "json"),
    "cut-off array": ("a.json", b'[{"prompt": "Hi"},\n {"prompt": "o', r"a.json:2 holds a record, from byte 20 on, that does not "
                      r"end: the file is cut off at byte 33.*Unterminated string", 1, "truncated"),
    "array cut off between": ("a.json", b'[{"prompt": "Hi"},\n', r"a.json:2 ends at byte 19 without the closing bracket", 1,
                              "truncated"),
    "broken element": ("a.json", b'[{"prompt": "Hi"},\n {"prompt" "x"},\n\n {"prompt": "ok"}]',
                       r"a.json:2 is not JSON at byte 30: Expecting ':'", 2, "json"),
    "latin-1 in an array": ("a.json", '[{"prompt": "Hi"}, {"prompt": "é"}, {"prompt": "ok"}]'.encode("latin-1"),
                            r"a.json:1 is not UTF-8 at byte 31", 2, "encoding"),
    "trailing comma": ("a.json", b'[{"prompt": "Hi"},]', r"a.json:1 is not JSON at byte 18: no record behind a comma", 1, "json"),
    "two arrays": ("a.json", b'[{"prompt": "Hi"}]\n[{"prompt": "ok"}]',
                   r"a.json:1 goes on behind the end of the array, at byte 18", 1, "json"),
    "quote missing": ("a.json", b'[{"prompt": "Hi"}, {"prompt": "x}, {"prompt": "ok"}]', r"a.json:1 holds a record, from byte 19 "
                      r"on, that does not end: .* a quote or bracket is missing.*at byte 37", 1, "truncated"),
    "not parquet": ("a.parquet", b"PAR1 nothing", r"a.parquet: after record 0 cannot be read any further, 0 records", 0, "file"),
    "not gzip": ("a.jsonl.gz", A, r"a.jsonl.gz: after record 0 cannot be read any further", 0, "file"),
    "text in latin-1": ("a.txt", "Hi\né\nok\n".encode("latin-1"), r"a.txt:2 is not UTF-8 at byte 3 \(0xe9\)", 2, "encoding"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_the_rest_is_used_when_asked(tmp_path, case):
    name, content, message, whole, reason = DAMAGE[case]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PipelineError, match=message) as e:
        selected(path, tmp_path / "out")
    before = min(whole, 1)  # the damage is the second record
    assert f"{before} records before it can be used" in str(e.value)
    assert str(path) in e.value.value and "prompts.on_bad_record=skip" in e.value.fix
    assert len(str(e.value)) < 1000 and not (tmp_path / "out" / "skipped.jsonl").exists()

    # With another source beside it, so that something is left in any case.
    other = jsonl(tmp_path / "other.jsonl", OTHER)
    records, account = selected([{"path": str(path)}, {"path": str(other)}], tmp_path / "out", on_bad_record="skip")
    assert [r.messages[0]["content"] for r in records] == ["Hi", "ok"][:whole] + ["other"]
    assert account.by_source == [{"read": whole + 1, f"skipped_bad_{reason}": 1}, {"read": 1}]
    [line] = skipped(tmp_path / "out", "quarantine.jsonl")
    assert line["where"].startswith(str(path)) and line["reason"] == f"bad_{reason}" and len(line["raw"]) <= 1000


@pytest.mark.parametrize("write", [parquet, arrow_file, arrow_stream])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_cut_off_table_says_what_was_read(tmp_path, write, suffix):
    kind = "parquet" if write is parquet else "arrow"
    path = write(tmp_path / f"a.{kind}", *({"prompt": f"prompt {i}" * 50} for i in range(500)))
    path = compressed(path, suffix) if suffix else path
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(PipelineError, match=r"after record 0 cannot be read any further, 0 records of it were read"):
        selected(path, tmp_path / "out")


def test_a_cut_off_compressed_file_gives_what_is_before(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(A * 20_000) + gzip.compress(B)[:-10])
    items = list(read_file(path))
    assert 10_000 < len(items) - 1 <= 20_000 and "cannot be read any further" in items[-1][1].detail
    assert items[-1][0] == f"{path}: after record {len(items) - 1}"


def test_a_table_with_text_that_is_not_utf8_loses_that_row_only(tmp_path):
    column = pyarrow.array([b"Hi", b"\xff", b"ok"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "a.parquet")
    records, account = selected(tmp_path / "a.parquet", tmp_path / "out", on_bad_record="skip")
    assert [r.messages[0]["content"] for r in records] == ["Hi", "ok"] and account.reasons == {"bad_encoding": 1}
    assert skipped(tmp_path / "out", "quarantine.jsonl")[0]["where"] == f"{tmp_path / 'a.parquet'}: row 2"


def test_a_long_line_is_read(tmp_path):
    text = "moon" * 2_500_000  # 10 MB
    path = jsonl(tmp_path / "a.jsonl", {"prompt": text}, {"prompt": "ok"})
    assert [len(r.messages[0]["content"]) for r in selected(path, tmp_path / "out")[0]] == [len(text), 2]


def test_what_has_no_end_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "MAX_RECORD", 1000)
    monkeypatch.setattr(containers, "_CHUNK", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(A + b'{"prompt": "' + b"x" * 5000 + b'"}\n' + B)
    (_, good), (where, bad), (_, behind) = read_file(path)
    assert (good, behind) == ({"prompt": "Hi"}, {"prompt": "ok"})
    assert where == f"{path}:2" and bad.reason == "bad_too_large" and "5,015 bytes from byte 17 on" in bad.detail
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"prompt": "Hi"}, {"prompt": "x' + b"y" * 5000)
    (_, good), (where, bad) = read_file(path)
    assert good == {"prompt": "Hi"} and "does not end within 1,000 bytes" in bad.detail


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_an_array_is_the_same_in_chunks_of_any_size(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(containers, "_CHUNK", chunk)
    values = [{"prompt": 'a "quoted" \\ [,]{}'}, {"messages": [{"role": "user", "content": "é\n"}]}, [[], {}], 5, "x,]", None]
    path = tmp_path / "a.json"
    for indent in (None, 2):
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(values, indent=indent, ensure_ascii=False).encode())
        assert [value for _, value in read_file(path)] == values
