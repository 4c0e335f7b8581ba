"""Let the target answer prompts, and keep every answer in a journal so that an interrupted run asks nothing twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.files import clear_disk_errors, make_dir, sha256_json
from pipeline.target import DTYPES

if TYPE_CHECKING:
    from pipeline.prompts.decode import Response
    from pipeline.target import Target

_SGLANG_BATCH = 256  # requests handed to the engine at once; it batches them itself: this sets how often we save

RESPONSES = "responses"
"""folder of the journals in the run's folder"""


@dataclass(frozen=True)
class Request:
    """A prompt that waits for its answer: sample id and token ids."""

    id: str
    prompt_ids: list[int]

    @property
    def key(self) -> str:
        """Hash of the prompt's tokens: an answer holds for this prompt only, even if the source was edited."""
        return sha256_json(self.prompt_ids)[:32]

    def seed(self, seed: int) -> int:
        """Seed of this answer's random numbers: the same in any batch and after any interruption."""
        return int(sha256_json([seed, self.key])[:15], 16)


def journal_path(run_dir: Path, config: Config, target: Target) -> Path:
    """The journal of a run for one way to answer: everything an answer depends on beside its prompt is in the name.

    It lies outside the stage's folder, so that another source, limit or held-out share asks only what is new.
    """
    prompts = config.prompts
    sampling = {"temperature": prompts.temperature, "top_p": prompts.top_p, "seed": config.seed}
    way = sha256_json({
        "target": target.record.model_dump(exclude={"path"}), "eos_token_ids": target.eos_token_ids,
        "engine": prompts.respond_engine, "dtype": prompts.respond_dtype, "max_new_tokens": prompts.max_new_tokens,
        "sampling": sampling if prompts.temperature > 0 else "greedy"})
    return Path(run_dir) / RESPONSES / f"{way[:16]}.jsonl"


