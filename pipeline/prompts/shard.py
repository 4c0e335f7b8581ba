"""One of several machines: each chooses the conversations as if it were alone, and encodes or answers its own of them.

Reading is cheap and answering is not. So removal of duplicates, caps, mixture, limit and split see everything, and the
shards together are what one machine makes, whatever their number. Which shard a conversation belongs to follows from
its id, the hash of its content.

What the choice counted (`read`, `duplicates`, `skipped_…`) is counted by every shard, and kept apart as `selected`;
the conversations of the others are its `other_shards`. pipeline/merge.py joins the shards.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.files import write_text
from pipeline.prompts.account import Account
from pipeline.prompts.select import Selection

SELECTED = "selected.txt"
"""a shard's file of all chosen ids, one a line, in the order of the samples: by it the shards are joined"""


def parsed(shard: str) -> tuple[int, int]:
    """Number and count of "0/2", whose form the configuration has checked."""
    number, count = map(int, shard.split("/"))
    return number, count


def owner(id: str, count: int) -> int:
    """The shard, of `count`, of the conversation with this id."""
    return int(id, 16) % count


def one_shard(selection: Selection, shard: str, account: Account, path: Path) -> Selection:
    """A shard's part of what was chosen; the ids of all of it go to `path`."""
    number, count = parsed(shard)
    write_text(path, "".join(f"{candidate.id}\n" for candidate in selection.candidates))
    own = []
    for candidate in selection.candidates:
        if owner(candidate.id, count) == number:
            own.append(candidate)
        else:
            account.count(candidate.source, "other_shards")
    return Selection(own, selection.spool)
