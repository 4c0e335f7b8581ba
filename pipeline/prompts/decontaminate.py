"""Training conversations that repeat a held-out or benchmark prompt are left out.

A conversation is contaminated if one of its user turns shares a run of n words with a user turn of a protected prompt.
A first user turn of fewer than n words counts as a whole: it repeats another if all its words are the same. (Short
later turns, "thanks" or "go on", say nothing.) Runs that occur in more than `_COMMON` protected prompts are the
benchmark's own wording around the questions, "let's think step by step", and protect nothing.
"""

from __future__ import annotations

from array import array

import numpy as np

from pipeline.prompts.text import grams, words

_COMMON = 10


class Protected:
    """The runs of words that must not occur in training.

    Args:
        n: words of a run.
    """

    def __init__(self, n: int):
        self.n = n
        self._hashes = array("Q")
        self._prompts: set[int] = set()
        self._sorted: np.ndarray | None = None

    def add(self, user_turns: list[str]) -> None:
        """Protect a prompt. The same prompt given twice counts once."""
        runs = np.unique(self._runs(user_turns))
        key = hash(runs.tobytes())
        if len(runs) and key not in self._prompts:
            self._prompts.add(key)
            self._hashes.frombytes(runs.tobytes())
            self._sorted = None

    def __len__(self) -> int:
        return len(self._prompts)

    def repeated_in(self, user_turns: list[str]) -> bool:
        """Whether a conversation repeats a protected prompt."""
        if self._sorted is None:
            found, times = np.unique(np.frombuffer(self._hashes, np.uint64), return_counts=True)
            self._sorted = found[times <= _COMMON]
        runs = np.sort(self._runs(user_turns))  # looking up in order stays in the processor's cache
        if not len(runs) or not len(self._sorted):
            return False
        places = np.searchsorted(self._sorted, runs).clip(max=len(self._sorted) - 1)
        return bool((self._sorted[places] == runs).any())

    def _runs(self, user_turns: list[str]) -> np.ndarray:
        said = [words(turn) for turn in user_turns]
        parts = [grams(turn, self.n) for k, turn in enumerate(said) if len(turn) >= self.n or k == 0]
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)
