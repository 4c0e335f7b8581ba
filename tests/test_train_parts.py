"""The parts of training that can be worked out by hand: schedules, ratios, averages, spikes, early stop, FLOPs."""

import importlib
import math
import sys

import pytest
import torch

from pipeline.train.alignment import select_rows
from pipeline.train.drafter_config import DrafterConfig
from pipeline.train.ema import Ema
from pipeline.train.metrics import ratios
from pipeline.train.position import Position
from pipeline.train.schedule import learning_rate
from pipeline.train.spikes import find_spikes
from pipeline.train.throughput import Meter, named_peak, step_flops
from tests.tiny_run import ROOT


def rates(total: int, **settings) -> list[float]:
    return [learning_rate(step, total, lr=1.0, **{"warmup_ratio": 0.25, "min_lr_ratio": 0.1, **settings})
            for step in range(total)]


def test_cosine_by_hand():
    found = rates(12)
    assert found[:3] == [1 / 3, 2 / 3, 1.0]  # three steps of warm-up
    assert found[3] == 1.0 and found[7] == pytest.approx(0.1 + 0.9 * 0.5) and found[11] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule, expected", [
    ("constant", [1 / 2, 1, 1, 1, 1, 1, 1, 1]),
    ("linear", [1 / 2, 1, 1, 0.82, 0.64, 0.46, 0.28, 0.1]),
    ("wsd", [1 / 2, 1, 1, 1, 1, 1, 0.55, 0.1]),  # the last three of eight steps decay
])
def test_schedules_by_hand(schedule, expected):
    assert rates(8, schedule=schedule, decay_ratio=0.375) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_one_step_and_all_warm_up_are_finite(schedule):
    assert all(math.isfinite(r) for r in rates(1, schedule=schedule, warmup_ratio=0.0))
    assert rates(4, schedule=schedule, warmup_ratio=0.99) == [0.25, 0.5, 0.75, 1.0]


def test_a_decay_of_one_step_ends_at_the_floor_too():
    assert rates(2, warmup_ratio=0.5) == pytest.approx([1.0, 0.1])
    assert rates(4, schedule="wsd", decay_ratio=0.25) == pytest.approx([1.0, 1.0, 1.0, 0.1])
    assert rates(4, schedule="wsd", decay_ratio=0.1) == [1.0] * 4  # no step at all


def test_ratios_by_hand():
    """Ten rows at step 0, eight at step 1, five at step 2. Of the six right at step 0 one is not gated at step 1."""
    found = ratios(torch.tensor([[8.0, 4.0, 2.0], [8, 4, 2], [10, 8, 5], [10, 5, 2], [6, 5, 2], [6, 4, 1]]))
    assert found["loss"] == [1, 1, 1]
    assert found["accuracy"] == pytest.approx([0.6, 5 / 8, 0.4])
    assert found["conditional_accuracy"] == pytest.approx([0.6, 4 / 5, 1 / 2])
    assert found["tau_row@3"] == pytest.approx(1 + 0.6 + 0.5 + 0.2)
    assert "tau_row@3" not in ratios(torch.ones(6, 2))
    assert ratios(torch.zeros(6, 3))["tau_row@3"] == 1.0  # nothing counted, no division by zero


