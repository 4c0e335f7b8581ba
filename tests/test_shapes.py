"""What a training step asks of oneDNN and of malloc: few shapes, and no new pages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from test_drafter import HIDDEN, frozen, make_drafter, make_samples, pack
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import products
from pipeline.train.shapes import ROWS, missing, pad_rows


class Products(TorchDispatchMode):
    """Notes the shapes of the products that oneDNN makes: of bf16 matrices, and of fp32 ones where it may (`products`)."""

    def __init__(self):
        super().__init__()
        self.shapes: set[tuple] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            if args[-1].dtype == torch.bfloat16 or torch.backends.mkldnn.matmul.fp32_precision == "bf16":
                self.shapes.add((args[-1].dtype, *(tuple(a.shape) for a in args[-2:])))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sizes_of_products_are_those_of_the_drafter_or_multiples(dtype, monkeypatch):
    """Nothing about a batch that differs from the next one's may be a shape of its own."""
    monkeypatch.setattr(products, "_onednn_keeps_fp32", lambda: dtype == torch.float32)
    drafter = make_drafter(num_attention_heads=6, num_key_value_heads=2, head_dim=14)
    of_the_drafter = {3 * HIDDEN, HIDDEN, 20, 30, 14, 2 * 2 * 14, 6 * 14, 10 * 14, 2}
    generator = torch.Generator().manual_seed(0)
    shapes = set()
    for _ in range(12):
        lengths = torch.randint(25, 60, (3,), generator=generator).tolist()
        masks = [(torch.arange(n) > torch.randint(0, 6, (), generator=generator)).tolist() for n in lengths]
        batch = pack(make_samples(lengths, masks, 3))
        with Products() as seen, products.fast_fp32(), torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            drafter(batch, frozen(drafter), torch.ones(3)).loss.backward()
        shapes |= seen.shapes
    sizes = {size for _, *matrices in shapes for matrix in matrices for size in matrix}
    assert {n for n in sizes - of_the_drafter if n % ROWS} == set()
    assert {found for found, *_ in shapes} == {dtype, torch.float32}


def test_padding():
    x = torch.ones(17, 3)
    assert (missing(0), missing(16), missing(17), missing(5, 4)) == (0, 0, 15, 3)
    assert pad_rows(x).shape == (32, 3)
    assert pad_rows(x).sum() == x.sum()
    assert pad_rows(x[:16]).data_ptr() == x.data_ptr()


_FAULTS = """
import resource, sys, torch
from pipeline.train.allocator import keep_freed_memory
torch.set_num_threads(1)
asked = sys.argv[1] == "keep" and keep_freed_memory()
def step():
    for size in (48, 20):  # MiB
        torch.ones(size << 18)
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(asked, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64", reason="another allocator")
def test_freed_memory_is_kept():
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))}

    def faults(how: str) -> tuple[str, int]:
        run = subprocess.run([sys.executable, "-c", _FAULTS, how], env=plain, capture_output=True, text=True, check=True)
        asked, count = run.stdout.split()
        return asked, int(count)

    (asked, kept), (_, usual) = faults("keep"), faults("as it is")
    assert asked == "True"
    assert kept * 10 < usual  # of 17,408 pages of 4 KiB a step
