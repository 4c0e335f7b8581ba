"""Engine layer ids: expectations read by hand from SGLang 0.5.23, and the whole space of lists for every class."""

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.layers import layer_ids, layer_stubs, sglang_models
from pipeline.layers.layer_ids import (
    capture_points_for,
    check_layers,
    default_layers,
    derive_for_class,
    derive_sglang_ids,
    explain_published_ids,
)
from pipeline.layers.plain_config import num_layers, read_target_config
from pipeline.layers.sglang_models import CannotBeAsked

N = 12

RULES = json.loads((Path(layer_ids.__file__).parents[1] / "data" / "layer_rules.json").read_text())["classes"]
CLASSES = [name for name, rule in RULES.items() if rule["explicit"]]  # test_layer_rules proves that none is missing


def target(architecture: str, num_layers: int) -> dict:
    return {"architectures": [architecture], "num_hidden_layers": num_layers}


def wrapper(architecture: str, num_layers: int) -> dict:
    return {"architectures": [architecture], "text_config": {"num_hidden_layers": num_layers}}


# ---------------------------------------------------------------- what may be asked for


def test_good_layers_come_back_as_a_tuple():
    assert check_layers([2, 15, 27], 30) == (2, 15, 27)
    assert check_layers([0, 1, 2, 3, 28], 30) == (0, 1, 2, 3, 28)
    assert check_layers([0, 29], 30, allow_last=True) == (0, 29)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([5], "two or more"),
        ([], "two or more"),
        ([-1, 2, 30], "captures the embedding"),
        ([2, 2, 5], "strictly ascending"),
        ([15, 2, 27], "strictly ascending"),
        ([2, 15, 30], "the outputs are 0 to 29"),
        ([2, 15, 29], "the last one"),
        ([True, 2, 3], "whole number"),
        ([2.0, 15, 27], "whole number"),
        (["2", 15], "whole number"),
        ("2,15,27", "must be a list"),
        (7, "must be a list"),
    ],
)
def test_bad_layers_are_refused_with_a_command_that_works(layers, says):
    with pytest.raises(PipelineError) as e:
        check_layers(layers, 30)
    assert says in str(e.value) and e.value.field == "slots.layers"
    suggested = json.loads(e.value.fix.partition("slots.layers=")[2].rstrip('"'))
    assert check_layers(suggested, 30) == tuple(suggested)


def test_default_layers_are_low_middle_high():
    assert default_layers(30) == (1, 14, 26)
    assert default_layers(61) == (1, 29, 57)
    for n in range(7, 200):
        assert check_layers(default_layers(n), n) == default_layers(n)
    for n in range(1, 7):
        with pytest.raises(PipelineError, match="too few"):
            default_layers(n)


@given(n=st.integers(1, 12), layers=st.lists(st.integers(-2, 13), max_size=4), allow_last=st.booleans())
def test_layers_are_accepted_or_refused_by_the_rule_and_nothing_else_happens(n, layers, allow_last):
    limit = n if allow_last else n - 1
    good = len(layers) >= 2 and sorted(set(layers)) == layers and layers[0] >= 0 and layers[-1] < limit
    if good:
        assert check_layers(layers, n, allow_last=allow_last) == tuple(layers)
    else:
        with pytest.raises(PipelineError, match="slots.layers"):
            check_layers(layers, n, allow_last=allow_last)


# ---------------------------------------------------------------- classes that misbehave


class AddsOne:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.model.layers_to_capture = [i + 1 for i in layer_ids]


class AddsTwo:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.model.layers_to_capture = [i + 2 for i in layer_ids]


class SetsNothing:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        pass


