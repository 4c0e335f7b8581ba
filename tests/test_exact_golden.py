"""The real trainer follows the dense reference step by step."""

from __future__ import annotations

import json

import pytest
import torch

from pipeline.samples import read_samples
from tests.dense_training import GOLDEN, SETTINGS, STEPS, dense_curve, golden_run
from tests.tiny_run import TinyRun
from tests.train_cases import metrics


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TinyRun:
    return golden_run(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def golden(run) -> dict:
    curve = json.loads(GOLDEN.read_text())
    tokens = sum(sum(s.input_ids) for s in read_samples(run.folder / "prompts" / "samples.parquet"))
    assert tokens == curve["sum_of_all_token_ids"], "other samples than the curve was made with"
    return curve


def test_thirty_steps_follow_the_golden_curve(run, golden):
    """fp32 in the trainer, fp64 in the dense reference."""
    run.stage("train", **SETTINGS)
    logged = [line for line in metrics(run) if "mean_loss" in line]
    assert [line["step"] for line in logged] == list(range(1, STEPS + 1))
    for line, loss, norm in zip(logged, golden["loss"], golden["grad_norm"], strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-4), line["step"]
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-3), line["step"]


def test_the_golden_curve_is_the_dense_references(run, golden):
    curve = dense_curve(run)
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(torch.tensor(curve[name]), torch.tensor(golden[name]), rtol=1e-5, atol=0)
