"""What a raw record says: every known format read into messages, or into token ids made elsewhere.

=============  =====================================================================================================
format         a record holds
=============  =====================================================================================================
pretokenised   `input_ids` and `loss_mask`
openai         `messages`: role/content; content may be a list of text parts; `tool_calls`, `reasoning_content`; `tools`
sharegpt       `conversations`: from/value (or role/content); `system`, `tools`
ultrachat      `data`: strings, user and assistant in turn
alpaca         `instruction`, with `input`, `output`, `system` and `history` where given
turns          `turns`: what the user says turn by turn, unanswered (MT-bench)
prompt         `prompt`: a string, or messages; `system`
text           `text`: a string; `system`
=============  =====================================================================================================

Any record may have a `category` and a `split` ("train" or "heldout").
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.prompts.records import Split
from pipeline.prompts.refused import BadRecord, Refused

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
          "model": "assistant", "system": "system", "developer": "developer", "tool": "tool", "observation": "tool",
          "function": "tool", "function_response": "tool", "function_call": "assistant"}
# What engines hand to chat templates beside role and content; other fields (dates, ratings) would only rename samples.
_OTHER_FIELDS = ("name", "tool_call_id")


@dataclass(frozen=True)
class Conversation:
    """What a raw record says; see `Record` for the fields."""

    messages: list[dict]
    tools: list[dict] | None
    input_ids: list[int] | None
    loss_mask: list[int] | None
    category: str | None
    split: Split | None


def parse(raw: object, form: str = "auto") -> Conversation:
    """Read a raw record.

    Args:
        form: name of its format; "auto": the first one of the table above whose field it has.

    Raises:
        BadRecord: of unknown form, or damaged.
        Refused: well-formed, but nothing to train on, such as an image.
    """
    if not isinstance(raw, dict):
        raise BadRecord("form", f"holds a {type(raw).__name__}, not an object", raw, fix=_FIX)
    known = [name for name, (keys, _) in _FORMATS.items() if all(raw.get(key) is not None for key in keys)]
    if form == "auto" and not known or form not in ("auto", *known):
        keys = ", ".join(map(str, raw)) or "(none)"
        wanted = "unknown form" if form == "auto" else f"another form than {form} ({_needs(form)})"
        raise BadRecord("form", f"is of {wanted}: its keys are {keys}", raw, fix=_FIX)
    name = known[0] if form == "auto" else form
    keys, read = _FORMATS[name]
    try:
        messages = read(raw)
        tools = _tools(raw.get("tools"))
    except _Wrong as e:
        raise BadRecord("form", f"is not well-formed {name}: {e}", raw, fix=_FIX) from e
    category, split = raw.get("category"), raw.get("split")
    if split not in (None, "train", "heldout"):
        raise BadRecord("split", f"says split = {split!r}", raw, fix='`split` is "train" or "heldout"; without it, '
                                                                   "prompts.heldout_fraction is held out")
    rows = (raw["input_ids"], raw["loss_mask"]) if name == "pretokenised" else (None, None)
    return Conversation(messages, tools, *rows, None if category is None else str(category), split)


class _Wrong(Exception):
    """What about a record's fields is not as its format says."""


def _pretokenised(raw: dict) -> list[dict]:
    ids, mask = raw["input_ids"], raw["loss_mask"]
    if not (isinstance(ids, list) and isinstance(mask, list)):
        raise _Wrong("`input_ids` and `loss_mask` are lists")
    if len(ids) != len(mask):
        raise _Wrong(f"{len(ids)} `input_ids` but {len(mask)} in `loss_mask`")
    if not set(map(type, ids)) <= {int} or min(ids, default=0) < 0:
        raise _Wrong("`input_ids` are whole numbers from 0 on")
    if not set(map(type, mask)) <= {int} or not set(mask) <= {0, 1}:
        raise _Wrong("`loss_mask` is zeros and ones")
    return []


def _openai(raw: dict) -> list[dict]:
    return _with_system(raw, _turns(raw["messages"], "messages"))


def _sharegpt(raw: dict) -> list[dict]:
    return _with_system(raw, _turns(raw["conversations"], "conversations"))


def _ultrachat(raw: dict) -> list[dict]:
    data = raw["data"]
    if not isinstance(data, list):
        raise _Wrong(f"`data` is a {type(data).__name__}, not a list")
    return [{"role": ("user", "assistant")[k % 2], "content": _text(text, f"data[{k}]")} for k, text in enumerate(data)]


def _alpaca(raw: dict) -> list[dict]:
    history = raw.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise _Wrong("`history` is a list of [instruction, output]")
    said = [*history, ["\n".join(_text(raw[key], key) for key in ("instruction", "input") if raw.get(key)),
                       raw.get("output") or None]]
    messages = [{"role": role, "content": _text(text, role)} for pair in said
                for role, text in zip(("user", "assistant"), pair) if text is not None]
    return _with_system(raw, messages)


