"""SGLang plugin of stage 2: keeps the hidden states of every prefill. No file of SGLang is edited.

SGLang loads it (entry point `eagle3_capture`) into every scheduler process, where it does nothing unless the stage set
`EAGLE3_CAPTURE_PLAN`. Then it wraps `ModelRunner.forward`: with the engine's capture flags on, a forward returns the
captured layers `[tokens, n·H]` and the final hidden state after the norm `[tokens, H]` of all its tokens, which may
belong to several requests and to parts of them (chunked prefill). They are copied off the device and handed to
`CaptureWriter`, a thread that puts samples together and writes shards.

Probe requests get every layer. Models capture at the input of a layer, so layer outputs 0 … N-2 come from capture
points 1 … N-1; nothing follows the last layer, so its output is taken where the final norm adds and normalises it.

The request id carries what the plugin needs to know of a request (`RequestTag`), the plan file what it needs of the
run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.dump.capture_plan import PLAN_ENV, PROBE, Captured, CapturePlan, RequestTag, Span
from pipeline.store import FINAL_HIDDEN, layer_output

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Entry point: wrap `ModelRunner.forward` if the stage asked for it."""
    wrap_forward(PLAN_ENV, lambda plan: Capture(CapturePlan(**plan)).around_forward)


def wrap_forward(variable: str, hook_of: Callable[[dict], Callable]) -> None:
    """Wrap `ModelRunner.forward` with the hook for the plan file that `variable` names; nothing if it is not set."""
    if (path := os.environ.get(variable)) is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plan = json.loads(Path(path).read_text(encoding="utf-8"))
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", hook_of(plan), HookType.AROUND)


class Capture:
    """The hook of one scheduler process."""

    def __init__(self, plan: CapturePlan):
        self.plan = plan
        self._writer: Any = None
        self._stream: torch.cuda.Stream | None = None

    def around_forward(self, forward: Callable, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; hand the hidden states of the stage's requests to the writer."""
        spans = [] if runner.is_draft_worker else _spans(forward_batch, self.plan.attempt)
        if not spans:
            return forward(runner, forward_batch, *args, **kwargs)
        if any(s.tag.kind == PROBE for s in spans):
            # On every rank: ranks must agree on what a forward does, though only one of them writes.
            with every_layer(runner.model) as last:
                result = forward(runner, forward_batch, *args, **kwargs)
            layers = list(range(self.plan.num_layers - 1))
        else:
            result, last, layers = forward(runner, forward_batch, *args, **kwargs), {}, self.plan.layers
        if is_writing_rank():
            writer = self._started_writer(runner.model)
            try:
                states = _split(result.logits_output, layers) | last
                writer.put(self._to_host(spans, forward_batch.input_ids, states))
            except Exception as e:  # reported to the stage, which ends the engine; a scheduler's traceback helps nobody
                writer.fail(e)
        return result

    def _started_writer(self, model: Any) -> Any:
        if self._writer is None:
            from pipeline.dump.capture_writer import CaptureWriter

            self._writer = CaptureWriter(self.plan)
            try:
                self._writer.report(live_wiring(model))
            except Exception as e:
                self._writer.fail(e)
            self._writer.start()
        return self._writer

    def _to_host(self, spans: list[Span], input_ids: torch.Tensor, states: dict[str, torch.Tensor]) -> Captured:
        """On a GPU: start copies to pinned memory on a side stream, beside the next forward. On a CPU: no copy."""
        import torch

        if not input_ids.is_cuda:
            return Captured(spans, input_ids.clone(), states, ready=lambda: None)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())

        def copy(source: torch.Tensor) -> torch.Tensor:
            source.record_stream(self._stream)  # its memory may not be reused before the copy is done
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            return host.copy_(source, non_blocking=True)

        with torch.cuda.stream(self._stream):
            captured = Captured(spans, copy(input_ids), {n: copy(s) for n, s in states.items()}, ready=lambda: None)
            captured.ready = self._stream.record_event().synchronize
        return captured


def live_wiring(model: Any) -> dict:
    """What the live model captures, for comparison with what was derived."""
    from pipeline.layers.layer_stubs import read_capture_points

    try:
        return {"model_class": type(model).__name__, "capture_points": list(read_capture_points(model))}
    except ValueError as e:
        return {"model_class": type(model).__name__, "capture_points": [], "problem": str(e)}


def _spans(forward_batch: Any, attempt: str) -> list[Span]:
    """The requests of a prefill batch; none for decoding and idle batches and for requests of somebody else."""
    if not forward_batch.forward_mode.is_extend_without_speculative() or not forward_batch.rids:
        return []
    spans, row = [], 0
    for rid, start, length in zip(forward_batch.rids, forward_batch.extend_prefix_lens_cpu,
                                  forward_batch.extend_seq_lens_cpu):
        if (tag := RequestTag.parse(rid, attempt)) is not None and length > 0:
            spans.append(Span(tag, row, int(start), int(length)))
        row += int(length)
    return spans


def is_writing_rank() -> bool:
    """Rank 0 of tensor parallelism; with DP attention the first rank of every attention group, for its own requests."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0


def _split(output: Any, layers: list[int]) -> dict[str, torch.Tensor]:
    """Name the parts of what the engine returned: layer outputs (concatenated ascending) and the final hidden."""
    if output is None or output.hidden_states is None or output.last_hidden_states is None:
        raise RuntimeError("the forward returned no hidden states although capture is switched on")
    width = output.last_hidden_states.shape[-1]
    if output.hidden_states.shape[-1] != len(layers) * width:
        raise RuntimeError(f"the forward returned {output.hidden_states.shape[-1]} columns, not {len(layers)} x {width}")
    parts = output.hidden_states.split(width, dim=-1)
    return {layer_output(layer): part for layer, part in zip(layers, parts)} | {FINAL_HIDDEN: output.last_hidden_states}


def inner_model(model: Any) -> Any:
    """The module that holds the decoder layers, below wrappers such as `language_model`."""
    while not hasattr(model, "layers"):
        below = getattr(model, "language_model", None) or getattr(model, "model", None)
        if below is None:
            raise RuntimeError(f"{type(model).__name__} holds no decoder layers where they are looked for")
        model = below
    return model


@contextlib.contextmanager
def every_layer(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Within the block a forward captures at every layer; the dict yielded receives the last layer's output.

    Two conventions of SGLang's models are served: a list `layers_to_capture` and marked layers.
    """
    inner = inner_model(model)
    last: dict[str, torch.Tensor] = {}
    name = layer_output(len(inner.layers) - 1)

    def at_final_norm(norm: Any, inputs: tuple, output: Any) -> None:
        # With a pending residual the norm returns (normalised, hidden + residual), the latter in reused storage.
        fused = isinstance(output, tuple)
        last[name] = (output[1] if fused else inputs[0]).clone()
        last[FINAL_HIDDEN] = (output[0] if fused else output).clone()

    saved = list(inner.layers_to_capture) if hasattr(inner, "layers_to_capture") else None
    marked = [getattr(layer, "_is_layer_to_capture", False) for layer in inner.layers]
    hook = inner.norm.register_forward_hook(at_final_norm)
    try:
        if saved is not None:
            inner.layers_to_capture = list(range(1, len(inner.layers)))
        if any(marked):
            for layer in inner.layers[1:]:
                layer._is_layer_to_capture = True
        yield last
    finally:
        hook.remove()
        if saved is not None:
            inner.layers_to_capture = saved
        if any(marked):
            for layer, mark in zip(inner.layers, marked):
                layer._is_layer_to_capture = mark
