"""SGLang plugin of the live probe: keeps what the drafter is really given. No file of SGLang is edited.

SGLang loads it (entry point `eagle3_observe`) into every scheduler process, where it does nothing unless the live probe
set `EAGLE3_OBSERVE_PLAN`. Then it wraps `ModelRunner.forward`. Of the target it reports once what the live model
captures; of the drafter what it is made of, and for every row that carries the target's states (not its own, as in the
draft steps): the states, fc's input where a norm made it another tensor, the position and the token that the row reads.

    prefill   rows of the prompt
    decode    rows of accepted tokens, after a verification ("draft-extend"); the engine also computes rows of refused
              drafts there, which belong to no sequence and are left out

The files it leaves in the plan's folder, read back by `read_observation`:

    target-<pid>.json, drafter-<pid>.json   the live models
    rows-<pid>-<n>.safetensors              one forward of the drafter
    error-<pid>.json                        why observing failed first; the engine served on
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.dump.capture import is_writing_rank, live_wiring, wrap_forward
from pipeline.dump.capture_plan import RequestTag
from pipeline.files import save_safetensors, write_json

if TYPE_CHECKING:
    import torch

PLAN_ENV = "EAGLE3_OBSERVE_PLAN"
PREFILL, DECODE = "prefill", "decode"
NORMS = ("input_norm", "fc_norm")
"""The norms that SGLang's drafter can apply before fc, in the order in which it does."""


@dataclasses.dataclass(frozen=True)
class ObservePlan:
    """What the live probe tells the plugin."""

    attempt: str
    """first part of the ids of the requests to observe (`RequestTag`)"""
    folder: str
    """where the files go"""


def register() -> None:
    """Entry point: wrap `ModelRunner.forward` if the live probe asked for it."""
    wrap_forward(PLAN_ENV, lambda plan: Observer(ObservePlan(**plan)).around_forward)