class FallsBackToItsDefault:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        n = self.config.num_hidden_layers
        self.model.layers_to_capture = [2, n // 2, n - 3]


class MarksOtherLayersThanItLists:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.model.layers_to_capture = [i + 1 for i in layer_ids]
        for i in layer_ids:
            self.model.layers[i]._is_layer_to_capture = True


class OnlyEvenLayers:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.model.layers_to_capture = [i - i % 2 for i in layer_ids]


class LargestIdFirst:
    """Made up: takes the ids literally only when the list descends."""

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.model.layers_to_capture = list(layer_ids) if layer_ids[0] > layer_ids[-1] else [0 for _ in layer_ids[:1]]


def derive(cls, layers, num_layers=N):
    return derive_for_class(cls, read_target_config(target(cls.__name__, num_layers)), layers)


def test_made_up_rules_are_found_out():
    assert derive(AddsOne, [1, 5, 8]).ids == (1, 5, 8)
    assert derive(AddsTwo, [1, 5, 8]).ids == (0, 4, 7)
    descending = derive(LargestIdFirst, [1, 5, 8])
    assert sorted(descending.ids) == [2, 6, 9] and descending.capture_points == (2, 6, 9)
    assert not descending.proven and "stub only" in descending.note


def test_ids_that_would_be_negative_are_not_an_answer():
    with pytest.raises(PipelineError, match="no ids make"):
        derive(AddsTwo, [0, 5])


@pytest.mark.parametrize(
    ("cls", "layers", "says"),
    [
        (SetsNothing, [2, 5, 7], "nothing was set"),
        (FallsBackToItsDefault, [2, 5, 7], "no ids make"),
        # The default layers of the pipeline are the engine's default too: right by accident is still wrong.
        (FallsBackToItsDefault, [1, 5, 8], "whatever ids it is given"),
        (MarksOtherLayersThanItLists, [2, 5, 7], "different things in different places"),
        (OnlyEvenLayers, [2, 5, 7], "no ids make"),
    ],
)
def test_classes_that_do_not_do_as_told_are_refused(cls, layers, says):
    with pytest.raises(PipelineError, match=says) as e:
        derive(cls, layers)
    assert e.value.fix


def all_layers(n: int) -> list[list[int]]:
    """Every ascending list of two or more layer outputs that may be asked for."""
    return [list(c) for size in range(2, n) for c in itertools.combinations(range(n - 1), size)]


def check_against_exhaustive_search(cls, layers: list[int], n: int) -> None:
    """Ids are derived exactly if some list of ids, in any order, leads to these layers."""
    config, wanted = read_target_config(target(cls.__name__, n)), tuple(layer + 1 for layer in layers)

    def captured(ids):
        try:
            return layer_stubs.ask(cls, config, list(ids))
        except ValueError:
            return None

    try:
        assert captured(derive_for_class(cls, config, layers).ids) == wanted
    except PipelineError as e:
        if "whatever ids" not in e.what:
            assert not any(captured(ids) == wanted for ids in itertools.permutations(range(n), len(layers)))


CONDITIONS = {
    "first": lambda ids, n, k: ids[0] == k,
    "contains": lambda ids, n, k: k in ids,
    "largest": lambda ids, n, k: max(ids) == n - k,
    "ascending": lambda ids, n, k: ids == sorted(ids),
    "smallest first": lambda ids, n, k: ids[0] == min(ids),
    "many": lambda ids, n, k: len(ids) > k,
}


@settings(deadline=None, max_examples=25)
@given(condition=st.sampled_from(sorted(CONDITIONS)), k=st.integers(0, 4), usual=st.integers(0, 2), otherwise=st.integers(0, 2))
def test_whatever_the_rule_ids_are_found_exactly_where_there_are_some(condition, k, usual, otherwise):
    """Rules that shift a list by one of two numbers, depending on a property of the list."""

    class Invented:
        def set_eagle3_layers_to_capture(self, layer_ids=None):
            applies = CONDITIONS[condition](layer_ids, self.config.num_hidden_layers, k)
            self.model.layers_to_capture = [i + (otherwise if applies else usual) for i in layer_ids]

    for layers in all_layers(4):
        check_against_exhaustive_search(Invented, layers, 4)


@pytest.mark.parametrize("cls", [AddsOne, AddsTwo, OnlyEvenLayers, LargestIdFirst, SetsNothing])
def test_a_refusal_means_that_no_ids_exist(cls):
    for layers in all_layers(5):
        check_against_exhaustive_search(cls, layers, 5)


# ---------------------------------------------------------------- a rule stated by the user


def test_a_class_that_cannot_be_asked_is_refused_with_the_key_that_states_the_rule():
    with pytest.raises(CannotBeAsked, match="SetsNothing cannot be asked") as e:
        derive(SetsNothing, [2, 5, 7])
    assert e.value.field == "target.layer_id_rule" and "target.layer_id_rule=layer_output" in e.value.fix


@pytest.mark.parametrize(("rule", "ids"), [("layer_output", (2, 5, 7)), ("capture_point", (3, 6, 8))])
def test_a_stated_rule_stands_in_for_the_answer(monkeypatch, rule, ids):
    monkeypatch.setattr(sglang_models, "model_class", lambda config: SetsNothing)
    config = target("SetsNothing", N)
    answer = derive_sglang_ids(config, [2, 5, 7], rule)
    assert answer.ids == ids and answer.capture_points == (3, 6, 8) and answer.model_class == "SetsNothing"
    assert answer.rule_source == "stated by target.layer_id_rule" and not answer.proven
    assert capture_points_for(config, list(ids), rule) == (3, 6, 8)
    with pytest.raises(PipelineError, match="nothing was set"):
        capture_points_for(config, list(ids))
    with pytest.raises(PipelineError, match="nothing was set"):
        capture_points_for(config, None, rule)


def test_a_stated_rule_that_the_class_contradicts_is_refused(monkeypatch):
    monkeypatch.setattr(sglang_models, "model_class", lambda config: AddsOne)
    config = target("AddsOne", N)
    assert derive_sglang_ids(config, [2, 5, 7], "layer_output").rule_source.endswith("AddsOne.set_eagle3_layers_to_capture")
    with pytest.raises(PipelineError, match=r"answers otherwise: ids \[3,6,8\] make it capture layer outputs \[3,6,8\]") as e:
        derive_sglang_ids(config, [2, 5, 7], "capture_point")
    assert e.value.field == "target.layer_id_rule"
    assert capture_points_for(config, [2, 5], "capture_point") == (3, 6)  # its own answer, not the stated one


def test_every_trial_gets_a_fresh_stub():
    seen = []

    class Remembers(AddsOne):
        def set_eagle3_layers_to_capture(self, layer_ids=None):
            seen.append((self, self.model, self.model.layers))
            super().set_eagle3_layers_to_capture(layer_ids)

    derive(Remembers, [2, 5])
    for a, b in itertools.combinations(seen, 2):
        assert all(x is not y for x, y in zip(a, b, strict=True))


def test_config_without_a_layer_count_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(PipelineError, match="num_hidden_layers"):
        num_layers(read_target_config(tmp_path))
    with pytest.raises(PipelineError, match="does not exist"):
        read_target_config(tmp_path / "missing" / "config.json")


# ---------------------------------------------------------------- the installed SGLang


@pytest.mark.slow
class TestInstalledSGLang:
    """Imports SGLang's models once (some 15 s); no engine is started."""

    def test_llama_ids_are_layer_outputs(self):
        answer = derive_sglang_ids(target("LlamaForCausalLM", 30), [2, 15, 27])
        assert answer.ids == (2, 15, 27) and answer.capture_points == (3, 16, 28)
        assert (answer.engine, answer.model_class, answer.proven) == ("sglang", "LlamaForCausalLM", True)
        assert answer.rule_source == "sglang/srt/models/llama.py LlamaForCausalLM.set_eagle3_layers_to_capture"

    def test_deepseek_ids_are_capture_points_unless_the_first_is_1(self):
        deepseek = target("DeepseekV3ForCausalLM", 61)
        answer = derive_sglang_ids(deepseek, [2, 30, 58])
        assert answer.ids == answer.capture_points == (3, 31, 59)
        assert derive_sglang_ids(deepseek, [1, 29, 57]).ids == (1, 29, 57)
        assert derive_sglang_ids(target("DeepseekV3ForCausalLM", 8), [1, 4]).ids == (1, 4)
        assert capture_points_for(deepseek, [2, 4]) == (2, 4)
        assert capture_points_for(deepseek, [1, 4]) == (2, 5)

    def test_deepseek_layer_0_needs_an_order_that_does_not_start_with_1(self):
        answer = derive_sglang_ids(target("DeepseekV3ForCausalLM", 8), [0, 4])
        assert answer.ids == (5, 1) and answer.capture_points == (1, 5)

    def test_gpt_oss_ids_are_layer_outputs_unless_one_is_n(self):
        gpt_oss = target("GptOssForCausalLM", 24)
        assert derive_sglang_ids(gpt_oss, [1, 11, 20]).ids == (1, 11, 20)
        assert capture_points_for(gpt_oss, [2, 12, 24]) == (2, 12, 24)

    def test_a_class_of_which_no_model_was_run(self):
        answer = derive_sglang_ids(target("ApertusForCausalLM", 36), [1, 17, 32])
        assert answer.ids == (1, 17, 32) and not answer.proven and "asked on a stub only" in answer.note

    def test_a_class_that_was_run_and_delivers_something_else(self):
        answer = derive_sglang_ids(target("Gemma3ForCausalLM", 36), [1, 17, 32])
        assert answer.ids == (1, 17, 32) and not answer.proven and "without the pending residual" in answer.deviation
        assert "right for SGLang only" in answer.note

    def test_a_wrapper_around_such_a_class(self):
        """Gemma 3 from 4B on comes as Gemma3ForConditionalGeneration."""
        answer = derive_sglang_ids(wrapper("Gemma3ForConditionalGeneration", 36), [1, 17, 32])
        assert not answer.proven and "without the pending residual" in answer.deviation
        assert "a model of Gemma3ForCausalLM, which this class wraps, was run" in answer.note
        assert "right for SGLang only" in answer.note
        kimi = derive_sglang_ids(wrapper("KimiK25ForConditionalGeneration", 61), [2, 30, 58])  # around a proven class
        assert not kimi.proven and kimi.deviation is None and "asked on a stub only" in kimi.note

    @pytest.mark.parametrize(
        ("architecture", "layers", "ids", "asked"),
        [
            ("KimiK25ForConditionalGeneration", [2, 30, 58], (3, 31, 59), "deepseek_v2.py"),
            ("KimiK25ForConditionalGeneration", [1, 29, 57], (1, 29, 57), "deepseek_v2.py"),
            ("Gemma3ForConditionalGeneration", [2, 30, 58], (2, 30, 58), "gemma3_causal.py"),
            ("Llama4ForConditionalGeneration", [2, 30, 58], (2, 30, 58), "llama.py"),
            ("Qwen3VLMoeForConditionalGeneration", [2, 30, 58], (2, 30, 58), "qwen2_moe.py"),
            ("Qwen3VLForConditionalGeneration", [2, 30, 58], (2, 30, 58), "qwen3_vl.py"),
        ],
    )
    def test_wrappers_follow_their_language_model(self, architecture, layers, ids, asked):
        answer = derive_sglang_ids(wrapper(architecture, 61), layers)
        assert answer.ids == ids and answer.model_class == architecture
        assert asked in answer.rule_source.split(" -> ")[-1]

    def test_no_ids_means_the_engines_default(self):
        assert capture_points_for(target("LlamaForCausalLM", 30), None) == (2, 15, 27)
        assert capture_points_for(target("MiniMaxM3SparseForConditionalGeneration", 30), None) == (3, 16, 28)

    def test_the_published_list_of_the_kimi_story(self):
        assert explain_published_ids(wrapper("KimiK25ForConditionalGeneration", 61), [2, 30, 58]) == {
            "the installed SGLang": (1, 29, 57),
            "an SGLang that always adds 1": (2, 30, 58),
            "capture points (vLLM, speculators)": (1, 29, 57),
        }

    def test_a_transformers_config_and_a_folder_give_the_same_answer(self, tmp_path):
        sglang_models.sglang_classes()
        from transformers import DeepseekV3Config

        config = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], num_hidden_layers=61)
        config.save_pretrained(tmp_path)
        assert derive_sglang_ids(config, [2, 30, 58]) == derive_sglang_ids(tmp_path, [2, 30, 58])

    def test_a_class_without_the_method_is_refused(self):
        with pytest.raises(PipelineError, match="MixtralForCausalLM has no set_eagle3_layers_to_capture") as e:
            derive_sglang_ids(target("MixtralForCausalLM", 32), [1, 15, 28])
        assert e.value.field == "architectures"

    def test_an_unknown_architecture_is_refused(self):
        with pytest.raises(PipelineError, match="offers no model class"):
            derive_sglang_ids(target("NobodysForCausalLM", 32), [1, 15, 28])

    def test_a_class_that_this_machine_can_only_ask(self):
        """Qwen3.5's file looks up a CPU kernel that PyPI does not carry."""
        config = target("Qwen3_5ForCausalLM", N)
        answer = derive_sglang_ids(config, [1, 5, 8])
        assert answer.ids == (1, 5, 8) and "qwen3_5.py" in answer.rule_source
        if "Qwen3_5ForCausalLM" in sglang_models.sglang_classes():
            sglang_models.check_loadable(read_target_config(config))
        else:
            with pytest.raises(PipelineError, match="cannot load Qwen3_5ForCausalLM on this machine") as e:
                sglang_models.check_loadable(read_target_config(config))
            assert "dump.engine=transformers" in e.value.fix
            assert not hasattr(__import__("torch").ops.sgl_kernel, "fused_sigmoid_mul_cpu")  # no placeholder is left

    def test_a_class_that_cannot_be_imported_here_says_why_and_may_be_stated(self, monkeypatch):
        monkeypatch.setattr(sglang_models, "unregistered_classes", lambda: {"XForCausalLM": "x.py needs a package"})
        with pytest.raises(CannotBeAsked, match="x.py needs a package"):
            derive_sglang_ids(target("XForCausalLM", N), [1, 5, 8])
        answer = derive_sglang_ids(target("XForCausalLM", N), [1, 5, 8], "capture_point")
        assert answer.ids == (2, 6, 9) and answer.model_class == "XForCausalLM" and not answer.proven

    @pytest.mark.parametrize("name", sorted(layer_stubs.INNER_CLASSES))
    def test_the_inner_class_is_the_one_that_init_builds(self, name):
        cls = sglang_models.sglang_classes()[name]
        attribute, inner = layer_stubs.INNER_CLASSES[name]
        assert f"self.{attribute} = {inner}(" in inspect.getsource(cls.__init__)

    @pytest.mark.parametrize("name", CLASSES)
    @settings(deadline=None, max_examples=12)
    @given(layers=st.sets(st.integers(0, N - 2), min_size=2).map(sorted))
    def test_derived_ids_capture_exactly_the_wanted_layers(self, name, layers):
        """For every class and every ascending list: the ids, given to a fresh stub, set the wanted points."""
        config = read_target_config(target(name, N))
        cls = sglang_models.eagle3_classes()[name]
        answer = derive_for_class(cls, config, layers)  # 0.5.23: every list has ids, so no refusal
        assert layer_stubs.ask(cls, config, list(answer.ids)) == tuple(layer + 1 for layer in layers)
        assert all(0 <= i < N for i in answer.ids) and len(set(answer.ids)) == len(layers)  # what the dump flag accepts
        if layer_stubs.ask(cls, config, layers) == answer.capture_points:
            assert answer.ids == tuple(layers)  # preferred: right under the old always-add-1 rule too

    @pytest.mark.parametrize("name", CLASSES)
    def test_every_list_of_a_small_target_has_ids_or_provably_none(self, name):
        cls = sglang_models.eagle3_classes()[name]
        for layers in all_layers(5):
            check_against_exhaustive_search(cls, layers, 5)

    def test_nothing_is_allocated_at_real_sizes(self):
        import torch

        config = read_target_config(wrapper("KimiK25ForConditionalGeneration", 61))
        stub = layer_stubs.build_stub(sglang_models.model_class(config), config)
        assert not list(stub.parameters()) and not list(stub.buffers())
        assert isinstance(stub, torch.nn.Module)

    def test_reads_a_live_model(self):
        """The same reader serves on the engine's loaded model, where layers sit in a ModuleList."""
        from torch import nn

        live, live.model = nn.Module(), nn.Module()
        live.model.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
        live.model.layers_to_capture = [3, 1]
        assert layer_stubs.read_capture_points(live) == (1, 3)
        for i in (1, 3):
            live.model.layers[i]._is_layer_to_capture = True
        assert layer_stubs.read_capture_points(live) == (1, 3)
        live.model.layers[2]._is_layer_to_capture = True
        with pytest.raises(ValueError, match="different things"):
            layer_stubs.read_capture_points(live)


@pytest.mark.slow
def test_the_command_prints_json_and_refuses_in_one_message(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(wrapper("KimiK25ForConditionalGeneration", 61)))
    assert layer_ids.main(["--config", str(tmp_path), "--layers", "2,30,58"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == [3, 31, 59]
    assert layer_ids.main(["--config", str(tmp_path), "--ids", "[2,30,58]"]) == 0
    assert json.loads(capsys.readouterr().out)["the installed SGLang"] == [1, 29, 57]
    assert layer_ids.main(["--config", str(tmp_path), "--layers", "2,30,60"]) == 1
    assert "slots.layers" in capsys.readouterr().err
