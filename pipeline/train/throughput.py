"""How fast training is, and how near to what the device can do: tokens/s, model FLOPs utilisation (MFU), memory."""

from __future__ import annotations

import re
import resource
import time

import torch

from pipeline.train.alignment import Rows
from pipeline.train.drafter_config import DrafterConfig

# Dense bf16 peak in FLOP/s by a word of the device's name (vendors' data sheets, no sparsity). Longer names first.
_PEAKS = {
    "GB200": 2.5e15, "B200": 2.25e15, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "A10G": 70e12, "A10": 125e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "RTX 6000 Ada": 364e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def step_flops(c: DrafterConfig, tokens: int, rows: Rows) -> float:
    """Floating-point operations of matrix products that one batch's forward and backward need.

    A product [a, b] @ [b, c] is 2abc. Backward costs twice its forward where weight and input both need gradients,
    once where one does: fc's input and the embedding half of q, k and v's input are the target's. Counted are

    * fc, and step 0's keys and values, over all `tokens`;
    * query, output projection, MLP, and the later steps' keys and values, over the rows gated at each step;
    * attention over the keys each row sees: its position + 1 at step 0, and one more a step;
    * lm_head over the rows the loss is over, and the target's head (no backward) over the tokens they learn from.

    Padding, recomputing and rows that are computed but not gated at a later step are not counted: they are no use. As in
    the benchmark's count, every step's q, k and v read [embedding | hidden] in full, though `Drafter.unroll` works out
    the embedding's half once per token: some 4 % of an 8B target's step.
    """
    hidden, heads, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    gated = rows.gates.sum(0).double()  # [T]
    visible = float((rows.gates * (rows.position + 1)[:, None]).sum())
    own = float((gated * torch.arange(len(gated))).sum())
    rows_of_all_steps, later_rows = float(gated.sum()), float(gated[1:].sum())

    def linear(count: float, inputs: int, outputs: int, gradients: float = 2.0) -> float:
        return 2.0 * count * inputs * outputs * (1 + gradients)

    return (
        linear(tokens, c.num_fc_inputs * hidden, hidden, 1.0)
        + linear(tokens + later_rows, 2 * hidden, 2 * kv, 1.5)
        + linear(rows_of_all_steps, 2 * hidden, heads, 1.5)
        + linear(rows_of_all_steps, heads, hidden)
        + 3 * linear(rows_of_all_steps, hidden, c.intermediate_size)
        + 12.0 * heads * (visible + own)  # q·k and p·v: 4 a pair forward, twice that backward
        + linear(float(rows.loss_rows.sum()), hidden, c.draft_vocab_size)
        + linear(len(rows.tokens), hidden, c.draft_vocab_size, 0.0)
    )


def peak_flops(device: torch.device, precision: str) -> float | None:
    """What the device can do at best in FLOP/s: by name on a GPU in bf16, measured on a CPU; None where unknown."""
    if device.type == "cpu":
        return _matmul_rate(torch.bfloat16 if precision == "bf16" else torch.float32)
    if precision != "bf16":
        return None
    return named_peak(torch.cuda.get_device_name(device))


def named_peak(name: str) -> float | None:
    """Peak of a GPU in bf16, None if it is not in the table."""
    return next((peak for known, peak in _PEAKS.items() if re.search(rf"\b{known}\b", name)), None)


def _matmul_rate(dtype: torch.dtype, size: int = 768) -> float:
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(4):  # the first one warms up
        started = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has used so far: the device's on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Meter:
    """What happened since the last `read`, in wall time."""

    def __init__(self, device: torch.device, precision: str, ranks: int):
        self._device, self._ranks, self._peak = device, ranks, peak_flops(device, precision)
        self._reset()

    def _reset(self) -> None:
        self._started, self._tokens, self._flops, self._waited = time.perf_counter(), 0, 0.0, 0.0

    def add(self, *, tokens: int, flops: float, waited: float) -> None:
        """One step: tokens and FLOPs of all ranks, seconds that this rank stood still for data."""
        self._tokens, self._flops, self._waited = self._tokens + tokens, self._flops + flops, self._waited + waited

    def read(self) -> dict[str, float | None]:
        """tokens_per_second, mfu (share of the ranks' peak; None where that is unknown), data_wait (share of the time),
        memory_gib (peak of this process)."""
        seconds = time.perf_counter() - self._started
        mfu = self._flops / seconds / (self._peak * self._ranks) if self._peak else None
        found = {"tokens_per_second": round(self._tokens / seconds, 1), "mfu": mfu and round(mfu, 4),
                 "data_wait": round(self._waited / seconds, 4), "memory_gib": round(peak_memory_gib(self._device), 3)}
        self._reset()
        return found
