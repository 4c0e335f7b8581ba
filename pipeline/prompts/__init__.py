"""Stage 1: prompts → conversations → the target's responses → token ids and loss mask.

    sources.py        finds the built-in set, files, folders and datasets; containers.py, tables.py read them one by one
    formats.py        what a record says, as messages (records.py: the form in which they are used, and their ids)
    select.py         filters, and hands on what near.py, decontaminate.py and mixture.py leave (account.py: what became of
                      each record; spool.py: where they wait; text.py, language.py: what they are judged by)
    answered.py       lets the target write the assistant's turns: which turn is asked when (dialogue.py: one conversation;
                      agenda.py: all of them), who answers (respond.py; decode.py: transformers, server.py: servers), and
                      every answer kept (journal.py)
    chat.py           chat template → token ids and loss mask (messages.py: what the engine hands to the template; turns.py:
                      where the assistant's turns lie in what it renders; fit.py: conversations that are too long)
    encode.py         the same for many records at once (workers.py: in several processes) as rows of the samples file
    shard.py          which conversations are whose where several machines share the work
    show.py           shows samples with the trained tokens coloured

Training data is best written by the target itself: on-policy responses give about 10 % more accept length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.files import clear_disk_errors
from pipeline.prompts.account import QUARANTINE, SKIPPED, Account, open_account
from pipeline.prompts.chat import ChatEncoder
from pipeline.prompts.encode import RowEncoder, count
from pipeline.prompts.select import Selection, select
from pipeline.prompts.shard import SELECTED, one_shard
from pipeline.prompts.sources import sources
from pipeline.prompts.spool import open_spool
from pipeline.prompts.workers import encode_here, encode_in_workers, workers_for
from pipeline.samples import Sample, to_batches, write_batches
from pipeline.stage import StageResult

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from pipeline.target import Target


def generate(config: Config, target: Target, folder: Path) -> StageResult:
    """Write `samples.parquet`, `skipped.jsonl` and `quarantine.jsonl` into `folder`; the target's answers stay in
    `responses/` beside it.

    Counts, in all and for each source: read = kept + duplicates + the sum of all `skipped_<reason>`, and of one shard
    of several + `other_shards` (shard.py).

    Raises:
        PipelineError: the source cannot be read, or none of its conversations can be trained on.
    """
    prompts = config.prompts
    if config.force:
        _forget_answers(config, target, folder)
    tokenizer = target.tokenizer()
    encoder = ChatEncoder(tokenizer, target.eos_token_ids, reasoning=prompts.reasoning, train_on=prompts.train_on)
    paths = [source.path for source in sources(prompts)]
    samples_path = folder / "samples.parquet"
    outputs = [samples_path, folder / SKIPPED, folder / QUARANTINE]
    counts: Counter[str] = Counter()
    metrics: dict[str, object] = {}
    with open_account(folder, len(paths)) as account, open_spool(folder) as spool:
        selection = select(prompts, seed=config.seed, account=account, spool=spool,
                           decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
        if prompts.shard is not None:
            metrics["selected"] = by_source(paths, account.by_source)
            outputs.append(folder / SELECTED)
            selection = one_shard(selection, prompts.shard, account, outputs[-1])
        if prompts.respond == "target":
            from pipeline.prompts.answered import answered, settings

            metrics["responses"] = settings(config, target)
            samples = answered(selection, encoder, account, config, target, folder.parent, counts,
                               max_length=max_length(config))
            rows = to_batches(_counted(samples, counts, account))
        else:
            rows = _encoded(selection, encoder, account, counts, config, target)
        write_batches(samples_path, _some(rows, account, config))
    print(_summary(account.total, counts))
    return StageResult(outputs=outputs, counts=all_counts(account.total, counts),
                       metrics={"sources": by_source(paths, account.by_source), **metrics})


def _forget_answers(config: Config, target: Target, folder: Path) -> None:
    """Those that this command would ask for, not those of other settings; once: it goes on from its own when killed."""
    if config.prompts.respond != "target" or (folder / ".forced").exists():
        return
    from pipeline.prompts.journal import journal_path
    from pipeline.prompts.respond import engine_name

    journal = journal_path(folder.parent, config, target, engine_name(config))
    with clear_disk_errors(journal):
        journal.unlink(missing_ok=True)
        (folder / ".forced").touch()


def _encoded(selection: Selection, encoder: ChatEncoder, account: Account, counts: Counter[str], config: Config,
             target: Target) -> Iterator[RecordBatch]:
    """Rows of the records with the source's own responses."""
    from tqdm import tqdm

    places = [candidate.place for candidate in selection.candidates]
    selection.spool.flush()
    rows = {"spool": str(selection.spool.path), "max_length": max_length(config), "truncate": config.prompts.truncate,
            "vocab_size": target.record.vocab_size}
    if (workers := workers_for(config.prompts.workers, len(places))) == 1:
        outcomes = encode_here(RowEncoder(encoder, **rows), places)
    else:
        outcomes = encode_in_workers(workers, {
            "tokenizer": str(target.path), "trust_remote_code": target.trust_remote_code, "rows": rows,
            "chat": {"eos_token_ids": target.eos_token_ids, "reasoning": encoder.reasoning,
                     "train_on": encoder.train_on}}, places)
    with tqdm(total=len(places), desc="encoding", unit="record", unit_scale=True, mininterval=5.0, delay=5.0) as bar:
        for outcome in outcomes:
            for source in outcome.kept:
                account.count(source, "kept")
            for skipped in outcome.skipped:
                account.skip(*skipped)
            counts.update(outcome.counts)
            bar.update(len(outcome.kept) + len(outcome.skipped))
            yield outcome.rows


