"""Files that are whole or absent: tmp + fsync + rename, checksums, and one clear error when the disk refuses."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import PipelineError

_DISK_ERRORS = {
    errno.ENOSPC: ("the disk is full", "free some space (or point run.root at another disk), then run the same command again"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, then run the same command again"),
    errno.EACCES: ("the folder cannot be written", "give yourself write access to it or choose another run.root"),
    errno.EPERM: ("the folder cannot be written", "give yourself write access to it or choose another run.root"),
    errno.EROFS: ("the file system is read-only", "choose another run.root"),
    errno.ENOTDIR: ("a file lies where a folder is needed", "move that file away or choose another run.root"),
}


@contextlib.contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """Turn the OSErrors that a user can mend (full, read-only, forbidden) into a `PipelineError` naming `path`."""
    try:
        yield
    except PipelineError:
        raise
    except OSError as e:
        if e.errno not in _DISK_ERRORS:
            raise
        what, fix = _DISK_ERRORS[e.errno]
        raise PipelineError(f"cannot write {path}: {what}", field=str(path), value=os.strerror(e.errno), fix=fix) from e
    except Exception as e:  # safetensors reports ENOSPC as its own exception type
        if "os error 28" in str(e).lower() or "no space left" in str(e).lower():
            what, fix = _DISK_ERRORS[errno.ENOSPC]
            raise PipelineError(f"cannot write {path}: {what}", field=str(path), value=str(e), fix=fix) from e
        raise


def make_dir(path: Path) -> Path:
    """Create a folder and its parents, or say clearly why not."""
    try:
        with clear_disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError) as e:
        raise PipelineError(f"the folder {path} cannot be made: a file, or a link that leads nowhere, is in the way",
                            field=str(path), value=e.strerror, fix="mount the disk it points to, or remove it") from e
    return path


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is fsynced and renamed over `path`, on failure removed."""
    path = Path(path)
    make_dir(path.parent)
    # The suffix stays last, since writers such as save_pretrained or Parquet look at it.
    tmp = path.with_name(f".tmp-{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        with clear_disk_errors(path):
            yield tmp
            _fsync(tmp)
            os.replace(tmp, path)
            _fsync(path.parent)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files that a killed process left in `folder`."""
    for tmp in Path(folder).glob(".tmp-*"):
        if not tmp.is_dir():
            tmp.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as tmp:
        tmp.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write indented JSON; NaN and Infinity are refused since other readers do not know them."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, *, fix: str) -> object:
    """Read JSON, or raise a `PipelineError` that names the file, the byte and `fix`."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise PipelineError(f"{path} does not exist", field=str(path), fix=fix) from e
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise PipelineError(f"{path} is not readable JSON: {e}", field=str(path), fix=fix) from e


def save_safetensors(path: Path, tensors: dict, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically. `tensors`: name → contiguous torch tensor."""
    from safetensors.torch import save_file

    with atomic_path(path) as tmp:
        save_file(tensors, tmp, metadata=metadata)
        os.chmod(tmp, 0o666 & ~_umask())  # safetensors makes files that only their owner can read


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def sha256_file(path: Path, *, chunk: int = 1 << 22) -> str:
    """Hex sha256 of a file, read in chunks of `chunk` bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(chunk):
            digest.update(block)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sha256_json(value: object) -> str:
    """Hash of a JSON value that does not depend on key order or spacing."""
    return sha256_text(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))
