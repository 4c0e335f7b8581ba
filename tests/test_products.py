"""fp32 products by oneDNN: exact, only where they are, and the setting is torch's own again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import products
from pipeline.products import fast_fp32, fp32_by_onednn, wide_product
from pipeline.train.loss import _add_product


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


def error(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> float:
    """Relative to what is added up, which may cancel."""
    assert found.dtype == torch.float32
    a, b = scale * a.double(), b.double()
    return float((found.double() - a @ b).abs().max() / (a.abs() @ b.abs()).max())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 700), st.integers(1, 300), st.booleans(), st.booleans())
def test_products_keep_fp32(m, k, n, turn_a, turn_b):
    """As the drafter's layers ask for them: forward, and either factor transposed in backward."""
    a, b = matrices((k, m) if turn_a else (m, k), (n, k) if turn_b else (k, n))
    a, b = a.T if turn_a else a, b.T if turn_b else b
    with fast_fp32():
        assert error(a @ b, a, b) <= 1e-6
        assert error(wide_product(a[None], b[None], 0.3)[0], a, b, 0.3) <= 1e-6


@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_is_written_over_what_was_there_or_added_to_it(first):
    a, b, before = matrices((40, 200), (40, 96), (200, 96))
    total = torch.full_like(before, torch.nan) if first else before.clone()
    with fast_fp32():
        _add_product(total, a, b, first)
    assert error(total if first else total - before, a.T, b) <= 1e-6


@pytest.mark.parametrize("kept", [False, True])
def test_the_setting_is_torchs_own_again(monkeypatch, kept):
    before = setting()
    assert before != "bf16"
    monkeypatch.setattr(products, "_onednn_keeps_fp32", lambda: kept)
    a, b = matrices((2, 8, 64), (2, 64, 8), dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="size"), fast_fp32():
        with fast_fp32():
            assert fp32_by_onednn() == kept
        wide_product(a, b)
        assert fp32_by_onednn() == kept
        with fast_fp32("cuda"):
            assert fp32_by_onednn() == kept
        wide_product(a, b[:, 1:])  # fails
    assert setting() == before
    with fast_fp32("cuda"):
        assert setting() == before
    wide_product(a, b)
    with pytest.raises(RuntimeError, match="size"):
        wide_product(a, b[:, 1:])
    assert setting() == before


@pytest.mark.parametrize("d", [64, 128])
def test_wide_products_of_bf16_lose_nothing(d):
    a, b = matrices((2, 70, d), (2, d, 90), dtype=torch.bfloat16)
    assert error(wide_product(a, b), a, b) <= 1e-6
    assert error(wide_product(a, b, 0.3), a, b, 0.3) <= 1e-6
    assert wide_product(a.double(), b.double()).dtype == torch.float64


class Trial(TorchDispatchMode):
    """Watches the products of a trial; number `at` is one of a factor rounded to bf16, as AMX may make it."""

    def __init__(self, at: int = 0, factor: int = 0):
        super().__init__()
        self.at, self.factor, self.seen = at, factor, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "mm":
            self.seen += [(setting(), x.dtype, x.device.type) for x in args]
            if len(self.seen) == 2 * self.at:
                args = [x.bfloat16().float() if i == self.factor else x for i, x in enumerate(args)]
        return function(*args, **kwargs or {})


@pytest.fixture
def onednn_with_avx512(tried_anew, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@pytest.mark.parametrize(("product", "factor"), [(1, 0), (2, 1), (3, 0), (4, 1)])
def test_a_cpu_that_rounds_is_not_trusted(onednn_with_avx512, product, factor):
    with Trial(product, factor) as trial:
        assert not products._onednn_keeps_fp32()
    assert len(trial.seen) == 8
    with fast_fp32():
        assert not fp32_by_onednn()


def test_what_torch_is_told_does_not_change_the_trial(onednn_with_avx512):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), Trial() as trial:
            products._onednn_keeps_fp32()
    finally:
        torch.set_default_dtype(torch.float32)
    assert trial.seen == [("bf16", torch.float32, "cpu")] * 8


@pytest.mark.parametrize("lacking", ["AVX-512", "oneDNN"])
def test_without_its_code_torch_goes_on_as_ever(tried_anew, monkeypatch, lacking):
    if lacking == "oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if lacking == "oneDNN" else "AVX2")
    with fast_fp32():
        assert not fp32_by_onednn()