class Observer:
    """The hook of one scheduler process."""

    def __init__(self, plan: ObservePlan):
        self.plan = plan
        self._reported: set[str] = set()
        self._forwards = 0

    def around_forward(self, forward: Callable, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; keep what the drafter was given for the observed requests."""
        if not runner.is_draft_worker:
            with self._reporting_errors():
                self._report("target", lambda: live_wiring(runner.model))
            return forward(runner, forward_batch, *args, **kwargs)
        spans = observed_rows(forward_batch, self.plan.attempt)
        if not spans:
            return forward(runner, forward_batch, *args, **kwargs)
        received = forward_batch.spec_info.hidden_states
        positions, tokens = forward_batch.positions, forward_batch.input_ids  # the forward may put padded ones there
        with self._reporting_errors():  # before the forward, which ends the process where widths do not fit
            self._report("drafter", lambda: describe_drafter(runner.model) | {"received": received.shape[-1]})
        with _fc_inputs(runner.model) as at_fc:
            result = forward(runner, forward_batch, *args, **kwargs)
        with self._reporting_errors():
            if is_writing_rank():
                self._write(phase_of(forward_batch), spans, received, at_fc, positions, tokens)
        return result

    def _report(self, name: str, facts: Callable[[], dict]) -> None:
        if name not in self._reported and is_writing_rank():
            self._reported.add(name)
            write_json(self._file(name, "json"), facts())

    def _write(self, phase: str, spans: list[tuple[RequestTag, int, int]], received: torch.Tensor,
               at_fc: list[torch.Tensor], positions: torch.Tensor, tokens: torch.Tensor) -> None:
        import torch

        rows = torch.cat([torch.arange(start, start + count) for _, start, count in spans])

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[rows.to(tensor.device)].cpu()

        tensors = {"received": pick(received), "positions": pick(positions).long(), "tokens": pick(tokens).long()}
        if at_fc and not torch.equal(pick(at_fc[0]), tensors["received"]):
            tensors["fc_input"] = pick(at_fc[0])
        self._forwards += 1
        save_safetensors(self._file(f"rows-{self._forwards:06d}", "safetensors"), tensors, {
            "phase": phase, "fc_calls": str(len(at_fc)),
            "requests": json.dumps([[tag.sample_id, count] for tag, _, count in spans])})

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """What goes wrong in here first is told to the live probe; the engine serves on."""
        try:
            yield
        except Exception:
            if not (path := self._file("error", "json")).exists():
                write_json(path, {"trace": traceback.format_exc()})

    def _file(self, stem: str, ending: str) -> Path:
        return Path(self.plan.folder) / f"{stem}-{os.getpid()}.{ending}"


def phase_of(forward_batch: Any) -> str | None:
    """None for the drafter's own steps and idle batches."""
    mode = forward_batch.forward_mode
    if mode.is_extend_without_speculative():
        return PREFILL
    return DECODE if mode.is_draft_extend_v2() else None


def observed_rows(forward_batch: Any, attempt: str) -> list[tuple[RequestTag, int, int]]:
    """(request, first row in the forward's tensors, rows) for what carries the target's states of observed requests."""
    phase = phase_of(forward_batch)
    if phase is None or not forward_batch.rids:
        return []
    lengths = [int(n) for n in forward_batch.extend_seq_lens_cpu]
    kept = lengths if phase == PREFILL else forward_batch.spec_info.num_accept_tokens.tolist()
    spans, row = [], 0
    for rid, length, count in zip(forward_batch.rids, lengths, kept):
        if (tag := RequestTag.parse(rid, attempt)) is not None and count > 0:
            spans.append((tag, row, int(count)))
        row += length
    return spans


def describe_drafter(model: Any) -> dict:
    """Class, fc's shape, and the opt-in norms of the live drafter."""
    parent, fc = _fc(model)
    return {
        "class": type(model).__name__,
        "fc": None if fc is None else [fc.weight.shape[1], fc.weight.shape[0]],
        "norms": [name for name in NORMS if getattr(parent, name, None) is not None],
        "norm_output": bool(getattr(parent, "norm_output", False)),
    }


def _fc(model: Any) -> tuple[Any, Any]:
    """The module that holds fc, and fc; (model, None) if there is none."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if last == "fc":
            return modules[parent], module
    return model, None


@contextlib.contextmanager
def _fc_inputs(model: Any) -> Iterator[list[torch.Tensor]]:
    """What fc is called with inside the block."""
    seen: list[torch.Tensor] = []
    _, fc = _fc(model)
    hook = fc and fc.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        if hook is not None:
            hook.remove()


# ---------------------------------------------------------------- reading it back


@dataclasses.dataclass
class Rows:
    """Rows of one request in one phase, as they were computed."""

    positions: torch.Tensor
    """[R]"""
    tokens: torch.Tensor
    """[R] token that the row reads; by the EAGLE convention the one after its position"""
    received: torch.Tensor
    """[R, width] the target's states"""
    fc_input: torch.Tensor
    """[R, width] what fc was called with; `received` itself where no norm came before"""


@dataclasses.dataclass
class Observation:
    """What the plugin left."""

    target: dict
    drafter: dict
    rows: dict[str, dict[str, Rows]]
    """phase → request → rows"""
    forwards: dict[str, int]
    fc_calls: dict[str, int]
    """phase → forwards of the drafter with the target's states, and how many of them went through fc"""
    errors: list[str]


def read_observation(folder: Path) -> Observation:
    """Everything the plugin wrote to `folder`; empty parts where it wrote nothing."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    def facts(name: str) -> dict:
        return next((json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob(f"{name}-*.json"))), {})

    parts: dict[str, dict[str, list[Rows]]] = {PREFILL: {}, DECODE: {}}
    forwards, fc_calls = dict.fromkeys(parts, 0), dict.fromkeys(parts, 0)
    for path in sorted(folder.glob("rows-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            said = file.metadata()
        forwards[said["phase"]] += 1
        fc_calls[said["phase"]] += int(said["fc_calls"])
        tensors, start = load_file(path), 0
        for request, count in json.loads(said["requests"]):
            piece = {name: tensor[start:start + count] for name, tensor in tensors.items()}
            piece.setdefault("fc_input", piece["received"])
            parts[said["phase"]].setdefault(request, []).append(Rows(**piece))
            start += count
    rows = {phase: {request: Rows(*(torch.cat([getattr(p, f.name) for p in pieces]) for f in dataclasses.fields(Rows)))
                    for request, pieces in of_phase.items()} for phase, of_phase in parts.items()}
    errors = [json.loads(p.read_text(encoding="utf-8"))["trace"] for p in sorted(folder.glob("error-*.json"))]
    return Observation(facts("target"), facts("drafter"), rows, forwards, fc_calls, errors)
