"""Messages and tools as the engine hands them to the chat template, and what of an assistant's turn is reasoning.

SGLang reads a request into typed messages and hands those to the template, so a template that prints a whole tool call
or schema sees fields that the client did not send (sglang/srt/entrypoints/openai/protocol.py). Here they are added too.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from pipeline.prompts.refused import Refused

Reasoning = Literal["keep", "drop", "mask"]

_OTHER_FIELDS = ("tool_call_id", "name", "reasoning_content", "tool_calls")
# How models write reasoning inline: opening and closing marker.
REASONING_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_INLINE = re.compile(r"\A(\s*<think>)(.*?)(</think>)(.*)\Z", re.DOTALL)


def engine_messages(messages: list[dict], reasoning: Reasoning = "keep") -> list[dict]:
    """The messages of a `Record` as SGLang's template sees them; `reasoning` "drop" takes an assistant's out.

    Raises:
        Refused: a tool call whose arguments are no JSON object, or content that is not text.
    """
    return [_engine_message(m, reasoning) for m in messages]


def _engine_message(message: dict, reasoning: Reasoning) -> dict:
    content = message.get("content")
    if not isinstance(content, str | None):
        raise Refused("not_text", f"content of type {type(content).__name__}: chat templates are given one string a turn")
    out = {"role": message["role"], "content": content or ""}
    if message["role"] == "user":
        return out
    out |= {key: message[key] for key in _OTHER_FIELDS if message.get(key) is not None}
    if message["role"] == "assistant" and reasoning == "drop":
        out = without_reasoning(out)
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [_engine_call(call) for call in calls]
    return out


def _engine_call(call: dict) -> dict:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as e:
            raise Refused("tool_json", f"the arguments of {function['name']} are not JSON: {e}") from e
    if not isinstance(arguments, dict | None):
        raise Refused("tool_json", f"the arguments of {function['name']} are not a JSON object")
    return {"id": call.get("id"), "index": call.get("index"), "type": "function",
            "function": {"name": function["name"], "arguments": arguments}}


def engine_tools(tools: list[dict] | None) -> list[dict] | None:
    """Function schemas as SGLang's template sees them: what is missing is null, what is not known left out."""
    return [_engine_tool(tool) for tool in tools] if tools else None


def _engine_tool(tool: dict) -> dict:
    defer = tool.get("defer_loading")
    function = {key: value for key, value in tool["function"].items()
                if key in ("description", "name", "parameters") or key in ("strict", "defer_loading") and value is not None}
    for key in ("description", "parameters"):
        function.setdefault(key, None)
    if defer is not None:
        function.setdefault("defer_loading", defer)
    return {"type": tool.get("type", "function"), "function": function, "defer_loading": defer}


def inline_reasoning(content: str) -> tuple[str, str, str, str] | None:
    """Opening marker, reasoning, closing marker and answer of a turn that begins with ``<think>``; else None."""
    found = _INLINE.match(content) if "</think>" in content else None
    return found.groups() if found else None


def reasoning_of(message: dict) -> str:
    """What the assistant thought before it answered; "" if it did not."""
    if message.get("reasoning_content"):
        return message["reasoning_content"]
    found = inline_reasoning(message["content"])
    return found[1] if found else ""


def without_reasoning(message: dict) -> dict:
    """An assistant's message as if it had answered at once."""
    out = {key: value for key, value in message.items() if key != "reasoning_content"}
    if found := inline_reasoning(out["content"]):
        out["content"] = found[3].lstrip("\n")
    return out


def answer_start(text: str, start: int, end: int, reasoning: str) -> int | None:
    """Where the answer of the turn text[start:end] begins, behind its reasoning block and the blanks that follow.

    None: the turn does not begin with the reasoning between known markers.
    """
    for opening, closing in REASONING_MARKERS:
        at = text.find(closing, start, end)
        if at >= 0 and text[start:at].strip().removeprefix(opening).strip() == reasoning.strip():
            at += len(closing)
            while at < end and text[at].isspace():
                at += 1
            return at
    return None
