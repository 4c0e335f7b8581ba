"""`dump.engine=transformers`: the same files as the SGLang dump, computed by the reference, one sample after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version

import torch
from tqdm import tqdm

from pipeline.capture import PROBE, SAMPLE, Captured, RequestTag, Span
from pipeline.capture_writer import CaptureWriter
from pipeline.dump import Backend, Job
from pipeline.engine import resolve_device
from pipeline.reference import Reference


def run(job: Job) -> Backend:
    """Store all samples and probes; the samples go through the same checks and writer as the plugin's."""
    device = resolve_device(job.config.device)
    if job.config.threads:
        torch.set_num_threads(job.config.threads)
    reference = Reference(job.target.path, dtype=getattr(torch, job.plan.dtype), device=device,
                          trust_remote_code=job.target.trust_remote_code)
    writer = CaptureWriter(job.plan)
    every_layer = list(range(job.target.num_layers))
    with tqdm(total=job.todo_tokens, unit="tok", desc="dump", smoothing=0.1) as progress:
        for sample in job.todo():
            writer.take(_captured(reference.states, job.plan.attempt, SAMPLE, sample.id, sample.input_ids, job.plan.layers))
            progress.update(len(sample.input_ids))
    for sample in job.probe_samples():
        writer.take(_captured(reference.states, job.plan.attempt, PROBE, sample.id, sample.input_ids, every_layer))
    writer.finish()
    return Backend("transformers", version("transformers"), reference.model_class, requested_ids=[],
                   capture_points=[layer + 1 for layer in job.plan.layers])


def _captured(states: Callable, attempt: str, kind: str, sample_id: str, input_ids: Sequence[int], layers: list[int]) -> Captured:
    span = Span(RequestTag.of(attempt, kind, sample_id, input_ids), row=0, start=0, length=len(input_ids))
    return Captured([span], torch.tensor(input_ids), states(input_ids, layers), ready=lambda: None)
