"""samples.parquet: what is written is read back, and every kind of damage is named with file and row."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import samples as module
from pipeline.errors import PipelineError
from pipeline.prompts.show import show
from pipeline.samples import SCHEMA, Sample, read_batches, read_sample_lines, read_samples, to_batch, write_batches, write_samples

SAMPLE = Sample(id="a", split="train", category="maths", messages=[{"role": "user", "content": "é🙂"}],
                input_ids=[5, 6, 7], loss_mask=[0, 1, 1], finish_reason="stop")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def many(draw) -> list[Sample]:
    made = []
    for id in draw(st.lists(TEXT.filter(bool), max_size=12, unique=True)):
        ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8))
        trained = draw(st.integers(0, len(ids) - 1))
        mask = [int(k == trained or draw(st.booleans())) for k in range(len(ids))]
        made.append(Sample(id, draw(st.sampled_from(["train", "heldout"])), draw(st.none() | TEXT),
                           [{"role": "user", "content": draw(TEXT), "tool_calls": [{"n": None}]}], ids, mask,
                           draw(st.sampled_from(["stop", "length", None]))))
    return made


@settings(max_examples=60, deadline=None)
@given(samples=many(), group_bytes=st.integers(1, 200), cut=st.integers(1, 5))
def test_what_is_written_is_read_and_batches_do_not_change_a_byte(samples, group_bytes, cut):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_GROUP_BYTES", group_bytes)
        first, second, third = (Path(folder) / name for name in "abc")
        write_samples(first, samples)
        assert list(read_samples(first)) == samples
        write_batches(second, (to_batch(samples[i:i + cut]) for i in range(0, len(samples), cut)))
        write_batches(third, (batch.slice(i, cut) for batch in read_batches(first) for i in range(0, len(batch), cut)))
        assert first.read_bytes() == second.read_bytes() == third.read_bytes()


def test_row_groups_are_bounded_and_other_programs_can_read_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_GROUP_BYTES", 100)
    samples = [replace(SAMPLE, id=str(i)) for i in range(20)]
    write_samples(tmp_path / "s", samples)
    assert len(json.dumps(SAMPLE.messages, ensure_ascii=False).encode()) == 39  # and 5 bytes for each of 3 tokens
    table = pa.parquet.read_table(tmp_path / "s")
    metadata = pa.parquet.read_metadata(tmp_path / "s")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [2] * 10
    assert table["input_ids"].to_pylist() == [[5, 6, 7]] * 20
    assert table["loss_mask"].to_pylist() == [[False, True, True]] * 20
    assert json.loads(table["messages"][0].as_py()) == SAMPLE.messages
    assert metadata.row_group(0).column(4).compression == "ZSTD"


# --- damage

def rows_file(path: Path, *rows: dict) -> Path:
    """A file of samples that nobody checked."""
    rows = [{**asdict(SAMPLE), "messages": json.dumps(SAMPLE.messages), "loss_mask": [False, True, True]} | row
            for row in rows]
    pa.parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), path)
    return path


@pytest.mark.parametrize("change, message", [
    ({"loss_mask": [False, True]}, "3 input_ids but 2 loss_mask"),
    ({"loss_mask": [False] * 3}, "sums to 0"),
    ({"input_ids": [1, -2, 3]}, "token ids"),
    ({"split": "test"}, "split is 'test'"),
    ({"finish_reason": "abort"}, "finish_reason"),
    ({"id": ""}, "id is ''"),
    ({"id": "a"}, "already occurs in row 1"),
    ({"messages": "[{"}, "is not a sample: Expecting"),
])
def test_a_bad_row_is_named(tmp_path, change, message):
    path = rows_file(tmp_path / "s.parquet", {}, {"id": "b"} | change)
    with pytest.raises(PipelineError, match=message) as e:
        list(read_samples(path))
    assert e.value.field == f"{path}: row 2" and "make prompts" in e.value.fix


def test_a_file_that_is_cut_off_altered_or_something_else_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_GROUP_BYTES", 1)  # one sample in each row group
    path = tmp_path / "s.parquet"
    write_samples(path, [replace(SAMPLE, id=str(i)) for i in range(4)])
    whole = path.read_bytes()
    pages = pa.parquet.read_metadata(path).row_group(2).column(5)
    begin = pages.dictionary_page_offset or pages.data_page_offset
    for damaged, behind in ((whole[:-10], 0), (whole[:40], 0), (b"", 0), (b"text\n", 0),
                            (whole[:begin + 30] + bytes([whole[begin + 30] ^ 1]) + whole[begin + 31:], 2)):
        path.write_bytes(damaged)
        with pytest.raises(PipelineError, match=f"is damaged behind row {behind}: ") as e:
            list(read_samples(path))
        assert e.value.field == str(path)
    pa.parquet.write_table(pa.table({"id": ["a"], "input_ids": [[1]]}), path)
    with pytest.raises(PipelineError, match="not a file of samples: its columns are id string, input_ids list"):
        list(read_samples(path))
    with pytest.raises(PipelineError, match="does not exist"):
        list(read_samples(tmp_path / "other"))


@pytest.mark.parametrize("bad", [
    SAMPLE, replace(SAMPLE, id="b", loss_mask=[0, 0, 0]), replace(SAMPLE, id="b", loss_mask=[0, True, 0]),
    replace(SAMPLE, id="b", input_ids=[1, 2, 2**31])])
def test_a_bad_sample_is_not_written_and_leaves_no_file(tmp_path, bad):
    with pytest.raises(PipelineError):
        write_samples(tmp_path / "s.parquet", [SAMPLE, bad])
    assert list(tmp_path.iterdir()) == []


# --- JSON lines that a user hands to diagnose

def lines_file(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_lines_are_read_and_a_bad_one_is_named(tmp_path):
    path = lines_file(tmp_path / "s.jsonl", asdict(SAMPLE), asdict(SAMPLE) | {"id": "b"})
    assert list(read_sample_lines(path)) == [SAMPLE, replace(SAMPLE, id="b")]
    for change, message in (({"loss_mask": [0, 2, 0]}, "zeros and ones"), ({"input_ids": "abc"}, "token ids"),
                            ({"id": 7}, "id is 7"), ({"id": "a"}, "already occurs in line 1"),
                            ({"more": 1}, "unexpected keyword")):
        lines_file(path, asdict(SAMPLE), asdict(SAMPLE) | {"id": "b"} | change)
        with pytest.raises(PipelineError, match=message) as e:
            list(read_sample_lines(path))
        assert e.value.field == f"{path}:2"


@pytest.mark.parametrize("line", [b'{"id": "b", "spl', b'"text"', b"\xff\xfe\n", b'{"id": "b"}'])
def test_a_line_that_is_no_sample_is_named(tmp_path, line):
    path = tmp_path / "s.jsonl"
    path.write_bytes(json.dumps(asdict(SAMPLE)).encode() + b"\n" + line)
    with pytest.raises(PipelineError, match=r"s.jsonl:2 is not a sample"):
        list(read_sample_lines(path))


def test_view_marks_exactly_the_trained_tokens():
    class Letters:
        def decode(self, ids, skip_special_tokens):
            return "".join(map(chr, ids))

    sample = replace(SAMPLE, input_ids=[*map(ord, "abcdef")], loss_mask=[0, 1, 1, 0, 0, 1])
    head, text = show(sample, Letters(), colour=False).splitlines()
    assert text == "a⟦bc⟧de⟦f⟧"
    assert "6 tokens, 3 trained" in head
    assert "\x1b[30;42mbc\x1b[0m" in show(sample, Letters(), colour=True)
