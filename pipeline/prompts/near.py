"""Near duplicates: of conversations that are almost the same, one is used.

Alike means that the Jaccard similarity of their sets of 5-word runs, estimated by MinHash, reaches the threshold. In
a fixed order of preference each conversation is dropped if it is like one that was taken before; so the result depends
neither on the source's order nor, through chains of ever less similar neighbours, on what was dropped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator

import numpy as np

from pipeline.prompts.text import grams, words

_RUN = 5  # words
_PERMUTATIONS = 128  # the estimate's standard deviation is at most 0.044
# Missing a pair is worse than looking at one too many, since every pair found is compared.
_WEIGHTS = (0.1, 0.9)


class Signatures:
    """MinHash signatures, 512 bytes each, in a temporary file.

    A pair at the threshold is found with a probability of 0.8 or more, one that is 0.05 above it with 0.95 or more.

    Args:
        size: how many there will be.
    """

    def __init__(self, size: int):
        from datasketch import MinHash

        self._empty = MinHash(num_perm=_PERMUTATIONS, hashfunc=int)
        self._rows = np.memmap(tempfile.TemporaryFile(), np.uint32, "w+", shape=(max(size, 1), _PERMUTATIONS))

    def set(self, row: int, text: str) -> None:
        minhash = self._empty.copy()
        minhash.update_batch((grams(words(text), _RUN) >> np.uint64(32)).tolist())
        self._rows[row] = minhash.hashvalues

    def near_duplicates(self, order: Iterable[int], threshold: float) -> Iterator[tuple[int, int]]:
        """Rows to drop, each with the row it is like.

        Args:
            order: rows in the order of preference.
        """
        from datasketch import LeanMinHash, MinHashLSH

        taken = MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS, weights=_WEIGHTS)
        # The index takes 5 KB for each row, and most rows are like no other: only those that share a band go in.
        shared = self._share_a_band(taken.b, taken.r)
        for row in order:
            if not shared[row]:
                continue
            signature = np.array(self._rows[row])
            minhash = LeanMinHash(seed=self._empty.seed, hashvalues=signature, scheme=self._empty.scheme)
            like = [other for other in taken.query(minhash)
                    if (self._rows[other] == signature).mean() >= threshold]
            if like:
                yield row, min(like)
            else:
                taken.insert(row, minhash)

    def _share_a_band(self, bands: int, width: int) -> np.ndarray:
        """[rows] whether another row has the same values in one of the bands by which the index finds rows."""
        shared = np.zeros(len(self._rows), bool)
        mix = np.random.default_rng(0).integers(1 << 63, size=width, dtype=np.uint64) | np.uint64(1)
        for band in range(bands):
            keys = (self._rows[:, band * width:(band + 1) * width] * mix).sum(axis=1, dtype=np.uint64)
            _, places, times = np.unique(keys, return_inverse=True, return_counts=True)
            shared |= times[places] > 1
        return shared
