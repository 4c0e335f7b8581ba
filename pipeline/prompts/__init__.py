"""Stage 1: prompts → conversations → the target's responses → token ids and loss mask.

    sources.py   reads conversations from the built-in set, a file or a dataset
    select.py    prepares, de-duplicates and limits them
    respond.py   lets the target write the last turn (decode.py: batched generation with transformers)
    chat.py      chat template → token ids and loss mask
    view.py      prints samples with the trained tokens coloured

Training data is best written by the target itself: on-policy responses give about 10 % more accept length.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.prompts.chat import ChatEncoder, Refused
from pipeline.prompts.select import Selection, select
from pipeline.prompts.sources import Record, read_records
from pipeline.samples import Sample, write_samples
from pipeline.stage import StageResult

if TYPE_CHECKING:
    from pipeline.target import Target


def generate(config: Config, target: Target, folder: Path) -> StageResult:
    """Write `samples.jsonl` and `skipped.jsonl` into `folder`, going on from its `responses.jsonl` if there is one.

    Counts: read = kept + duplicates + the sum of all `skipped_<reason>`.

    Raises:
        PipelineError: the source cannot be read, or none of its conversations can be trained on.
    """
    prompts = config.prompts
    records = read_records(prompts.source, source_split=prompts.source_split,
                           heldout_fraction=prompts.heldout_fraction, at_most=prompts.limit)
    selection = select(records, respond=prompts.respond, system_prompt=prompts.system_prompt, limit=prompts.limit)
    encoder = ChatEncoder(target.tokenizer(), target.eos_token_ids)
    if prompts.respond == "target":
        samples = _answered(selection, encoder, config, target, folder / "responses.jsonl")
    else:
        samples = _encoded(selection, encoder, config.target.context_length)
    if not samples:
        raise _nothing_left(selection, config)

    samples_path, skipped_path = folder / "samples.jsonl", folder / "skipped.jsonl"
    write_samples(samples_path, samples)
    write_text(skipped_path, "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in selection.skipped))
    return StageResult(outputs=[samples_path, skipped_path], counts=_counts(selection, samples))


def _answered(selection: Selection, encoder: ChatEncoder, config: Config, target: Target, journal: Path
              ) -> list[Sample]:
    """Samples whose last turn the target writes. Its exact tokens follow the prompt's, and only they count."""
    from pipeline.prompts.respond import Request, respond

    room = config.target.context_length - config.prompts.max_new_tokens
    asked: list[tuple[Record, Request]] = []
    for record in selection.records:
        try:
            ids = encoder.prompt_ids(record.messages)
            if len(ids) > room:
                raise Refused("too_long", f"{len(ids)} prompt tokens and {config.prompts.max_new_tokens} new ones "
                                          f"exceed target.context_length = {config.target.context_length}")
            asked.append((record, Request(record.id, ids)))
        except Refused as e:
            selection.skip(record, e.reason, e.detail)
    answers = respond([request for _, request in asked], config, target, journal) if asked else {}
    samples = []
    for record, request in asked:
        answer = answers[request.id]
        text = encoder.tokenizer.decode(answer.ids, skip_special_tokens=True)
        samples.append(Sample(
            id=record.id, split=record.split, category=record.category,
            messages=[*record.messages, {"role": "assistant", "content": text}],
            input_ids=request.prompt_ids + answer.ids,
            loss_mask=[0] * len(request.prompt_ids) + [1] * len(answer.ids), finish_reason=answer.finish_reason))
    return samples


def _encoded(selection: Selection, encoder: ChatEncoder, context_length: int) -> list[Sample]:
    """Samples with the source's own responses; every assistant turn counts."""
    samples = []
    for record in selection.records:
        try:
            ids, mask = encoder.encode(record.messages)
            if len(ids) > context_length:
                raise Refused("too_long", f"{len(ids)} tokens are more than target.context_length = {context_length}")
            if not any(mask):
                raise Refused("no_trained_tokens", "the loss mask sums to 0")
            samples.append(Sample(id=record.id, split=record.split, category=record.category, messages=record.messages,
                                  input_ids=ids, loss_mask=mask, finish_reason=None))
        except Refused as e:
            selection.skip(record, e.reason, e.detail)
    return samples


def _nothing_left(selection: Selection, config: Config) -> PipelineError:
    reasons = Counter(s["reason"] for s in selection.skipped)
    if not selection.read:
        return PipelineError("the source holds no records", field="prompts.source", value=config.prompts.source,
                             fix="give a source with conversations, or leave the default: prompts.source=builtin")
    fixes = {
        "no_trained_tokens": "the template marks no assistant tokens: check its {% generation %} tags, or let the "
                             "target answer: prompts.respond=target",
        "no_assistant_turn": "the source holds prompts only: let the target answer them: prompts.respond=target",
        "template": "the target's chat template accepts none of them: check roles and their order"
                    + (", and prompts.system_prompt" if config.prompts.system_prompt else ""),
        "too_long": "raise target.context_length, or lower prompts.max_new_tokens",
    }
    # Zero masks first: they point at the template, whatever else the source holds.
    most = "no_trained_tokens" if "no_trained_tokens" in reasons else reasons.most_common(1)[0][0]
    example = next(s for s in selection.skipped if s["reason"] == most)
    listed = ", ".join(f"{n} × {reason}" for reason, n in reasons.most_common())
    return PipelineError(
        f"none of {selection.read} conversations can be trained on ({listed}); for example {example['where']}: "
        f"{example['detail']}", field="prompts.source", value=config.prompts.source,
        fix=fixes.get(most, "look at the source's records"))


def _counts(selection: Selection, samples: Iterable[Sample]) -> dict[str, int]:
    samples = list(samples)
    splits, finishes = Counter(s.split for s in samples), Counter(s.finish_reason for s in samples)
    reasons = Counter(s["reason"] for s in selection.skipped)
    return {
        "read": selection.read,
        "kept": len(samples),
        "duplicates": selection.duplicates,
        **{f"skipped_{reason}": n for reason, n in sorted(reasons.items())},
        "train_samples": splits["train"],
        "heldout_samples": splits["heldout"],
        "tokens": sum(len(s.input_ids) for s in samples),
        "trained_tokens": sum(sum(s.loss_mask) for s in samples),
        "finish_stop": finishes["stop"],
        "finish_length": finishes["length"],
    }
