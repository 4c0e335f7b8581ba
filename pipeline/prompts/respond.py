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

if TYPE_CHECKING:
    from pipeline.prompts.decode import Response
    from pipeline.target import Target

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SGLANG_BATCH = 256  # requests handed to the engine at once; it batches them itself: this sets how often we save


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


class Journal:
    """Answers in the order they came, one JSON line each, on disk before the next batch is asked.

    Opening it drops a last line that a killed process left unfinished.

    Raises:
        PipelineError: a line before the last one is damaged.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._answers: dict[str, Response] = {}
        whole = self._load() if self.path.exists() else 0
        make_dir(self.path.parent)
        with clear_disk_errors(self.path):
            self._file = open(self.path, "ab")
            self._file.truncate(whole)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def get(self, request: Request) -> Response | None:
        return self._answers.get(request.key)

    def add(self, answers: list[tuple[Request, Response]]) -> None:
        """Store answers durably."""
        lines = [{"id": q.id, "prompt": q.key, "ids": a.ids, "finish_reason": a.finish_reason} for q, a in answers]
        with clear_disk_errors(self.path):
            self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        self._answers.update((q.key, a) for q, a in answers)

    def _load(self) -> int:
        """Read the answers; returns the length in bytes of the whole lines."""
        from pipeline.prompts.decode import Response

        whole = 0
        with open(self.path, "rb") as f:
            for number, line in enumerate(f, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    raw = json.loads(line)
                    self._answers[raw["prompt"]] = Response(raw["ids"], raw["finish_reason"])
                except (ValueError, KeyError, TypeError) as e:
                    where = f"{self.path}:{number}"
                    raise PipelineError(f"{where} is damaged: {e}", field=where,
                                        fix=f"remove that line, or {self.path} to ask for all answers again") from e
                whole += len(line)
        return whole


def respond(requests: list[Request], config: Config, target: Target, journal_path: Path) -> dict[str, Response]:
    """Answers of the target by request id. Answers that are already in the journal are not asked for again."""
    with Journal(journal_path) as journal:
        todo = [q for q in requests if journal.get(q) is None]
        if len(todo) < len(requests):
            print(f"prompts: {len(requests) - len(todo)} answers are already in {journal_path}, {len(todo)} to go")
        if todo:
            ask = _ask_transformers if config.prompts.respond_engine == "transformers" else _ask_sglang
            with _progress(len(todo)) as bar:
                tokens = 0
                for answers in ask(todo, config, target):
                    journal.add(answers)
                    tokens += sum(len(a.ids) for _, a in answers)
                    bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s", refresh=False)
                    bar.update(len(answers))
        return {q.id: journal.get(q) for q in requests}


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
        target.path, dtype=getattr(torch, _DTYPES.get(prompts.respond_dtype, target.dtype)),
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
    from pipeline.engine import engine, generate, resolve_device
    from pipeline.prompts.decode import Response

    prompts = config.prompts
    sampling = {"temperature": prompts.temperature, "top_p": prompts.top_p, "max_new_tokens": prompts.max_new_tokens,
                "stop_token_ids": target.eos_token_ids}
    # SGLang draws a batch from one random stream: sampled answers repeat for an uninterrupted run only.
    with engine(target.path, device=resolve_device(config.device),
                dtype=_DTYPES.get(prompts.respond_dtype, target.dtype), tp_size=config.target.tp_size,
                context_length=config.target.context_length, quantization=config.target.quantization,
                trust_remote_code=target.trust_remote_code, random_seed=config.seed) as llm:
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
