"""The target's config as plain attributes, without transformers and without remote code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import read_json


def read_target_config(source: Path | Mapping | Any) -> SimpleNamespace:
    """The target's config as nested attributes.

    Args:
        source: a `config.json` or the folder that holds it, its content as a mapping, or a `PretrainedConfig`.
    """
    return _namespace(_content(source))


def target_fields(source: Path | Mapping | Any) -> dict[str, Any]:
    """The target's config as one mapping: the fields of the language model, before those of what is around it.

    Args:
        source: as for `read_target_config`.
    """
    content = _content(source)
    return {**content, **(content.get("text_config") or {})}


def _content(source: Path | Mapping | Any) -> Mapping[str, Any]:
    if isinstance(source, (str, Path)):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        return read_json(path, fix="name a folder that holds the target's config.json (target.path, --target)")
    return source if isinstance(source, Mapping) else source.to_dict()


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


def with_layers(config: SimpleNamespace, num_layers: int) -> SimpleNamespace:
    """The same target, made of `num_layers` decoder layers."""
    text = getattr(config, "text_config", None)
    if text:
        return SimpleNamespace(**vars(config) | {"text_config": with_layers(text, num_layers)})
    return SimpleNamespace(**vars(config) | {"num_hidden_layers": num_layers})
