"""Engine layer ids: expectations read by hand from SGLang 0.5.23, and the whole space of lists for every class."""

from __future__ import annotations

import inspect
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import layer_ids, layer_stubs
from pipeline.errors import PipelineError
from pipeline.layer_ids import (
    capture_points_for,
    check_layers,
    default_layers,
    derive_for_class,
    derive_sglang_ids,
    derive_vllm_ids,
    explain_published_ids,
)

N = 12

# Every class of SGLang 0.5.23 that a target can have, outside NPUs. Drafter classes (NextN, MTP, Eagle) are left out.
TARGET_CLASSES = [
    "ApertusForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
    "Cosmos3ForConditionalGeneration", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM",
    "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Glm5NextForConditionalGeneration", "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM", "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "InternS1ProForConditionalGeneration",
    "KimiK25ForConditionalGeneration", "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM",
    "LongcatFlashForCausalLM", "MellumForCausalLM", "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration", "Ministral3ForCausalLM", "MistralForCausalLM",
    "MistralLarge3ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "SarvamMoEForCausalLM",
    "TeleFLMForCausalLM",
]


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


def test_vllm_ids_are_capture_points():
    answer = derive_vllm_ids([2, 30, 58], 61)
    assert answer.ids == answer.capture_points == (3, 31, 59)
    assert "not asked" in answer.note and answer.version is None and not answer.proven
    assert derive_vllm_ids([0, 60], 61).ids == (1, 61)  # id N is the last layer before the norm


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
    return derive_for_class(cls, layer_stubs.read_config(target(cls.__name__, num_layers)), layers)


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
        layer_stubs.num_layers(layer_stubs.read_config(tmp_path))
    with pytest.raises(PipelineError, match="does not exist"):
        layer_stubs.read_config(tmp_path / "missing" / "config.json")


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

    def test_a_class_is_proven_in_the_tested_versions_only(self, monkeypatch):
        monkeypatch.setattr(layer_stubs, "sglang_version", lambda: "0.9.9")
        answer = derive_sglang_ids(target("LlamaForCausalLM", 30), [2, 15, 27])
        assert not answer.proven and answer.version == "0.9.9" and "0.9.9, with which this pipeline" in answer.note

    def test_qwen3(self):
        answer = derive_sglang_ids(target("Qwen3ForCausalLM", 36), [1, 17, 32])
        assert answer.ids == (1, 17, 32) and not answer.proven and "asked on a stub only" in answer.note

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
        layer_stubs.sglang_classes()
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

    def test_the_list_of_classes_is_the_engines(self):
        """A class that SGLang gains must be asked too; NPU-only and drafter classes are the only ones left out."""
        with_method = {n for n, c in layer_stubs.sglang_classes().items() if hasattr(c, layer_stubs.METHOD)}
        others = {n for n in with_method - set(TARGET_CLASSES) if not n.startswith("Qwen3_5")}  # see the next test
        assert set(TARGET_CLASSES) <= with_method
        left_out = ("NextN", "MTP", "Eagle", "Embedding", "Assistant", "MindSpore")
        assert all(any(word in name for word in left_out) for name in others)

    def test_a_class_that_cannot_be_imported_here_says_why(self):
        if "Qwen3_5ForCausalLM" in layer_stubs.sglang_classes():
            answer = derive_sglang_ids(target("Qwen3_5ForCausalLM", N), [1, 5, 8])
            assert answer.ids == (1, 5, 8) and "qwen3_5.py" in answer.rule_source
        else:
            with pytest.raises(PipelineError, match=r"qwen3_5\w*.py cannot be imported on this machine"):
                derive_sglang_ids(target("Qwen3_5ForCausalLM", N), [1, 5, 8])

    @pytest.mark.parametrize("name", sorted(layer_stubs.INNER_CLASSES))
    def test_the_inner_class_is_the_one_that_init_builds(self, name):
        cls = layer_stubs.sglang_classes()[name]
        attribute, inner = layer_stubs.INNER_CLASSES[name]
        assert f"self.{attribute} = {inner}(" in inspect.getsource(cls.__init__)

    @pytest.mark.parametrize("name", TARGET_CLASSES)
    @settings(deadline=None, max_examples=60)
    @given(layers=st.sets(st.integers(0, N - 2), min_size=2).map(sorted))
    def test_derived_ids_capture_exactly_the_wanted_layers(self, name, layers):
        """For every class and every ascending list: the ids, given to a fresh stub, set the wanted points."""
        config = layer_stubs.read_config(target(name, N))
        cls = layer_stubs.sglang_classes()[name]
        answer = derive_for_class(cls, config, layers)  # 0.5.23: every list has ids, so no refusal
        assert layer_stubs.ask(cls, config, list(answer.ids)) == tuple(layer + 1 for layer in layers)
        assert all(0 <= i < N for i in answer.ids) and len(set(answer.ids)) == len(layers)  # what the dump flag accepts
        if layer_stubs.ask(cls, config, layers) == answer.capture_points:
            assert answer.ids == tuple(layers)  # preferred: right under the old always-add-1 rule too

    def test_nothing_is_allocated_at_real_sizes(self):
        import torch

        config = layer_stubs.read_config(wrapper("KimiK25ForConditionalGeneration", 61))
        stub = layer_stubs.build_stub(layer_stubs.model_class(config), config)
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
def test_the_command_prints_json_and_refuses_in_one_message(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(wrapper("KimiK25ForConditionalGeneration", 61)))

    def run(*args):
        command = [sys.executable, "-m", "pipeline.layer_ids", "--config", str(tmp_path), *args]
        root = Path(layer_ids.__file__).parent.parent
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)

    good = run("--layers", "2,30,58")
    assert good.returncode == 0 and json.loads(good.stdout)["ids"] == [3, 31, 59]
    bad = run("--layers", "2,30,60")
    assert bad.returncode == 1 and "slots.layers" in bad.stderr and "Traceback" not in bad.stderr
