"""A small file system to fill up."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tiny_disk(path: Path, size: str = "64m") -> Iterator[None]:
    """Mount an empty tmpfs of `size` at `path`; skips the test where mounting is not allowed."""
    path.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        # Lazily: files of it may still be mapped.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> None:
    """Write `disk`/filler until not a byte is left."""
    with contextlib.suppress(OSError), open(disk / "filler", "ab", buffering=0) as f:
        while True:
            f.write(bytes(4096))
