"""Reading conversations: every format in every container gives the same record, and what is not accepted is named."""

from __future__ import annotations

import json

import pytest

from pipeline.errors import PipelineError
from pipeline.prompts.sources import BUILTIN, fingerprint
from tests.source_files import CONTAINERS, compressed, jsonl, parquet, selected, settings

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok"}
TALK = [{"role": "system", "content": "Be kind"}, USER, ANSWER]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}}}}}
CALL = {"role": "assistant", "content": "", "reasoning_content": "I need the weather.", "tool_calls": [
    {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}
TOOL_TALK = [USER, CALL, {"role": "tool", "content": "rain", "tool_call_id": "c1"}, ANSWER]

# Format, raw record, the messages it holds.
RECORDS = {
    "openai": ({"messages": TALK}, TALK),
    "openai, content parts": ({"messages": [
        {"role": role, "content": [{"type": "text", "text": part} for part in text.split()]}
        for role, text in (("user", "Hi you"), ("assistant", "ok"))]}, [{"role": "user", "content": "Hi you"}, ANSWER]),
    "openai, tools": ({"messages": [
        USER, CALL | {"content": None, "tool_calls": [{"type": "function", "id": "c1", "function": {
            "name": "weather", "arguments": '{"city": "Oslo"}'}}]}, TOOL_TALK[2], ANSWER], "tools": [WEATHER]}, TOOL_TALK),
    "openai, fields of other kinds": ({"messages": [USER | {"timestamp": 5}, ANSWER | {"weight": 1, "name": None}]},
                                      [USER, ANSWER]),
    "sharegpt": ({"conversations": [{"from": "system", "value": "Be kind"}, {"from": "human", "value": "Hi"},
                                    {"from": "gpt", "value": "ok"}]}, TALK),
    "sharegpt, system beside it": ({"system": "Be kind", "conversations": [
        {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "ok"}]}, TALK),
    "sharegpt, role and content": ({"conversations": TALK}, TALK),
    "sharegpt, tools": ({"tools": json.dumps([WEATHER["function"]]), "conversations": [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "rain"}, {"from": "gpt", "value": "ok"}]}, [
            USER, {"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
            {"role": "tool", "content": "rain"}, ANSWER]),
    "ultrachat": ({"id": "0", "data": ["Hi", "ok", "More", "yes"]},
                  [USER, ANSWER, {"role": "user", "content": "More"}, {"role": "assistant", "content": "yes"}]),
    "alpaca": ({"instruction": "Hi", "input": "", "output": "ok", "system": "Be kind"}, TALK),
    "alpaca, input and history": (
        {"instruction": "Add", "input": "1 2", "output": "3", "history": [["Hi", "ok"]]},
        [USER, ANSWER, {"role": "user", "content": "Add\n1 2"}, {"role": "assistant", "content": "3"}]),
}
PROMPTS = {
    "prompt": ({"prompt": "Hi"}, [USER]),
    "prompt as messages": ({"prompt": [USER]}, [USER]),
    "text": ({"text": "Hi"}, [USER]),
    "turns": ({"turns": ["Hi", "More"]}, [USER, {"role": "user", "content": "More"}]),
    "alpaca without output": ({"instruction": "Hi", "input": "", "output": ""}, [USER]),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("form", [*RECORDS, *PROMPTS])
def test_every_format_in_every_container(tmp_path, form, container):
    raw, messages = (RECORDS | PROMPTS)[form]
    path = CONTAINERS[container](tmp_path / container, raw)
    respond = "keep" if form in RECORDS else "target"
    [record], _ = selected(path, tmp_path / "out", respond=respond)
    assert record.messages == messages
    assert record.tools == ([WEATHER] if "tools" in raw else None)
    # Its name depends on the content alone, whatever the container.
    [same], _ = selected(jsonl(tmp_path / "again" / "x.jsonl", raw), tmp_path / "out", respond=respond)
    assert record.id == same.id and len(record.id) == 16


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_compressed(tmp_path, container, suffix):
    texts = [f"prompt {i}" for i in range(300)]
    path = compressed(CONTAINERS[container](tmp_path / container, *({"prompt": text} for text in texts)), suffix)
    records, account = selected(path, tmp_path / "out")
    assert [r.messages[0]["content"] for r in records] == texts and account.total == {"read": 300}


@pytest.mark.parametrize("container", CONTAINERS)
def test_rows_tokenised_elsewhere(tmp_path, container):
    raw = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    path = CONTAINERS[container](tmp_path / container, raw)
    [record], _ = selected(path, tmp_path / "out", respond="keep", decode=str)
    assert (record.input_ids, record.loss_mask, record.messages) == ([5, 6, 7, 8], [0, 0, 1, 1], [])
    records, account = selected(path, tmp_path / "out", respond="target")
    assert records == [] and account.reasons == {"pretokenised": 1}


def test_lines_of_text(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffWhat is \u2028 this?\r\n\r\n  two\tblanks \nlast".encode())
    for pack in (lambda path: path, lambda path: compressed(path, ".gz")):
        records, _ = selected(pack(path), tmp_path / "out")
        assert [r.messages[0]["content"] for r in records] == ["What is \u2028 this?", "  two\tblanks ", "last"]


def test_builtin_prompts_are_read_with_their_split_and_categories(tmp_path):
    records, account = selected("builtin", tmp_path, answer="last")
    raw = [json.loads(line) for line in BUILTIN.read_text(encoding="utf-8").splitlines()]
    # Nothing of it is contaminated, twice there, or left out.
    assert [(r.split, r.category, r.messages) for r in records] == [(r["split"], r["category"], r["messages"]) for r in raw]
    assert account.total == {"read": len(raw)}


def test_byte_order_mark_crlf_and_blank_lines_are_tolerated(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "Hi"}\r\n\r\n{"prompt": "ok"}\r\n')
    assert [r.messages[0]["content"] for r in selected(path, tmp_path / "out")[0]] == ["Hi", "ok"]
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf [\r\n{"prompt": "Hi"}\r\n,\r\n{"prompt": "]ok,\\"["}\r\n]\r\n')
    assert [r.messages[0]["content"] for r in selected(path, tmp_path / "out")[0]] == ["Hi", ']ok,"[']
    path.write_bytes(b" [ ] ")
    assert selected(path, tmp_path / "out")[1].total == {}


def test_a_format_can_be_demanded(tmp_path):
    both = {"prompt": "the first turn again", "messages": TALK}  # as UltraChat 200k has them
    path = jsonl(tmp_path / "a.jsonl", both)
    assert selected(path, tmp_path / "out")[0][0].messages == TALK[:2]
    [record], _ = selected([{"path": str(path), "format": "prompt"}], tmp_path / "out")
    assert record.messages == [{"role": "user", "content": "the first turn again"}]
    with pytest.raises(PipelineError, match=r"a.jsonl:1 is of another form than alpaca \(`instruction`\): its keys are"):
        selected([{"path": str(path), "format": "alpaca"}], tmp_path / "out")


def test_unknown_form_says_what_is_accepted(tmp_path):
    with pytest.raises(PipelineError, match="a.jsonl:1 is of unknown form: its keys are question") as e:
        selected(jsonl(tmp_path / "a.jsonl", {"question": "Hi"}), tmp_path / "out")
    assert all(word in e.value.fix for word in ("messages", "conversations", "data", "instruction", "prompt", "input_ids"))


@pytest.mark.parametrize("raw, message", [
    ([1], r"a.jsonl:1 holds a list, not an object"),
    ({"prompt": 5}, r"prompt is a int, not a string"),
    ({"messages": "Hi"}, r"not well-formed openai: `messages` is a str, not a list"),
    ({"messages": ["Hi"]}, r"messages\[0\] is a str, not an object"),
    ({"messages": [{"role": "boss", "content": "Hi"}]}, r"`role` = 'boss'"),
    ({"messages": [{"role": "user", "text": "Hi"}]}, r"keys are role, text"),
    ({"messages": [{"role": "user", "content": [5]}]}, r"messages\[0\] has a part of type int"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, r"a call without the name of a function"),
    ({"conversations": [{"from": "human", "content": "Hi"}]}, r"keys are from, content"),
    ({"data": "Hi"}, r"not well-formed ultrachat: `data` is a str"),
    ({"instruction": "Hi", "history": ["Hi"]}, r"`history` is a list of"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, r"2 `input_ids` but 1 in `loss_mask`"),
    ({"input_ids": [1, -2], "loss_mask": [1, 1]}, r"whole numbers from 0"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, r"zeros and ones"),
    ({"prompt": "Hi", "split": "test"}, r"split = 'test'"),
    ({"prompt": "H\0i"}, r"NUL character in prompt"),
    ({"prompt": "\ud83d"}, r"not valid Unicode"),
])
def test_a_record_that_is_not_well_formed_is_named(tmp_path, raw, message):
    with pytest.raises(PipelineError, match=message) as e:
        selected(jsonl(tmp_path / "a.jsonl", raw), tmp_path / "out")
    assert "a.jsonl:1" in str(e.value) and "prompts.on_bad_record=skip" in e.value.fix


@pytest.mark.parametrize("raw, reason", [
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "not_text"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "{city: Oslo"}}]}, USER]}, "tool_json"),
    ({"messages": []}, "no_user_turn"),
])
def test_a_sound_record_that_cannot_be_used_is_skipped(tmp_path, raw, reason):
    records, account = selected(jsonl(tmp_path / "a.jsonl", raw, {"prompt": "Hi"}), tmp_path / "out")
    assert len(records) == 1 and account.reasons == {reason: 1} and account.total["read"] == 2


