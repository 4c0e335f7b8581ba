"""What layer ids mean to every model class of the installed SGLang: a table, made by asking each class.

    python -m pipeline.layers.layer_rules                    # every class, grouped by rule, for the terminal
    python -m pipeline.layers.layer_rules --markdown         # one row per class
    python -m pipeline.layers.layer_rules --json             # what pipeline/data/layer_rules.json was made with
    python -m pipeline.layers.layer_rules --config DIR       # one target, for its own number of layers

Asked means: the class's own method answered on a stub, so the ids are right. Proven means: a model of the class was run
too, and what it captured equalled transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.errors import PipelineError
from pipeline.layers import layer_ids, layer_meaning, layer_stubs, plain_config, sglang_models
from pipeline.layers.proven_classes import NOT_WITHOUT_A_GPU
from pipeline.layers.vllm_ids import derive_vllm_ids
from pipeline.sglang_cpu import TESTED_SGLANG

_EXAMPLE_LAYERS = 32
_NO_TARGETS = ("NextN", "MTP", "Eagle", "Assistant", "Embedding")
"""In the names of classes that inherit the method but are drafters or embedding models"""


@dataclasses.dataclass(frozen=True)
class LayerRule:
    """One class's answers. N is its number of decoder layers."""

    architecture: str
    explicit: str | None
    """what a list of ids means; None: cannot be asked"""
    no_ids: str | None
    """what is captured when the config holds no ids"""
    decided_in: str
    """file and method, joined by ` -> ` where one class asks another"""
    status: str
    """`proven`; `asked` or `run: `, with what else is known; `cannot be asked: ` and why"""
    target: bool
    """False: a drafter or an embedding model, which inherits the method but serves no drafter"""


def layer_rules() -> list[LayerRule]:
    """The rule of every architecture whose class takes EAGLE-3's layer ids, by name."""
    def config(name: str) -> SimpleNamespace:
        return plain_config.read_target_config({"architectures": [name], "num_hidden_layers": _EXAMPLE_LAYERS})

    return [_rule(name, cls, config(name)) for name, cls in sglang_models.eagle3_classes().items()]


def _rule(name: str, cls: type, config: SimpleNamespace) -> LayerRule:
    explicit = no_ids = None
    try:
        found = layer_meaning.meaning(cls, config)
        explicit, no_ids = found.explicit, found.no_ids
        status = _status(cls)
    except ValueError as e:
        status = f"cannot be asked: {e}"
    return LayerRule(name, explicit, no_ids, layer_stubs.rule_source(cls), status,
                     target=not any(word in name for word in _NO_TARGETS))


def _status(cls: type) -> str:
    """Of a class that was asked: what more is known of it."""
    if (known := layer_ids.known_of(cls)) is None:
        needs_gpu = NOT_WITHOUT_A_GPU.get(cls.__name__) if sglang_models.sglang_version() in TESTED_SGLANG else None
        return "asked" if needs_gpu is None else f'asked; not run, since without a GPU SGLang says "{needs_gpu}"'
    if (deviation := known.proof.deviation) is None:
        return "proven"
    return f"run: captures {deviation}" if known.run is cls else f"asked; the class inside it was run: captures {deviation}"


def as_json(rules: Iterable[LayerRule]) -> dict[str, Any]:
    classes = {rule.architecture: {k: v for k, v in vars(rule).items() if k != "architecture"} for rule in rules}
    return {"engine": "sglang", "version": sglang_models.sglang_version(), "classes": classes}


