"""Memory that a training step frees stays with the process, for the next step to take."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt, see malloc.h
_NEVER = -1
# Up to 2.34 glibc refuses more than half of a heap's largest size. A refusal after the trim threshold was set would leave
# the other where it stands, often far lower than it would have grown by itself.
_LARGEST_MMAP_THRESHOLDS = (2**31 - 1, 2**25)


def keep_freed_memory() -> bool:
    """Tell glibc's malloc, which torch allocates CPU tensors with on x86, not to return freed memory to the kernel.

    By default a large tensor is a mapping of its own that is undone when it is freed. Every step allocates much the same
    tensors again, and the kernel maps and clears their pages one by one while all but one thread wait: a tenth of a step
    on two cores. The memory that a process holds at most hardly grew in what was measured.

    Returns:
        Whether glibc has agreed. It is without effect where another allocator stands before glibc's.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no such function, or no such thing as a process's own library
        return False
    agreed = any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST_MMAP_THRESHOLDS)
    return agreed and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
