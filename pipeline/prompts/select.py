"""Which conversations are used: read, made ready, filtered, cleaned of duplicates and contamination, mixed, limited.

Everything is decided by what a conversation says, never by its place: the same set is chosen from a source in any order
and any number of files. Conversations wait on disk (`spool.py`); in memory is a `Candidate` of each, about 0.4 GB for
a million.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from pipeline.config import PromptsConfig, SourceConfig
from pipeline.errors import PipelineError
from pipeline.prompts.account import Account
from pipeline.prompts.containers import Item
from pipeline.prompts.decontaminate import Protected
from pipeline.prompts.formats import Conversation, parse
from pipeline.prompts.language import language_of
from pipeline.prompts.mixture import Candidate, choose
from pipeline.prompts.near import Signatures
from pipeline.prompts.records import Record, content_id, draw_split
from pipeline.prompts.refused import BadRecord, Refused
from pipeline.prompts.sources import read_source, sources
from pipeline.prompts.spool import Spool
from pipeline.prompts.text import words

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Selection:
    """The records to use, in the sources' order, read from disk whenever they are asked for."""

    candidates: list[Candidate]
    spool: Spool

    def __len__(self) -> int:
        return len(self.candidates)

    def __iter__(self) -> Iterator[Record]:
        return self.read(self.candidates)

    def read(self, some: Iterable[Candidate]) -> Iterator[Record]:
        """The records of these candidates."""
        return self.spool.read(c.place for c in some)


def select(prompts: PromptsConfig, *, seed: int, account: Account, spool: Spool, decode: Decode | None = None
           ) -> Selection:
    """Choose from the sources.

    Args:
        decode: text of token ids, needed to judge rows that were tokenised elsewhere.

    Raises:
        PipelineError: a source cannot be read; or holds a bad record, unless these are to be skipped.
    """
    asked = sources(prompts)
    found = _Found(account, spool)
    for number, source in enumerate(asked):
        for record in _admitted(source, number, prompts, account, decode):
            found.add(record)
    candidates = found.candidates()
    if prompts.decontaminate_words is not None:
        candidates = _decontaminated(candidates, prompts, account, spool, decode)
    if prompts.near_duplicates is not None:
        candidates = _without_near_duplicates(candidates, prompts.near_duplicates, account, spool, decode)
    chosen, left = choose(candidates, asked, limit=prompts.limit, seed=seed)
    details = {"cap": "the source's cap", "mixture": "the source's weight", "limit": f"prompts.limit = {prompts.limit}"}
    for record in spool.read(c.place for c in candidates if c.id in left):
        account.skip(record.source, record.where, left[record.id], details[left[record.id]], record.id)
    return Selection(chosen, spool)


def _admitted(source: SourceConfig, number: int, prompts: PromptsConfig, account: Account, decode: Decode | None
              ) -> Iterator[Record]:
    """The records of a source that can be used by themselves."""
    items = islice(read_source(source, prompts.source_split), source.take)
    readable = 0
    for where, raw in _with_progress(items, source.path):
        account.count(number, "read")
        try:
            if isinstance(raw, BadRecord):
                raise raw
            record = _record(parse(raw, source.format), where, number, prompts)
            readable += 1
            _filter(record, prompts, decode)
        except BadRecord as bad:
            if prompts.on_bad_record == "stop":
                raise PipelineError(
                    f"{where} {bad.detail}\n  read:  {readable} records before it can be used", field="prompts.source",
                    value=where, fix=f"{bad.fix}; or leave such records out: prompts.on_bad_record=skip") from bad
            account.bad(number, where, bad)
        except Refused as e:
            account.skip(number, where, e.reason, e.detail)
        else:
            yield record


def _with_progress(items: Iterator[Item], path: str) -> Iterable[Item]:
    from tqdm import tqdm

    often = 0.5 if sys.stderr.isatty() else 60.0
    return tqdm(items, desc=f"reading {path}", unit="record", unit_scale=True, mininterval=often, delay=5.0)


def _record(said: Conversation, where: str, source: int, prompts: PromptsConfig) -> Record:
    messages = said.messages if said.input_ids is not None else prepared(said.messages, prompts.respond)
    if said.input_ids is not None and prompts.respond == "target":
        raise Refused("pretokenised", "a row of tokens cannot be answered by the target; prompts.respond=keep uses it")
    if prompts.respond == "target" and prompts.answer == "all":
        messages = _unwritten(messages)
    try:
        id = content_id(messages, said.tools, said.input_ids, said.loss_mask)
        (said.category or "").encode()
    except UnicodeEncodeError as e:
        raise BadRecord("text", f"holds text that is not valid Unicode: {e.reason}", e.object) from e
    opening = next((m["content"] for m in messages if m["role"] == "user"), "")
    split = said.split or draw_split(" ".join(words(opening)) or id, prompts.heldout_fraction)
    if prompts.system_prompt is not None and messages and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": prompts.system_prompt}, *messages]
    return Record(id, said.category, split, messages, where, said.tools, said.input_ids, said.loss_mask, source)


