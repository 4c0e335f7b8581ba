"""Where a precision is `auto`: what each machine and engine gets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.precision import bf16_is_faster, respond_dtype
from pipeline.train.train import resolve_precision


def machine(monkeypatch, *, amx: bool, avx512_bf16: bool) -> torch.device:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    return torch.device("cpu")


@pytest.mark.parametrize("amx, avx512_bf16, faster", [(0, 0, False), (1, 0, True), (0, 1, True)])
def test_a_cpu_is_faster_in_bf16_iff_it_has_instructions_for_it(monkeypatch, amx, avx512_bf16, faster):
    device = machine(monkeypatch, amx=bool(amx), avx512_bf16=bool(avx512_bf16))
    assert bf16_is_faster(device) == faster
    assert resolve_precision("auto", device) == ("bf16" if faster else "fp32")
    assert resolve_precision("fp32", device) == "fp32" and resolve_precision("bf16", device) == "bf16"


@pytest.mark.parametrize("has_it", [True, False])
def test_a_gpu_is_iff_it_computes_in_bf16_itself(monkeypatch, has_it):
    """V100 and T4 emulate it."""
    machine(monkeypatch, amx=True, avx512_bf16=True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_it or including_emulation)
    assert resolve_precision("auto", torch.device("cuda")) == ("bf16" if has_it else "fp32")


@pytest.mark.parametrize("asked, engine, fast, expected", [
    ("auto", "transformers", True, "bf16"), ("auto", "transformers", False, "target"), ("auto", "sglang", True, "target"),
    ("auto", "server", True, "target"), ("fp32", "transformers", True, "fp32"), ("target", "transformers", True, "target")])
def test_answers_are_written_in_bf16_where_transformers_is_faster_in_it(monkeypatch, asked, engine, fast, expected):
    machine(monkeypatch, amx=False, avx512_bf16=fast)
    config = SimpleNamespace(prompts=SimpleNamespace(respond_dtype=asked), device="cpu")
    assert respond_dtype(config, engine) == expected


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
def test_torch_says_of_this_cpu_what_the_kernel_says():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert bf16_is_faster(torch.device("cpu")) == bool(flags & {"avx512_bf16", "amx_tile"})
