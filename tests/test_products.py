"""fp32 products by oneDNN: exact, only where they are, and only while training runs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.train import products
from pipeline.train.loss import _add_product
from pipeline.train.products import fast_fp32, fp32_is_fast, wide_product


def setting() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture
def tried_anew():
    products._onednn_keeps_fp32.cache_clear()
    yield
    products._onednn_keeps_fp32.cache_clear()


def matrices(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert found.dtype == torch.float32
    return float((found.double() - exact).abs().max() / exact.abs().max())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 700), st.integers(1, 300), st.booleans(), st.booleans())
def test_products_keep_fp32(m, k, n, turn_a, turn_b):
    """As the drafter's layers ask for them: forward, and either factor transposed in backward."""
    a, b = matrices((k, m) if turn_a else (m, k), (n, k) if turn_b else (k, n))
    a, b = a.T if turn_a else a, b.T if turn_b else b
    exact = a.double() @ b.double()
    with fast_fp32():
        assert error(a @ b, exact) <= 3e-6
        assert error(wide_product(a[None], b[None], 0.3)[0], 0.3 * exact) <= 3e-6


@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_is_written_over_what_was_there_or_added_to_it(first):
    a, b, total = matrices((40, 200), (40, 96), (200, 96))
    exact = a.T.double() @ b.double() + (0 if first else total.double())
    total = torch.full_like(total, torch.nan) if first else total
    with fast_fp32():
        _add_product(total, a, b, first)
    assert error(total, exact) <= 3e-6


@pytest.mark.parametrize("fails", [False, True])
def test_the_setting_is_torchs_own_again(fails):
    """It is the process's."""
    before = setting()
    with pytest.raises(ValueError) if fails else contextlib.nullcontext(), fast_fp32():
        assert fp32_is_fast() == products._onednn_keeps_fp32()
        if fails:
            raise ValueError
    assert setting() == before != "bf16" and not fp32_is_fast()
    a, b = torch.ones(1, 2, 64).bfloat16(), torch.ones(1, 63 if fails else 64, 2).bfloat16()
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        assert wide_product(a, b).dtype == torch.float32
    assert setting() == before


@pytest.mark.parametrize("d", [64, 128])
def test_wide_products_of_bf16_lose_nothing(d):
    a, b = matrices((2, 70, d), (2, d, 90), dtype=torch.bfloat16)
    exact = a.double() @ b.double()
    assert error(wide_product(a, b), exact) <= 1e-6
    assert error(wide_product(a, b, 0.3), 0.3 * exact) <= 1e-6
    assert wide_product(a.double(), b.double()).dtype == torch.float64


@pytest.mark.parametrize("rounded", [0, 1])
def test_a_cpu_that_rounds_is_not_trusted(tried_anew, monkeypatch, rounded):
    """As one with AMX does, be it in one of the products tried only."""
    exact, tried = torch.Tensor.__matmul__, []

    def rounding(a, b):
        tried.append(setting())
        return exact(a.bfloat16().float(), b) if len(tried) == rounded + 1 else exact(a, b)

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.Tensor, "__matmul__", rounding)
    with fast_fp32():
        assert not fp32_is_fast()
    assert tried == ["bf16"] * (rounded + 1)


@pytest.mark.parametrize("lacking", ["AVX-512", "oneDNN"])
def test_without_its_code_torch_goes_on_as_ever(tried_anew, monkeypatch, lacking):
    if lacking == "oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if lacking == "oneDNN" else "AVX2")
    with fast_fp32():
        assert not fp32_is_fast()


def test_trying_is_not_fooled_by_autocast(tried_anew):
    wanted = products._onednn_keeps_fp32()
    products._onednn_keeps_fp32.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert products._onednn_keeps_fp32() == wanted
