"""Engine layer ids, derived from layer outputs by asking the installed engine.

The project names a hidden state by the decoder layer whose output it is. Engines want other numbers, and they do not
agree: SGLang's Llama adds 1 to what it is given, its DeepSeek adds 1 only when the first id is 1, vLLM takes the
numbers as they are. So the ids are never typed: `derive_sglang_ids` runs the engine's own method on a stub of the
target's model class and looks for ids that lead to the wanted capture points. It needs a config.json, no weights and
no GPU.

A capture point k is the residual stream at the input of layer k, that is layer output k-1.

    python -m pipeline.layer_ids --config DIR --layers 2,30,58     # ids for these layer outputs
    python -m pipeline.layer_ids --config DIR --ids 2,30,58        # what a published list means here
    python -m pipeline.layer_ids --list                            # every class that can be asked
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline import layer_stubs
from pipeline.errors import PipelineError
from pipeline.sglang_cpu import TESTED_SGLANG

PROVEN_CLASSES = frozenset({"LlamaForCausalLM", "DeepseekV3ForCausalLM"})
"""SGLang classes of which a model was run in the engine, and every capture point compared with transformers."""


@dataclasses.dataclass(frozen=True)
class EngineIds:
    """The numbers an engine must be given, and how they were found."""

    engine: str
    version: str | None
    """of the engine that was asked; None: not asked"""
    ids: tuple[int, ...]
    """what goes into the engine's config, in this order"""
    capture_points: tuple[int, ...]
    """what the engine then captures, ascending: layer output + 1"""
    model_class: str | None
    """the engine's class whose method was asked"""
    rule_source: str
    """file and method that decide what an id means"""
    proven: bool
    """whether a model of this class was run in this version of the engine and matched transformers"""
    note: str


# ---------------------------------------------------------------- the layers a user may ask for


def check_layers(layers: Sequence[int], num_layers: int, *, allow_last: bool = False) -> tuple[int, ...]:
    """`slots.layers`, checked: two or more layer outputs, 0 ≤ l < N, strictly ascending.

    Args:
        layers: layer outputs, 0-based.
        num_layers: N, the number of decoder layers of the target.
        allow_last: accept layer output N-1 (transformers and vLLM can deliver it; most SGLang models cannot).

    Raises:
        PipelineError: naming `slots.layers`, the value and a command that works.
    """

    def refuse(why: str) -> PipelineError:
        usable = num_layers if allow_last else num_layers - 1
        example = sorted({max(0, min(usable - 1, layer)) for layer in layers if type(layer) is int})
        if len(example) < 2:
            example = [0, usable - 1] if num_layers < 7 else list(default_layers(num_layers))
        return PipelineError(f"slots.layers: {why}", field="slots.layers", value=_list(layers), fix=_choose(example))

    if isinstance(layers, (str, bytes)) or not isinstance(layers, Sequence):
        raise PipelineError(
            "slots.layers must be a list of layer outputs", field="slots.layers", value=layers,
            fix=_choose([2, 15, 27]),
        )
    if not all(type(layer) is int for layer in layers):
        raise refuse("every entry must be a whole number")
    if len(layers) < 2:
        raise refuse("a drafter reads two or more layer outputs")
    if min(layers) < 0:
        raise refuse(
            "negative numbers are refused: they do not count from the end. An engine that accepts -1 captures the "
            "embedding, which is no layer output"
        )
    if max(layers) >= num_layers:
        raise refuse(f"the target has {num_layers} layers, so the outputs are 0 to {num_layers - 1}")
    if any(a >= b for a, b in itertools.pairwise(layers)):
        raise refuse("must be strictly ascending: engines concatenate in layer order, whatever order the list has")
    if not allow_last and layers[-1] == num_layers - 1:
        raise refuse(
            f"layer output {num_layers - 1} is the last one: most SGLang models never reach that capture point, and "
            "transformers only returns it after the final norm"
        )
    return tuple(layers)


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """One low, one middle and one high layer output: (1, N//2-1, N-4), the EAGLE-3 choice.

    The same layers that SGLang captures when its config holds no ids (capture points 2, N//2, N-3).
    """
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if not layers[0] < layers[1] < layers[2]:
        raise PipelineError(
            f"the target has {num_layers} layers, too few for the default low, middle and high layer outputs",
            field="slots.layers", value="null (default)", fix=_choose([0, num_layers - 2]),
        )
    return layers


def _list(layers: Any) -> str:
    return "[" + ",".join(str(layer) for layer in layers) + "]"


