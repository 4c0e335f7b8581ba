"""Where the assistant's turns lie in a rendered conversation, from rendering alone.

A turn begins where the prompt for it ends: what the template renders of the messages before it with the generation
prompt. It ends behind its end-of-turn token. Asking the template for every turn of every conversation would cost more
than all else, so it is asked once per *shape*, the conversation with a stand-in for every text: of the shape's rendering
it is known what is template and what is content. Put back, the contents must give the conversation's own rendering
letter by letter; only where a template does something else with them is each turn of that conversation looked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from os.path import commonprefix

from pipeline.prompts.messages import inline_reasoning
from pipeline.prompts.refused import Refused

Span = tuple[int, int]
Tools = list[dict] | None
Render = Callable[..., str]

# Private-use characters: no template looks for them, and they differ at both ends, so that a rendering with a stand-in
# agrees with the real one exactly up to the content's first and from its last character.
_BEGIN, _END = "\ue0f0", "\ue0f1"
_STAND_IN = re.compile(f"{_BEGIN}([0-9]+){_END}")
_ADDED = f"{_BEGIN}{10**9}{_END}"  # for a text that has no stand-in
_OTHER = "\ue0f2content\ue0f3"  # for a text among others that stand as they are
_MOST_SHAPES = 4096


@dataclass(frozen=True)
class _Shape:
    """What the template makes of all conversations that differ in their texts alone.

    Attributes:
        literals: the template's own text before, between and behind the slots (one more than `slots`).
        slots: which text stands between, in the order of the rendering; one may be missing or occur twice.
        spans: of the assistant's turns. A border is (index into literals, offset in that literal).
    """

    literals: list[str]
    slots: list[int]
    spans: list[tuple[tuple[int, int], tuple[int, int]]]


class TurnFinder:
    """Finds the assistant's turns of rendered conversations.

    Args:
        render: (messages, tools, prompt=bool) → text; raises Refused.
        end_strings: texts of the tokens that end a turn.
    """

    def __init__(self, render: Render, end_strings: list[str]):
        self._render, self._ends = render, end_strings
        self._shapes: dict[tuple, _Shape | None] = {}

    def spans(self, messages: list[dict], tools: Tools, text: str) -> list[Span]:
        """[start, end) in `text`, the rendering of `messages`, of each assistant turn.

        Raises:
            Refused: the template leaves a turn out, or where it ends cannot be told.
        """
        key, bare, texts = _emptied(messages, tools)
        if key not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._shape(bare, tools)
        shape = self._shapes[key]
        if shape is not None and (starts := _fill(shape, texts, text)) is not None:
            return [(starts[i] + a, starts[j] + b) for (i, a), (j, b) in shape.spans]
        return self._compared(messages, tools, text)

    def turn_end(self, text: str, start: int, end: int, limit: int | None = None) -> int:
        """The end of a turn whose content ends at `end`, moved to just behind its end-of-turn token."""
        inside = [i + len(s) for s in self._ends if (i := text.rfind(s, start, end)) >= 0]
        if inside and not text[max(inside):end].strip():
            return max(inside)
        # Only blanks may lie between: some templates do not end a turn that another one follows.
        after = self._next_end(text, end, limit)
        return after[1] if after and not text[end:after[0]].strip() else end

    def _next_end(self, text: str, position: int, limit: int | None) -> Span | None:
        found = [(i, i + len(s)) for s in self._ends if (i := text.find(s, position, limit)) >= 0]
        return min(found, default=None)

    def _shape(self, bare: list[dict], tools: Tools) -> _Shape | None:
        """None: the template does not take stand-ins."""
        try:
            text = self._render(bare, tools)
        except Refused:
            return None
        found = list(_STAND_IN.finditer(text))
        borders = [0, *(m.end() for m in found)]
        spans = self._located(bare, tools, text)

        def place(position: int) -> tuple[int, int]:
            index = max(i for i, border in enumerate(borders) if border <= position)
            return index, position - borders[index]

        literals = [text[a:b] for a, b in zip(borders, [*(m.start() for m in found), len(text)])]
        return _Shape(literals, [int(m[1]) for m in found], [(place(a), place(b)) for a, b in spans])

    def _located(self, bare: list[dict], tools: Tools, text: str) -> list[Span]:
        owner = {slot: k for k, message in enumerate(bare) for slot in _slots_of(message)}
        places = [(owner[int(m[1])], m.span()) for m in _STAND_IN.finditer(text)]
        spans = []
        for k, message in enumerate(bare):
            if message["role"] != "assistant":
                continue
            own = [span for of, span in places if of == k]
            calls = bool(message.get("tool_calls"))
            said = own[-1][1] if own else None
            if said is None or not message["content"].endswith(_END):
                said = self._content_position(bare, k, tools, text)
            limit = min((a for of, (a, _) in places if of > k), default=len(text))
            start = self._prompt_end(bare, k, tools, text, own[0][0] if own else limit)
            if start is None:  # an earlier turn may be written differently from what is prompted for
                start = own[0][0] if own else said
            if start is None or said is None and not calls:
                raise Refused("template", f"the chat template leaves out turn {k}")
            if calls:
                end = self._calls_end(bare, k, tools, text, max(start, said or 0), limit)
            else:
                end = self.turn_end(text, start, said, limit)
            spans.append((start, end))
        return spans

    def _attempt(self, messages: list[dict], tools: Tools, *, prompt: bool = False) -> str:
        """"" where the template does not take the messages."""
        try:
            return self._render(messages, tools, prompt=prompt) if messages else ""
        except Refused:
            return ""

    def _prompt_end(self, bare: list[dict], k: int, tools: Tools, text: str, limit: int) -> int | None:
        """Where in `text` the prompt for turn k ends, with Qwen3 before the think block; None if the turn begins otherwise.

        Templates may write what is further up differently, such as the tools before the last user turn only (Mistral), so
        what counts is the template's own text between what was said last and the turn.
        """
        before = self._attempt(bare[:k], tools, prompt=True)
        if not before or text.startswith(before):
            return len(before) if before and len(before) <= limit else None
        marked, added = text, 0
        if not bare[k - 1]["content"].endswith(_END):  # nothing was said: something is, and taken away again
            said = bare[k - 1] | {"content": bare[k - 1]["content"] + _ADDED}
            bare, added = [*bare[:k - 1], said, *bare[k:]], len(_ADDED)
            marked, before = self._attempt(bare, tools), self._attempt(bare[:k], tools, prompt=True)
            if marked.replace(_ADDED, "", 1) != text:
                return None
        last = next(reversed(list(_STAND_IN.finditer(before))), None)
        here = next(reversed(list(_STAND_IN.finditer(marked, 0, limit + added))), None)
        if last is None or here is None or here[0] != last[0] or not marked.startswith(before[last.end():], here.end()):
            return None
        end = here.end() + len(before) - last.end() - added
        return end if end <= limit else None

    def _calls_end(self, bare: list[dict], k: int, tools: Tools, text: str, said: int, limit: int) -> int:
        if after := self._next_end(text, said, limit):
            return after[1]
        whole = self._render(bare[:k + 1], tools)
        if not text.startswith(whole):
            raise Refused("template", f"where turn {k} with its tool calls ends cannot be told from the rendered text")
        return len(whole.rstrip())

    def _content_position(self, messages: list[dict], k: int, tools: Tools, text: str) -> int | None:
        """Where what a turn says would stand if it said something; None if the template would leave it out."""
        marked = self._with_content(messages, k, tools, messages[k]["content"] + _OTHER)
        position = len(commonprefix([text, marked]))
        return position if marked.startswith(_OTHER, position) else None

    def _with_content(self, messages: list[dict], k: int, tools: Tools, content: str) -> str:
        return self._render([*messages[:k], messages[k] | {"content": content}, *messages[k + 1:]], tools)

    def _compared(self, messages: list[dict], tools: Tools, text: str) -> list[Span]:
        """Turn by turn: what of the text changes when the content does."""
        spans = []
        for k, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._attempt(messages[:k], tools, prompt=True)
            marked = self._with_content(messages, k, tools, _OTHER)
            if _OTHER not in marked:
                raise Refused("template", f"the chat template leaves out turn {k}")
            start = len(commonprefix([text, marked]))
            end = len(text) - len(commonprefix([text[::-1], marked[::-1]]))
            if before and text.startswith(before):
                start = len(before)
            if message.get("tool_calls"):
                spans.append((start, self._calls_end(messages, k, tools, text, end, None)))
            else:
                spans.append((start, self.turn_end(text, start, end)))
        return spans


def _emptied(messages: list[dict], tools: Tools) -> tuple[tuple, list[dict], list[str]]:
    """Shape key, the messages with a stand-in for every text, and the texts.

    Texts of blanks alone stay: templates leave out what is empty. Tool calls stay too: they are written as JSON.
    """
    texts: list[str] = []

    def slot(said: str) -> str:
        if not said.strip():
            return said
        texts.append(said)
        return f"{_BEGIN}{len(texts) - 1}{_END}"

    bare, key = [], [json.dumps(tools) if tools else None]
    for message in messages:
        role, content = message["role"], message["content"]
        empty = dict(message)
        if reasoning := message.get("reasoning_content"):
            empty["reasoning_content"] = slot(reasoning)
        if role == "assistant" and (parts := inline_reasoning(content)):
            opening, thought, closing, said = parts
            empty["content"] = opening + slot(thought) + closing + slot(said)
        else:
            empty["content"] = slot(content)
        bare.append(empty)
        key.append((role, empty["content"]) if len(message) == 2 else json.dumps(empty))
    return tuple(key), bare, texts


def _slots_of(message: dict) -> list[int]:
    return [int(m[1]) for field in ("reasoning_content", "content") for m in _STAND_IN.finditer(message.get(field) or "")]


def _fill(shape: _Shape, texts: list[str], text: str) -> list[int] | None:
    """Where each literal begins in `text`; None if `text` is not the shape with these texts in it.

    Templates trim texts: all blanks, or newlines as Qwen3 does with reasoning, at either side.
    """
    if not text.startswith(shape.literals[0]):
        return None
    starts, position = [0], len(shape.literals[0])
    for slot, literal in zip(shape.slots, shape.literals[1:]):
        said = texts[slot]
        if not text.startswith(said + literal, position):
            said = next((s for s in _trimmed(said) if text.startswith(s + literal, position)), None)
            if said is None:
                return None
        starts.append(position + len(said))
        position = starts[-1] + len(literal)
    return starts if position == len(text) else None


def _trimmed(said: str) -> list[str]:
    lefts = [said, said.lstrip("\n"), said.lstrip()]
    return [s for left in lefts for s in (left, left.rstrip("\n"), left.rstrip())][1:]
