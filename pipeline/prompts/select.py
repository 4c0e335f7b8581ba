"""Which conversations are used: made ready to be answered, exact duplicates dropped, a limit spread evenly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pipeline.errors import PipelineError
from pipeline.files import sha256_json
from pipeline.prompts.chat import Refused
from pipeline.prompts.sources import Record


@dataclass
class Selection:
    """The records to use, in the source's order, and an account of the others."""

    records: list[Record] = field(default_factory=list)
    read: int = 0
    duplicates: int = 0
    skipped: list[dict] = field(default_factory=list)
    """lines of skipped.jsonl"""

    def skip(self, record: Record, reason: str, detail: str) -> None:
        self.skipped.append({"id": record.id, "where": record.where, "reason": reason, "detail": detail})


def select(records: Iterable[Record], *, respond: str, system_prompt: str | None, limit: int | None) -> Selection:
    """Prepare, de-duplicate and limit the source's records.

    Args:
        respond: "target": conversations end with the turn to be answered, an answer behind it is dropped; "keep": they
            end with the source's last answer.
        system_prompt: put in front of conversations that have none.
        limit: number of records to use, see `spread`; the others are counted as skipped.

    Raises:
        PipelineError: two different conversations have the same id.
    """
    selection = Selection()
    by_content: set[str] = set()
    by_id: dict[str, Record] = {}
    for record in records:
        selection.read += 1
        try:
            messages = _prepared(record.messages, respond, system_prompt)
        except Refused as e:
            selection.skip(record, e.reason, e.detail)
            continue
        content = sha256_json(messages)
        if content in by_content:
            selection.duplicates += 1
            continue
        if record.id in by_id:
            raise PipelineError(f"{record.where} has the id {record.id!r} of another conversation, "
                                f"{by_id[record.id].where}", field="prompts.source", value=record.where,
                                fix="give each conversation its own id, or leave ids out: then they are content hashes")
        by_content.add(content)
        by_id[record.id] = record
        selection.records.append(replace(record, messages=messages))
    if limit is not None and len(selection.records) > limit:
        chosen = spread(selection.records, limit)
        for record in selection.records:
            if record.id not in chosen:
                selection.skip(record, "limit", f"prompts.limit = {limit}")
        selection.records = [r for r in selection.records if r.id in chosen]
    return selection


def _prepared(messages: list[dict], respond: str, system_prompt: str | None) -> list[dict]:
    last_roles = ("assistant",) if respond == "keep" else ("user", "tool")
    last = next((k for k in reversed(range(len(messages))) if messages[k]["role"] in last_roles), None)
    if last is None:
        raise Refused(*(("no_assistant_turn", "there is no answer to keep") if respond == "keep"
                        else ("no_user_turn", "there is no turn to answer")))
    messages = messages[:last + 1]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def spread(records: list[Record], limit: int) -> set[str]:
    """Ids of `limit` records: the held-out share is kept, and within each split categories are served evenly.

    Within a category the first records are taken. A split that has records keeps at least one if `limit` allows.
    """
    heldout = [r for r in records if r.split == "heldout"]
    train = [r for r in records if r.split == "train"]
    share = round(limit * len(heldout) / len(records))
    if heldout and train and limit >= 2:
        share = min(max(share, 1), limit - 1)
    return {r.id for part, n in ((train, limit - share), (heldout, share)) for r in _evenly(part, n)}


def _evenly(records: list[Record], n: int) -> list[Record]:
    """Round-robin over the categories, until `n` are taken; small categories are used up and the others go on."""
    waiting: dict[str | None, list[Record]] = defaultdict(list)
    for record in records:
        waiting[record.category].append(record)
    # Sorting by (place within its category, order of the categories) is that round-robin.
    ranked = sorted((place, order, record.id, record) for order, part in enumerate(waiting.values())
                    for place, record in enumerate(part))
    return [record for *_, record in ranked[:n]]
