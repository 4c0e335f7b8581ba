"""Every target config composes with the checks that need no weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.config import TargetConfig
from pipeline.layers.layer_ids import check_layers, default_layers, derive_sglang_ids
from pipeline.layers.vllm_ids import derive_vllm_ids

# Worked out by hand: layer outputs, the ids of SGLang 0.5.23, and the shape of fc.
EXPECTED = {
    "smollm2_135m": ([1, 14, 26], (1, 14, 26), (1728, 576)),
    "llama31_8b": ([1, 15, 28], (1, 15, 28), (12288, 4096)),
    "qwen3_8b": ([1, 17, 32], (1, 17, 32), (12288, 4096)),
    "gpt_oss_20b": ([1, 11, 20], (1, 11, 20), (8640, 2880)),
    "deepseek_v3": ([1, 29, 57], (1, 29, 57), (21504, 7168)),
    "kimi_k25": ([2, 30, 58], (3, 31, 59), (21504, 7168)),
}

CONFIGS = [Path(__file__).parent.parent / "conf" / "target" / f"{name}.yaml" for name in EXPECTED]


def load(path: Path) -> TargetConfig:
    return TargetConfig(**yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_facts_and_layers(path):
    target = load(path)
    layers, _, fc = EXPECTED[path.stem]
    assert target.name == path.stem
    assert check_layers(target.slots_layers, target.num_layers) == tuple(layers)
    assert (len(layers) * target.hidden_size, target.hidden_size) == fc
    if path.stem != "kimi_k25":
        assert default_layers(target.num_layers) == tuple(layers)
    assert derive_vllm_ids(layers, target.num_layers).ids == tuple(layer + 1 for layer in layers)
    assert target.drafter.num_attention_heads % target.drafter.num_key_value_heads == 0
    assert target.context_length <= target.max_position_embeddings
    assert target.trust_remote_code == (path.stem == "kimi_k25")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_disk_figure_in_the_comment(path):
    """(3 slots + teacher) x H x bytes: the number a user plans with must be right."""
    target = load(path)
    kib = 4 * target.hidden_size * (4 if target.dtype == "fp32" else 2) / 1024
    assert f"= {kib:g} KiB" in path.read_text()


def test_the_kimi_drafter():
    drafter = load(next(path for path in CONFIGS if path.stem == "kimi_k25")).drafter
    assert (drafter.num_attention_heads, drafter.num_key_value_heads, drafter.head_dim) == (64, 64, 128)
    assert drafter.intermediate_size == 18432


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_sglang_ids_can_be_derived_without_weights(path):
    target = load(path)
    text = {"num_hidden_layers": target.num_layers}
    parts = {"text_config": text} if "Kimi" in target.architecture else text
    answer = derive_sglang_ids({"architectures": [target.architecture], **parts}, target.slots_layers)
    assert answer.ids == EXPECTED[path.stem][1]
    assert answer.capture_points == tuple(layer + 1 for layer in target.slots_layers)
