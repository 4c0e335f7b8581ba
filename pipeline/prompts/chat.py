"""Chat template → token ids and loss mask: which tokens of a conversation the target generated.

The mask of an assistant turn covers everything after the generation prompt up to and including the end-of-turn token,
and not the newline that many templates put behind it, because nobody generates that.

Where a turn lies in the rendered text is found in one of two ways, and which tokens lie there again in one of two:

===========  ================================================  =============================================
method       where the turn lies                               which tokens lie there
===========  ================================================  =============================================
`tags`       ``{% generation %}`` tags of the template         character offsets, else prefixes as below
`offsets`    rendering the conversation up to the turn         character offsets of a fast tokenizer
`prefixes`   rendering the conversation up to the turn         tokenizing the text up to the turn's start and
                                                               end (slow tokenizers: Kimi, SpecForge PR 108)
===========  ================================================  =============================================
"""

from __future__ import annotations

import re
from functools import cached_property
from os.path import commonprefix
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Method = Literal["tags", "offsets", "prefixes"]
Span = tuple[int, int]

# Stands in for a turn's content to see what of the rendered text is content. Private-use characters, different at both
# ends, so that the text agrees with the real rendering exactly up to the content's first and from its last character.
_STAND_IN = "\ue0f0content\ue0f1"


class Refused(Exception):
    """A conversation that cannot become a sample.

    Attributes:
        reason: one word for counting, e.g. ``template``.
        detail: the sentence for people.
    """

    def __init__(self, reason: str, detail: str):
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class ChatEncoder:
    """Turns conversations into token ids with the target's own template and tokenizer.

    Args:
        tokenizer: of the target, with a chat template.
        eos_token_ids: the tokens that end a turn for the target.
        method: how to find the tokens of a turn; by default the first of tags, offsets and prefixes that applies.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: list[int], method: Method | None = None):
        self.tokenizer = tokenizer
        self.method: Method = method or ("tags" if self.has_tags else "offsets" if tokenizer.is_fast else "prefixes")
        ends = dict.fromkeys([*eos_token_ids, tokenizer.eos_token_id])
        self._end_strings = [tokenizer.convert_ids_to_tokens(i) for i in ends if i is not None]

    @cached_property
    def has_tags(self) -> bool:
        """Whether the template marks what is generated."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.tokenizer.get_chat_template()) is not None

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Token ids of a conversation that waits for the target's answer, including the generation prompt.

        Raises:
            Refused: the template does not accept the conversation.
        """
        return self._tokenize(self._render(messages, prompt=True))

    def encode(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        """Token ids and loss mask (both [T]) of a whole conversation, every assistant turn marked.

        Raises:
            Refused: the template does not accept the conversation, drops a turn, or tokens cannot be told apart.
        """
        text = self._render(messages)
        spans = self._tagged_spans(messages) if self.method == "tags" else self._rendered_spans(messages, text)
        if self.method != "prefixes" and self.tokenizer.is_fast:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return list(encoded["input_ids"]), _mask_by_offsets(encoded["offset_mapping"], spans)
        ids = self._tokenize(text)
        return ids, self._mask_by_prefixes(text, ids, spans)

    def _tokenize(self, text: str) -> list[int]:
        # apply_chat_template tokenizes just so: the template writes the special tokens itself.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, messages: list[dict], *, prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as e:  # jinja2 errors, TypeErrors on missing fields, or what remote code raises
            raise Refused("template", f"the chat template does not accept it: {e}") from e

    def _tagged_spans(self, messages: list[dict]) -> list[Span]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[messages], chat_template=self.tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True, **self.tokenizer.special_tokens_map)
        return [(start, self._turn_end(texts[0], start, end)) for start, end in spans[0]]

    def _rendered_spans(self, messages: list[dict], text: str) -> list[Span]:
        spans = []
        for k, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:k], prompt=True) if k else ""
            stand_in = self._render([*messages[:k], message | {"content": _STAND_IN}, *messages[k + 1:]])
            if _STAND_IN[0] not in stand_in:
                raise Refused("template", f"the chat template leaves out turn {k}")
            start = len(commonprefix([text, stand_in]))
            end = len(text) - len(commonprefix([text[::-1], stand_in[::-1]]))
            # What the target generates begins after the generation prompt: with Qwen3 that includes the think block.
            # A template may render an earlier turn differently from what it prompts for; then it begins at the content.
            if before and text.startswith(before):
                start = len(before)
            spans.append((start, self._turn_end(text, start, end, tools=bool(message.get("tool_calls")))))
        return spans

    def _turn_end(self, text: str, start: int, end: int, *, tools: bool = False) -> int:
        """The end of a turn whose content ends at `end`, moved to just behind its end-of-turn token."""
        inside = [i + len(s) for s in self._end_strings if (i := text.rfind(s, start, end)) >= 0]
        if inside and not text[max(inside):end].strip():
            return max(inside)
        after = [(i, i + len(s)) for s in self._end_strings if (i := text.find(s, end)) >= 0]
        # Only blanks may lie between, or tool calls: some templates do not end a turn that another one follows.
        if after and (tools or not text[end:min(after)[0]].strip()):
            return min(after)[1]
        return end

    def _mask_by_prefixes(self, text: str, ids: list[int], spans: list[Span]) -> list[int]:
        mask = [0] * len(ids)
        for span in spans:
            start, end = (self._prefix_length(text[:position], ids) for position in span)
            mask[start:end] = [1] * (end - start)
        return mask

    def _prefix_length(self, prefix: str, ids: list[int]) -> int:
        head = self._tokenize(prefix)
        if ids[:len(head)] != head:
            raise Refused("prefix", "a token lies across the border of a turn: the tokens of "
                          f"…{prefix[-20:]!r} are not a prefix of the conversation's tokens")
        return len(head)


def _mask_by_offsets(offsets: list[Span], spans: list[Span]) -> list[int]:
    """1 for each token that lies within a span; a token across its border belongs to what is before it."""
    mask = [0] * len(offsets)
    for start, end in spans:
        for i, (a, b) in enumerate(offsets):
            # Tokenizers may trim blanks off offsets: a token of blanks is then empty and lies at its own end.
            if start <= a and start < b <= end:
                mask[i] = 1
    return mask
