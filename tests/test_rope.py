"""RoPE equals transformers' own for every type, and what a drafter gets of it is what engines compute too."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.errors import PipelineError
from pipeline.train.drafter_config import DrafterConfig
from pipeline.train.drafter_rope import drafter_rope
from pipeline.train.rope import Rope, rotate

HEAD_DIM, CONTEXT, ORIGINAL = 16, 64, 32
LENGTHS = [20, 48, 100, 400]  # within the original length, beyond it, beyond the context, far beyond

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SCALED = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, "factor": 4.0,
        "short_factor": [1.0 + 0.1 * n for n in range(8)], "long_factor": [2.0 + n for n in range(8)],
    },
    "longrope, attention_factor": {
        "rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.3,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    },
    "yarn": YARN,
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, mscale as DeepSeek": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, one mscale": YARN | {"mscale_all_dim": 1.0},
    "yarn, attention_factor": YARN | {"attention_factor": 1.25},
    "yarn, attention_factor before mscale": YARN | {"attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, betas": YARN | {"beta_fast": 4.0, "beta_slow": 0.5},
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 5.0},
    "yarn, factor below 1": YARN | {"factor": 0.5},
}  # fmt: skip
PARTIAL = {
    f"{name}, half of each head": {key: value[:4] if isinstance(value, list) else value for key, value in rope.items()}
    | {"partial_rotary_factor": 0.5}
    for name, rope in SCALED.items()
}


def rope_of(parameters: dict) -> dict:
    return {"rope_theta": 10000.0, **parameters}


def theirs(parameters: dict, x: torch.Tensor) -> torch.Tensor:
    """x [length, heads, head_dim] rotated by transformers: Llama's module, or Phi-3's, which knows partial factors."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        head_dim=HEAD_DIM, hidden_size=2 * HEAD_DIM, num_attention_heads=2, max_position_embeddings=CONTEXT,
        rope_parameters=rope_of(parameters),
    )  # fmt: skip
    module = (Phi3RotaryEmbedding if "partial_rotary_factor" in parameters else LlamaRotaryEmbedding)(config)
    cos, sin = module(x, torch.arange(len(x))[None])
    heads_first = x.transpose(0, 1)[None]
    return apply_rotary_pos_emb(heads_first, heads_first, cos, sin)[0][0].transpose(0, 1)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SCALED | PARTIAL)
def test_equals_transformers(name, length):
    parameters = (SCALED | PARTIAL)[name]
    x = torch.randn(length, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    rope = Rope(HEAD_DIM, rope_of(parameters), CONTEXT)
    found = rotate(x, *rope.cos_sin(torch.arange(length), torch.full((length,), length), torch.device("cpu")))
    assert torch.equal(found, theirs(parameters, x))


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_sample_does_not_depend_on_its_neighbours(name):
    """Nor does anything else, but the frequencies of these depend on a length: on that of the sample."""
    rope = Rope(HEAD_DIM, rope_of(SCALED[name]), CONTEXT)
    lengths = torch.tensor([20, 100])
    position = torch.cat([torch.arange(n) for n in lengths.tolist()])
    packed = rope.cos_sin(position, lengths.repeat_interleave(lengths), torch.device("cpu"))[0]
    alone = [rope.cos_sin(torch.arange(n), torch.full((n,), n), torch.device("cpu"))[0] for n in lengths.tolist()]
    assert torch.equal(packed, torch.cat(alone))


def test_an_unknown_type_is_refused_at_construction():
    with pytest.raises(PipelineError, match="spiral"):
        Rope(HEAD_DIM, {"rope_type": "spiral", "rope_theta": 1e4}, 64)


# -- what a drafter gets --


@pytest.mark.parametrize("name", [name for name in SCALED if "dynamic" not in name and "longrope" not in name])
def test_a_drafter_rotates_as_its_target(name):
    rope = rope_of(SCALED[name])
    position = torch.arange(300)
    wanted, found = (
        torch.stack(Rope(HEAD_DIM, r, CONTEXT).cos_sin(position, torch.full_like(position, 300), torch.device("cpu")))
        for r in (rope, drafter_rope(rope))
    )
    assert torch.allclose(found, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [name for name in SCALED if name.startswith("yarn")])
def test_engines_read_the_same_magnitude_out_of_yarn(name):
    """SGLang and older vLLM: YaRN's own magnitude times attn_factor; newer vLLM and transformers: attention_factor."""
    rope = drafter_rope(rope_of(SCALED[name]))
    own = 0.1 * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0
    assert own * rope.get("attn_factor", 1.0) == pytest.approx(rope.get("attention_factor", own))
    assert not {"mscale", "mscale_all_dim"} & rope.keys()
    assert ("attn_factor" in rope) == ("attention_factor" in rope) == (name in (
        "yarn, mscale", "yarn, mscale as DeepSeek", "yarn, attention_factor", "yarn, attention_factor before mscale"))


def test_a_type_that_follows_the_length_becomes_the_default_one():
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    for name in ("dynamic", "longrope"):
        assert drafter_rope(rope_of(SCALED[name])) == plain
    assert drafter_rope(rope_of({"rope_type": "default", "partial_rotary_factor": 0.5})) == plain


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCALED | PARTIAL if "below 1" not in name])  # SGLang's ends early
def test_sglang_rotates_every_drafter_as_the_trainer_does(name):
    from pipeline.engines.engine import prepare_environment
    from pipeline.export.rope_check import check_rope

    prepare_environment("cpu")
    check_rope(DrafterConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD_DIM,
        vocab_size=512, draft_vocab_size=128, max_position_embeddings=CONTEXT,
        rope_parameters=drafter_rope(rope_of((SCALED | PARTIAL)[name])),
    ))  # fmt: skip
