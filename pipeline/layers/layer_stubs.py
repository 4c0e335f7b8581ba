"""Asks SGLang's own model classes which layers they capture, on stubs without weights and without a GPU.

`set_eagle3_layers_to_capture(ids)` is the method that both the dump and EAGLE-3 serving call on the loaded target. It
only writes a few attributes, so an object that skipped `__init__` can answer it, given the attributes it reads: the
config, a pipeline group of one rank, and an inner model with as many layer objects as the target has layers.

A stub proves what ids mean, not what arrives: whether a capture point is reached, and whether the tensor found there
is the residual stream, shows only in a run (`proven_classes`).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.layers.plain_config import num_layers, text_config
from pipeline.layers.sglang_models import METHOD, sglang_classes

INNER_CLASSES: dict[str, tuple[str, str]] = {
    "KimiK25ForConditionalGeneration": ("language_model", "DeepseekV3ForCausalLM"),
    "Gemma3ForConditionalGeneration": ("language_model", "Gemma3ForCausalLM"),
    "Llama4ForConditionalGeneration": ("language_model", "Llama4ForCausalLM"),
    "Qwen2MoeForCausalLM": ("model", "Qwen2MoeModel"),
    "Qwen3MoeForCausalLM": ("model", "Qwen3MoeModel"),
    "Qwen3NextForCausalLM": ("model", "Qwen3NextModel"),
    "MellumForCausalLM": ("model", "MellumModel"),
}
"""Classes (and their descendants) that forward the ids to an inner object whose class their `__init__` names: class →
(attribute, inner class). The name is looked up in the module of the class, then among the registered architectures.
Which inner object was really built shows when the capture points are read back from the live model."""

_HOLDERS = ("model", "language_model")  # the attributes under which SGLang's classes keep an inner model


# ---------------------------------------------------------------- inner objects


def inner_class(cls: type) -> tuple[str, type] | None:
    """(attribute, class) of the inner object that `cls` forwards the ids to, or None when it needs none of its own.

    Besides the table, two habits of SGLang's classes are read from the class itself: the default of the constructor
    argument `language_model_cls` (Qwen3-VL and its descendants) and the class attribute `body_cls` (Qwen3.5).
    """
    for base in cls.__mro__:
        if base.__name__ in INNER_CLASSES:
            attribute, name = INNER_CLASSES[base.__name__]
            inner = getattr(sys.modules[base.__module__], name, None) or sglang_classes().get(name)
            if inner is None:
                raise LookupError(f"{base.__name__} no longer builds a {name}: INNER_CLASSES needs an update")
            return attribute, inner
    argument = inspect.signature(cls.__init__).parameters.get("language_model_cls")
    for candidate in (argument.default if argument else None, getattr(cls, "body_cls", None)):
        if inspect.isclass(candidate) and candidate is not inspect.Parameter.empty:
            return "model", candidate
    return None


def rule_source(cls: type) -> str:
    """`file Class.method` of the code that decides what an id means; joined by ` -> ` where one class asks another."""
    steps = []
    while cls is not None and (method := getattr(cls, METHOD, None)) is not None:
        path = Path(inspect.getsourcefile(method) or "?")
        package = path.parts.index("sglang") if "sglang" in path.parts else -1
        steps.append(f"{Path(*path.parts[package:])} {method.__qualname__}")
        inner = inner_class(cls)
        cls = inner[1] if inner else None
    return " -> ".join(steps)


# ---------------------------------------------------------------- stubs


class _StubConfig:
    """Answers for the whole config and for its text part, since classes keep one or the other as `self.config`."""

    def __init__(self, config: SimpleNamespace):
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name == "text_config":
            return _StubConfig(text_config(self._config))
        for part in (self._config, text_config(self._config)):
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(f"the target's config has no {name}")


class _PlainInner(SimpleNamespace):
    """An inner model that holds what it is given and has no method of its own."""

    def __getattr__(self, name: str) -> Any:
        if name == METHOD:
            raise AttributeError("it hands the ids to an inner model of a class that it does not name")
        raise AttributeError(name)


def build_stub(cls: type, config: SimpleNamespace, layers: list[SimpleNamespace] | None = None) -> Any:
    """An instance of `cls` that never ran `__init__`: config, one pipeline rank and N empty layer objects."""
    from torch import nn

    stub = object.__new__(cls)
    if isinstance(stub, nn.Module):
        nn.Module.__init__(stub)  # only the empty dictionaries without which no attribute can be set
    layers = [SimpleNamespace() for _ in range(num_layers(config))] if layers is None else layers
    parts: dict[str, Any] = {"config": _StubConfig(config), "pp_group": _one_rank(), "layers": layers}
    plain = _PlainInner(**parts)
    parts |= dict.fromkeys(_HOLDERS, plain)
    if inner := inner_class(cls):
        attribute, inner_cls = inner
        parts |= dict.fromkeys(_HOLDERS) | {attribute: build_stub(inner_cls, text_config(config), layers)}
    for name, value in parts.items():
        if not isinstance(getattr(cls, name, None), property):
            setattr(stub, name, value)
    return stub


def _one_rank() -> SimpleNamespace:
    return SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1)


@contextlib.contextmanager
def _one_rank_parallel_state() -> Iterator[None]:
    """Some classes read the pipeline group from SGLang's global parallel state instead of `self`."""
    if "sglang.srt.runtime_context" not in sys.modules:  # then the class is not one of SGLang's
        yield
        return
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(pp_group=_one_rank()):
        yield


