"""Engine layer ids, derived from layer outputs by asking the installed engine.

The project names a hidden state by the decoder layer whose output it is. Engines want other numbers, and they do not
agree: SGLang's Llama adds 1 to what it is given, its DeepSeek adds 1 only when the first id is 1, vLLM takes the
numbers as they are. So the ids are never typed: `derive_sglang_ids` runs the engine's own method on a stub of the
target's model class and looks for ids that lead to the wanted capture points. It needs a config.json, no weights and
no GPU.

A capture point k is the residual stream at the input of layer k, that is layer output k-1. What every class of the engine
makes of ids: `pipeline.layers.layer_rules`. vLLM's ids: `pipeline.layers.vllm_ids`.

    python -m pipeline.layers.layer_ids --config DIR --layers 2,30,58     # ids for these layer outputs
    python -m pipeline.layers.layer_ids --config DIR --ids 2,30,58        # what a published list means here
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
from typing import Any, NamedTuple

from pipeline.errors import PipelineError
from pipeline.layers import layer_meaning, layer_stubs, plain_config, sglang_models
from pipeline.layers.proven_classes import PROVEN_CLASSES, Proof
from pipeline.layers.sglang_models import CannotBeAsked, StatedRule
from pipeline.sglang_cpu import TESTED_SGLANG


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
    deviation: str | None = None
    """what a run in this version has shown to arrive instead of the residual stream"""


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


def derive_sglang_ids(config: Any, layers: Sequence[int], rule: StatedRule | None = None) -> EngineIds:
    """The ids that make the installed SGLang capture exactly these layer outputs of this target.

    The same ids are valid for the dump flag `return_aux_hidden_state_layer_ids` (which wants 0 ≤ id < N, no repeats)
    and for serving (`eagle_config.eagle_aux_hidden_state_layer_ids`), because SGLang hands both to the same method.

    Args:
        config: a `config.json` or its folder, its content as a mapping, or a `PretrainedConfig`.
        layers: layer outputs, as accepted by `check_layers`.
        rule: `target.layer_id_rule`, for a class that cannot be asked.

    Raises:
        CannotBeAsked: the class cannot be asked, and no rule is stated.
        PipelineError: no ids lead to these layers, or the class answers otherwise than the stated rule.
    """
    config = plain_config.read_target_config(config)
    check_layers(layers, plain_config.num_layers(config))  # before SGLang's slow import
    try:
        return derive_for_class(sglang_models.model_class(config), config, layers, rule)
    except CannotBeAsked as e:
        if rule is None:
            raise
        return _by_stated_rule(e.architecture, layers, rule)


def derive_for_class(
    cls: type, config: SimpleNamespace, layers: Sequence[int], rule: StatedRule | None = None
) -> EngineIds:
    """`derive_sglang_ids` for a model class in hand (see there), which must be askable."""
    num_layers = plain_config.num_layers(config)
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
            if rule is not None:
                _refuse_if_contradicted(cls, config, layers, rule)
            version, known = sglang_models.sglang_version(), known_of(cls)
            return EngineIds(
                engine="sglang",
                version=version,
                ids=ids,
                capture_points=wanted,
                model_class=cls.__name__,
                rule_source=layer_stubs.rule_source(cls),
                proven=known is not None and known.proof.deviation is None,
                note=_note(cls, config, version),
                deviation=known.proof.deviation if known else None,
            )
    tried = [(ids, answer) for ids, answer in answers.items() if isinstance(answer, tuple)]
    if not tried:
        ids, answer = next(iter(answers.items()))
        raise CannotBeAsked(cls.__name__, f"for ids {_list(ids)}: {answer}")
    ids, points = tried[0]
    raise PipelineError(
        f"no ids make SGLang's {cls.__name__} capture layer outputs {_list(layers)} ({len(answers)} lists tried); "
        f"ids {_list(ids)} give layer outputs {_list(p - 1 for p in points)}",
        field="slots.layers", value=_list(layers),
        fix="choose other layers; `python -m pipeline.layers.layer_ids --config DIR --layers ...` says which have ids",
    )


def _stated_ids(layers: Sequence[int], rule: StatedRule) -> tuple[int, ...]:
    return tuple(layer + (rule == "capture_point") for layer in layers)


def _by_stated_rule(name: str, layers: Sequence[int], rule: StatedRule) -> EngineIds:
    return EngineIds(
        engine="sglang", version=sglang_models.sglang_version(), ids=_stated_ids(layers, rule),
        capture_points=tuple(layer + 1 for layer in layers), model_class=name,
        rule_source="stated by target.layer_id_rule", proven=False,
        note=f"{name} could not be asked: target.layer_id_rule says that an id is a {rule.replace('_', ' ')}; only the "
        "capture points of the live model, read back when dumping, bear it out",
    )


def _refuse_if_contradicted(cls: type, config: SimpleNamespace, layers: Sequence[int], rule: StatedRule) -> None:
    ids = _stated_ids(layers, rule)
    try:
        points = layer_stubs.ask(cls, config, list(ids))
        if points == tuple(layer + 1 for layer in layers):
            return
        said = f"ids {_list(ids)} make it capture layer outputs {_list(p - 1 for p in points)}, not {_list(layers)}"
    except ValueError as e:
        said = f"it does not take ids {_list(ids)}: {e}"
    raise PipelineError(
        f"SGLang's {cls.__name__} can be asked, and answers otherwise: {said}",
        field="target.layer_id_rule", value=rule, fix="leave it unset: target.layer_id_rule=null",
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
        field="slots.layers", value=_list(p - 1 for p in points), fix=sglang_models.TARGETS_FIX,
    )


class Known(NamedTuple):
    """What runs have shown about a class."""

    run: type
    """the class whose model was run: this one, or one that it wraps"""
    proof: Proof


def known_of(cls: type) -> Known | None:
    """What is known of a class from runs in the installed version of SGLang; None: nothing.

    What a wrapper captures comes from the class inside it, so that class's deviation is the wrapper's too. A match is not
    handed on: it does not prove how the wrapper calls what is inside.
    """
    run: type | None = cls if sglang_models.sglang_version() in TESTED_SGLANG else None
    while run is not None:
        proof = PROVEN_CLASSES.get(run.__name__)
        if proof is not None and (run is cls or proof.deviation is not None):
            return Known(run, proof)
        inner = layer_stubs.inner_class(run)
        run = inner[1] if inner else None
    return None


def _note(cls: type, config: SimpleNamespace, version: str) -> str:
    if version not in TESTED_SGLANG:
        return (
            f"{layer_meaning.compare_with_recorded(cls, config)}. No model was compared with transformers in {version}, so "
            "what arrives at the capture points may differ from the residual stream"
        )
    if (known := known_of(cls)) is not None:
        seen = "matched transformers" if (deviation := known.proof.deviation) is None else (
            f"did not match transformers: what arrives is {deviation}. A drafter trained on it is right for SGLang only")
        which = "this class" if known.run is cls else f"{known.run.__name__}, which this class wraps,"
        return f"asked on a stub; a model of {which} was run in the engine and {seen}"
    return (
        f"asked on a stub only: {cls.__name__} is not among the classes that were run in the engine and compared with "
        "transformers, so what arrives at the capture points may differ from the residual stream"
    )


def capture_points_for(config: Any, ids: Sequence[int] | None, rule: StatedRule | None = None) -> tuple[int, ...]:
    """What the installed SGLang captures for `ids` (None: when its config holds none), as ascending capture points.

    Args:
        rule: `target.layer_id_rule`; used where the class cannot be asked.
    """
    config = plain_config.read_target_config(config)
    try:
        cls = sglang_models.model_class(config)
        if rule is None or ids is None or layer_stubs.is_askable(cls, config):
            return layer_stubs.ask(cls, config, None if ids is None else list(ids))
    except CannotBeAsked:
        if rule is None or ids is None:
            raise
    except ValueError as e:
        raise PipelineError(
            f"SGLang's {cls.__name__} does not accept these ids: {e}",
            field="eagle_config.eagle_aux_hidden_state_layer_ids", value=ids, fix="make export (derives the ids anew)",
        ) from e
    return tuple(sorted(i + (rule == "layer_output") for i in ids))


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
    layers = plain_config.num_layers(plain_config.read_target_config(config))
    return {who: f"not possible: the target has layer outputs 0 to {layers - 1}, these are {list(reading)}"
            if not isinstance(reading, str) and not all(0 <= layer < layers for layer in reading) else reading
            for who, reading in readings.items()}


def main(argv: Sequence[str] | None = None) -> int:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.strip("[]").split(",")]

    parser = argparse.ArgumentParser(prog="python -m pipeline.layers.layer_ids", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="the target's folder or config.json")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--layers", type=numbers, help="layer outputs, e.g. 2,30,58: derive the ids")
    what.add_argument("--ids", type=numbers, help="published ids, e.g. 2,30,58: say what they can mean")
    args = parser.parse_args(argv)
    try:
        if args.ids:
            answer: Any = explain_published_ids(args.config, args.ids)
        else:
            answer = dataclasses.asdict(derive_sglang_ids(args.config, args.layers))
    except PipelineError as e:
        print(e, file=sys.stderr)
        return 1
    print(json.dumps(answer, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