def _user_turns(raw: dict) -> list[dict]:
    turns = raw["turns"]
    if not isinstance(turns, list):
        raise _Wrong(f"`turns` is a {type(turns).__name__}, not a list")
    return [{"role": "user", "content": _text(text, f"turns[{k}]")} for k, text in enumerate(turns)]


def _prompt(raw: dict) -> list[dict]:
    if isinstance(raw["prompt"], list):
        return _with_system(raw, _turns(raw["prompt"], "prompt"))
    return _with_system(raw, [{"role": "user", "content": _text(raw["prompt"], "prompt")}])


def _plain_text(raw: dict) -> list[dict]:
    return _with_system(raw, [{"role": "user", "content": _text(raw["text"], "text")}])


def _with_system(raw: dict, messages: list[dict]) -> list[dict]:
    system = raw.get("system")
    if not system or any(m["role"] == "system" for m in messages):
        return messages
    return [{"role": "system", "content": _text(system, "system")}, *messages]


def _turns(turns: object, field: str) -> list[dict]:
    if not isinstance(turns, list):
        raise _Wrong(f"`{field}` is a {type(turns).__name__}, not a list")
    return [_turn(turn, f"{field}[{k}]") for k, turn in enumerate(turns)]


def _turn(turn: object, at: str) -> dict:
    if not isinstance(turn, dict):
        raise _Wrong(f"{at} is a {type(turn).__name__}, not an object")
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    said = str(turn.get(role_key))
    role, content = _ROLES.get(said), turn.get(content_key)
    calls, reasoning = turn.get("tool_calls"), turn.get("reasoning_content") or turn.get("reasoning")
    if said == "function_call":
        content, calls = "", content
    if role is None or content is None and not (calls or reasoning):
        raise _Wrong(f"{at} has `{role_key}` = {turn.get(role_key)!r} and `{content_key}` of type "
                     f"{type(content).__name__}; its keys are {', '.join(map(str, turn))}; "
                     f"known roles are {', '.join(_ROLES)}")
    message = {"role": role, "content": _content(content, at)}
    if reasoning:
        message["reasoning_content"] = _text(reasoning, f"{at}.reasoning_content")
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{at}.tool_calls") for call in _listed(_loaded(calls, at))]
    return message | {key: _text(turn[key], f"{at}.{key}") for key in _OTHER_FIELDS if turn.get(key) is not None}


def _content(content: object, at: str) -> str:
    """Text of a turn. Text parts are joined by a blank, as SGLang does for templates that take strings."""
    if not isinstance(content, list):
        return _text("" if content is None else content, at)
    texts = []
    for part in content:
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, dict) else None
        if kind is None:
            raise _Wrong(f"{at} has a part of type {type(part).__name__} without a `type`")
        if kind not in ("text", "input_text", "output_text"):
            raise Refused("not_text", f"{at} holds a part of type {kind!r}")
        texts.append(_text(part if isinstance(part, str) else part.get("text"), at))
    return " ".join(texts)


def _text(value: object, at: str) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"{at} is a {type(value).__name__}, not a string")
    if "\0" in value:
        raise BadRecord("text", f"holds a NUL character in {at}", value)
    return value


def _tool_call(call: object, at: str) -> dict:
    """``{"type", "id"?, "function": {"name", "arguments": {…}}}``: templates want the arguments as an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Wrong(f"{at} holds a call without the name of a function")
    arguments = _loaded(function.get("arguments") or {}, at)
    if not isinstance(arguments, dict):
        raise Refused("tool_json", f"{at}: the arguments of {function['name']} are not a JSON object")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **named, "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: object) -> list[dict] | None:
    if not tools:
        return None
    listed = _listed(_loaded(tools, "tools"))
    if not all(isinstance(tool, dict) for tool in listed):
        raise _Wrong("`tools` is a list of function schemas")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in listed] or None


def _loaded(value: object, at: str) -> object:
    """Many sources hold tool calls, arguments and schemas as JSON in a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        raise Refused("tool_json", f"{at} holds a string that is not JSON: {e}") from e


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [value]


_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[dict], list[dict]]]] = {
    "pretokenised": (("input_ids", "loss_mask"), _pretokenised),
    "openai": (("messages",), _openai),
    "sharegpt": (("conversations",), _sharegpt),
    "ultrachat": (("data",), _ultrachat),
    "alpaca": (("instruction",), _alpaca),
    "turns": (("turns",), _user_turns),
    "prompt": (("prompt",), _prompt),
    "text": (("text",), _plain_text),
}


def _needs(form: str) -> str:
    return " and ".join(f"`{key}`" for key in _FORMATS[form][0])


_FIX = ("a record needs " + ", or ".join(f"{_needs(form)} ({form})" for form in _FORMATS)
        + ": the table in pipeline/prompts/formats.py")