def test_average_by_hand():
    """Steps 0 and 1 forget fast: d = 1/10 and 2/11; step 9 is held at 0.5 instead of 10/19."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(8.0)
    ema = Ema(model, 0.5)
    model.weight.data.fill_(3.0)
    ema.update(0)
    assert float(ema.average["weight"]) == pytest.approx(0.8 + 2.7)
    ema.update(1)
    assert float(ema.average["weight"]) == pytest.approx(3.5 * 2 / 11 + 3.0 * 9 / 11)
    ema.average["weight"].fill_(5.0)
    ema.update(9)
    assert float(ema.average["weight"]) == pytest.approx(4.0)
    with pytest.raises(KeyError), ema.applied():
        assert model.weight.item() == pytest.approx(4.0)
        raise KeyError
    assert model.weight.item() == 3.0 and float(ema.average["weight"]) == pytest.approx(4.0)


def test_spikes_by_hand():
    """Losses 2.0 and 2.2 in turn: median 2.1, deviation 1.4826 · 0.1; four of them above the median is 2.693."""
    history: list[float] = []
    assert find_spikes([9.0], history, 4.0) == []  # nothing is usual yet
    history[:] = [2.0, 2.2] * 10
    assert find_spikes([2.69, math.nan], history, 4.0) == [] and history[-1] == 2.69
    history[:] = [2.0, 2.2] * 10
    (found,) = find_spikes([2.0, 2.70], history, 4.0)
    assert found == (1, pytest.approx(2.1)) and history[-1] == 2.70
    history[:] = [2.0] * 70  # a loss that does not vary: 1 % of the median counts as deviation
    assert find_spikes([2.07], history, 4.0) == [] and len(history) == 64
    assert find_spikes([2.09], history, 4.0) == [(0, 2.0)]


def test_early_stop_by_hand():
    def stopped(taus: list[float], patience: int | None) -> bool:
        return Position(history=[{"tau_row@3": tau} for tau in taus]).stopped_early(patience)

    assert not stopped([], 1) and not stopped([1.2, 1.1, 1.0], None)
    assert not stopped([1.2, 1.3], 1) and not stopped([1.3, 1.2], 2)
    assert stopped([1.2, 1.3, 1.3], 1)  # as good is not better
    assert stopped([1.3, 1.2, 1.25], 2) and not stopped([1.3, 1.2, 1.31], 2)


def shape(**sizes) -> DrafterConfig:
    return DrafterConfig(max_position_embeddings=64, vocab_size=100, **sizes)


def test_flops_by_hand():
    """One prompt token and three answer tokens, one TTT step: rows 0 and 1 count, and see one and two keys."""
    c = shape(hidden_size=2, num_attention_heads=1, num_key_value_heads=1, head_dim=2, intermediate_size=3,
              draft_vocab_size=5, num_fc_inputs=2)
    rows = select_rows(torch.tensor([False, True, True, True]), torch.tensor([4]), torch.zeros(4, dtype=torch.long), 1)
    fc, kv, q, o = 4 * 2 * 4 * 2 * 2, 2 * (4 * 2 * 4 * 2) * 2.5, 2 * 2 * 4 * 2 * 2.5, 2 * 2 * 2 * 2 * 3
    mlp = 3 * 2 * 2 * 2 * 3 * 3
    attention, lm_head, teacher = 12 * 2 * (1 + 2), 2 * 2 * 2 * 5 * 3, 2 * 2 * 2 * 5
    assert step_flops(c, 4, rows) == fc + kv + q + o + mlp + attention + lm_head + teacher == 1024


def test_flops_are_those_of_the_benchmarks_workload(monkeypatch):
    """Counted there independently; it counts the few rows at the seam of prompt and answer as well."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    workload = importlib.import_module("workload")
    s = workload.Shape()
    c = DrafterConfig(hidden_size=s.hidden, num_attention_heads=s.heads, num_key_value_heads=s.kv_heads,
                      head_dim=s.head_dim, intermediate_size=s.intermediate, vocab_size=s.target_vocab,
                      draft_vocab_size=s.draft_vocab, max_position_embeddings=4096, num_fc_inputs=s.aux)
    mask = torch.from_numpy(workload.loss_mask(s))
    rows = select_rows(mask, torch.tensor([s.seq_len]), torch.zeros(s.seq_len, dtype=torch.long), s.ttt)
    expected = workload.flops(s, train_lm_head=True, teacher_vocab=s.draft_vocab)["pruned"]
    assert step_flops(c, s.seq_len, rows) == pytest.approx(expected, rel=0.02)


def test_meter_on_a_cpu():
    meter = Meter(torch.device("cpu"), "fp32", ranks=2)
    meter.add(tokens=1000, flops=1e3, waited=0.0)
    found = meter.read()
    assert found["tokens_per_second"] > 0 and 0 <= found["mfu"] < 1 and found["memory_gib"] > 0.05
    assert meter.read()["tokens_per_second"] == 0


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A10G", 70e12),
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA RTX A1000", None), ("Tesla T4", None)])
def test_peaks_by_name(name, peak):
    assert named_peak(name) == peak
