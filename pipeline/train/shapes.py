"""Matrix products of few different shapes.

oneDNN, which multiplies bf16 matrices on a CPU, compiles code for every shape that it meets: half a millisecond and a
megabyte each, and it keeps a thousand of them. Batches of whole samples never have the same number of rows, so rows are
rounded up with zeros, and the shapes recur.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

ROWS = 16  # whose multiple the rows of a product are


def missing(rows: int, multiple: int = ROWS) -> int:
    """How many rows are missing to the next multiple."""
    return -rows % multiple


def pad_rows(x: Tensor, multiple: int = ROWS) -> Tensor:
    """x [rows, ·] with rows of zeros at the end up to a multiple; x itself if nothing is missing."""
    return F.pad(x, (0, 0, 0, missing(len(x), multiple))) if missing(len(x), multiple) else x
