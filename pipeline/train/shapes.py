"""Matrix products of few different shapes.

oneDNN, which multiplies bf16 matrices on a CPU and fp32 ones where that is faster (see `products`), compiles code for every
shape that it meets: half a millisecond and a megabyte each, and it keeps a thousand of them. Batches of whole samples hardly
ever have the same number of rows, so rows are rounded up, and the shapes recur.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

ROWS = 16  # the rows of a product are rounded up to a multiple of it


def missing(rows: int, multiple: int = ROWS) -> int:
    """How many rows are missing to the next multiple."""
    return -rows % multiple


def pad_rows(x: Tensor) -> Tensor:
    """x [rows, …] with zeros behind it up to a multiple of `ROWS` rows; x itself if none is missing."""
    behind = missing(len(x))
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, behind)) if behind else x
