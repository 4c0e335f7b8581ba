"""Every shipped configuration composes and is valid; what is misspelt or out of bounds is an error that names it."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from pipeline.config import Config, load_config
from pipeline.errors import PipelineError

CONF = Path(__file__).resolve().parent.parent / "conf"


def resolved(*overrides: str) -> dict:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)


def choices() -> list[str]:
    groups = [p for p in CONF.iterdir() if p.is_dir()]
    return [f"{g.name}={f.stem}" for g in groups for f in sorted(g.glob("*.yaml")) if f.stem != "local"]


@pytest.mark.parametrize("choice", choices())
def test_every_choice_of_every_group_composes_and_is_valid(choice):
    load_config(resolved(choice))


def test_local_target_needs_only_its_path():
    config = load_config(resolved("target=local", "target.path=/models/x"))
    assert config.target.num_layers is None and config.drafter.head_dim is None


def test_layers_are_given_on_the_command_line():
    assert load_config(resolved("slots.layers=[2,15,27]")).slots.layers == [2, 15, 27]
    assert load_config(resolved()).slots.layers is None


def test_drafter_shape_follows_the_target():
    config = load_config(resolved("target=kimi_k25"))
    assert (config.drafter.num_attention_heads, config.drafter.head_dim) == (64, 128)
    assert config.target.hidden_size == 7168 and config.target.slots_layers == [2, 30, 58]
    assert config.target.trust_remote_code


def test_trust_remote_code_is_never_on_by_itself():
    for choice in choices():
        if choice.startswith("target=") and choice != "target=kimi_k25":
            assert not load_config(resolved(choice)).target.trust_remote_code


def test_sources_to_mix_are_given_on_the_command_line():
    mixed = load_config(resolved("prompts.source=[{path: a.jsonl, weight: 2}, {path: b/, weight: 1, cap: 9}]")).prompts.source
    assert [(s.path, s.weight, s.cap, s.format) for s in mixed] == [("a.jsonl", 2, None, "auto"), ("b/", 1, 9, "auto")]
    assert load_config(resolved()).prompts.source == "builtin"


@pytest.mark.parametrize("override", ["dump.shard_token=5", "slot.layers=[1,2]", "train.learning_rate=1"])
def test_a_misspelt_key_is_an_error(override):
    with pytest.raises(ConfigCompositionException):
        resolved(override)


def test_a_key_added_with_plus_or_in_a_file_is_an_error_too():
    with pytest.raises(PipelineError, match="dump.shard_token = 5"):
        load_config(resolved("+dump.shard_token=5"))


@pytest.mark.parametrize("override", [
    "train.lr=-1", "train.epochs=0", "prompts.top_p=0", "dump.engine=vllm", "run.name=../x", "train.precision=fp8",
    "prompts.source=[{path: a, weigth: 1}]", "prompts.source=[{path: a, weight: 1}, {path: b}]", "slots.layers=3",
    "drafter.num_key_value_heads=2", "export.engines=[]", "verify.checks=[luck]", "seed=-1",
    "train.ema=1.5", "train.early_stop=0", "train.decay_ratio=2", "train.betas=[1.5,0.9]", "train.hard_label_weight=0.1",
])
def test_values_out_of_bounds_are_named(override):
    with pytest.raises(PipelineError) as e:
        load_config(resolved(override))
    assert override.split("=")[0].split(".")[0] in e.value.field


def test_every_key_of_the_typed_model_is_in_the_files():
    """What can be set is visible in conf/: no default hides in code."""
    def keys(model) -> set:
        return set(model.model_fields)

    shipped = resolved()
    shipped.pop("hydra", None)
    assert set(shipped) == keys(Config)
    for name, info in Config.model_fields.items():
        if isinstance(shipped[name], dict):
            assert set(shipped[name]) == keys(info.annotation), name
