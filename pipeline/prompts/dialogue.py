"""A conversation that the target answers anew, turn by turn.

What the source's user says stays; each of the assistant's turns is written by the target, which sees its own earlier
answers, in the text that an engine gives to a client and gets back from it: reasoning and answer apart, rendered by the
chat template, tokenized. Turns of the assistant before the first user turn stay as they are, and are not trained.

The answers stop, and what was answered is kept, before

    tool            results of tools: they belong to calls that the target did not make
    too_long        a prompt that leaves no room for an answer
    template        a turn that the chat template does not take

and after

    reasoning_cut   an answer whose reasoning has no end within max_new_tokens
    special_tokens  an answer with control tokens in it (a tool call, another channel), which no message can hold

Trained are exactly the tokens that were generated. Answers share a sample as long as the prompt of the next one begins
with the very tokens of the last prompt and its answer. Where it does not (Qwen3 drops the reasoning of earlier turns;
text that another tokenization would spell differently), a new sample begins, so that a conversation can become one
sample per answer, `<id>#<k>`: each is what the engine would see.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from pipeline.prompts.chat import ChatEncoder
from pipeline.prompts.journal import Answer, Request
from pipeline.prompts.messages import REASONING_MARKERS
from pipeline.prompts.records import Record
from pipeline.prompts.refused import Refused


@dataclass(frozen=True)
class Rules:
    """What is asked, and what of the answers is trained.

    Attributes:
        encoder: of the target; its `reasoning` and `train_on` hold for what the target writes too.
        answer: every turn of the assistant, or the last one, with the source's own before it.
        max_length: most tokens of a prompt and its answer.
        max_new_tokens: most tokens of an answer.
    """

    encoder: ChatEncoder
    answer: Literal["all", "last"]
    max_length: int
    max_new_tokens: int
    eos_token_ids: list[int]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that no message can hold."""
        tokenizer = self.encoder.tokenizer
        added = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
        found = {tokenizer.convert_tokens_to_ids(marker): marker for pair in REASONING_MARKERS for marker in pair}
        # Of a marker that is no token, the unknown token's id was given.
        markers = {i for i, marker in found.items() if i is not None and tokenizer.convert_ids_to_tokens(i) == marker}
        return frozenset({*added, *tokenizer.all_special_ids, *self.eos_token_ids} - markers)


class Part(NamedTuple):
    """A sample: messages, token ids [T], loss mask [T], and "length" if one of its answers was cut."""

    messages: list[dict]
    input_ids: list[int]
    loss_mask: list[int]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class _Turn:
    """An answer: its prompt, how many messages there are with it, and where in it the reasoning ends (in tokens)."""

    prompt_ids: list[int]
    answer: Answer
    messages: int
    reasoning: int


