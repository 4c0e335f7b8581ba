"""Random cases for the comparisons with `dense_reference`: samples of several lengths, masks of every pattern."""

from __future__ import annotations

from hypothesis import strategies as st

PATTERNS = ("none", "all", "answer at the very end", "one answer", "turns", "alternating", "single tokens", "random")


@st.composite
def masks(draw, size: int) -> list[bool]:
    """Which of a sample's `size` tokens the target generated, after one of `PATTERNS`."""
    pattern = draw(st.sampled_from(PATTERNS))
    if pattern == "none":
        return [False] * size
    if pattern == "all":
        return [True] * size
    if pattern == "answer at the very end":
        answer = draw(st.integers(1, min(3, size)))
        return [i >= size - answer for i in range(size)]
    if pattern == "one answer":
        start, stop = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        return [start <= i < stop for i in range(size)]
    if pattern == "turns":
        prompt, answer = draw(st.integers(1, 3)), draw(st.integers(1, 5))
        return [i % (prompt + answer) >= prompt for i in range(size)]
    if pattern == "alternating":
        return [i % 2 == 1 for i in range(size)]
    if pattern == "single tokens":
        tokens = draw(st.sets(st.integers(0, size - 1), max_size=3))
        return [i in tokens for i in range(size)]
    return draw(st.lists(st.booleans(), min_size=size, max_size=size))


@st.composite
def lengths_and_masks(draw, longest: int = 14) -> tuple[list[int], list[list[bool]]]:
    """1 to 4 samples of 1 to `longest` tokens."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=4))
    return lengths, [draw(masks(n)) for n in lengths]


objectives = st.one_of(
    st.sampled_from([{"kind": "ce"}, {"kind": "tv"}, {"kind": "lk"}]),
    st.builds(lambda hard: {"kind": "kl", "hard": hard}, st.sampled_from([0.0, 0.3, 1.0])),
    st.builds(lambda eta: {"kind": "lk_hybrid", "eta": eta}, st.sampled_from([0.0, 1.0, 3.0])),
)
"""Arguments of `dense_reference.row_loss`."""
