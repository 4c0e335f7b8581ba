"""Chat template → token ids and loss mask: which tokens of a conversation the target generated.

The mask of an assistant turn covers everything after the generation prompt up to and including the end-of-turn token:
reasoning, content, tool calls. It does not cover the newline that many templates put behind, because nobody generates
that. A token across a turn's first or last letter (``\\n\\n``, half of it the header's) is not what was generated either.

Where a turn lies in the rendered text is found in one of two ways, and which tokens lie there again in one of two:

===========  ================================================  =============================================
method       where the turn lies                               which tokens lie there
===========  ================================================  =============================================
`tags`       ``{% generation %}`` tags of the template         character offsets, else prefixes as below
`offsets`    rendering up to the turn (turns.py)               character offsets of a fast tokenizer
`prefixes`   rendering up to the turn (turns.py)               tokenizing the text up to the turn's start and
                                                               end (slow tokenizers: Kimi, SpecForge PR 108)
===========  ================================================  =============================================
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from pipeline.prompts.messages import Reasoning, answer_start, engine_messages, engine_tools, reasoning_of, without_reasoning
from pipeline.prompts.refused import Refused
from pipeline.prompts.turns import Span, Tools, TurnFinder

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

Method = Literal["tags", "offsets", "prefixes"]


class Encoded(NamedTuple):
    """A conversation as the target sees it.

    Attributes:
        input_ids: T token ids.
        loss_mask: T zeros and ones; 1 marks a token that the target generated.
        turn_ends: for each assistant turn the number of tokens up to its end.
    """

    input_ids: list[int]
    loss_mask: list[int]
    turn_ends: list[int]


class ChatEncoder:
    """Turns conversations into token ids with the target's own template and tokenizer.

    Args:
        tokenizer: of the target, with a chat template.
        eos_token_ids: the tokens that end a turn for the target.
        method: how to find the tokens of a turn; by default the first of tags, offsets and prefixes that applies.
        reasoning: "keep" trains it, "mask" keeps it in the text only, "drop" takes it out of the messages.
        train_on: every assistant turn, or the last one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: list[int], method: Method | None = None, *,
                 reasoning: Reasoning = "keep", train_on: Literal["all", "last"] = "all"):
        self.tokenizer, self.reasoning, self.train_on = tokenizer, reasoning, train_on
        self.method: Method = method or ("tags" if self.has_tags else "offsets" if tokenizer.is_fast else "prefixes")
        ends = dict.fromkeys([*eos_token_ids, tokenizer.eos_token_id])
        self._turns = TurnFinder(self._render, [tokenizer.convert_ids_to_tokens(i) for i in ends if i is not None])

    @cached_property
    def has_tags(self) -> bool:
        """Whether the template marks what is generated."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.tokenizer.get_chat_template()) is not None

    def prompt_ids(self, messages: list[dict], tools: Tools = None) -> list[int]:
        """Token ids of a conversation that waits for the target's answer, including the generation prompt.

        Raises:
            Refused: the template does not accept the conversation.
        """
        return self._tokenize(self._render(engine_messages(messages, self.reasoning), engine_tools(tools), prompt=True))

    def encode(self, messages: list[dict], tools: Tools = None) -> Encoded:
        """A whole conversation.

        Raises:
            Refused: the template does not accept the conversation, drops a turn, or tokens cannot be told apart.
        """
        found = self.encode_batch([(messages, tools)])[0]
        if isinstance(found, Refused):
            raise found
        return found

    def encode_batch(self, conversations: Iterable[tuple[list[dict], Tools]]) -> list[Encoded | Refused]:
        """Whole conversations, each a pair of messages and tools, tokenized in one call."""
        rendered = [self._rendered(messages, tools) for messages, tools in conversations]
        accepted = [i for i, found in enumerate(rendered) if not isinstance(found, Refused)]
        texts = [rendered[i][0] for i in accepted]
        if not texts or self.method == "prefixes" or not self.tokenizer.is_fast:
            borders = [_PrefixBorders(self, text) for text in texts]
        else:
            # As apply_chat_template tokenizes: the template writes the special tokens itself.
            batch = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            borders = [_OffsetBorders(encoding) for encoding in batch.encodings]
        out: list[Encoded | Refused] = list(rendered)
        for i, border in zip(accepted, borders, strict=True):
            try:
                out[i] = self._masked(border, rendered[i][1])
            except Refused as e:
                out[i] = e
        return out

    def _rendered(self, messages: list[dict], tools: Tools) -> tuple[str, list[list[Span]]] | Refused:
        """Text, and for each assistant turn the spans that were generated."""
        try:
            messages, tools = engine_messages(messages, self.reasoning), engine_tools(tools)
            if self.method == "tags":
                text, tagged = self._render_tagged(messages, tools)
                turns = [[span] for span in tagged]
                if len(turns) != sum(message["role"] == "assistant" for message in messages):  # one is tagged in parts
                    whole = self._turns.spans(messages, tools, text)
                    turns = [[tag for tag in tagged if a <= tag[0] < b] for a, b in whole]
            else:
                text = self._render(messages, tools)
                turns = [[span] for span in self._turns.spans(messages, tools, text)]
            if self.reasoning == "mask":
                places = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
                turns = [self._unreasoned(text, spans, messages, k, tools) for spans, k in zip(turns, places)]
            return text, turns
        except Refused as e:
            return e

    def _unreasoned(self, text: str, spans: list[Span], messages: list[dict], k: int, tools: Tools) -> list[Span]:
        """The spans of turn k without its reasoning."""
        if not spans:
            return spans
        (start, _), (_, end) = spans[0], spans[-1]
        thought = reasoning_of(messages[k])
        begin = answer_start(text, start, end, thought)
        if begin is None and thought.strip() and thought.strip() in text[start:end]:
            answered = [*messages[:k], without_reasoning(messages[k]), *messages[k + 1:]]
            if self._render(answered, tools) != text:  # else the template left it out and the answer says the same
                raise Refused("reasoning", f"how the template marks the reasoning of turn {k} is not known, so it cannot be "
                              "masked")
        return spans if begin is None else [(max(a, begin), b) for a, b in spans if b > begin]

    def _masked(self, borders: _OffsetBorders | _PrefixBorders, turns: list[list[Span]]) -> Encoded:
        ids = borders.ids
        mask, ends = [0] * len(ids), []
        for k, spans in enumerate(turns):
            for a, b in spans:
                start, end = borders.first_from(a), borders.count_until(b)
                if self.train_on == "all" or k == len(turns) - 1:
                    mask[start:end] = [1] * (end - start)
            ends.append(end if spans else 0)
        return Encoded(ids, mask, ends)

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, messages: list[dict], tools: Tools, *, prompt: bool = False) -> str:
        def render(tools: Tools) -> str:
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)

        return _tried(render, tools)

    def _render_tagged(self, messages: list[dict], tools: Tools) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        def render(tools: Tools) -> tuple[list[str], list[list[Span]]]:
            return render_jinja_template(
                conversations=[messages], tools=tools, return_assistant_tokens_mask=True,
                chat_template=self.tokenizer.get_chat_template(tools=tools), **self.tokenizer.special_tokens_map)

        (text,), (spans,) = _tried(render, tools)
        return text, [(start, self._turns.turn_end(text, start, end)) for start, end in spans]


def _tried(render, tools: Tools):
    """Render as SGLang does: where a template does not take schemas in OpenAI's wrapper, the bare functions."""
    try:
        return render(tools)
    except Exception as first:  # jinja2 errors, TypeErrors on missing fields, or what remote code raises
        try:
            if tools:
                return render([tool["function"] for tool in tools])
        except Exception:
            pass
        raise Refused("template", f"the chat template does not accept it: {first}") from first


