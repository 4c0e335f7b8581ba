"""samples.jsonl: what is written is read back, and every kind of damage is named with file and line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from pipeline.errors import PipelineError
from pipeline.prompts.view import show
from pipeline.samples import Sample, read_samples, write_samples

SAMPLE = Sample(id="a", split="train", category="maths", messages=[{"role": "user", "content": "é🙂"}],
                input_ids=[5, 6, 7], loss_mask=[0, 1, 1], finish_reason="stop")


def test_round_trip(tmp_path):
    samples = [SAMPLE, replace(SAMPLE, id="b", split="heldout", category=None, finish_reason=None)]
    write_samples(tmp_path / "s.jsonl", samples)
    assert list(read_samples(tmp_path / "s.jsonl")) == samples
    assert json.loads((tmp_path / "s.jsonl").read_text().splitlines()[0])["messages"][0]["content"] == "é🙂"


@pytest.mark.parametrize("change, message", [
    ({"loss_mask": [0, 1]}, "3 input_ids but 2 loss_mask"),
    ({"loss_mask": [0, 0, 0]}, "sums to 0"),
    ({"loss_mask": [0, 2, 0]}, "zeros and ones"),
    ({"loss_mask": [0, True, 0]}, "zeros and ones"),
    ({"input_ids": [1, -2, 3]}, "token ids"),
    ({"input_ids": "abc"}, "token ids"),
    ({"split": "test"}, "split is 'test'"),
    ({"finish_reason": "abort"}, "finish_reason"),
    ({"id": 7}, "id is 7"),
    ({"id": "a"}, "already occurs in line 1"),
    ({"more": 1}, "unexpected keyword"),
])
def test_a_bad_line_is_named(tmp_path, change, message):
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(s) + "\n" for s in (asdict(SAMPLE), asdict(SAMPLE) | {"id": "b"} | change)))
    with pytest.raises(PipelineError, match=message) as e:
        list(read_samples(path))
    assert e.value.field == f"{path}:2"


@pytest.mark.parametrize("line", [b'{"id": "b", "spl', b'"text"', b"\xff\xfe\n", b'{"id": "b"}'])
def test_a_line_that_is_no_sample_is_named(tmp_path, line):
    path = tmp_path / "s.jsonl"
    path.write_bytes(json.dumps(asdict(SAMPLE)).encode() + b"\n" + line)
    with pytest.raises(PipelineError, match=r"s.jsonl:2 is not a sample"):
        list(read_samples(path))


def test_missing_file(tmp_path):
    with pytest.raises(PipelineError, match="does not exist"):
        list(read_samples(tmp_path / "s.jsonl"))


@pytest.mark.parametrize("bad", [SAMPLE, replace(SAMPLE, id="b", loss_mask=[0, 0, 0])])
def test_a_bad_sample_is_not_written_and_leaves_no_file(tmp_path, bad):
    with pytest.raises(PipelineError):
        write_samples(tmp_path / "s.jsonl", [SAMPLE, bad])
    assert list(tmp_path.iterdir()) == []


def test_view_marks_exactly_the_trained_tokens():
    class Letters:
        def decode(self, ids, skip_special_tokens):
            return "".join(map(chr, ids))

    sample = replace(SAMPLE, input_ids=[*map(ord, "abcdef")], loss_mask=[0, 1, 1, 0, 0, 1])
    head, text = show(sample, Letters(), colour=False).splitlines()
    assert text == "a⟦bc⟧de⟦f⟧"
    assert "6 tokens, 3 trained" in head
    assert "\x1b[30;42mbc\x1b[0m" in show(sample, Letters(), colour=True)
