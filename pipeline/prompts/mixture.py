"""How many conversations of each source are used, and which.

Which ones is decided by a hash of seed and id, so neither the order in which they were read nor what else was read
changes their ranks. First a source's `cap` is applied. Then, with weights, each source gives its share of the largest
mixture that has these shares and repeats nothing (nor exceeds `prompts.limit`). Without weights `prompts.limit` is
spread over everything. A part is taken so that the held-out share is kept and categories are served evenly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pipeline.config import SourceConfig
from pipeline.errors import PipelineError
from pipeline.files import sha256_text
from pipeline.prompts.records import Split


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is kept in memory of a record: enough to choose by, and its place in the spool."""

    id: str
    source: int
    split: Split
    category: str | None
    place: int


def choose(candidates: Sequence[Candidate], sources: Sequence[SourceConfig], *, limit: int | None, seed: int
           ) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates to use, in their order, and why each other one is not: id → "cap", "mixture" or "limit"."""
    ranked = sorted(candidates, key=lambda c: sha256_text(f"{seed}:{c.id}"))
    parts = [[c for c in ranked if c.source == k] for k in range(len(sources))]
    left: dict[str, str] = {}

    def cut(part: list[Candidate], size: int | None, reason: str) -> list[Candidate]:
        ids = spread(part, size) if size is not None and size < len(part) else {c.id for c in part}
        left.update((c.id, reason) for c in part if c.id not in ids)
        return [c for c in part if c.id in ids]

    parts = [cut(part, source.cap, "cap") for part, source in zip(parts, sources, strict=True)]
    if sources[0].weight is not None:
        for source, part in zip(sources, parts):
            if not part:
                raise PipelineError(f"the source {source.path} has nothing left to mix, so no mixture has the asked weights",
                                    field="prompts.source", value=source.path,
                                    fix="take it out of prompts.source, or check it alone: prompts.source=<path>")
        sizes = quotas([len(part) for part in parts], [source.weight for source in sources], limit)
        parts = [cut(part, size, "mixture") for part, size in zip(parts, sizes, strict=True)]
    elif limit is not None:
        together = {c.id for part in parts for c in part}
        parts = [cut([c for c in ranked if c.id in together], limit, "limit")]
    taken = {c.id for part in parts for c in part}
    return [c for c in candidates if c.id in taken], left


def quotas(available: Sequence[int], weights: Sequence[float], limit: int | None) -> list[int]:
    """Sizes in proportion to the weights, as large as `available` allows, `limit` in all at most."""
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    total = min(int(there / share) for there, share in zip(available, shares, strict=True))
    total = total if limit is None else min(total, limit)
    exact = [total * share for share in shares]
    sizes = [int(x) for x in exact]
    # What rounding down left over goes to the largest remainders.
    for k in sorted(range(len(exact)), key=lambda k: sizes[k] - exact[k])[:total - sum(sizes)]:
        sizes[k] += 1
    return sizes


def spread(ranked: Sequence[Candidate], size: int) -> set[str]:
    """Ids of `size` candidates: the held-out share is kept, and within each split categories are served evenly.

    Within a category the first ones are taken. A split that has candidates keeps at least one if `size` allows.
    """
    heldout = [c for c in ranked if c.split == "heldout"]
    train = [c for c in ranked if c.split == "train"]
    share = round(size * len(heldout) / len(ranked)) if ranked else 0
    if heldout and train and size >= 2:
        share = min(max(share, 1), size - 1)
    return {c.id for part, n in ((train, size - share), (heldout, share)) for c in _evenly(part, n)}


def _evenly(ranked: list[Candidate], n: int) -> list[Candidate]:
    """Round-robin over the categories, until `n` are taken; small categories are used up and the others go on."""
    places: dict[str, int] = defaultdict(int)
    order = []
    for candidate in ranked:
        category = candidate.category or ""
        # Sorting by (place within its category, category) is that round-robin.
        order.append((places[category], category, candidate))
        places[category] += 1
    return [candidate for *_, candidate in sorted(order, key=lambda entry: entry[:2])[:n]]
