"""Conversations that are too long: what is kept is whole turns as the engine would see them, and always trained."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.prompts import generate
from pipeline.prompts.fit import fit_batch, fit_row
from pipeline.prompts.refused import Refused
from pipeline.samples import read_samples
from pipeline.target import open_target
from tests.chat_templates import CHATML, FAMILIES, GEMMA, QWEN3, marked
from tests.test_chat import ASKED, TOOLS, conversations, encoder, turns
from tests.tiny_models import tiny_llama
from tests.tiny_run import tiny_config

THREE = turns("Hi", "ok", "Hi hm", "hm", "hm", "Hi", system="kind")


def fitted(chat, messages, max_length: int, truncate: str, tools=None):
    return fit_batch(chat, [(messages, tools)], max_length=max_length, truncate=truncate)[0]


def text(chat, part) -> str:
    return marked(chat.tokenizer, part.input_ids, part.loss_mask)


SYSTEM, HI, HM, LAST = (
    "<|im_start|>system\nkind<|im_end|>\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«ok<|im_end|>»\n",
    "<|im_start|>user\nHi hm<|im_end|>\n<|im_start|>assistant\n«hm<|im_end|>»\n",
    "<|im_start|>user\nhm<|im_end|>\n<|im_start|>assistant\n«Hi<|im_end|>»\n")  # 6, 12, 14 and 12 tokens


@pytest.mark.parametrize("max_length, truncate, expected", [
    (44, "skip", [SYSTEM + HI + HM + LAST]),
    (43, "skip", None),
    (43, "turns", [SYSTEM + HI + HM]),
    (32, "turns", [SYSTEM + HI + HM]),
    (31, "turns", [SYSTEM + HI]),
    (17, "turns", None),
    (43, "cut", [(SYSTEM + HI + HM + LAST).removesuffix("\n")]),
    (18 + 11, "cut", [SYSTEM + HI + HM.removesuffix("«hm<|im_end|>»\n")]),
    (15, "cut", None),
    (43, "split", [SYSTEM + HI + HM, SYSTEM + LAST]),
    (32, "split", [SYSTEM + HI + HM, SYSTEM + LAST]),
    (31, "split", [SYSTEM + HI, SYSTEM + HM, SYSTEM + LAST]),
    (18, "split", [SYSTEM + HI, (SYSTEM + HM).replace("«hm<|im_end|>»\n", "«hm»"), SYSTEM + LAST]),
    (17, "split", [(SYSTEM + HI)[:-1], (SYSTEM + LAST)[:-1]]),
    (9, "split", None),
])
def test_by_hand(max_length: int, truncate: str, expected: list[str] | None):
    chat = encoder(CHATML)
    parts = fitted(chat, THREE, max_length, truncate)
    if expected is None:
        assert isinstance(parts, Refused) and parts.reason == "too_long"
        assert f"44 tokens are more than the {max_length}" in parts.detail
    else:
        assert [text(chat, part) for part in parts] == expected


def test_the_last_turn_that_is_kept_is_written_as_a_last_one():
    # Qwen3 writes the think block of what is then the last turn; the room it takes is counted.
    chat = encoder(QWEN3)
    messages = turns("Hi", "ok", "hm", "<think>hm</think>Hi")
    whole = chat.encode(messages)
    first = chat.encode(messages[:2])
    assert len(whole.input_ids) > len(first.input_ids) > whole.turn_ends[0] + 1
    assert fitted(chat, messages, len(first.input_ids), "turns")[0][1:] == first[:2]
    assert fitted(chat, messages, len(first.input_ids) - 1, "turns").reason == "too_long"


def test_only_a_part_with_the_last_turn_is_kept_where_only_that_is_trained():
    chat = encoder(CHATML, train_on="last")
    assert [text(chat, part) for part in fitted(chat, THREE, 32, "split")] == [SYSTEM + LAST]
    assert fitted(chat, THREE, 32, "turns").reason == fitted(chat, THREE, 32, "cut").reason == "too_long"


def test_tool_calls_and_their_results_are_one_exchange():
    chat = encoder(FAMILIES["kimi"])
    messages = [*ASKED, *turns("hm", "Hi")]
    one, two = chat.encode(ASKED, TOOLS), chat.encode(turns("hm", "Hi"), TOOLS)
    parts = fitted(chat, messages, len(one.input_ids), "split", TOOLS)
    assert [part[1:] for part in parts] == [one[:2], two[:2]]
    assert [part.messages for part in parts] == [ASKED, turns("hm", "Hi")]


def test_what_cannot_be_a_sample_is_refused_with_its_reason():
    chat = encoder(GEMMA)
    assert fitted(chat, turns("Hi", "ok", system="kind"), 99, "split").reason == "template"
    assert fitted(chat, turns("Hi"), 99, "skip").reason == "no_trained_tokens"


@pytest.mark.parametrize("truncate, expected", [("cut", ([1, 2, 3], [0, 0, 1])), ("skip", None), ("split", None)])
def test_rows_of_tokens(truncate: str, expected):
    parts = fit_row([1, 2, 3, 4], [0, 0, 1, 1], max_length=3, truncate=truncate)
    assert parts.reason == "too_long" if expected is None else parts[0][1:] == expected
    assert fit_row([1, 2], [0, 1], max_length=3, truncate=truncate)[0][1:] == ([1, 2], [0, 1])
    assert fit_row([1, 2], [0, 0], max_length=3, truncate=truncate).reason == "no_trained_tokens"


@settings(max_examples=120, deadline=None)
@given(data=st.data(), name=st.sampled_from(list(FAMILIES)), truncate=st.sampled_from(["turns", "cut", "split"]),
       max_length=st.integers(2, 120))
def test_parts_fit_are_trained_and_are_what_their_messages_give(data, name: str, truncate: str, max_length: int):
    chat = encoder(FAMILIES[name])
    messages, tools = data.draw(conversations(FAMILIES[name]))
    whole = chat.encode(messages, tools)
    parts = fitted(chat, messages, max_length, truncate, tools)
    if isinstance(parts, Refused):
        assert len(whole.input_ids) > max_length and parts.reason in ("too_long", "template")
        return
    for part in parts:
        assert len(part.input_ids) == len(part.loss_mask) <= max_length and any(part.loss_mask)
        own = chat.encode(part.messages, tools)
        assert (part.input_ids, part.loss_mask) == (own.input_ids[:max_length], own.loss_mask[:max_length])
        assert truncate != "turns" or part.messages == messages[:len(part.messages)]
    if len(whole.input_ids) <= max_length:
        assert len(parts) == 1 and parts[0][1:] == whole[:2]
    # Split, no message is used twice but the system message, and they stay in order.
    rest = [m for part in parts for m in part.messages if m["role"] != "system"]
    places = [next(i for i, m in enumerate(messages) if m is found) for found in rest]
    assert places == sorted(set(places))


def test_the_stage_names_the_parts_and_its_counts_add_up(tmp_path):
    target_dir = tiny_llama(tmp_path / "target", layers=1)
    source = tmp_path / "source.jsonl"
    records = [{"messages": THREE}, {"messages": turns("Hi", "ok")}, {"messages": turns("hm " * 30, "ok")},
               {"input_ids": [5] * 60, "loss_mask": [0] * 10 + [1] * 50}]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))

    def made(**overrides):
        config = tiny_config(target_dir, tmp_path, **{"prompts.source": str(source), "prompts.respond": "keep",
                                                      "slots.layers": [0], "target.slots_layers": [0],
                                                      "prompts.heldout_fraction": 0, **overrides})
        folder = tmp_path / "-".join(map(str, overrides.values()))
        folder.mkdir()
        target, config = open_target(config)
        return generate(config, target, folder).counts, list(read_samples(folder / "samples.parquet")), target

    counts, samples, target = made(**{"prompts.truncate": "split", "prompts.max_length": 50})
    assert counts["read"] == counts["kept"] + counts["skipped_too_long"] == 4
    ids = [sample.id for sample in samples]
    assert ids[0].endswith("#0") and ids[1] == ids[0].replace("#0", "#1") and "#" not in ids[-1]
    assert all(len(sample.input_ids) <= 50 for sample in samples)
    assert counts["train_samples"] == len(samples) and counts["trained_tokens"] == sum(sum(s.loss_mask) for s in samples)
    template = target.tokenizer().apply_chat_template
    assert [sample.input_ids for sample in samples] == [template(s.messages)["input_ids"] for s in samples]
    counts, samples, _ = made(**{"prompts.truncate": "cut", "prompts.max_length": 50})
    assert counts["read"] == counts["kept"] + counts["skipped_too_long"] and len(samples[-1].input_ids) == 50
    with pytest.raises(PipelineError, match="more than target.context_length"):
        made(**{"prompts.max_length": 513})
