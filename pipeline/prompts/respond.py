"""Let the target answer: in this process with transformers or SGLang, or through servers that serve it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.precision import respond_dtype
from pipeline.prompts.agenda import Agenda, keep_busy
from pipeline.prompts.journal import Answer, Request
from pipeline.target import DTYPES

if TYPE_CHECKING:
    from pipeline.target import Target

_SORTED_BATCHES = 32  # so many batches are sorted by length at a time


def engine_name(config: Config) -> str:
    """`prompts.respond_engine`; null: SGLang on a GPU, transformers without one."""
    from pipeline.engines.engine import resolve_device

    return config.prompts.respond_engine or ("sglang" if resolve_device(config.device) == "cuda" else "transformers")


def respond(agenda: Agenda, config: Config, target: Target) -> None:
    """Ask all questions of the agenda."""
    ways = {"transformers": _ask_transformers, "sglang": _ask_sglang, "server": _ask_servers}
    ways[engine_name(config)](agenda, config, target)


@contextlib.contextmanager
def progress(conversations: int) -> Iterator[Callable[[int, list[Answer] | None], None]]:
    """A progress line over conversations, with answers and tokens per second and the time left; for an `Agenda`."""
    from tqdm import tqdm

    # In a log file each refresh is a line of its own: a few are enough.
    often = {} if sys.stderr.isatty() else {"mininterval": 15.0, "maxinterval": 15.0}
    with tqdm(total=conversations, desc="responses", unit="conversation", smoothing=0, **often) as bar:
        counts = {"answers": 0, "tok": 0}

        def advance(ended: int, answers: list[Answer] | None) -> None:
            if answers is None:  # was there already: no part of the rate
                bar.initial += ended
            else:
                counts["answers"] += len(answers)
                counts["tok"] += sum(len(answer.ids) for answer in answers)
                elapsed = max(bar.format_dict["elapsed"], 1e-9)
                rates = (f"{n / elapsed:.{1 if n < 10 * elapsed else 0}f} {what}/s" for what, n in counts.items())
                bar.set_postfix_str(", ".join(rates), refresh=False)
            bar.update(ended)

        yield advance


def _ask_transformers(agenda: Agenda, config: Config, target: Target) -> None:
    prompts = config.prompts

    def batch() -> list[Request]:
        return agenda.take_longest(prompts.batch_size, _SORTED_BATCHES * prompts.batch_size)

    if not (requests := batch()):
        return
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.engines.engine import resolve_device
    from pipeline.prompts.decode import generate_batch, use_grouped_attention

    model = AutoModelForCausalLM.from_pretrained(
        target.path, dtype=getattr(torch, DTYPES.get(respond_dtype(config, "transformers"), target.dtype)),
        trust_remote_code=target.trust_remote_code).eval().to(resolve_device(config.device))
    use_grouped_attention(model)
    while requests:
        answers = generate_batch(
            model, [q.prompt_ids for q in requests], max_new_tokens=prompts.max_new_tokens,
            eos_token_ids=target.eos_token_ids, temperature=prompts.temperature, top_p=prompts.top_p,
            seeds=[q.seed(config.seed) for q in requests])
        agenda.store([(q, Answer(a.ids, a.finish_reason)) for q, a in zip(requests, answers, strict=True)])
        requests = batch()


def _ask_sglang(agenda: Agenda, config: Config, target: Target) -> None:
    from pipeline.engines.engine import engine, resolve_device, tensor_parallel

    prompts, device = config.prompts, resolve_device(config.device)
    if agenda.done:
        return
    sampling = {"temperature": prompts.temperature, "top_p": prompts.top_p, "max_new_tokens": prompts.max_new_tokens,
                "stop_token_ids": target.eos_token_ids}
    # SGLang draws a batch from one random stream: sampled answers repeat for an uninterrupted run only.
    with engine(target.path, device=device, dtype=DTYPES.get(respond_dtype(config, "sglang"), target.dtype),
                force_version=config.dump.allow_untested_engine, tp_size=tensor_parallel(config, device),
                context_length=config.target.context_length, quantization=config.target.quantization,
                mem_fraction_static=config.dump.mem_fraction_static, trust_remote_code=target.trust_remote_code,
                random_seed=config.seed) as llm:

        async def ask(request: Request) -> Answer:
            out = await llm.async_generate(input_ids=request.prompt_ids, sampling_params=sampling)
            return Answer(list(out["output_ids"]), _finish_reason(request, out["meta_info"]["finish_reason"]))

        llm.loop.run_until_complete(keep_busy(agenda, ask, prompts.concurrency))


def _finish_reason(request: Request, reason: dict) -> str:
    if reason["type"] not in ("stop", "length"):
        raise PipelineError(f"SGLang did not answer a prompt of {request.id}: {reason}", field="prompts.respond_engine",
                            value="sglang", fix="run the same command again to go on, or use "
                            "prompts.respond_engine=transformers")
    return reason["type"]


def _ask_servers(agenda: Agenda, config: Config, target: Target) -> None:
    from pipeline.prompts.server import Servers

    async def ask_all() -> None:
        async with Servers(config, target) as servers:
            await keep_busy(agenda, servers.ask, servers.at_once)

    if not agenda.done:
        asyncio.run(ask_all())
