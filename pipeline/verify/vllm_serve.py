"""Greedy answers of vLLM without and with a drafter, and what vLLM counted. Runs with vLLM's own interpreter, which has no
other part of this package (see `vllm_env`).

Question: {"engine": arguments of `vllm.LLM`, "draft": folder, "draft_steps": K, "prompts": [[token id, …], …],
           "max_tokens": n, "stop": [token id, …]}.
Answer:   {"version", "plain", "beyond", "outputs": token ids of every prompt; "histograms": verifications of every prompt
           that accepted 0 … K drafts; "metrics": vLLM's totals over all prompts, as a server publishes them}.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

_TOTALS = "vllm:spec_decode_"


def answer(question: dict[str, Any]) -> dict[str, Any]:
    import vllm

    prompts, steps = question["prompts"], question["draft_steps"]
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    as_served = vllm.SamplingParams(**greedy, max_tokens=question["max_tokens"], stop_token_ids=question["stop"])

    def alone(llm: Any) -> dict[str, Any]:
        plain = _token_ids(_generate(llm, prompts, as_served))
        # vLLM verifies past the end of an answer and counts what it accepts there.
        sequences = [prompt + output for prompt, output in zip(prompts, plain)]
        beyond = _generate(llm, sequences, vllm.SamplingParams(**greedy, max_tokens=steps + 1))
        return {"plain": plain, "beyond": _token_ids(beyond)}

    def drafted(llm: Any) -> dict[str, Any]:
        results = _generate(llm, prompts, as_served)
        counted = [result.outputs[0].spec_decode_metrics for result in results]
        totals = [metric for metric in llm.get_metrics() if metric.name.startswith(_TOTALS + "num_")]
        return {
            "outputs": _token_ids(results),
            "histograms": [[] if of_request is None else of_request.histogram for of_request in counted],
            "metrics": {m.name.removeprefix(_TOTALS): getattr(m, "values", None) or m.value for m in totals},
        }

    drafting = {
        "speculative_config": {"method": "eagle3", "model": question["draft"], "num_speculative_tokens": steps},
        "per_request_spec_decode_metrics": "summary",
        "disable_log_stats": False,
    }
    found = _with_engine(alone, question) | _with_engine(drafted, question, **drafting)
    return {"version": vllm.__version__, **found}


def _with_engine(work: Callable[[Any], dict[str, Any]], question: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What `work` does with an engine that is gone, and its memory free, when it returns."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    longest = max(map(len, question["prompts"])) + question["max_tokens"] + 2 * (question["draft_steps"] + 1)
    llm = vllm.LLM(
        **question["engine"],
        **options,
        max_model_len=longest,
        # Token ids in, token ids out. A cached prefix could leave one token to compute, which vLLM pads with drafts
        # that nobody made, and counts.
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        enforce_eager=True,
    )
    try:
        return work(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _generate(llm: Any, prompts: list[list[int]], sampling: Any) -> list[Any]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


def _token_ids(results: list[Any]) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in results]


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # vLLM prints
        found = answer(json.load(sys.stdin))
    print(json.dumps(found))