def test_missing_file_and_folder_and_kind(tmp_path):
    for source in (tmp_path / "no.jsonl", tmp_path / "no", "no.parquet"):
        with pytest.raises(PipelineError, match="does not exist"):
            selected(source, tmp_path / "out")
    (tmp_path / "a.csv").write_text("prompt\nHi\n")
    with pytest.raises(PipelineError, match=r"a.csv is not of a known kind") as e:
        selected(tmp_path / "a.csv", tmp_path / "out")
    assert ".parquet" in e.value.fix and ".zst" in e.value.fix
    (tmp_path / "empty").mkdir()
    with pytest.raises(PipelineError, match="empty holds no file of a known kind"):
        selected(tmp_path / "empty", tmp_path / "out")


def test_folder_of_shards_is_read_in_the_order_of_names(tmp_path):
    folder = tmp_path / "shards"
    jsonl(folder / "part-1.jsonl", {"prompt": "b"})
    jsonl(folder / "part-0.jsonl", {"prompt": "a"})
    compressed(jsonl(folder / "sub" / "part-2.jsonl", {"prompt": "c"}), ".zst")
    (folder / "README.md").write_text("# shards")
    records, _ = selected(folder, tmp_path / "out")
    assert [r.messages[0]["content"] for r in records] == ["a", "b", "c"]


