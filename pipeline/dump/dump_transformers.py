"""`dump.engine=transformers`: the same files as the SGLang dump, computed by the reference sample by sample."""

from __future__ import annotations

from importlib.metadata import version

import torch
from tqdm import tqdm

from pipeline.dump.capture_plan import PROBE, SAMPLE, Captured, RequestTag, Span
from pipeline.dump.capture_writer import CaptureWriter
from pipeline.dump.dump_job import Backend, Job
from pipeline.dump.reference import Reference
from pipeline.engines.engine import resolve_device
from pipeline.samples import Sample


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
            writer.take(_captured(reference, job.plan.attempt, SAMPLE, sample, job.plan.layers))
            progress.update(len(sample.input_ids))
    for sample in job.probe_samples():
        writer.take(_captured(reference, job.plan.attempt, PROBE, sample, every_layer))
    writer.finish()
    return Backend("transformers", version("transformers"), reference.model_class, requested_ids=[],
                   capture_points=[layer + 1 for layer in job.plan.layers])


def _captured(reference: Reference, attempt: str, kind: str, sample: Sample, layers: list[int]) -> Captured:
    ids = sample.input_ids
    span = Span(RequestTag.of(attempt, kind, sample.id, ids), row=0, start=0, length=len(ids))
    return Captured([span], torch.tensor(ids), reference.states(ids, layers), ready=lambda: None)