def read_capture_points(model: Any) -> tuple[int, ...]:
    """The capture points set on `model`, ascending: a stub or the live model object of the engine.

    Two conventions exist: a list `layers_to_capture`, and layers marked `_is_layer_to_capture`, which is what the
    forward pass of those models looks at. Where both exist they must agree.

    Raises:
        ValueError: nothing was set, a value is no layer, or two places say different things.
    """
    lists, marked = [], []
    for part in _parts(model):
        attributes = vars(part)
        if points := attributes.get("layers_to_capture"):
            lists.append(tuple(sorted(points)))
        layers = attributes.get("layers") or attributes.get("_modules", {}).get("layers") or []
        if points := tuple(i for i, layer in enumerate(layers) if getattr(layer, "_is_layer_to_capture", False)):
            marked.append(points)
    found = set(lists) | set(marked)
    if not found:
        raise ValueError("nothing was set")
    if len(found) > 1:
        raise ValueError(f"it says different things in different places: {sorted(found)}")
    points = found.pop()
    if not all(type(p) is int and p >= 0 for p in points) or len(set(points)) != len(points):
        raise ValueError(f"it holds values that are not distinct layers: {points}")
    return points


def _parts(model: Any) -> list[Any]:
    """`model` and the inner models below it."""
    parts, todo = [], [model]
    while todo:
        part = todo.pop()
        if part is None or any(part is seen for seen in parts) or not hasattr(part, "__dict__"):
            continue
        parts.append(part)
        below = vars(part) | (vars(part).get("_modules") or {})
        todo += [below.get(name) for name in _HOLDERS]
    return parts


def ask(cls: type, config: SimpleNamespace, ids: list[int] | None) -> tuple[int, ...]:
    """The capture points that `cls` sets for `ids` (None: its default), asked on a fresh stub.

    Raises:
        ValueError: the class set nothing, set something unreadable, or failed; the message says which.
    """
    with _one_rank_parallel_state():
        try:
            stub = build_stub(cls, config)
            getattr(stub, METHOD)(None if ids is None else list(ids))
        except Exception as e:  # the engine's code on a stub may fail in any way; each is an answer "cannot be asked"
            raise ValueError(f"{type(e).__name__}: {e}") from e
    return read_capture_points(stub)


def is_askable(cls: type, config: SimpleNamespace) -> bool:
    """Whether `cls` answers at all on a stub."""
    try:
        ask(cls, config, [0])
    except ValueError:
        return False
    return True
