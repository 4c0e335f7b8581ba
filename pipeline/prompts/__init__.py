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
import shutil
from collections import Counter
from collections.abc import Iterator
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
    from pipeline.prompts.decode import Response
    from pipeline.target import Target


def generate(config: Config, target: Target, folder: Path) -> StageResult:
    """Write `samples.jsonl` and `skipped.jsonl` into `folder`; the target's answers stay in `responses/` beside it.

    Counts: read = kept + duplicates + the sum of all `skipped_<reason>`.

    Raises:
        PipelineError: the source cannot be read, or none of its conversations can be trained on.
    """
    prompts = config.prompts
    from pipeline.prompts.respond import RESPONSES

    if config.force and not (folder / ".forced").exists():  # once: the same forced command goes on from its own answers
        shutil.rmtree(folder.parent / RESPONSES, ignore_errors=True)
        (folder / ".forced").touch()
    records = read_records(prompts.source, source_split=prompts.source_split,
                           heldout_fraction=prompts.heldout_fraction, at_most=prompts.limit)
    selection = select(records, respond=prompts.respond, system_prompt=prompts.system_prompt, limit=prompts.limit)
    encoder = ChatEncoder(target.tokenizer(), target.eos_token_ids)
    if prompts.respond == "target":
        samples = _answered(selection, encoder, config, target, folder.parent)
    else:
        samples = _encoded(selection, encoder, config.target.context_length)
    counts: Counter[str] = Counter()
    samples_path, skipped_path = folder / "samples.jsonl", folder / "skipped.jsonl"
    write_samples(samples_path, _counted(samples, counts, selection, config))
    write_text(skipped_path, "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in selection.skipped))
    return StageResult(outputs=[samples_path, skipped_path], counts=_all_counts(selection, counts))


def _answered(selection: Selection, encoder: ChatEncoder, config: Config, target: Target, run_dir: Path
              ) -> Iterator[Sample]:
    """Samples whose last turn the target writes. Its exact tokens follow the prompt's, and only they count.

    All questions are asked before this returns; the samples are then made one by one.
    """
    from pipeline.prompts.respond import Request, journal_path, respond

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
    answers = respond([request for _, request in asked], config, target, journal_path(run_dir, config, target))

    def sample(record: Record, prompt_ids: list[int], answer: Response) -> Sample:
        text = encoder.tokenizer.decode(answer.ids, skip_special_tokens=True)
        return Sample(id=record.id, split=record.split, category=record.category,
                      messages=[*record.messages, {"role": "assistant", "content": text}],
                      input_ids=prompt_ids + answer.ids, loss_mask=[0] * len(prompt_ids) + [1] * len(answer.ids),
                      finish_reason=answer.finish_reason)

    return (sample(record, request.prompt_ids, answer)
            for (record, request), answer in zip(asked, answers, strict=True))


def _encoded(selection: Selection, encoder: ChatEncoder, context_length: int) -> Iterator[Sample]:
    """Samples with the source's own responses; every assistant turn counts."""
    for record in selection.records:
        try:
            ids, mask = encoder.encode(record.messages)
            if len(ids) > context_length:
                raise Refused("too_long", f"{len(ids)} tokens are more than target.context_length = {context_length}")
            if not any(mask):
                raise Refused("no_trained_tokens", "the loss mask sums to 0")
        except Refused as e:
            selection.skip(record, e.reason, e.detail)
            continue
        yield Sample(id=record.id, split=record.split, category=record.category, messages=record.messages,
                     input_ids=ids, loss_mask=mask, finish_reason=None)


def _counted(samples: Iterator[Sample], counts: Counter[str], selection: Selection, config: Config) -> Iterator[Sample]:
    """Hand samples on and count them; that there was none is an error."""
    for sample in samples:
        counts.update({"kept": 1, f"{sample.split}_samples": 1, f"finish_{sample.finish_reason}": 1,
                       "tokens": len(sample.input_ids), "trained_tokens": sum(sample.loss_mask)})
        yield sample
    if not counts["kept"]:
        raise _nothing_left(selection, config)


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


def _all_counts(selection: Selection, counts: Counter[str]) -> dict[str, int]:
    reasons = Counter(s["reason"] for s in selection.skipped)
    of_samples = ("train_samples", "heldout_samples", "tokens", "trained_tokens", "finish_stop", "finish_length")
    return {
        "read": selection.read,
        "kept": counts["kept"],
        "duplicates": selection.duplicates,
        **{f"skipped_{reason}": n for reason, n in sorted(reasons.items())},
        **{name: counts[name] for name in of_samples},
    }