def as_markdown(rules: Iterable[LayerRule]) -> str:
    rows = [("class", "ids are", "no ids", "decided in", "status")]
    rows += [(f"`{r.architecture}`" + ("" if r.target else " (no target)"), r.explicit or "-", r.no_ids or "-",
              f"`{_place(r)}`", r.status) for r in rules]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def as_text(rules: Sequence[LayerRule], width: int) -> str:
    """The table for a terminal of `width` columns: classes that answer alike stand together."""
    asked = [r for r in rules if r.explicit]
    proven = [r for r in asked if r.status == "proven"]
    remarks = sorted({r.status for r in asked} - {"proven", "asked"})
    marks = {"proven": "*", "asked": ""} | {status: f" [{i}]" for i, status in enumerate(remarks, 1)}
    lines = [f"SGLang {sglang_models.sglang_version()}: {len(rules)} classes take EAGLE-3 layer ids, {len(asked)} answer, "
             f"{len(proven)} of them proven (*)"]

    def answers(rule: LayerRule) -> tuple[bool, str, str]:
        return not rule.target, rule.explicit or "", rule.no_ids or ""

    for (drafter, explicit, no_ids), group in itertools.groupby(sorted(asked, key=answers), answers):
        lines += ["", f"ids are {explicit}" + (" (drafters and embedding models: no targets)" if drafter else ""),
                  f"no ids: {no_ids}"]
        for place, members in itertools.groupby(sorted(group, key=_place), _place):
            names = ", ".join(r.architecture + marks[r.status] for r in members)
            lines += textwrap.wrap(f"{place}: {names}", width, initial_indent="  ", subsequent_indent="      ",
                                   break_on_hyphens=False)
    lines += [""] * bool(remarks)
    for i, status in enumerate(remarks, 1):
        lines += textwrap.wrap(f"[{i}] {status}", width, subsequent_indent="    ")
    if refused := [r for r in rules if not r.explicit]:
        lines += ["", "cannot be asked, so refused unless target.layer_id_rule states what an id is"]
        for r in refused:
            lines += textwrap.wrap(f"{r.architecture}: {r.status.partition(': ')[2]}", width, initial_indent="  ",
                                   subsequent_indent="      ")
    return "\n".join(lines)


def _place(rule: LayerRule) -> str:
    """The files that decide, without the folder that all share."""
    return " -> ".join(dict.fromkeys(Path(step.split(" ")[0]).name for step in rule.decided_in.split(" -> ")))


def _not_loaded() -> list[str]:
    """What this machine lacks: one line for classes that were asked but cannot run, one for those unknown."""
    offered = sglang_models.unregistered_classes()
    able = [name for name, cls in offered.items() if name in sglang_models.eagle3_classes()]
    unknown = [name for name, cls in offered.items() if isinstance(cls, str)]
    return [f"{what}: {', '.join(names)}" for what, names in (
        ("asked, but cannot run on this machine (kernels are missing)", able),
        ("unknown, since their files cannot be imported on this machine", unknown)) if names]


# ---------------------------------------------------------------- one target


def target_rule(path: Path) -> dict[str, Any]:
    """What ids mean to one target's class, and what this pipeline's default layers would be called there.

    Raises:
        PipelineError: no class, or one that cannot be asked.
    """
    config = plain_config.read_target_config(path)
    cls, layers = sglang_models.model_class(config), plain_config.num_layers(config)
    rule = _rule(cls.__name__, cls, config)
    if rule.explicit is None:
        raise sglang_models.CannotBeAsked(cls.__name__, rule.status.partition(": ")[2])
    wanted = layer_ids.default_layers(layers)
    sglang, vllm = layer_ids.derive_for_class(cls, config, wanted), derive_vllm_ids(wanted, layers, path)
    return vars(rule) | {
        "version": sglang.version,
        "num_layers": layers,
        "no_ids_layer_outputs": [point - 1 for point in layer_stubs.ask(cls, config, None)],
        "default_layers": {
            "layer_outputs": list(wanted),
            "sglang_ids": list(sglang.ids),
            "vllm_ids": list(vllm.ids),
            "sglang": sglang.note,
            "vllm": vllm.note,
        },
    }


def target_text(rule: dict[str, Any]) -> str:
    default = rule["default_layers"]
    return "\n".join([
        f"{rule['architecture']} in SGLang {rule['version']}, N = {rule['num_layers']}: {rule['status']}",
        f"  ids are     {rule['explicit']}",
        f"  no ids      {rule['no_ids']}: layer outputs {rule['no_ids_layer_outputs']}",
        f"  decided in  {rule['decided_in']}",
        f"  layer outputs {default['layer_outputs']} are",
        f"    SGLang ids {default['sglang_ids']}: {default['sglang']}",
        f"    vLLM ids {default['vllm_ids']}: {default['vllm']}",
    ])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.layers.layer_rules", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, help="one target: its folder or config.json")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="as a Markdown table")
    args = parser.parse_args(argv)
    if args.config is not None and args.markdown:
        parser.error("--markdown is for the whole table")
    try:
        if args.config is not None:
            rule = target_rule(args.config)
            print(json.dumps(rule, indent=2) if args.json else target_text(rule))
            return 0
        rules = layer_rules()
    except PipelineError as e:
        print(e, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(as_json(rules), indent=1))
    elif args.markdown:
        print(as_markdown(rules))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        print(as_text(rules, width))
        for line in _not_loaded():
            print(textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