def _choose(layers: Sequence[int]) -> str:
    if layers[0] >= layers[-1]:
        return "choose a deeper target"
    return f'make dump ARGS="slots.layers={_list(layers)}"'


# ---------------------------------------------------------------- SGLang: ask its class


def derive_sglang_ids(config: Any, layers: Sequence[int]) -> EngineIds:
    """The ids that make the installed SGLang capture exactly these layer outputs of this target.

    The same ids are valid for the dump flag `return_aux_hidden_state_layer_ids` (which wants 0 ≤ id < N, no repeats)
    and for serving (`eagle_config.eagle_aux_hidden_state_layer_ids`), because SGLang hands both to the same method.

    Args:
        config: a `config.json` or its folder, its content as a mapping, or a `PretrainedConfig`.
        layers: layer outputs, as accepted by `check_layers`.

    Raises:
        PipelineError: the class cannot be asked, or no ids lead to these layers.
    """
    config = layer_stubs.read_config(config)
    check_layers(layers, layer_stubs.num_layers(config))  # before SGLang's slow import
    return derive_for_class(layer_stubs.model_class(config), config, layers)


def derive_for_class(cls: type, config: SimpleNamespace, layers: Sequence[int]) -> EngineIds:
    """`derive_sglang_ids` for a model class in hand (see there)."""
    num_layers = layer_stubs.num_layers(config)
    layers = check_layers(layers, num_layers)
    wanted = tuple(layer + 1 for layer in layers)
    answers: dict[tuple[int, ...], tuple[int, ...] | str] = {}
    for ids in _candidates(layers, num_layers):
        try:
            answers[ids] = layer_stubs.ask(cls, config, list(ids))
        except ValueError as e:
            answers[ids] = str(e)
        if answers[ids] == wanted:
            if len(answers) == 1:
                _refuse_if_ids_are_ignored(cls, config, ids, wanted)
            version = layer_stubs.sglang_version()
            return EngineIds(
                engine="sglang",
                version=version,
                ids=ids,
                capture_points=wanted,
                model_class=cls.__name__,
                rule_source=layer_stubs.rule_source(cls),
                proven=cls.__name__ in PROVEN_CLASSES and version in TESTED_SGLANG,
                note=_note(cls, version),
            )
    tried = [(ids, answer) for ids, answer in answers.items() if isinstance(answer, tuple)]
    if not tried:
        ids, answer = next(iter(answers.items()))
        raise PipelineError(
            f"SGLang's {cls.__name__} cannot be asked which layers it captures; for ids {_list(ids)}: {answer}",
            field="architectures", value=cls.__name__, fix=layer_stubs.TARGETS_FIX,
        )
    ids, points = tried[0]
    raise PipelineError(
        f"no ids make SGLang's {cls.__name__} capture layer outputs {_list(layers)}; "
        f"ids {_list(ids)} give layer outputs {_list(p - 1 for p in points)}",
        field="slots.layers", value=_list(layers),
        fix="choose other layers; `python -m pipeline.layer_ids --config DIR --layers ...` says which have ids",
    )


def _candidates(layers: tuple[int, ...], num_layers: int) -> Iterator[tuple[int, ...]]:
    """Id lists to try: the layer outputs themselves, then other ascending lists, then other orders.

    Rules shift all ids of a list by the same number, and may look at the first id, the last, the largest or the order
    to decide by which. So: ids that are layer outputs, capture points, or one below (a rule that adds 2); ascending,
    with each id in turn moved to the front, and descending. That is 3(n+1) lists, so dumping every layer stays quick.
    Both entrances of the engine want 0 ≤ id < N.
    """
    shifted = [tuple(layer + shift for layer in layers) for shift in (0, 1, -1)]
    ascending = [ids for ids in shifted if ids[0] >= 0 and ids[-1] < num_layers]
    yield from ascending
    for ids in ascending:
        for first in ids[1:]:
            yield (first, *(i for i in ids if i != first))
        yield ids[::-1]


def _refuse_if_ids_are_ignored(
    cls: type, config: SimpleNamespace, ids: tuple[int, ...], points: tuple[int, ...]
) -> None:
    """A class that falls back to its default layers seems right whenever those are the wanted ones: ask for others."""
    for step in (1, 2, 3):
        try:
            if layer_stubs.ask(cls, config, [i + step for i in ids]) != points:
                return
        except ValueError:
            return  # it refused these, so it looks at them
    raise PipelineError(
        f"SGLang's {cls.__name__} captures layer outputs {_list(p - 1 for p in points)} whatever ids it is given",
        field="slots.layers", value=_list(p - 1 for p in points), fix=layer_stubs.TARGETS_FIX,
    )


