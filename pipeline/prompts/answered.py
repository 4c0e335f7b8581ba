"""Samples of conversations that the target answered: all questions are asked first, then the answers are read again.

So a sample follows from its record and the journal alone, in the order of the records, whatever order the answers came
in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.precision import respond_dtype
from pipeline.prompts.account import Account
from pipeline.prompts.agenda import Agenda
from pipeline.prompts.chat import ChatEncoder
from pipeline.prompts.dialogue import Dialogue, Rules
from pipeline.prompts.journal import Journal, journal_path
from pipeline.prompts.refused import Refused
from pipeline.prompts.respond import engine_name, progress, respond
from pipeline.prompts.select import Selection
from pipeline.samples import Sample

if TYPE_CHECKING:
    from pipeline.target import Target


def answered(selection: Selection, encoder: ChatEncoder, account: Account, config: Config, target: Target,
             run_dir: Path, counts: Counter[str], *, max_length: int) -> Iterator[tuple[int, list[Sample]]]:
    """For each record its source and its samples. All questions are asked before this returns.

    Args:
        counts: gets `answers_asked` = `answers_success` + `answers_failed` + `answers_skipped` (of turns that were not
            reached), of the successful ones `answers_length` (cut at max_new_tokens) and `answers_retokenised`, and for
            conversations that ended early `ended_<reason>` (dialogue.py). Of a conversation with a failed answer
            nothing is used: it is listed in skipped.jsonl.
    """
    prompts = config.prompts
    rules = Rules(encoder, prompts.answer, max_length, prompts.max_new_tokens, target.eos_token_ids)
    with Journal(journal_path(run_dir, config, target, engine_name(config))) as journal:
        if len(journal):
            print(f"prompts: {len(journal)} answers are already in {journal.path}")
        with progress(len(selection)) as advance:
            agenda = Agenda((Dialogue(record, rules) for record in selection), journal, advance)
            respond(agenda, config, target)
    if agenda.failures:
        print(f"prompts: {len(agenda.failures)} requests failed for good; their conversations are in skipped.jsonl. "
              "To ask these alone again, remove the stage's samples and run the same command")
    return _samples(selection, rules, journal, agenda.failures, account, counts)


def _samples(selection: Selection, rules: Rules, journal: Journal, failures: dict[str, str], account: Account,
             counts: Counter[str]) -> Iterator[tuple[int, list[Sample]]]:
    for record in selection:
        dialogue = Dialogue(record, rules)
        while dialogue.request is not None and (answer := journal.get(dialogue.request)) is not None:
            dialogue.answer(answer)
        _count(dialogue, counts)
        try:
            if dialogue.request is not None:
                raise Refused("request_failed", f"answer {dialogue.answered + 1}: {failures[dialogue.request.key]}")
            parts = dialogue.samples()
        except Refused as e:
            account.skip(record.source, record.where, e.reason, e.detail, record.id)
            continue
        yield record.source, [
            Sample(id=record.id if len(parts) == 1 else f"{record.id}#{k}", split=record.split,
                   category=record.category, messages=part.messages, input_ids=part.input_ids, loss_mask=part.loss_mask,
                   finish_reason=part.finish_reason)
            for k, part in enumerate(parts)]


def _count(dialogue: Dialogue, counts: Counter[str]) -> None:
    failed = int(dialogue.request is not None)
    counts.update({
        "answers_asked": dialogue.wanted, "answers_success": dialogue.answered, "answers_failed": failed,
        "answers_skipped": dialogue.wanted - dialogue.answered - failed,
        "answers_length": sum(answer.finish_reason == "length" for answer in dialogue.answers)})
    if retokenised := sum(answer.retokenised for answer in dialogue.answers):
        counts["answers_retokenised"] += retokenised
    if dialogue.ended is not None and not failed:
        counts[f"ended_{dialogue.ended}"] += 1


def settings(config: Config, target: Target) -> dict[str, object]:
    """How the target was asked, for the manifest."""
    prompts = config.prompts
    engine = engine_name(config)
    return {"engine": engine, "dtype": "served" if engine == "server" else respond_dtype(config, engine),
            "answer": prompts.answer, "temperature": prompts.temperature, "top_p": prompts.top_p,
            "max_new_tokens": prompts.max_new_tokens, "seed": config.seed, "stop_token_ids": target.eos_token_ids}
