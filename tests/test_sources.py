"""Reading conversations: every accepted form gives the same record, and what is not accepted is named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.prompts.select import select, spread
from pipeline.prompts.sources import BUILTIN, Record, fingerprint, read_records

HI = [{"role": "user", "content": "Hi"}]
TALK = [{"role": "system", "content": "Be kind"}, *HI, {"role": "assistant", "content": "ok"}]
SHAREGPT = [{"from": "system", "value": "Be kind"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "ok"}]


def read(source, heldout_fraction=0.1, at_most=None) -> list[Record]:
    return list(read_records(str(source), source_split="train", heldout_fraction=heldout_fraction, at_most=at_most))


def lines(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_builtin_prompts_are_read_with_their_split_and_categories():
    records = read("builtin")
    raw = [json.loads(line) for line in BUILTIN.read_text(encoding="utf-8").splitlines()]
    assert [(r.id, r.split, r.category, r.messages) for r in records] == [
        (r["id"], r["split"], r["category"], r["messages"]) for r in raw]


@pytest.mark.parametrize("raw, messages", [
    ({"prompt": "Hi"}, HI), ({"text": "Hi"}, HI), ({"messages": TALK}, TALK), ({"conversations": SHAREGPT}, TALK),
    ({"prompt": "other", "messages": TALK}, TALK),
])
def test_every_form_in_every_kind_of_file(tmp_path, raw, messages):
    jsonl = lines(tmp_path / "a.jsonl", raw)
    array = tmp_path / "a.json"
    array.write_text(json.dumps([raw], indent=1))
    json_lines = lines(tmp_path / "b.json", raw)
    parquet = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([raw]), parquet)
    records = [read(path) for path in (jsonl, array, json_lines, parquet)]
    assert all([r.messages for r in found] == [messages] for found in records)
    assert len({found[0].id for found in records}) == 1  # the id is a hash of the content, whatever the file


def test_fields_of_messages_other_than_the_text_are_kept_and_nulls_dropped(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    path = lines(tmp_path / "a.jsonl", {"messages": [*HI, call], "id": 7, "category": None, "split": None})
    record = read(path)[0]
    assert record.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    assert (record.id, record.category) == ("7", None)


def test_byte_order_mark_crlf_and_blank_lines_are_tolerated(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "Hi"}\r\n\r\n{"prompt": "ok"}\r\n')
    assert [r.messages[0]["content"] for r in read(path)] == ["Hi", "ok"]
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf[{"prompt": "Hi"}]\r\n')
    assert [r.messages for r in read(path)] == [HI]


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", b'{"prompt": "Hi"}\n{"prompt": "H', r"a.jsonl:2 is not JSON"),
    ("a.jsonl", b'{"prompt": "Hi"}\n{"prompt": "\xff"}', r"a.jsonl:2 is not JSON"),
    ("a.json", b'[{"prompt": "Hi"},\n {"prompt": "H', r"a.json:2 is not JSON"),
    ("a.json", b'[{"prompt": "\xff"}]', r"not UTF-8"),
    ("a.parquet", b"PAR1 nothing", r"not readable Parquet"),
    ("a.csv", b"prompt\nHi\n", r"not of a known kind"),
    ("a.jsonl", b'{"question": "Hi", "answer": "ok"}', r"a.jsonl:1 is of unknown form: its keys are question, answer"),
    ("a.jsonl", b"[1]", r"a.jsonl:1 holds a list"),
    ("a.jsonl", b'{"prompt": ["Hi"]}', r"unknown form: its keys are prompt"),
    ("a.jsonl", b'{"messages": "Hi"}', r"`messages` is a str"),
    ("a.jsonl", b'{"messages": ["Hi"]}', r"messages\[0\] is not an object"),
    ("a.jsonl", b'{"messages": [{"role": "boss", "content": "Hi"}]}', r"`role` = 'boss'"),
    ("a.jsonl", b'{"messages": [{"role": "user", "text": "Hi"}]}', r"keys are role, text"),
    ("a.jsonl", b'{"conversations": [{"from": "human", "content": "Hi"}]}', r"keys are from, content"),
    ("a.jsonl", b'{"prompt": "Hi", "split": "test"}', r"split = 'test'"),
])
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PipelineError, match=message) as e:
        read(path)
    assert e.value.field == "prompts.source" and e.value.fix


def test_unknown_form_says_what_is_accepted(tmp_path):
    with pytest.raises(PipelineError) as e:
        read(lines(tmp_path / "a.jsonl", {"question": "Hi"}))
    assert all(word in e.value.fix for word in ("messages", "conversations", "prompt", "text"))


def test_missing_file_and_folder(tmp_path):
    for source in (tmp_path / "no.jsonl", tmp_path / "no"):
        with pytest.raises(PipelineError, match="does not exist"):
            read(source)


def test_dataset_folder_is_streamed(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": f"p{i}"} for i in range(5)]),
                                tmp_path / "train-00000.parquet")
    assert [r.messages[0]["content"] for r in read(tmp_path)] == [f"p{i}" for i in range(5)]
    assert len(read(tmp_path, at_most=2)) == 2
    with pytest.raises(PipelineError, match="split nosuch"):
        list(read_records(str(tmp_path), source_split="nosuch", heldout_fraction=0.1))


def test_dataset_without_network_is_one_clear_message(monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'someone/prompts' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(PipelineError, match="cannot read the dataset someone/prompts.*Couldn't reach") as e:
        read("someone/prompts")
    assert "network" in e.value.fix


def test_heldout_by_hash_is_stable_and_has_the_asked_share(tmp_path):
    prompts = [{"prompt": f"question {i}"} for i in range(2000)]
    records = read(lines(tmp_path / "a.jsonl", *prompts))
    share = sum(r.split == "heldout" for r in records) / len(records)
    assert 0.08 < share < 0.12
    again = read(lines(tmp_path / "b.jsonl", {"prompt": "new"}, *reversed(prompts)))
    assert {r.id: r.split for r in records}.items() <= {r.id: r.split for r in again}.items()
    assert all(r.split == "train" for r in read(tmp_path / "a.jsonl", heldout_fraction=0))


def test_fingerprint_follows_the_content(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"prompt": "Hi"})
    before = fingerprint(str(path))
    lines(path, {"prompt": "ok"})
    assert before != fingerprint(str(path)) and fingerprint("builtin") and fingerprint("someone/prompts") is None


def record(id: str, text: str = "", *, category=None, split="train") -> Record:
    return Record(id, category, split, [{"role": "user", "content": text or id}], f"a.jsonl:{id}")


def test_duplicates_are_dropped_and_an_id_for_two_conversations_is_an_error():
    selection = select([record("a", "Hi"), record("b", "Hi"), record("c", "ok")], respond="target", system_prompt=None,
                       limit=None)
    assert [r.id for r in selection.records] == ["a", "c"] and selection.duplicates == 1 and selection.read == 3
    with pytest.raises(PipelineError, match="has the id 'a' of another conversation, a.jsonl:a"):
        select([record("a", "Hi"), record("a", "ok")], respond="target", system_prompt=None, limit=None)


def test_what_is_answered_and_what_is_kept():
    talk = Record("t", None, "train", [*TALK, {"role": "user", "content": "hm"}], "a.jsonl:1")
    only_system = Record("s", None, "train", TALK[:1], "a.jsonl:2")

    def contents(respond, **options):
        selection = select([talk, only_system], respond=respond, limit=None, **{"system_prompt": None} | options)
        return [[m["content"] for m in r.messages] for r in selection.records], [s["reason"] for s in selection.skipped]

    assert contents("target") == ([["Be kind", "Hi", "ok", "hm"]], ["no_user_turn"])
    assert contents("keep") == ([["Be kind", "Hi", "ok"]], ["no_assistant_turn"])
    ends_with_answer = Record("t", None, "train", TALK[1:], "a.jsonl:1")
    chosen = select([ends_with_answer], respond="target", system_prompt="Be brief", limit=None).records[0]
    assert [m["content"] for m in chosen.messages] == ["Be brief", "Hi"]


@given(sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=5),
       limit=st.integers(1, 40))
def test_limit_is_even_over_categories_and_keeps_the_heldout_share(sizes, limit):
    records = [record(f"{c}-{split}-{i}", category=str(c), split=split)
               for c, counts in enumerate(sizes) for split, n in zip(("train", "heldout"), counts) for i in range(n)]
    if len(records) <= limit:
        return
    chosen = [r for r in records if r.id in spread(records, limit)]
    assert len(chosen) == limit
    heldout = sum(r.split == "heldout" for r in records)
    got = sum(r.split == "heldout" for r in chosen)
    assert abs(got - limit * heldout / len(records)) <= 1
    for split in ("train", "heldout"):
        there = Counter(r.category for r in records if r.split == split)
        taken = Counter(r.category for r in chosen if r.split == split)
        # Even: a category gets fewer than another, by more than one, only if it is used up.
        most = max(taken.values(), default=0)
        assert all(taken[c] >= most - 1 or taken[c] == there[c] for c in there)


def test_limit_counts_what_it_leaves_out():
    selection = select([record(str(i)) for i in range(5)], respond="target", system_prompt=None, limit=2)
    assert [r.id for r in selection.records] == ["0", "1"]
    assert [s["reason"] for s in selection.skipped] == ["limit"] * 3
