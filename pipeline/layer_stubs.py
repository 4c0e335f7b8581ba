"""Asks SGLang's own model classes which layers they capture, on stubs without weights and without a GPU.

`set_eagle3_layers_to_capture(ids)` is the method that both the dump and EAGLE-3 serving call on the loaded target. It
only writes a few attributes, so an object that skipped `__init__` can answer it, given the attributes it reads: the
config, a pipeline group of one rank, and an inner model with as many layer objects as the target has layers.

A stub proves what ids mean, not what arrives: whether a capture point is reached, and whether the tensor found there
is the residual stream, shows only in a run (`layer_ids.PROVEN_CLASSES`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import read_json

METHOD = "set_eagle3_layers_to_capture"
TARGETS_FIX = "choose a target whose SGLang class supports EAGLE-3: python -m pipeline.layer_ids --list"

INNER_CLASSES: dict[str, tuple[str, str]] = {
    "KimiK25ForConditionalGeneration": ("language_model", "DeepseekV3ForCausalLM"),
    "Gemma3ForConditionalGeneration": ("language_model", "Gemma3ForCausalLM"),
    "Llama4ForConditionalGeneration": ("language_model", "Llama4ForCausalLM"),
    "Qwen2MoeForCausalLM": ("model", "Qwen2MoeModel"),
    "Qwen3MoeForCausalLM": ("model", "Qwen3MoeModel"),
    "Qwen3NextForCausalLM": ("model", "Qwen3NextModel"),
    "MellumForCausalLM": ("model", "MellumModel"),
}
"""Classes that forward the ids to an inner object whose class their `__init__` names: class → (attribute, inner class).
The name is looked up in the module of the class, then among the registered architectures. Which inner object was really
built shows when the capture points are read back from the live model."""

_HOLDERS = ("model", "language_model")  # the attributes under which SGLang's classes keep an inner model


# ---------------------------------------------------------------- the target's config


def read_config(source: Path | Mapping | Any) -> SimpleNamespace:
    """The target's config as nested attributes, without transformers and without remote code.

    Args:
        source: a `config.json` or the folder that holds it, its content as a mapping, or a `PretrainedConfig`.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        source = read_json(path, fix="set target.path to a folder that holds the target's config.json")
    elif not isinstance(source, Mapping):
        source = source.to_dict()
    return _namespace(source)


def _namespace(value: Any) -> Any:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return SimpleNamespace(**{key: _namespace(item) for key, item in value.items()})
    return value


def text_config(config: SimpleNamespace) -> SimpleNamespace:
    """The part that describes the language model: `text_config` of a multimodal target, else the config itself."""
    return getattr(config, "text_config", None) or config


def num_layers(config: SimpleNamespace) -> int:
    """N, the number of decoder layers."""
    n = getattr(text_config(config), "num_hidden_layers", None)
    if not isinstance(n, int) or n < 1:
        raise PipelineError(
            "the target's config does not say how many decoder layers it has",
            field="num_hidden_layers", value=n, fix="set target.path to a complete checkpoint",
        )
    return n


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


# ---------------------------------------------------------------- the engine's classes


@functools.cache
def sglang_classes() -> Mapping[str, type]:
    """Every architecture SGLang has registered → its model class (about 14 s and 600 MiB the first time).

    Done in this process: the stages that need it start the engine, which imports SGLang here anyway. The import warns
    about every model file that needs a package or GPU kernel this machine lacks; only the architecture that somebody
    asks for matters, and `model_class` reports that one.
    """
    import torch

    if not torch.cuda.is_available():
        from pipeline.engine import prepare_environment

        prepare_environment("cpu")
    logs = [logging.getLogger(name) for name in ("sglang.srt.models.registry", "sglang.kernels.jit.utils.arch")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from sglang.srt.models.registry import ModelRegistry
    except ImportError as e:
        raise PipelineError(
            f"SGLang cannot be imported, so it cannot be asked for its layer ids: {e}", field="sglang", fix="make install"
        ) from e
    finally:
        for log, level in zip(logs, levels):
            log.setLevel(level)
    return {name: ModelRegistry.resolve_model_cls(name)[0] for name in sorted(ModelRegistry.get_supported_archs())}


def sglang_version() -> str:
    from importlib.metadata import version

    return version("sglang")


def model_class(config: SimpleNamespace) -> type:
    """SGLang's class for the target's architecture, refused when it cannot capture hidden states.

    Raises:
        PipelineError: unknown architecture, a module that cannot be imported on this machine, or a class without the
            method (a multimodal wrapper that does not delegate it, as in sglang 18374).
    """
    architectures = getattr(config, "architectures", None) or []
    known = sglang_classes()
    name = next((a for a in architectures if a in known), None)
    if name is None:
        raise PipelineError(
            f"SGLang {sglang_version()} offers no model class for this target{_why_missing(architectures)}",
            field="architectures", value=architectures, fix=TARGETS_FIX,
        )
    if not callable(getattr(known[name], METHOD, None)):
        raise PipelineError(
            f"SGLang {sglang_version()}'s {name} has no {METHOD}: no dump and no EAGLE-3 drafter with it",
            field="architectures", value=architectures, fix=TARGETS_FIX,
        )
    return known[name]


def _why_missing(architectures: list[str]) -> str:
    """The registry drops model files that fail to import; find the one that defines the architecture and say why."""
    models = importlib.import_module("sglang.srt.models")
    for path in sorted(Path(models.__path__[0]).glob("*.py")):
        if any(f"class {name}(" in path.read_text(encoding="utf-8") for name in architectures):
            try:
                importlib.import_module(f"{models.__name__}.{path.stem}")
            except Exception as e:  # whatever the engine's file raises is the answer
                return f": {path.name} cannot be imported on this machine ({type(e).__name__}: {e})"
    return ""


def inner_class(cls: type) -> tuple[str, type] | None:
    """(attribute, class) of the inner object that `cls` forwards the ids to, or None when it needs none of its own.

    Besides the table, two habits of SGLang's classes are read from the class itself: the default of the constructor
    argument `language_model_cls` (Qwen3-VL and its descendants) and the class attribute `body_cls` (Qwen3.5).
    """
    if cls.__name__ in INNER_CLASSES:
        attribute, name = INNER_CLASSES[cls.__name__]
        inner = getattr(sys.modules[cls.__module__], name, None) or sglang_classes().get(name)
        if inner is None:
            raise LookupError(f"{cls.__name__} no longer builds a {name}: INNER_CLASSES needs an update")
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


def build_stub(cls: type, config: SimpleNamespace, layers: list[SimpleNamespace] | None = None) -> Any:
    """An instance of `cls` that never ran `__init__`: config, one pipeline rank and N empty layer objects."""
    from torch import nn

    stub = object.__new__(cls)
    if isinstance(stub, nn.Module):
        nn.Module.__init__(stub)  # only the empty dictionaries without which no attribute can be set
    layers = [SimpleNamespace() for _ in range(num_layers(config))] if layers is None else layers
    parts: dict[str, Any] = {"config": _StubConfig(config), "pp_group": _one_rank(), "layers": layers}
    plain = SimpleNamespace(**parts)
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
