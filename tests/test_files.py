"""Files are whole or absent, and a disk that refuses gives one clear message."""

import errno
import os
import subprocess
import sys

import pytest
import torch

from pipeline import files
from pipeline.errors import PipelineError


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(RuntimeError):
        with files.atomic_path(path) as tmp:
            tmp.write_text("half")
            raise RuntimeError("killed")
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_kill_in_the_middle_of_a_write_leaves_no_file_that_looks_whole(tmp_path):
    script = (
        "import os, signal, sys; from pipeline import files\n"
        "with files.atomic_path(sys.argv[1] + '/x.bin') as tmp:\n"
        "    tmp.write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    assert done.returncode == -9
    assert not (tmp_path / "x.bin").exists()
    assert len(list(tmp_path.glob(".tmp-*"))) == 1
    files.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code, words", [(errno.ENOSPC, "disk is full"), (errno.EACCES, "cannot be written"),
                                         (errno.EROFS, "read-only")])
def test_disk_errors_name_the_file_and_the_mend(tmp_path, monkeypatch, code, words):
    def refuse(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PipelineError, match=words) as e:
        files.write_text(tmp_path / "x", "text")
    assert str(tmp_path / "x") in str(e.value) and "mend" in str(e.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 KiB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_under_safetensors_is_recognised(tiny_disk):
    # safetensors reports ENOSPC through an exception type of its own.
    with pytest.raises(PipelineError, match="disk is full"):
        files.save_safetensors(tiny_disk / "x.safetensors", {"a": torch.zeros(1 << 16)})
    assert list(tiny_disk.iterdir()) == []


def test_other_errors_pass_through(tmp_path):
    with pytest.raises(TypeError):
        files.write_json(tmp_path / "x", object())
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "x", float("nan"))


def test_read_json_names_file_and_byte(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text('{"a": 1,')
    with pytest.raises(PipelineError, match="broken.json.*char 8") as e:
        files.read_json(path, fix="make prompts")
    assert "make prompts" in str(e.value)
    with pytest.raises(PipelineError, match="does not exist"):
        files.read_json(tmp_path / "absent.json", fix="make prompts")


def test_hash_of_json_ignores_key_order():
    assert files.sha256_json({"a": 1, "b": [1, 2]}) == files.sha256_json({"b": [1, 2], "a": 1})
    assert files.sha256_json({"a": 1}) != files.sha256_json({"a": 2})
