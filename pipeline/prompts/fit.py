"""Conversations that are longer than a sample may be.

=======  ==============================================================================================================
skip     left out
turns    as many whole turns from the beginning as fit
cut      the tokens that do not fit are cut off on the right
split    several samples, each of whole exchanges (from a user turn to the answer before the next one) behind the system
         message; an exchange that does not fit alone is cut on the right
=======  ==============================================================================================================

Where only the last turn is trained (`train_on` = last), a part without it has nothing to train on and is left out. No
way gives a sample without trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from pipeline.prompts.chat import ChatEncoder, Encoded
from pipeline.prompts.refused import Refused
from pipeline.prompts.turns import Tools

Truncate = Literal["skip", "turns", "cut", "split"]


class Part(NamedTuple):
    """What becomes of a conversation, or of a part of it: its messages, token ids [T] and loss mask [T]."""

    messages: list[dict]
    input_ids: list[int]
    loss_mask: list[int]


def fit_batch(encoder: ChatEncoder, conversations: list[tuple[list[dict], Tools]], *, max_length: int, truncate: Truncate
              ) -> list[list[Part] | Refused]:
    """Encode conversations (pairs of messages and tools) into samples of at most `max_length` tokens.

    Returns for each one part or, where it was split, several; or why it gives none.
    """
    return [_fitted(encoder, *conversation, encoded, max_length, truncate)
            for conversation, encoded in zip(conversations, encoder.encode_batch(conversations), strict=True)]


def fit_row(input_ids: list[int], loss_mask: list[int], *, max_length: int, truncate: Truncate) -> list[Part] | Refused:
    """The same for a row of tokens [T] made elsewhere, whose turns are not known: too long, it is cut or left out."""
    if len(input_ids) > max_length and truncate != "cut":
        return _too_long(len(input_ids), max_length)
    part = _cut([], Encoded(input_ids, loss_mask, []), max_length)
    return [part] if any(part.loss_mask) else Refused("no_trained_tokens", "the loss mask sums to 0")


def _too_long(length: int, max_length: int) -> Refused:
    return Refused("too_long", f"{length} tokens are more than the {max_length} of prompts.max_length "
                               "(if null: target.context_length)")


def _fitted(encoder: ChatEncoder, messages: list[dict], tools: Tools, encoded: Encoded | Refused, max_length: int,
            truncate: Truncate) -> list[Part] | Refused:
    if isinstance(encoded, Refused):
        return encoded
    if not any(encoded.loss_mask):
        return Refused("no_trained_tokens", "the loss mask sums to 0")
    if len(encoded.input_ids) <= max_length:
        return [_cut(messages, encoded, max_length)]
    too_long = _too_long(len(encoded.input_ids), max_length)
    if truncate == "skip":
        return too_long
    if truncate == "cut":
        parts = [_cut(messages, encoded, max_length)]
    elif encoder.train_on == "last" and truncate == "turns":
        parts = []
    else:
        ways = {"turns": _first_turns, "split": _exchanges}
        try:
            parts = list(ways[truncate](encoder, messages, tools, encoded, max_length))
        except Refused as e:  # a template may not take a part of what it takes as a whole
            return e
    return [part for part in parts if any(part.loss_mask)] or too_long


def _cut(messages: list[dict], encoded: Encoded, max_length: int) -> Part:
    return Part(messages, encoded.input_ids[:max_length], encoded.loss_mask[:max_length])


def _first_turns(encoder: ChatEncoder, messages: list[dict], tools: Tools, encoded: Encoded, max_length: int
                 ) -> Iterator[Part]:
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    for k, end in reversed(list(zip(turns, encoded.turn_ends, strict=True))):
        if end <= max_length:
            # Rendered anew: a template may write the last turn differently from an earlier one.
            part = encoder.encode(messages[:k + 1], tools)
            if len(part.input_ids) <= max_length:
                yield _cut(messages[:k + 1], part, max_length)
                return


def _exchanges(encoder: ChatEncoder, messages: list[dict], tools: Tools, encoded: Encoded, max_length: int
               ) -> Iterator[Part]:
    first = 1 if messages[0]["role"] in ("system", "developer") else 0
    starts = [k for k in range(first, len(messages))
              if k == first or messages[k]["role"] == "user" and messages[k - 1]["role"] != "user"]
    borders = [*starts, len(messages)]
    taken = _tokens_before(messages, encoded, borders)
    begin = 0
    while begin < len(starts):
        # The most that may fit by what they take in the whole conversation, then fewer: a template may write more.
        most = max((end for end in range(begin + 1, len(borders)) if taken[end] - taken[begin] <= max_length),
                   default=begin + 1)
        for end in range(most, begin, -1):
            part = [*messages[:first], *messages[borders[begin]:borders[end]]]
            found = encoder.encode(part, tools)
            if len(found.input_ids) <= max_length:
                break
        if encoder.train_on == "all" or end == len(starts):
            yield _cut(part, found, max_length)
        begin = end


def _tokens_before(messages: list[dict], encoded: Encoded, borders: list[int]) -> list[int]:
    """For each border the tokens up to the end of the last assistant turn before it."""
    ends = iter(encoded.turn_ends)
    ended = [0]  # by the number of messages
    for message in messages:
        ended.append(next(ends) if message["role"] == "assistant" else ended[-1])
    return [ended[border] for border in borders]