class Journal:
    """Answers in the order they came, one JSON line each, on disk before the next batch is asked.

    Opening it drops a last line that a killed process left unfinished. In memory is only where each answer lies.

    Raises:
        PipelineError: a line before the last one is damaged, or the disk refuses.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._starts: dict[str, int] = {}
        """`Request.key` → byte at which the line begins"""
        self._end = self._load() if self.path.exists() else 0
        make_dir(self.path.parent)
        with clear_disk_errors(self.path):
            self._file = open(self.path, "ab", buffering=0)  # a full disk must not leave bytes for close() to try again
            self._file.truncate(self._end)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __contains__(self, request: Request) -> bool:
        return request.key in self._starts

    def get(self, request: Request) -> Response | None:
        """Read an answer; None if there is none."""
        if (start := self._starts.get(request.key)) is None:
            return None
        with open(self.path, "rb") as f:
            f.seek(start)
            return _parsed(f.readline())[1]

    def add(self, answers: list[tuple[Request, Response]]) -> None:
        """Store answers durably."""
        said = ({"id": q.id, "prompt": q.key, "ids": a.ids, "finish_reason": a.finish_reason} for q, a in answers)
        lines = [json.dumps(line).encode() + b"\n" for line in said]
        rest = memoryview(b"".join(lines))
        with clear_disk_errors(self.path):
            while rest:
                rest = rest[self._file.write(rest):]
            os.fsync(self._file.fileno())
        for (request, _), line in zip(answers, lines):
            self._starts[request.key] = self._end
            self._end += len(line)

    def _load(self) -> int:
        """Find the answers; returns the length in bytes of the whole lines."""
        whole = 0
        with open(self.path, "rb") as f:
            for number, line in enumerate(f, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._starts[_parsed(line)[0]] = whole
                except (ValueError, KeyError, TypeError) as e:
                    where = f"{self.path}:{number}"
                    raise PipelineError(f"{where} is damaged: {e}", field=where,
                                        fix=f"remove that line, or {self.path} to ask for all answers again") from e
                whole += len(line)
        return whole


def _parsed(line: bytes) -> tuple[str, Response]:
    from pipeline.prompts.decode import Response

    raw = json.loads(line)
    return raw["prompt"], Response(raw["ids"], raw["finish_reason"])


def respond(requests: list[Request], config: Config, target: Target, path: Path) -> Iterator[Response]:
    """Answers of the target, in order, read one by one once all are there.

    Args:
        path: the journal. Answers that are already in it are not asked for again.
    """
    with Journal(path) as journal:
        todo = [q for q in requests if q not in journal]
        if len(todo) < len(requests):
            print(f"prompts: {len(requests) - len(todo)} answers are already in {path}, {len(todo)} to go")
        if todo:
            ask = _ask_transformers if config.prompts.respond_engine == "transformers" else _ask_sglang
            with _progress(len(todo)) as bar:
                tokens = 0
                for answers in ask(todo, config, target):
                    journal.add(answers)
                    tokens += sum(len(a.ids) for _, a in answers)
                    bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s", refresh=False)
                    bar.update(len(answers))
    return (journal.get(q) for q in requests)


def _progress(total: int):
    import sys

    from tqdm import tqdm

    # In a log file each refresh is a line of its own: a few are enough.
    often = {} if sys.stderr.isatty() else {"mininterval": 15.0, "maxinterval": 15.0}
    return tqdm(total=total, desc="responses", unit="prompt", **often)


def _ask_transformers(requests: list[Request], config: Config, target: Target
                      ) -> Iterator[list[tuple[Request, Response]]]:
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.engine import resolve_device
    from pipeline.prompts.decode import generate_batch, use_grouped_attention

    prompts = config.prompts
    model = AutoModelForCausalLM.from_pretrained(
        target.path, dtype=getattr(torch, DTYPES.get(prompts.respond_dtype, target.dtype)),
        trust_remote_code=target.trust_remote_code).eval().to(resolve_device(config.device))
    use_grouped_attention(model)
    for batch in length_sorted_batches(requests, prompts.batch_size):
        answers = generate_batch(
            model, [q.prompt_ids for q in batch], max_new_tokens=prompts.max_new_tokens,
            eos_token_ids=target.eos_token_ids, temperature=prompts.temperature, top_p=prompts.top_p,
            seeds=[q.seed(config.seed) for q in batch])
        yield list(zip(batch, answers, strict=True))


def length_sorted_batches(requests: list[Request], size: int) -> Iterator[list[Request]]:
    """Batches of prompts of similar length, longest first, so that too large a batch fails at once, not at the end."""
    ordered = sorted(requests, key=lambda q: -len(q.prompt_ids))
    return (ordered[i:i + size] for i in range(0, len(ordered), size))


def _ask_sglang(requests: list[Request], config: Config, target: Target) -> Iterator[list[tuple[Request, Response]]]:
    from pipeline.engine import engine, generate, resolve_device, tensor_parallel
    from pipeline.prompts.decode import Response

    prompts, device = config.prompts, resolve_device(config.device)
    sampling = {"temperature": prompts.temperature, "top_p": prompts.top_p, "max_new_tokens": prompts.max_new_tokens,
                "stop_token_ids": target.eos_token_ids}
    # SGLang draws a batch from one random stream: sampled answers repeat for an uninterrupted run only.
    with engine(target.path, device=device, dtype=DTYPES.get(prompts.respond_dtype, target.dtype),
                force_version=config.dump.allow_untested_engine, tp_size=tensor_parallel(config, device),
                context_length=config.target.context_length, quantization=config.target.quantization,
                mem_fraction_static=config.dump.mem_fraction_static, trust_remote_code=target.trust_remote_code,
                random_seed=config.seed) as llm:
        for i in range(0, len(requests), _SGLANG_BATCH):
            batch = requests[i:i + _SGLANG_BATCH]
            outputs = generate(llm, [q.prompt_ids for q in batch], sampling)
            yield [(q, Response(out["output_ids"], _finish_reason(q, out)))
                   for q, out in zip(batch, outputs, strict=True)]


def _finish_reason(request: Request, output: dict) -> str:
    reason = output["finish_reason"]
    if reason not in ("stop", "length"):
        raise PipelineError(f"SGLang did not answer prompt {request.id}: {output['meta_info']['finish_reason']}",
                            field="prompts.respond_engine", value="sglang",
                            fix="run the same command again to go on, or use prompts.respond_engine=transformers")
    return reason