class _OffsetBorders:
    """Which tokens lie at a position of the text, by the character offsets of a fast tokenizer."""

    def __init__(self, encoding: Encoding):
        self.ids: list[int] = encoding.ids
        self._encoding = encoding

    def count_until(self, position: int) -> int:
        """Number of tokens that end at or before `position`."""
        over = self._encoding.char_to_token(position)  # the first token that covers the letter there
        if over is not None:
            return over
        return bisect_right(range(len(self.ids)), position, key=self._end)

    def first_from(self, position: int) -> int:
        """The first token that begins at or after `position`."""
        token = self.count_until(position)
        while token < len(self.ids) and self._start(token) < position:
            token += 1
        return token

    def _end(self, token: int) -> int:
        return self._encoding.token_to_chars(token)[1]

    def _start(self, token: int) -> int:
        # Tokenizers may trim blanks off offsets: they belong to the token behind them.
        return min(self._encoding.token_to_chars(token)[0], self._end(token - 1) if token else 0)


class _PrefixBorders:
    """The same for a slow tokenizer: by tokenizing the text up to a position."""

    def __init__(self, encoder: ChatEncoder, text: str):
        self._text, self._encoder = text, encoder
        self.ids = encoder._tokenize(text)

    def count_until(self, position: int) -> int:
        return self._around(position)[0]

    def first_from(self, position: int) -> int:
        return self._around(position)[1]

    def _around(self, position: int) -> tuple[int, int]:
        head = self._encoder._tokenize(self._text[:position])
        if self.ids[:len(head)] == head:
            return len(head), len(head)
        # A token lies across: the text of the tokens up to it is shorter than the position, with it it is longer.
        if self._decoded(len(self.ids)) != self._text:
            raise Refused("prefix", f"a token lies across the border of a turn at …{self._text[:position][-20:]!r}, and "
                          "the tokenizer does not give the text back")
        count = bisect_right(range(1, len(self.ids) + 1), position, key=lambda n: len(self._decoded(n)))
        return count, count + (len(self._decoded(count)) < position)

    def _decoded(self, count: int) -> str:
        return self._encoder.tokenizer.decode(self.ids[:count], skip_special_tokens=False,
                                              clean_up_tokenization_spaces=False)
