"""`dump.engine=sglang`: sends every sample through the engine, where the capture plugin stores its hidden states.

The first request only makes the live model say what it captures; nothing is dumped before that agrees with what was
derived. Then a fixed number of workers keeps the engine busy, the probes follow one by one, and a file asks the plugin
to put the rest on disk.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from pipeline.dump.capture_plan import CHECK, PLAN_ENV, PROBE, SAMPLE, CapturePlan, RequestTag
from pipeline.dump.dump_job import Backend, Job
from pipeline.engines.engine import engine, plugin_switched_on, prepare_environment, resolve_device, tensor_parallel
from pipeline.errors import PipelineError
from pipeline.export.rope_check import check_rope_of_target
from pipeline.files import clear_disk_errors, write_json
from pipeline.layers import plain_config
from pipeline.layers.layer_ids import EngineIds, derive_sglang_ids
from pipeline.layers.sglang_models import check_loadable
from pipeline.samples import Sample

_IN_FLIGHT = 2  # times max_running_requests: while one batch runs the next one waits in the engine
_RESERVED_TOKENS = 8  # SGLang refuses inputs that come within 6 tokens of its context length (managers/tp_worker.py)
_POLL_SECONDS = 0.2


def run(job: Job) -> Backend:
    """Dump with SGLang. Blocks until every captured sample is on disk.

    Raises:
        PipelineError: the engine did not start, died, or captures other layers than derived; or a shard could not be
            written.
    """
    config, target, plan = job.config, job.target, job.plan
    device = resolve_device(config.device)
    prepare_environment(device, threads=config.threads)
    check_loadable(plain_config.read_target_config(target.config))
    ids = derive_sglang_ids(target.config, plan.layers, config.target.layer_id_rule)
    if not ids.proven:
        print(f"dump: ids {list(ids.ids)}: {ids.note}", flush=True)
    check_rope_of_target(config, target)  # before anything is dumped for a drafter that cannot be served
    plan_file = plan.control / "plan.json"
    write_json(plan_file, vars(plan))
    options = dict(
        device=device, dtype=plan.dtype, force_version=config.dump.allow_untested_engine,
        tp_size=tensor_parallel(config, device),
        context_length=min(config.target.context_length + _RESERVED_TOKENS, config.target.max_position_embeddings),
        max_total_tokens=None if device == "cuda" else max(16384, 2 * config.target.context_length),
        chunked_prefill_size=config.dump.chunked_prefill_size, capture_ids=ids.ids,
        quantization=config.target.quantization, trust_remote_code=target.trust_remote_code,
        mem_fraction_static=config.dump.mem_fraction_static, random_seed=config.seed,
        extra={"skip_tokenizer_init": True, "max_running_requests": config.dump.max_running_requests})
    with plugin_switched_on(PLAN_ENV, plan_file), engine(target.path, **options) as llm:
        wiring = llm.loop.run_until_complete(_Client(llm, job, ids).run())
    return Backend("sglang", ids.version, wiring["model_class"], list(ids.ids), wiring["capture_points"],
                   ids.deviation)


class _Client:
    """One dump against a live engine."""

    def __init__(self, llm: Any, job: Job, ids: EngineIds):
        self.llm, self.job, self.plan, self.ids = llm, job, job.plan, ids
        self.check_refusal: str | None = None
        self.pids = llm.get_all_child_pids()
        self.progress = tqdm(total=job.todo_tokens, unit="tok", desc="dump", smoothing=0.1)

    async def run(self) -> dict:
        """All requests, watched; returns the wiring that the live model reported."""
        work, watch = asyncio.ensure_future(self._work()), asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            _raise_reported_error(self.plan)
            return work.result()
        finally:
            work.cancel()
            watch.cancel()
            self.progress.close()

    async def _work(self) -> dict:
        samples, probes = self.job.todo(), self.job.probe_samples()
        await self._request(CHECK, self.job.any_sample())
        wiring = self._check_wiring()
        workers = _IN_FLIGHT * self.job.config.dump.max_running_requests
        await asyncio.gather(*(self._send_from(samples) for _ in range(workers)))
        for sample in probes:  # one at a time: a batch is a probe batch or none
            await self._request(PROBE, sample)
        with clear_disk_errors(self.plan.control):
            (self.plan.control / "finish").touch()
        await self._finished()
        return wiring

    async def _send_from(self, samples: Iterator[Sample]) -> None:
        for sample in samples:
            await self._request(SAMPLE, sample)
            self.progress.update(len(sample.input_ids))

    async def _request(self, kind: str, sample: Sample) -> None:
        rid = str(RequestTag.of(self.plan.attempt, kind, sample.id, sample.input_ids))
        try:
            # Nothing is generated: the prefill is all that is wanted.
            answer = await self.llm.async_generate(input_ids=sample.input_ids, rid=rid,
                                                   sampling_params={"max_new_tokens": 0, "temperature": 0.0})
        except ValueError as e:  # how the engine refuses a request, e.g. one that does not fit into its KV cache
            return self._quarantine(kind, sample, f"the engine refused it: {e}")
        reason = answer["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            self._quarantine(kind, sample, f"the engine aborted it: {reason.get('message')}")

    def _quarantine(self, kind: str, sample: Sample, reason: str) -> None:
        if kind == CHECK:  # it would come again as a sample
            self.check_refusal = f"{sample.id!r} ({len(sample.input_ids)} tokens): {reason}"
            return
        entry = {"id": sample.id, "reason": reason, "tokens": len(sample.input_ids), "kind": kind}
        path = self.plan.control / "quarantine-stage.jsonl"
        with clear_disk_errors(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _check_wiring(self) -> dict:
        reports = [json.loads(path.read_text()) for path in self.plan.control.glob("wiring-*.json")]
        if not reports and self.check_refusal:
            raise PipelineError(f"the engine did not take the first sample, {self.check_refusal}", field="engine",
                                value=self.check_refusal, fix="make room for its KV cache (GPUS=n, or raise "
                                "dump.mem_fraction_static), or lower target.context_length")
        if not reports:
            raise PipelineError("the capture plugin is not active in the engine",
                                field="sglang.srt.plugins: eagle3_capture",
                                fix="pip install -e . (the entry point is missing), and unset SGLANG_PLUGINS")
        wiring = reports[0]
        derived = {"model_class": self.ids.model_class, "capture_points": list(self.ids.capture_points)}
        for key, expected in derived.items():
            if wiring[key] != expected:
                problem = f" ({wiring['problem']})" if "problem" in wiring else ""
                if self.job.config.target.layer_id_rule is None:
                    fix = "report this target; until then: make dump ARGS=\"dump.engine=transformers\""
                else:
                    fix = "state another target.layer_id_rule, or none where SGLang's class can be asked"
                raise PipelineError(f"the live model's {key} is {wiring[key]}{problem}, {expected} was derived for ids "
                                    f"{list(self.ids.ids)} ({self.ids.rule_source})", field=f"engine: {key}",
                                    value=wiring[key], fix=fix)
        return wiring

    async def _finished(self) -> None:
        """Wait until every process that captures has answered that all of it is on disk."""
        control = self.plan.control
        while len(list(control.glob("finished-*.json"))) < len(list(control.glob("wiring-*.json"))):
            await asyncio.sleep(_POLL_SECONDS)

    async def _watch(self) -> None:
        """Ends with an error when the plugin reports one or a process of the engine is gone; requests would hang."""
        while True:
            _raise_reported_error(self.plan)
            for pid in self.pids:
                if not _is_running(pid):
                    raise PipelineError(f"a process of the engine (pid {pid}) died during the dump", field="engine",
                                        fix="the same command again goes on; if it was killed for memory, lower "
                                            "dump.chunked_prefill_size or dump.shard_tokens")
            await asyncio.sleep(_POLL_SECONDS)


def _is_running(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _raise_reported_error(plan: CapturePlan) -> None:
    for path in plan.control.glob("error-*.json"):
        if text := path.read_text(encoding="utf-8").strip():
            try:
                said = json.loads(text)
            except ValueError:  # cut off, or being written
                said = {"what": text}
            if trace := said.pop("trace", None):
                said["what"] += f"\n{trace}"
            raise PipelineError(**({"fix": "see the lines above"} | said))
