"""Memory that a training step frees stays with the process, for the next step to take."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt (malloc.h), and the largest value that it takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MOST = -1, -3, 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc's malloc, which torch allocates CPU tensors with, not to return freed memory to the kernel.

    By default a large tensor is a mapping of its own that is undone when it is freed. Every step allocates the same
    tensors again, and the kernel maps and clears their pages one by one while all but one thread wait: a tenth of a step
    on two cores. What the process holds at most hardly changes, since steps are alike.

    Returns:
        Whether malloc is glibc's and has agreed. Another malloc is left as it is.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no such function, or no such thing as a process's own library
        return False
    return all([mallopt(parameter, _MOST) for parameter in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)])
