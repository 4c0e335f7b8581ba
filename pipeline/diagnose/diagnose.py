"""`make diagnose`: which states of its target a drafter of unknown wiring was trained on, and a run to export it from.

The drafter's files are read (`foreign_drafter`), the target is run on probe text with every layer kept (stage 1 and 2 of
the run `diagnosed`), wirings are searched (`wiring_search`) and judged (`wiring_verdict`). Where the evidence determines
every slot, the run gets stages 3 and 4 as well (`diagnosed_run`), so that `make export` and `make verify` go on from it.
Where it does not, the report says so and the run stops there.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.config import Config
from pipeline.diagnose.diagnose_report import report
from pipeline.diagnose.diagnosed_run import probe_run, write_drafter
from pipeline.diagnose.foreign_drafter import ForeignDrafter, Reading, read_drafter, read_maps
from pipeline.diagnose.wiring_search import Scores, Variant, search
from pipeline.diagnose.wiring_verdict import Verdict, judge
from pipeline.engines.engine import resolve_device
from pipeline.errors import PipelineError
from pipeline.files import write_json
from pipeline.manifest import Manifest
from pipeline.store import layer_output
from pipeline.target import Target, load_embedding, load_output_head
from pipeline.verify.replay import ExportedDrafter
from pipeline.verify.states import EMBEDDING, candidates
from pipeline.verify.wiring import read_probes

_ROWS = 32  # of a sample that are drafted from: neighbouring rows tell little more


def diagnose(config: Config, target: Target, run_dir: Path) -> Verdict:
    """Diagnose `diagnose.draft`, print what was found, and write `diagnosis.json` and, if determined, the run.

    Raises:
        PipelineError: the drafter cannot be read, the run belongs to something else, or the wiring is undetermined.
    """
    if config.diagnose.draft is None:
        raise PipelineError("no drafter is named", field="diagnose.draft", fix="make diagnose DRAFT=dir TARGET=folder")
    drafter = read_drafter(Path(config.diagnose.draft), target)
    readings, problems = read_maps(drafter.d2t, drafter.t2d, drafter.shape.draft_vocab_size, target.vocab_size)
    if not readings:
        raise PipelineError(
            f"the vocabulary maps of {drafter.folder} do not say which token each row of lm_head stands for:\n" +
            "\n".join(f"  - {p}" for p in problems), field="d2t", fix="get d2t from whoever trained the drafter, or choose "
            "the target that it belongs to: make diagnose DRAFT=dir TARGET=folder")
    manifest = probe_run(config, target, run_dir)
    verdict = infer(drafter, readings, target, run_dir, manifest, device=resolve_device(config.device))
    reason = why_no_run(verdict, target)
    path = run_dir / "diagnosis.json"
    write_json(path, {"draft": str(drafter.folder), "files": drafter.digest(), "config_ids": drafter.ids,
                      "map_problems": problems, "notes": drafter.notes, **verdict.as_json(), "no_run_because": reason})
    print(report(drafter, problems, verdict))
    if reason is not None:
        raise PipelineError(f"no drafter was put into {run_dir}: {reason}", field=str(path), fix=_mend(verdict, config))
    write_drafter(config, target, run_dir, drafter, verdict)
    return verdict


def infer(drafter: ForeignDrafter, readings: list[Reading], target: Target, run_dir: Path, manifest: Manifest, *,
          device: str) -> Verdict:
    """Search and judge, on the probes of a run's dump."""
    scores = Scores(_forward(drafter, readings[0], target, device), list(read_probes(manifest, run_dir, _ROWS)),
                    load_output_head(target).to(device), [reading.target_ids for reading in readings])
    if not scores.probes:
        raise PipelineError("no probe sample has a row to draft from", field="diagnose.samples",
                            fix='ARGS="diagnose.samples=text.txt" with a few thousand words the target could have written')
    found = search(scores, drafter.slots, candidates(target.num_layers), _variants(drafter), _guesses(drafter, target.num_layers))
    stated = {"norm_before_residual": drafter.norm_before_residual, "fc_norm": drafter.shape.fc_norm,
              "norm_before_fc": drafter.shape.norm_before_fc, "norm_output": drafter.shape.norm_output}
    return judge(scores, found, readings, stated=stated)


def _forward(drafter: ForeignDrafter, reading: Reading, target: Target, device: str) -> ExportedDrafter:
    import torch

    maps = {"d2t": reading.target_ids - torch.arange(len(reading.target_ids)), "t2d": None}
    config = {**vars(drafter.shape), "num_aux_hidden_states": drafter.slots}
    return ExportedDrafter.of(config, drafter.weights | maps, load_embedding(target), device)


def _variants(drafter: ForeignDrafter) -> list[Variant]:
    """With either residual, and with and without the norms whose weights are there. What the weights suggest first."""
    fc_norms = (True, False) if drafter.shape.fc_norm else (False,)
    before_fc = (True, False) if drafter.shape.norm_before_fc else (False,)
    return [Variant(residual, f, b) for residual in (False, True) for f in fc_norms for b in before_fc]


def _guesses(drafter: ForeignDrafter, num_layers: int) -> list[tuple[str, ...]]:
    """What the ids in config.json can mean: layer outputs, or capture points. A place to start from, not evidence."""
    ids = drafter.ids or []
    lists = [[i - shift for i in ids] for shift in (0, 1)]
    return [tuple(layer_output(i) if i >= 0 else EMBEDDING for i in layers) for layers in lists
            if len(layers) == drafter.slots and all(-1 <= i < num_layers for i in layers)]


def why_no_run(verdict: Verdict, target: Target) -> str | None:
    """Why no drafter can be exported from what was found; None if one can."""
    if verdict.why_undetermined:
        return "undetermined: " + "; ".join(verdict.why_undetermined)
    if unsure := [f"fc.{i}" for i, slot in enumerate(verdict.slots) if not slot.determined]:
        return f"undetermined: more than one state fits {', '.join(unsure)} within the noise"
    if unsure := [name for name, switch in verdict.switches.items() if not switch.known]:
        return f"undetermined: with and without {', '.join(unsure)} it fits alike within the noise, and its config.json says nothing"
    states = [slot.best for slot in verdict.slots]
    usable = {layer_output(layer) for layer in range(target.num_layers - 1)}
    if wrong := sorted({s for s in states if s not in usable or states.count(s) > 1}):
        return (f"it reads {', '.join(wrong)}{' more than once' if states.count(wrong[0]) > 1 else ''}, which engines do not "
                "feed: they capture distinct layer outputs below the last")
    if verdict.switches["norm_before_residual"].value:
        return ("it was trained with norm_before_residual, which vLLM serves as it is (norm_before_residual: true in a "
                "speculators config) and SGLang does not have")
    return None


def _mend(verdict: Verdict, config: Config) -> str:
    if verdict.determined:
        return "serve it with the engine it was made for, or train a drafter: make run RUN=<new name>"
    return (f'more text: ARGS="diagnose.max_samples={2 * config.diagnose.max_samples}", or text that it was trained on: '
            'ARGS="diagnose.samples=samples.parquet"; a drafter that learned little stays undetermined')