def _note(cls: type, version: str) -> str:
    if version not in TESTED_SGLANG:
        return (
            f"asked on a stub of SGLang {version}, with which this pipeline was not tested: no model was compared with "
            "transformers there, so what arrives at the capture points may differ from the residual stream"
        )
    if cls.__name__ in PROVEN_CLASSES:
        return "asked on a stub; a model of this class was run in the engine and matched transformers"
    return (
        f"asked on a stub only: {cls.__name__} is not among the classes that were run in the engine and compared with "
        "transformers, so what arrives at the capture points may differ from the residual stream"
    )


def capture_points_for(config: Any, ids: Sequence[int] | None) -> tuple[int, ...]:
    """What the installed SGLang captures for `ids` (None: when its config holds none), as ascending capture points."""
    config = layer_stubs.read_config(config)
    cls = layer_stubs.model_class(config)
    try:
        return layer_stubs.ask(cls, config, None if ids is None else list(ids))
    except ValueError as e:
        raise PipelineError(
            f"SGLang's {cls.__name__} does not accept these ids: {e}",
            field="eagle_config.eagle_aux_hidden_state_layer_ids", value=ids, fix="make export (derives the ids anew)",
        ) from e


# ---------------------------------------------------------------- vLLM: a documented rule


def derive_vllm_ids(layers: Sequence[int], num_layers: int) -> EngineIds:
    """vLLM's `eagle_aux_hidden_state_layer_ids`: capture points as they are (id N: the last layer before the norm)."""
    points = tuple(layer + 1 for layer in check_layers(layers, num_layers, allow_last=True))
    return EngineIds(
        engine="vllm", version=None, ids=points, capture_points=points, model_class=None,
        rule_source="vLLM 0.32.0 and speculators 0.9.0: an id is a capture point, layer output + 1",
        proven=False, note="documented rule, not asked: vLLM is not installed here",
    )


# ---------------------------------------------------------------- somebody else's ids


def explain_published_ids(config: Any, ids: Sequence[int]) -> dict[str, tuple[int, ...] | str]:
    """The layer outputs that a published list of ids can mean: here, in older SGLang versions, as capture points."""
    try:
        here: tuple[int, ...] | str = tuple(point - 1 for point in capture_points_for(config, ids))
    except PipelineError as e:
        here = e.what
    readings = {
        "the installed SGLang": here,
        "an SGLang that always adds 1": tuple(ids),
        "capture points (vLLM, speculators)": tuple(i - 1 for i in ids),
    }
    layers = layer_stubs.num_layers(layer_stubs.read_config(config))
    return {who: f"not possible: the target has layer outputs 0 to {layers - 1}, these are {list(reading)}"
            if not isinstance(reading, str) and not all(0 <= layer < layers for layer in reading) else reading
            for who, reading in readings.items()}


def list_classes() -> dict[str, str]:
    """Every registered SGLang class with the method → what ids [2,4] mean to it, or why it cannot be asked."""
    answers = {}
    for name, cls in layer_stubs.sglang_classes().items():
        if callable(getattr(cls, layer_stubs.METHOD, None)):
            config = layer_stubs.read_config({"architectures": [name], "num_hidden_layers": 8})
            try:
                points = layer_stubs.ask(cls, config, [2, 4])
                answers[name] = f"ids [2,4] are layer outputs {_list(p - 1 for p in points)}"
            except ValueError as e:
                answers[name] = f"cannot be asked: {e}"
    return answers


def main(argv: Sequence[str] | None = None) -> int:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.strip("[]").split(",")]

    parser = argparse.ArgumentParser(prog="python -m pipeline.layer_ids", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, help="the target's folder or config.json")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--layers", type=numbers, help="layer outputs, e.g. 2,30,58: derive the ids")
    what.add_argument("--ids", type=numbers, help="published ids, e.g. 2,30,58: say what they can mean")
    what.add_argument("--list", action="store_true", help="list the classes that can be asked")
    args = parser.parse_args(argv)
    if not args.list and args.config is None:
        parser.error("--config is needed")
    try:
        if args.list:
            answer: Any = list_classes()
        elif args.ids:
            answer = explain_published_ids(args.config, args.ids)
        else:
            answer = dataclasses.asdict(derive_sglang_ids(args.config, args.layers))
    except PipelineError as e:
        print(e, file=sys.stderr)
        return 1
    print(json.dumps(answer, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