class Dialogue:
    """Asks one turn after the other: `request` is what comes next, None at the end.

    It depends on the record and the answers alone, so replaying the answers of a journal gives the same samples.

    Attributes:
        wanted: answers asked for in all.
        ended: why fewer were given, one of the words above; None.
        refused: why not even the first turn can be asked.
    """

    def __init__(self, record: Record, rules: Rules):
        self.record, self._rules = record, rules
        self._said = [record.messages] if rules.answer == "last" else _between_answers(record.messages)
        self.wanted = len(self._said)
        self.ended: str | None = None
        self.refused: Refused | None = None
        self.request: Request | None = None
        self._messages: list[dict] = []
        self._turns: list[_Turn] = []
        self._next()

    @property
    def answered(self) -> int:
        return len(self._turns)

    @property
    def answers(self) -> list[Answer]:
        return [turn.answer for turn in self._turns]

    def answer(self, answer: Answer) -> None:
        """Take the answer to `request`, and go on to the next turn."""
        prompt_ids = self.request.prompt_ids
        message, reasoning, self.ended = _understood(answer, prompt_ids, self._rules)
        self._messages.append(message)
        self._turns.append(_Turn(prompt_ids, answer, len(self._messages), reasoning))
        self._next()

    def _next(self) -> None:
        self.request = None
        if self.ended or len(self._turns) == self.wanted:
            self.ended = self.ended if len(self._turns) < self.wanted else None
            return
        said = self._said[len(self._turns)]
        if self._rules.answer == "all" and any(message["role"] == "tool" for message in said):
            return self._end(Refused("tool", "results of tools that the target did not call come first"))
        try:
            ids = self._rules.encoder.prompt_ids([*self._messages, *said], self.record.tools)
        except Refused as e:
            return self._end(e)
        if len(ids) + self._rules.max_new_tokens > self._rules.max_length:
            return self._end(Refused(
                "too_long", f"{len(ids)} prompt tokens and {self._rules.max_new_tokens} new ones exceed the "
                            f"{self._rules.max_length} of prompts.max_length (if null: target.context_length)"))
        self._messages.extend(said)
        self.request = Request(self.record.id, ids)

    def _end(self, why: Refused) -> None:
        if self._turns:
            self.ended = why.reason
        else:
            self.refused = why

    def samples(self) -> list[Part]:
        """What the answers so far give.

        Raises:
            Refused: there is none, no token of them is trained, or (reasoning "drop") the template does not take the
                shorter turn.
        """
        if self.refused is not None:
            raise self.refused
        encoder, parts = self._rules.encoder, []
        for k, turn in enumerate(self._turns):
            prompt_ids, ids, mask = self._trained(turn)
            if encoder.train_on == "last" and k < len(self._turns) - 1:
                mask = [0] * len(mask)
            part = Part(self._messages[:turn.messages], prompt_ids + ids, [0] * len(prompt_ids) + mask,
                        turn.answer.finish_reason)
            if parts and prompt_ids[:len(parts[-1].input_ids)] == parts[-1].input_ids:
                before = parts.pop()
                part.loss_mask[:len(before.loss_mask)] = before.loss_mask
                if before.finish_reason == "length":
                    part = part._replace(finish_reason="length")
            parts.append(part)
        parts = [part for part in parts if any(part.loss_mask)]
        if not parts:
            raise Refused("no_trained_tokens", "the target's answers hold nothing but reasoning")
        if longest := max((n for p in parts if (n := len(p.input_ids)) > self._rules.max_length), default=0):
            raise Refused("too_long", f"{longest} tokens are more than prompts.max_length")
        return parts

    def _trained(self, turn: _Turn) -> tuple[list[int], list[int], list[int]]:
        """Ids of the prompt and of the answer, and the answer's loss mask."""
        prompt_ids, ids, reasoning = turn.prompt_ids, turn.answer.ids, turn.reasoning
        how = self._rules.encoder.reasoning
        if reasoning == 0 or how == "keep":
            return prompt_ids, ids, [1] * len(ids)
        if how == "mask":
            return prompt_ids, ids, [0] * reasoning + [1] * (len(ids) - reasoning)
        if reasoning == len(ids):
            return prompt_ids, [], []
        # Dropped: the turn as the template writes it without its reasoning.
        encoded = self._rules.encoder.encode(self._messages[:turn.messages], self.record.tools)
        end, before = encoded.turn_ends[-1], max(encoded.turn_ends[:-1], default=0)
        start = encoded.loss_mask.index(1, before) if any(encoded.loss_mask[before:end]) else end
        if turn.answer.finish_reason == "length" and encoded.input_ids[end - 1] in self._rules.eos_token_ids:
            end -= 1  # the template's, not the target's
        ids = encoded.input_ids[start:end]
        return encoded.input_ids[:start], ids, [1] * len(ids)


def _between_answers(messages: list[dict]) -> list[list[dict]]:
    """What is said before each of the assistant's turns; before the first one also what came before any user turn."""
    said: list[list[dict]] = []
    now: list[dict] = []
    asked = False
    for message in messages:
        if message["role"] != "assistant":
            now.append(message)
            asked |= message["role"] in ("user", "tool")
        elif not asked:
            now.append(message)
        elif now:  # two turns of the assistant in a row are one
            said.append(now)
            now = []
    return [*said, now] if now else said


class _Understood(NamedTuple):
    """An answer as a message, the number of its tokens up to the end of its reasoning, and why it is the last one."""

    message: dict
    reasoning: int
    ended: str | None


def _understood(answer: Answer, prompt_ids: list[int], rules: Rules) -> _Understood:
    tokenizer = rules.encoder.tokenizer

    def text_of(ids: list[int], *, skip: bool = False) -> str:
        return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    ids = answer.ids[:-1] if answer.ids[-1:] and answer.ids[-1] in rules.eos_token_ids else answer.ids
    held = rules.special_ids.isdisjoint(ids)
    text = text_of(ids)
    ended = None if held else "special_tokens"
    for opening, closing in REASONING_MARKERS:
        said = text.lstrip()
        if not (said.startswith(opening) or text_of(prompt_ids[-8:]).rstrip().endswith(opening)):
            continue
        begin = len(text) - len(said.removeprefix(opening))
        end = text.find(closing, begin)
        if end < 0:
            message = {"role": "assistant", "content": "", "reasoning_content": text[begin:]}
            return _Understood(message, len(answer.ids), "reasoning_cut")
        rest = text[end + len(closing):]
        message = {"role": "assistant", "content": rest, "reasoning_content": text[begin:end]}
        reasoning = _tokens_of(len(text) - len(rest.lstrip()), ids, text_of)
        return _Understood(message, reasoning, ended)
    return _Understood({"role": "assistant", "content": text_of(ids, skip=not held)}, 0, ended)


def _tokens_of(length: int, ids: list[int], text_of) -> int:
    """Number of tokens that the first `length` letters take, one that lies across the border included."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(text_of(ids[:middle])) < length:
            low = middle + 1
        else:
            high = middle
    return low