def test_a_folder_with_splits_is_read_by_split(tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    parquet(folder / "train-00000.parquet", *({"prompt": f"p{i}"} for i in range(5)))
    parquet(folder / "test-00000.parquet", {"prompt": "secret"})
    jsonl(folder / "more.jsonl", {"prompt": "of no split"})
    assert [r.messages[0]["content"] for r in selected(folder, tmp_path / "out")[0]] == [f"p{i}" for i in range(5)]
    assert "1 files of" in (said := capsys.readouterr().out) and "more.jsonl" in said
    assert len(selected([{"path": str(folder), "split": "test"}], tmp_path / "out")[0]) == 1
    with pytest.raises(PipelineError, match="no files of the split nosuch; it has train, test"):
        selected(folder, tmp_path / "out", source_split="nosuch")


def test_a_saved_dataset_is_read(tmp_path):
    import datasets

    made = datasets.Dataset.from_list([{"messages": TALK}, {"messages": TOOL_TALK[:1]}])
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "d")
    records, _ = selected(tmp_path / "d", tmp_path / "out")
    assert [r.messages for r in records] == [TALK[:2], [USER]] and records[0].where == f"{tmp_path / 'd'}[train]: row 1"
    with pytest.raises(PipelineError, match="split nosuch"):
        selected(tmp_path / "d", tmp_path / "out", source_split="nosuch")


def test_dataset_without_network_is_one_clear_message(tmp_path, monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'someone/prompts' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(PipelineError, match="cannot read the dataset someone/prompts.*Couldn't reach") as e:
        selected("someone/prompts", tmp_path)
    assert "network" in e.value.fix


def test_fingerprint_follows_the_content_of_all_that_is_read(tmp_path):
    path = jsonl(tmp_path / "a" / "a.jsonl", {"prompt": "Hi"})
    bench = jsonl(tmp_path / "bench.jsonl", {"prompt": "Hi"})
    asked = settings(tmp_path / "a", decontaminate_against=[str(bench)])
    seen = [fingerprint(asked)]
    for change in (lambda: jsonl(path, {"prompt": "ok"}), lambda: jsonl(bench, {"prompt": "ok"}),
                   lambda: jsonl(tmp_path / "a" / "b.jsonl", {"prompt": "ok"})):
        change()
        seen.append(fingerprint(asked))
    assert len(set(seen)) == 4 and fingerprint(asked) == seen[-1]
    assert fingerprint(settings("builtin")) and fingerprint(settings("someone/prompts"))