def max_length(config: Config) -> int:
    """The most tokens of a sample."""
    return config.prompts.max_length or config.target.context_length


def _counted(samples: Iterator[tuple[int, list[Sample]]], counts: Counter[str], account: Account) -> Iterator[Sample]:
    """Hand the samples of each record on and count them."""
    for source, of_record in samples:
        account.count(source, "kept")
        counts.update(count(of_record))
        counts.update(f"finish_{sample.finish_reason}" for sample in of_record)
        yield from of_record


def _some(rows: Iterator[RecordBatch], account: Account, config: Config) -> Iterator[RecordBatch]:
    """That there was none is an error, but in one shard of several, which can be small (unless it asked in vain)."""
    yield from rows
    if not account.total["kept"] and (config.prompts.shard is None or account.reasons["request_failed"]):
        raise _nothing_left(account, config)


def _nothing_left(account: Account, config: Config) -> PipelineError:
    reasons, read = account.reasons, account.total["read"]
    if not read:
        return PipelineError("the source holds no records", field="prompts.source", value=config.prompts.source,
                             fix="give a source with conversations, or leave the default: prompts.source=builtin")
    fixes = {
        "no_trained_tokens": "the template marks no assistant tokens: check its {% generation %} tags, or let the "
                             "target answer: prompts.respond=target",
        "no_assistant_turn": "the source holds prompts only: let the target answer them: prompts.respond=target",
        "template": "the target's chat template accepts none of them: check roles and their order"
                    + (", and prompts.system_prompt" if config.prompts.system_prompt else ""),
        "request_failed": "look at the server of prompts.base_url and at prompts.max_new_tokens",
        "too_long": "raise target.context_length or prompts.max_length, or "
                    + ("lower prompts.max_new_tokens" if config.prompts.respond == "target"
                       else "choose prompts.truncate=turns, cut or split"),
    }
    # Zero masks first: they point at the template, whatever else the source holds.
    most = "no_trained_tokens" if "no_trained_tokens" in reasons else reasons.most_common(1)[0][0]
    where, detail = account.examples[most]
    listed = ", ".join(f"{n} × {reason}" for reason, n in reasons.most_common())
    return PipelineError(
        f"none of {read} conversations can be trained on ({listed}); for example {where}: {detail}",
        field="prompts.source", value=config.prompts.source, fix=fixes.get(most, "look at the source's records"))


def _summary(total: Counter[str], counts: Counter[str]) -> str:
    left_out = [f"{n} {name.removeprefix('skipped_')}" for name, n in _ordered(total).items()
                if n and name not in ("read", "kept")]
    return (f"prompts: {total['kept']} of {total['read']} conversations kept"
            + (f" ({', '.join(left_out)})" if left_out else "")
            + f": {counts['train_samples']} samples to train on, {counts['heldout_samples']} held out; "
              f"{counts['trained_tokens']} of {counts['tokens']} tokens are trained")


def all_counts(total: Counter[str], counts: Counter[str]) -> dict[str, int]:
    """What the manifest says of the stage: what became of the records, and what is in the samples."""
    of_samples = ("train_samples", "heldout_samples", "tokens", "trained_tokens", "finish_stop", "finish_length")
    of_answers = sorted(name for name in counts if name.startswith(("answers_", "ended_")))
    return {**_ordered(total), **{name: counts[name] for name in (*of_samples, *of_answers)}}


def by_source(paths: list[str], counts: list[Counter[str]]) -> list[dict[str, int | str]]:
    """The same for each source."""
    return [{"path": path, **_ordered(of)} for path, of in zip(paths, counts, strict=True)]


def _ordered(counts: Counter[str]) -> dict[str, int]:
    named = ("read", "kept", "duplicates")
    return {name: counts[name] for name in (*named, *sorted(counts.keys() - set(named)))}
