"""vLLM's layer ids, by asking the installed vLLM where there is one, else by the documented rule.

vLLM pins another torch than SGLang, so it lives in an environment of its own (`make install-vllm`) and is asked there, by
`vllm_ask`. Where it is not installed, or cannot import the target's class, the ids follow what vLLM 0.32.0 and speculators
0.9.0 document: an id is a capture point, layer output + 1 (id N: the last layer before the norm). They say then that
nobody was asked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.engines import vllm_env
from pipeline.errors import PipelineError
from pipeline.layers import plain_config
from pipeline.layers.layer_ids import EngineIds, check_layers

_DOCUMENTED = "vLLM 0.32.0 and speculators 0.9.0: an id is a capture point, layer output + 1"
_ASK = Path(__file__).with_name("vllm_ask.py")
_TIMEOUT = 300  # seconds; the import takes about 20


def derive_vllm_ids(layers: Sequence[int], num_layers: int, config: Any = None) -> EngineIds:
    """vLLM's `eagle_aux_hidden_state_layer_ids` for these layer outputs.

    Args:
        layers: layer outputs, as accepted by `check_layers`; the last one, N-1, is possible.
        config: the target's config (path, mapping or `PretrainedConfig`), to ask the installed vLLM; None: do not ask.

    Raises:
        PipelineError: the installed vLLM serves no EAGLE-3 drafter with this target, or no ids lead to these layers.
    """
    layers = check_layers(layers, num_layers, allow_last=True)
    points = tuple(layer + 1 for layer in layers)
    if config is None:
        return _documented(points, "the target is not known")
    if not vllm_env.installed():
        return _documented(points, "vLLM is not installed here")
    architecture = (getattr(plain_config.read_target_config(config), "architectures", None) or [None])[0]
    said = ask_vllm(architecture, num_layers, (points, layers))
    if said.get("serves") is False:
        raise PipelineError(said["error"], field="architectures", value=architecture, fix='ARGS="export.engines=[sglang]"')
    if "error" in said:
        return _documented(points, said["error"])
    ids = next((ids for ids, found in zip((points, layers), said["answers"]) if found == list(points)), None)
    if ids is None:
        raise PipelineError(
            f"no ids make vLLM {said['version']}'s {said['model_class']} capture layer outputs {list(layers)}; for ids "
            f"{list(points)} it says {said['answers'][0]}",
            field="slots.layers", value=list(layers), fix='ARGS="export.engines=[sglang]"',
        )
    return EngineIds(
        engine="vllm", version=said["version"], ids=ids, capture_points=points, model_class=said["model_class"],
        rule_source=said["rule_source"], proven=False,
        note=f"asked on a stub of vLLM {said['version']}; no model was compared with transformers there",
    )


def _documented(points: tuple[int, ...], why: str) -> EngineIds:
    return EngineIds(
        engine="vllm", version=None, ids=points, capture_points=points, model_class=None, rule_source=_DOCUMENTED,
        proven=False, note=f"documented rule, not asked: {why}",
    )


@functools.cache
def ask_vllm(architecture: str | None, num_layers: int, ids: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """What vLLM's class captures for each list of ids; see `vllm_ask` for the answer. Takes about 20 s.

    A vLLM that cannot answer (an import error, a timeout) is an `error` too: the documented rule is left.
    """
    try:
        return vllm_env.ask(_ASK, {"architecture": architecture, "num_layers": num_layers, "ids": ids}, timeout=_TIMEOUT)
    except PipelineError as e:
        return {"error": f"it could not be asked: {e.what.splitlines()[-1].strip(' |')}"}
