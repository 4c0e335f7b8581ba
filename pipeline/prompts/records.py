"""The one form in which stage 1 works with a conversation, and its name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from pipeline.files import sha256_json, sha256_text

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Record:
    """A conversation, or a row of tokens made elsewhere.

    Attributes:
        id: hash of the content (`content_id`): order, sharding and additions do not rename a record.
        category: the source's, for spreading a limit and for reports.
        split: the source's, else drawn by a hash (`draw_split`).
        messages: as chat templates take them. Each has a `role` (system, developer, user, assistant or tool) and a
            `content` (a string); an assistant's may have `reasoning_content` (a string) and `tool_calls`
            (``{"type": "function", "id"?, "function": {"name", "arguments": {…}}}``), a tool's `tool_call_id` and
            `name`. Empty for a row of tokens.
        where: file and line, row or record, for messages.
        tools: JSON schemas of the functions the assistant may call, as chat templates take them; None without.
        input_ids: [T] token ids of a row made elsewhere; None for a conversation.
        loss_mask: [T] zeros and ones beside `input_ids`.
        source: place of its source in the list of sources.
    """

    id: str
    category: str | None
    split: Split
    messages: list[dict]
    where: str
    tools: list[dict] | None = None
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    source: int = 0

    def to_line(self) -> bytes:
        """As one line of JSON. (`where` holds the name of a file, which need not be Unicode.)"""
        text = json.dumps(self.__dict__, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace") + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Record:
        return cls(**json.loads(line))


def content_id(messages: list[dict], tools: list[dict] | None, input_ids: list[int] | None,
               loss_mask: list[int] | None) -> str:
    """16 hex digits that depend on what is said alone, not on where or in which format it was found.

    Raises:
        UnicodeEncodeError: text that is not Unicode (half of a surrogate pair, as scraped text contains).
    """
    content: object = messages
    if tools:
        content = {"messages": messages, "tools": tools}
    if input_ids is not None:
        content = {"input_ids": input_ids, "loss_mask": loss_mask}
    return sha256_json(content)[:16]


def draw_split(opening: str, heldout_fraction: float) -> Split:
    """Held out or not by a hash of how a conversation opens.

    So it does not depend on order, on other records or on the seed, and conversations that open alike (versions of one,
    or the same prompt answered twice) stay on one side.
    """
    draw = int(sha256_text(f"split:{opening}")[:8], 16) / 16**8
    return "heldout" if draw < heldout_fraction else "train"
