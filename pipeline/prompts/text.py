"""Words and n-grams of a text, as numbers: what near duplicates and contamination are recognised by."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from zlib import crc32

import numpy as np

# Scripts without blanks between words: there a character counts as a word.
_UNSPACED = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
_HAS_UNSPACED, _WORD = re.compile(_UNSPACED), re.compile(r"\w+")
_WORD_OR_CHARACTER = re.compile(rf"{_UNSPACED}|(?:(?!{_UNSPACED})\w)+")  # four times slower

# Windows of a polynomial in an odd factor, modulo 2**64. Of a sum over h[k] · factor**-k from the beginning, a window is
# a difference, and multiplying it by factor**i makes it the same wherever it begins.
_FACTOR = 0x9E3779B97F4A7C15


def words(text: str) -> list[str]:
    """Words without case, punctuation, spacing and the encoding of accents."""
    if text.isascii():
        return _WORD.findall(text.lower())
    text = unicodedata.normalize("NFKC", text).casefold()
    return (_WORD_OR_CHARACTER if _HAS_UNSPACED.search(text) else _WORD).findall(text)


def grams(said: list[str], n: int) -> np.ndarray:
    """64-bit hashes [max(1, len - n + 1)] of the n-grams of words; of a shorter text, one of the whole."""
    if not said:
        return np.empty(0, np.uint64)
    size, n = len(said), min(n, len(said))
    # A table for each power of two is kept, those for giant texts are not.
    up, down = (_powers if size < 1 << 16 else _powers.__wrapped__)(1 << size.bit_length())
    sums = np.zeros(size + 1, np.uint64)
    np.cumsum(np.fromiter(map(_HASHES.__getitem__, said), np.uint64, size) * down[:size], out=sums[1:])
    return (sums[n:] - sums[:size - n + 1]) * up[:size - n + 1]


@lru_cache
def _powers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Powers 0 … size-1 of the factor and of its inverse."""
    bases = (_FACTOR, pow(_FACTOR, -1, 1 << 64))
    return tuple(np.cumprod(np.array([1] + [base] * (size - 1), np.uint64), dtype=np.uint64) for base in bases)


class _WordHashes(dict):
    """Word → number; forgets all of them now and then, since texts hold new words without end."""

    def __missing__(self, word: str) -> int:
        if len(self) >= 1 << 18:
            self.clear()
        self[word] = value = crc32(word.encode()) + 1
        return value


_HASHES = _WordHashes()
