"""The installed SGLang's model classes: which there are, which take EAGLE-3's layer ids, which this machine can load."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from pipeline.errors import PipelineError
from pipeline.files import read_json
from pipeline.sglang_cpu import TESTED_SGLANG

METHOD = "set_eagle3_layers_to_capture"
TARGETS_FIX = "choose a target whose SGLang class supports EAGLE-3: make layer-rules"

StatedRule = Literal["layer_output", "capture_point"]
"""`target.layer_id_rule`: what an id means, stated by the user because the class cannot be asked"""


class CannotBeAsked(PipelineError):
    """SGLang's class does not answer on this machine; the user may state what its ids mean."""

    def __init__(self, architecture: str, why: str):
        self.architecture, version = architecture, sglang_version()
        untested = "" if version in TESTED_SGLANG else f" (tested: SGLang {', '.join(TESTED_SGLANG)}; the API may have changed)"
        super().__init__(
            f"SGLang {version}'s {architecture} cannot be asked which layers it captures{untested}: {why}",
            field="target.layer_id_rule",
            fix=f"read that class's {METHOD} and state what an id is to it: "
            'make dump ARGS="target.layer_id_rule=layer_output", or =capture_point where an id is the layer output + 1',
        )


@functools.cache
def sglang_classes() -> Mapping[str, type]:
    """Every architecture SGLang has registered → its model class (about 14 s and 600 MiB the first time).

    Done in this process: the stages that need it start the engine, which imports SGLang here anyway. The import warns
    about every model file that needs a package or GPU kernel this machine lacks; only the architecture that somebody
    asks for matters, and `model_class` reports that one.
    """
    import torch

    if not torch.cuda.is_available():
        from pipeline.engines.engine import prepare_environment

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


@functools.cache
def unregistered_classes() -> Mapping[str, type | str]:
    """Architectures whose file the registry could not import on this machine → the class all the same, or why not.

    Most of these files only look up a CPU kernel by its name (`torch.ops.sgl_kernel.…`) and call it when a model runs.
    With a placeholder for that name they can be imported and asked; a model of them still cannot run here.
    """
    registered = sglang_classes()
    models = importlib.import_module("sglang.srt.models")
    found: dict[str, type | str] = {}
    for path in sorted(Path(models.__path__[0]).glob("*.py")):
        try:
            with _placeholder_kernels(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                entries = getattr(importlib.import_module(f"{models.__name__}.{path.stem}"), "EntryClass", [])
        except Exception as e:  # whatever the engine's file raises is the answer
            reason = f"{path.name} cannot be imported on this machine ({type(e).__name__}: {e})"
            found |= dict.fromkeys(_entry_names(path), reason)
        else:
            found |= {cls.__name__: cls for cls in (entries if isinstance(entries, list) else [entries])}
    return {name: cls for name, cls in found.items() if name not in registered}


@contextlib.contextmanager
def _placeholder_kernels() -> Iterator[None]:
    """`torch.ops.sgl_kernel.<name>` of a kernel that is missing here is a function that refuses to run."""
    import torch

    namespace = type(torch.ops.sgl_kernel)
    lookup = namespace.__getattr__

    def find(self: Any, name: str) -> Any:
        try:
            return lookup(self, name)
        except AttributeError:
            if self.name != "sgl_kernel" or name.startswith("__"):
                raise
            return _missing_kernel(name)

    namespace.__getattr__ = find
    try:
        yield
    finally:
        namespace.__getattr__ = lookup


def _missing_kernel(name: str) -> Callable:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not available on this machine")

    return kernel


def _entry_names(path: Path) -> list[str]:
    """The architectures that a model file of SGLang offers: the names in its `EntryClass`."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == "EntryClass" for t in node.targets):
            return [name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)]
    return []


def sglang_version() -> str:
    from importlib.metadata import version

    return version("sglang")


@functools.cache
def recorded_rules() -> dict[str, Any]:
    """The table of the tested version, as `python -m pipeline.layers.layer_rules --json` printed it there."""
    path = Path(__file__).parents[1] / "data" / "layer_rules.json"
    return read_json(path, fix="python -m pipeline.layers.layer_rules --json > pipeline/data/layer_rules.json")


def eagle3_classes() -> dict[str, type]:
    """Every architecture whose class takes EAGLE-3's layer ids, also those that this machine can only ask."""
    offered = {**unregistered_classes(), **sglang_classes()}
    return {name: cls for name, cls in sorted(offered.items()) if callable(getattr(cls, METHOD, None))}


def model_class(config: SimpleNamespace) -> type:
    """SGLang's class for the target's architecture.

    Raises:
        CannotBeAsked: its file cannot be imported on this machine.
        PipelineError: unknown architecture, a class without the method (a multimodal wrapper that does not delegate
            it, as in sglang 18374), or one whose method is not called as the tested versions' are.
    """
    architectures = getattr(config, "architectures", None) or []
    known: Mapping[str, type | str] = sglang_classes()
    if not any(a in known for a in architectures):
        known = unregistered_classes()
    name = next((a for a in architectures if a in known), None)
    if name is None:
        raise PipelineError(
            f"SGLang {sglang_version()} offers no model class for this target",
            field="architectures", value=architectures, fix=TARGETS_FIX,
        )
    cls = known[name]
    if isinstance(cls, str):
        raise CannotBeAsked(name, cls)
    check_api(cls)
    return cls


def check_api(cls: type) -> None:
    """Refuse a class that does not take one list of ids.

    Raises:
        PipelineError: it has no such method, or one that needs other arguments.
    """
    name, tested = cls.__name__, ", ".join(TESTED_SGLANG)
    method = getattr(cls, METHOD, None)
    if not callable(method):
        changed = f" (SGLang {tested} has it: the API changed)" if name in recorded_rules()["classes"] else ""
        raise PipelineError(
            f"SGLang {sglang_version()}'s {name} has no {METHOD}: no dump and no EAGLE-3 drafter with it{changed}",
            field="architectures", value=name, fix=TARGETS_FIX,
        )
    signature = inspect.signature(method)
    try:
        signature.bind(None, [])
    except TypeError as e:
        raise PipelineError(
            f"the API changed: SGLang {sglang_version()}'s {name}.{METHOD}{signature} is not called with one list of ids, "
            f"as in SGLang {tested} ({e})",
            field="sglang", value=sglang_version(), fix=f"pip install --no-deps sglang=={TESTED_SGLANG[-1]}",
        ) from e


def check_loadable(config: SimpleNamespace) -> None:
    """Refuse a target whose class can be asked here but that the engine cannot load on this machine."""
    architectures = getattr(config, "architectures", None) or []
    if any(a in sglang_classes() for a in architectures):
        return
    for name in architectures:
        if name in unregistered_classes():
            raise PipelineError(
                f"SGLang {sglang_version()} cannot load {name} on this machine: its file needs kernels or packages that "
                "are missing here",
                field="architectures", value=name,
                fix='dump on a machine with a GPU, or: make dump ARGS="dump.engine=transformers"',
            )