def prepared(messages: list[dict], respond: str) -> list[dict]:
    """A conversation up to the turn to be answered ("target"), or up to the source's last answer ("keep").

    Raises:
        Refused: it has no such turn.
    """
    last_roles = ("assistant",) if respond == "keep" else ("user", "tool")
    last = next((k for k in reversed(range(len(messages))) if messages[k]["role"] in last_roles), None)
    if last is None:
        raise Refused(*(("no_assistant_turn", "there is no answer to keep") if respond == "keep"
                        else ("no_user_turn", "there is no turn to answer")))
    return messages[:last + 1]


def _unwritten(messages: list[dict]) -> list[dict]:
    """Of turns that the target writes anew, only that they are there: conversations that differ in them are copies."""
    asked = next(k for k, message in enumerate(messages) if message["role"] in ("user", "tool"))
    return [{"role": "assistant", "content": ""} if k > asked and message["role"] == "assistant" else message
            for k, message in enumerate(messages)]


def _filter(record: Record, prompts: PromptsConfig, decode: Decode | None) -> None:
    if prompts.min_chars is None and prompts.max_chars is None and prompts.languages is None:
        return
    length = len(text_of(record, decode))
    if length < (prompts.min_chars or 0):
        raise Refused("too_short", f"{length} characters are fewer than prompts.min_chars = {prompts.min_chars}")
    if prompts.max_chars is not None and length > prompts.max_chars:
        raise Refused("too_many_chars", f"{length} characters are more than prompts.max_chars = {prompts.max_chars}")
    if prompts.languages is not None:
        language = language_of("\n".join(user_turns(record, decode)))
        if language not in (None, *prompts.languages):
            raise Refused("language", f"its language is {language}; prompts.languages = {prompts.languages}")


def text_of(record: Record, decode: Decode | None) -> str:
    """All text of a conversation."""
    if record.input_ids is not None:
        return decode(record.input_ids)
    return "\n".join(m["content"] for m in record.messages)


def user_turns(record: Record, decode: Decode | None) -> list[str]:
    """What the user says, turn by turn; of a row of tokens, each run that is not trained."""
    if record.input_ids is None:
        return [m["content"] for m in record.messages if m["role"] == "user"]
    runs: list[list[int]] = []
    for k, (token, trained) in enumerate(zip(record.input_ids, record.loss_mask)):
        if not trained:
            if k == 0 or record.loss_mask[k - 1]:
                runs.append([])
            runs[-1].append(token)
    return [decode(run) for run in runs]


class _Found:
    """Distinct conversations. Of copies one is used: a held-out one if there is, else that of the first source."""

    def __init__(self, account: Account, spool: Spool):
        self._by_id: dict[str, Candidate] = {}
        self._account, self._spool = account, spool

    def add(self, record: Record) -> None:
        before = self._by_id.get(record.id)
        if before is not None and _preference(before) <= _preference(record):
            self._account.count(record.source, "duplicates")
            return
        if before is not None:
            self._account.count(before.source, "duplicates")
        category = record.category and sys.intern(record.category)
        self._by_id[record.id] = Candidate(record.id, record.source, record.split, category, self._spool.add(record))

    def candidates(self) -> list[Candidate]:
        return sorted(self._by_id.values(), key=lambda c: c.place)


def _preference(one: Candidate | Record) -> tuple[bool, int, bool, str]:
    return one.split != "heldout", one.source, one.category is None, one.category or ""


def _decontaminated(candidates: list[Candidate], prompts: PromptsConfig, account: Account, spool: Spool,
                    decode: Decode | None) -> list[Candidate]:
    """Without the training conversations that repeat a prompt of the held-out, built-in held-out or benchmark ones."""
    protected = Protected(prompts.decontaminate_words)
    for path in ("builtin", *prompts.decontaminate_against):
        for where, raw in read_source(SourceConfig(path=path), prompts.source_split):
            try:
                if isinstance(raw, BadRecord):
                    raise raw
                one = parse(raw)
            except (BadRecord, Refused) as e:  # what is not read would not be protected
                raise PipelineError(f"{where} {e.detail}", field="prompts.decontaminate_against", value=path,
                                    fix="repair that record") from e
            if path != "builtin" or one.split == "heldout":
                protected.add([m["content"] for m in one.messages if m["role"] == "user"])
    for record in spool.read(c.place for c in candidates if c.split == "heldout"):
        protected.add(user_turns(record, decode))
    contaminated = set()
    for record in spool.read(c.place for c in candidates if c.split == "train"):
        if protected.repeated_in(user_turns(record, decode)):
            contaminated.add(record.id)
            account.skip(record.source, record.where, "contaminated", "it repeats a held-out or benchmark prompt", record.id)
    return [c for c in candidates if c.id not in contaminated]


def _without_near_duplicates(candidates: list[Candidate], threshold: float, account: Account, spool: Spool,
                             decode: Decode | None) -> list[Candidate]:
    signatures = Signatures(len(candidates))
    for row, record in enumerate(spool.read(c.place for c in candidates)):
        signatures.set(row, text_of(record, decode))
    order = sorted(range(len(candidates)), key=lambda row: (*_preference(candidates[row]), candidates[row].id))
    dropped = dict(signatures.near_duplicates(order, threshold))
    for row, other in sorted(dropped.items()):
        record = spool.get(candidates[row].place)
        account.skip(record.source, record.where, "near_duplicate", f"it is nearly {candidates[other].id}", record.id)
    return [c for row, c in enumerate(candidates) if row not in dropped]
