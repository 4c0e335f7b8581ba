"""Conversations answered turn by turn: what the target is shown, what of its answers is trained, and when it ends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.prompts.agenda import Agenda
from pipeline.prompts.chat import ChatEncoder
from pipeline.prompts.dialogue import Dialogue, Part, Rules
from pipeline.prompts.journal import Answer, Journal, Request
from pipeline.prompts.records import Record
from pipeline.prompts.refused import Refused
from tests.chat_templates import (
    CHATML,
    DEEPSEEK,
    FAMILIES,
    KIMI,
    LLAMA3,
    MISTRAL,
    QWEN3,
    Family,
    make_tokenizer,
    marked,
    plain,
)
from tests.test_chat import ASKED, TOOLS, turns


def rules(family: Family, answer: str = "all", *, template: str | None = None, max_length: int = 1000,
          max_new_tokens: int = 50, **options) -> Rules:
    tokenizer = make_tokenizer(template or plain(family), family.eos)
    encoder = ChatEncoder(tokenizer, [tokenizer.eos_token_id], **options)
    return Rules(encoder, answer, max_length, max_new_tokens, [tokenizer.eos_token_id])


def record(messages: list[dict], tools: list[dict] | None = None, id: str = "r") -> Record:
    return Record(id, None, "train", messages, "x:1", tools)


def said(rule: Rules, text: str, *, cut: bool = False) -> Answer:
    """The tokens that a target generates for `text`."""
    tokenizer = rule.encoder.tokenizer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Answer(ids, "length") if cut else Answer([*ids, tokenizer.eos_token_id], "stop")


def finished(rule: Rules, asked: Record, *answers: str) -> Dialogue:
    dialogue = Dialogue(asked, rule)
    for text in answers:
        dialogue.answer(said(rule, text))
    assert dialogue.request is None
    return dialogue


def shown(rule: Rules, parts: list[Part]) -> list[str]:
    return [marked(rule.encoder.tokenizer, part.input_ids, part.loss_mask) for part in parts]


@pytest.mark.parametrize("train_on", ["all", "last"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("qwen-3", "mistral")])  # both below
def test_each_turn_is_written_anew_and_the_sample_is_what_the_encoder_makes_of_the_result(name: str, train_on: str):
    family = FAMILIES[name]
    rule = rules(family, train_on=train_on)
    system = {"system": "Be kind"} if family.system else {}
    contents, answers = ["Hi", "hm", "ok?", "é🙂"], ["ok hm", "Hi 🙂", "a  b\n\nc", "ok"]
    dialogue = Dialogue(record(turns("Hi", "old", "hm", "old", "ok?", "old", "é🙂", **system)), rule)
    for k, answer in enumerate(answers):
        before = list(itertools.chain.from_iterable(zip(contents, answers[:k])))
        assert dialogue.request.prompt_ids == rule.encoder.prompt_ids(turns(*before, contents[k], **system))
        dialogue.answer(said(rule, answer))
    assert (dialogue.wanted, dialogue.answered, dialogue.ended) == (4, 4, None)
    [part] = dialogue.samples()
    assert [m["content"] for m in part.messages if m["role"] == "assistant"] == answers
    whole = rule.encoder.encode(part.messages)
    size = len(part.input_ids)  # a template may write a newline behind the end of the turn, which nobody generates
    assert part.input_ids == whole.input_ids[:size] and not any(whole.loss_mask[size:])
    assert part.loss_mask == whole.loss_mask[:size] and part.finish_reason == "stop"


def test_a_template_that_writes_earlier_answers_differently_gives_a_sample_for_each():
    # The target writes the blank before its answer; given back, the template puts another one before it.
    rule = rules(MISTRAL)
    dialogue = finished(rule, record(turns("Hi", "old", "hm")), " ok", " Hi")
    assert shown(rule, dialogue.samples()) == [
        "<s>[INST]Hi[/INST]« ok</s>»", "<s>[INST]Hi[/INST]  ok</s>[INST]hm[/INST]« Hi</s>»"]


def test_the_last_turn_alone_sees_the_sources_answers():
    rule = rules(CHATML, "last")
    [part] = finished(rule, record(turns("Hi", "old", "hm")), "ok").samples()
    assert shown(rule, [part]) == ["<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                                   "<|im_start|>assistant\nold<|im_end|>\n<|im_start|>user\nhm<|im_end|>\n"
                                   "<|im_start|>assistant\n«ok<|im_end|>»"]


THOUGHTS = ["<think>\nhm\n</think>\n\nok", "<think>\nhm hm\n</think>\n\nHi"]
_USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_SECOND = _USER.format("Hi") + "\n\nok<|im_end|>\n" + _USER.format("hm")


@pytest.mark.parametrize("reasoning, expected", [
    ("keep", [_USER.format("Hi") + "«<think>\nhm\n</think>\n\nok<|im_end|>»",
              _SECOND + "«<think>\nhm hm\n</think>\n\nHi<|im_end|>»"]),
    ("mask", [_USER.format("Hi") + "<think>\nhm\n</think>\n\n«ok<|im_end|>»",
              _SECOND + "<think>\nhm hm\n</think>\n\n«Hi<|im_end|>»"]),
    # The template writes an empty block where it has no reasoning.
    ("drop", [_USER.format("Hi") + "«<think>\n\n</think>\n\nok<|im_end|>»",
              _SECOND + "«<think>\n\n</think>\n\nHi<|im_end|>»"])])
def test_a_template_that_drops_earlier_reasoning_gives_a_sample_for_each_answer(reasoning: str, expected: list[str]):
    # As the real one: of a turn whose reasoning is apart, an earlier one is written with its content as it is.
    template = plain(QWEN3).replace("{{ said }}", "{{ said if loop.index0 > ns.query else m.content }}")
    rule = rules(QWEN3, template=template, reasoning=reasoning)
    dialogue = finished(rule, record(turns("Hi", "old", "hm")), *THOUGHTS)
    assert shown(rule, dialogue.samples()) == expected
    rule = rules(QWEN3, template=template, reasoning=reasoning, train_on="last")
    assert shown(rule, finished(rule, record(turns("Hi", "old", "hm")), *THOUGHTS).samples()) == expected[1:]


def test_reasoning_that_the_prompt_begins_is_known_to_be_reasoning():
    template = plain(QWEN3).replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
    rule = rules(QWEN3, template=template, reasoning="mask")
    [part] = finished(rule, record(turns("Hi")), "hm\n</think>\n\nok").samples()
    assert shown(rule, [part]) == [_USER.format("Hi") + "<think>\nhm\n</think>\n\n«ok<|im_end|>»"]
    assert part.messages[-1] == {"role": "assistant", "content": "\n\nok", "reasoning_content": "hm\n"}


@pytest.mark.parametrize("reasoning", ["keep", "mask", "drop"])
def test_reasoning_without_an_end_ends_the_conversation(reasoning: str):
    rule = rules(QWEN3, reasoning=reasoning)
    dialogue = Dialogue(record(turns("Hi", "old", "hm")), rule)
    dialogue.answer(said(rule, "<think>\nhm hm", cut=True))
    assert dialogue.request is None and dialogue.ended == "reasoning_cut" and dialogue.answered == 1
    if reasoning == "keep":
        [part] = dialogue.samples()
        assert shown(rule, [part]) == [_USER.format("Hi") + "«<think>\nhm hm»"] and part.finish_reason == "length"
    else:
        with pytest.raises(Refused, match="nothing but reasoning"):
            dialogue.samples()


def test_a_cut_answer_is_kept_and_its_end_is_not_trained():
    rule = rules(CHATML)
    dialogue = Dialogue(record(turns("Hi", "old", "hm")), rule)
    dialogue.answer(said(rule, "ok ok", cut=True))
    dialogue.answer(said(rule, "Hi"))
    [part] = dialogue.samples()
    assert shown(rule, [part])[0].endswith("assistant\n«ok ok»<|im_end|>\n" + _USER.format("hm") + "«Hi<|im_end|>»")
    assert part.finish_reason == "length"
    # Dropped reasoning before a cut answer: the turn is written anew, its end is the template's.
    rule = rules(QWEN3, reasoning="drop")
    dialogue = Dialogue(record(turns("Hi")), rule)
    dialogue.answer(said(rule, "<think>\nhm\n</think>\n\nok ok", cut=True))
    assert shown(rule, dialogue.samples()) == [_USER.format("Hi") + "«<think>\n\n</think>\n\nok ok»"]


def test_what_is_trained_are_the_generated_tokens_though_they_are_spelt_otherwise():
    # The target may write "Hi" as two tokens; given back as text it is one: the next prompt does not go on from there.
    rule = rules(CHATML)
    tokenizer = rule.encoder.tokenizer
    odd = Answer([*tokenizer.convert_tokens_to_ids(["H", "i"]), tokenizer.eos_token_id], "stop")
    dialogue = Dialogue(record(turns("ok", "old", "hm")), rule)
    dialogue.answer(odd)
    dialogue.answer(said(rule, "hm"))
    first, second = dialogue.samples()
    assert first.input_ids[-3:] == odd.ids and first.loss_mask[-3:] == [1, 1, 1]
    assert second.input_ids == rule.encoder.prompt_ids(turns("ok", "Hi", "hm")) + said(rule, "hm").ids
    assert sum(second.loss_mask) == 2


def test_results_of_tools_that_the_target_did_not_call_end_the_conversation_before_them():
    rule = rules(LLAMA3)
    dialogue = finished(rule, record([*turns("hm", "old"), *ASKED], TOOLS), "ok", "Hi")
    assert (dialogue.wanted, dialogue.answered, dialogue.ended) == (3, 2, "tool")
    assert [m["role"] for m in dialogue.samples()[0].messages] == ["user", "assistant"] * 2
    last = rules(LLAMA3, "last")
    dialogue = Dialogue(record(ASKED[:3], TOOLS), last)  # the source's calls and their results, and the target's answer
    assert dialogue.request.prompt_ids == last.encoder.prompt_ids(ASKED[:3], TOOLS)


def test_tokens_that_no_message_holds_end_the_conversation_after_them():
    rule = rules(KIMI)
    dialogue = finished(rule, record(turns("Hi", "old", "hm"), TOOLS),
                        "ok<|calls|><|call|>f:0<|args|>{}<|/call|><|/calls|>")
    assert dialogue.ended == "special_tokens" and dialogue.answered == 1
    [part] = dialogue.samples()
    assert shown(rule, [part])[0].endswith("«ok<|calls|><|call|>f:0<|args|>{}<|/call|><|/calls|><|im_end|>»")


def test_an_unknown_token_that_ends_turns_is_no_marker_of_reasoning():
    rule = rules(CHATML)
    tokenizer = rule.encoder.tokenizer
    tokenizer.unk_token = tokenizer.eos_token
    assert tokenizer.convert_tokens_to_ids("[NO TOKEN]") == tokenizer.eos_token_id in rule.special_ids
    markers = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert rule.special_ids.isdisjoint(i for i in markers if i != tokenizer.unk_token_id)


def test_a_greeting_of_the_source_stays_and_two_turns_in_a_row_are_one():
    rule = rules(DEEPSEEK)
    messages = [{"role": "assistant", "content": "Hi"}, *turns("hm", "old"), {"role": "assistant", "content": "older"},
                *turns("ok?")]
    [part] = finished(rule, record(messages), "ok", "Hi").samples()
    assert shown(rule, [part]) == [
        "<s><|Assistant|>Hi<|end|><|User|>hm<|Assistant|>«ok<|end|>»<|User|>ok?<|Assistant|>«Hi<|end|>»"]


def test_prompts_without_room_and_turns_the_template_refuses():
    messages = turns("Hi", "old", "hm " * 100)
    short = rules(CHATML, max_length=120)
    dialogue = finished(short, record(messages), "ok")
    assert (dialogue.ended, dialogue.answered, dialogue.wanted) == ("too_long", 1, 2) and len(dialogue.samples()) == 1
    refused = Dialogue(record(turns("hm " * 100)), short)
    assert refused.request is None and refused.wanted == 1
    with pytest.raises(Refused, match="prompt tokens and 50 new ones exceed the 120"):
        refused.samples()
    picky = rules(CHATML, template=plain(CHATML).replace(
        "{% for m in messages %}", "{% if messages | length > 1 %}{{ raise_exception('enough') }}{% endif %}"
        "{% for m in messages %}", 1))
    assert finished(picky, record(turns("Hi", "old", "hm")), "ok").ended == "template"


def answer_to(rule: Rules, key: str) -> Answer:
    """Any answer, the same for the same prompt."""
    number = int(key, 16)
    texts = ["ok", "Hi hm", "é🙂", "<think>\nhm\n</think>\n\nok", "ok<|im_end|>Hi"]
    return said(rule, texts[number % len(texts)], cut=number % 7 == 0)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_order_of_answers_gives_the_same_samples_and_asks_nothing_twice(tmp_path_factory, data):
    rule = rules(QWEN3, max_length=400)
    contents = st.sampled_from(["Hi", "hm", "ok"])
    odd = st.lists(contents, min_size=1, max_size=7).filter(lambda said: len(said) % 2)
    records = [record(turns(*data.draw(odd)), id=str(k)) for k in range(data.draw(st.integers(1, 6)))]
    path = tmp_path_factory.mktemp("journal") / "j.jsonl"

    def samples(journal: Journal) -> list[list[Part]]:
        found = []
        for one in records:
            dialogue = Dialogue(one, rule)
            while dialogue.request is not None:
                dialogue.answer(journal.get(dialogue.request))
            found.append(dialogue.samples())
        return found

    asked = []
    stops = data.draw(st.integers(0, 20))  # killed after so many answers, and started again
    for attempt in range(2):
        with Journal(path) as journal:
            agenda = Agenda((Dialogue(one, rule) for one in records), journal)
            outstanding = []
            while attempt or len(asked) < stops:
                room = max(0, data.draw(st.integers(1, 4)) - len(outstanding))
                longest = data.draw(st.booleans())
                outstanding += agenda.take_longest(room, 2 * room) if longest else agenda.take(room)
                if not outstanding:
                    break
                request = outstanding.pop(data.draw(st.integers(0, len(outstanding) - 1)))
                asked.append(request.key)
                agenda.store([(request, answer_to(rule, request.key))])
            if attempt:
                found = samples(journal)
    assert len(asked) == len(set(asked))
    with Journal(path.with_name("one_by_one.jsonl")) as journal:
        for one in records:
            dialogue = Dialogue(one, rule)
            while (request := dialogue.request) is not None:
                if request not in journal:
                    journal.add([(request, answer_to(rule, request.key))])
                dialogue.answer(journal.get(request))
        assert samples(journal) == found and len(journal) == len(asked)


def test_later_turns_wait_for_a_batch_of_their_own(tmp_path):
    """A few of them among openings would have all the openings padded to their length."""
    rule = rules(CHATML)
    # 16 openings, longest first; the 1st, 2nd, 5th, 6th, 9th and 10th go on after their answer.
    goes_on = {0, 1, 4, 5, 8, 9}
    talks = [turns("Hi" + " hm" * (20 - k), *["ok", "Hi"] * (k in goes_on)) for k in range(16)]
    with Journal(tmp_path / "j.jsonl") as journal:
        agenda = Agenda((Dialogue(record(talk, id=str(k)), rule) for k, talk in enumerate(talks)), journal)
        batches = []
        while batch := agenda.take_longest(4, 100):
            batches.append([int(request.id) for request in batch])
            agenda.store([(request, said(rule, "ok")) for request in batch])
    assert batches == [
        [0, 1, 2, 3], [4, 5, 6, 7],  # four of these eight go on: a batch
        [0, 1, 4, 5], [8, 9, 10, 11], [12, 13, 14, 15],
        [8, 9],  # nothing else is left
    ]


@pytest.mark.parametrize("answers, borne", [(0, 31), (600, 31), (1000, 49)])
def test_failures_of_before_an_interruption_do_not_stop_what_goes_on(tmp_path, answers: int, borne: int):
    rule = rules(CHATML)
    with Journal(tmp_path / "j.jsonl") as journal:
        journal.add([(Request("r", [k]), Answer([5], "length")) for k in range(answers)])
        agenda = Agenda((Dialogue(record(turns(f"Hi {k}")), rule) for k in range(100)), journal)
        failed = agenda.take(100)
        for request in failed[:borne]:
            agenda.fail(request, "too long for me")
        with pytest.raises(PipelineError, match=f"{borne + 1} requests in a row failed for good"):
            agenda.fail(failed[borne], "too long for me")
