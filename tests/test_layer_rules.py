"""The table of rules: complete against SGLang's source, right in words, and compared when the version differs."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from pathlib import Path

import pytest

from pipeline.engines import vllm_env
from pipeline.errors import PipelineError
from pipeline.layers import layer_ids, layer_meaning, layer_rules, layer_stubs, sglang_models
from pipeline.layers.layer_ids import derive_sglang_ids
from pipeline.layers.plain_config import read_target_config
from pipeline.layers.sglang_models import METHOD, CannotBeAsked

RECORDED = Path(layer_rules.__file__).parents[1] / "data" / "layer_rules.json"
LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30}


def config(name: str, num_layers: int) -> dict:
    return {"architectures": [name], "num_hidden_layers": num_layers}


# ---------------------------------------------------------------- words


class Rule:
    """A class whose answers follow `points(ids, N)`."""

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        n = self.config.num_hidden_layers
        self.model.layers_to_capture = self.default(n) if layer_ids is None else self.points(layer_ids, n)


def rule(points, default=lambda n: [2, n // 2, n - 3]):
    return type("Rule", (Rule,), {"points": lambda self, ids, n: points(ids, n), "default": lambda self, n: default(n)})


def up(ids, n):
    return [i + 1 for i in ids]


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (up, "layer outputs"),
        (lambda ids, n: list(ids), "capture points"),
        (lambda ids, n: [i + 2 for i in ids], "capture points +2"),
        (lambda ids, n: up(ids, n) if ids[0] == 1 else list(ids), "capture points unless the first id is 1"),
        (lambda ids, n: up(ids, n) if 1 in ids else list(ids), "capture points unless 1 is among the ids"),
        (lambda ids, n: list(ids) if max(ids) == n else up(ids, n), "layer outputs unless max(ids) == N"),
        (lambda ids, n: list(ids) if ids[-1] == n else up(ids, n), "layer outputs unless the last id is N"),
        (lambda ids, n: list(ids) if max(ids) >= n - 1 else up(ids, n), "layer outputs unless max(ids) >= N-1"),
        (lambda ids, n: up([i for i in ids if range(n - 1)[i] >= 0], n), "layer outputs; fails if max(ids) >= N-1"),
    ],
)
def test_the_words_follow_from_the_answers(points, words):
    for n in (6, 12, 13, 32, 61):
        assert layer_meaning.meaning(rule(points), read_target_config(config("Rule", n))).explicit == words


def test_a_rule_without_words_is_told_by_its_answers():
    said = layer_meaning.meaning(rule(lambda ids, n: [i - i % 2 for i in ids]), read_target_config(config("Rule", 12))).explicit
    assert "[2, 3, 4, 8]: refused" in said and "[2, 4, 8]: layer outputs [1, 3, 7]; [1, 4, 8]: layer outputs [-1, 3, 7]" in said


@pytest.mark.parametrize(
    ("default", "words"),
    [
        (lambda n: [3, n // 2 + 1, n - 2], "capture points 3, N//2+1, N-2"),
        (lambda n: [n // 2, n], "capture points N//2, N"),
        (lambda n: [n // 4, n - 1], "capture points [6, 23] for N = 24; capture points [8, 31] for N = 32; "
                                    "capture points [15, 60] for N = 61"),
    ],
)
def test_no_ids_become_a_formula_where_there_is_one(default, words):
    assert layer_meaning.meaning(rule(up, default), read_target_config(config("Rule", 40))).no_ids == words


# ---------------------------------------------------------------- what runs have shown


def wrapper_of(name: str) -> type:
    return type("Wrapper", (), {"body_cls": type(name, (), {})})


def test_a_wrapper_inherits_a_deviation_and_no_proof():
    gemma, llama = wrapper_of("Gemma3ForCausalLM"), wrapper_of("LlamaForCausalLM")
    assert layer_ids.known_of(llama) is None and layer_ids.known_of(llama.body_cls).proof.deviation is None
    known = layer_ids.known_of(gemma)
    assert known.run is gemma.body_cls and "without the pending residual" in known.proof.deviation
    outermost = type("Outermost", (), {"body_cls": gemma})
    assert layer_ids.known_of(outermost) == known
    assert layer_rules._status(gemma) == f"asked; the class inside it was run: captures {known.proof.deviation}"


def test_the_terminal_says_what_is_known_besides_the_answers():
    names = ("ApertusForCausalLM", "Gemma3ForCausalLM", "Llama4ForCausalLM", "LlamaForCausalLM", "MiniMaxM2ForCausalLM")
    text = layer_rules.as_text([
        layer_rules.LayerRule(name, "layer outputs", "capture points 2, N//2, N-3", "models/x.py X.method",
                              layer_rules._status(type(name, (), {})), target=True) for name in names], 160)
    assert ("ApertusForCausalLM, Gemma3ForCausalLM [3], Llama4ForCausalLM [1], LlamaForCausalLM*, MiniMaxM2ForCausalLM [2]"
            in " ".join(text.split()))
    assert '\n[1] asked; not run, since without a GPU SGLang says "expected m1 and m2 to have the same dtype"\n' in text
    assert "\n[3] run: captures the hidden state without the pending residual" in text


# ---------------------------------------------------------------- the installed SGLang


@pytest.fixture(scope="module")
def rules():
    return layer_rules.layer_rules()


class Source:
    """SGLang's model files, read and not imported."""

    def __init__(self):
        [package] = importlib.util.find_spec("sglang").submodule_search_locations
        self.root = Path(package)
        self.trees = {p.stem: ast.parse(p.read_text()) for p in (self.root / "srt" / "models").glob("*.py")}
        self.classes = {f: {n.name: n for n in t.body if isinstance(n, ast.ClassDef)} for f, t in self.trees.items()}

    def files_with_method(self) -> set[str]:
        return {p.relative_to(self.root.parent).as_posix() for p in self.root.rglob("*.py") if f"def {METHOD}(" in p.read_text()}

    @functools.cached_property
    def architectures(self) -> set[str]:
        """Names in the files' `EntryClass` whose class has the method, itself or from a base."""
        return {name for file, tree in self.trees.items() for node in tree.body if isinstance(node, ast.Assign)
                and getattr(node.targets[0], "id", None) == "EntryClass"
                for name in (n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)) if self.has_method(file, name)}

    def has_method(self, file: str, name: str) -> bool:
        if name not in self.classes[file]:
            origin = self.imported_from(file, name)
            return origin is not None and self.has_method(origin, name)
        node = self.classes[file][name]
        own = any(isinstance(n, ast.FunctionDef) and n.name == METHOD for n in node.body)
        return own or any(self.has_method(file, base.id) for base in node.bases if isinstance(base, ast.Name))

    def imported_from(self, file: str, name: str) -> str | None:
        for node in ast.walk(self.trees[file]):
            if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
                package, _, stem = (node.module or "").rpartition(".")
                return stem if package == "sglang.srt.models" and stem in self.trees else None
        return None


@pytest.mark.slow
class TestInstalledSGLang:
    def test_no_file_and_no_architecture_of_the_source_is_missed(self, rules):
        source = Source()
        decided_in = {step.split(" ")[0] for r in rules for step in r.decided_in.split(" -> ")}
        assert decided_in == source.files_with_method()
        assert len(decided_in) == 29  # SGLang 0.5.23
        assert {r.architecture for r in rules} == source.architectures

    def test_one_class_cannot_be_asked(self, rules):
        [refused] = [r for r in rules if r.explicit is None]
        assert refused.architecture == "MindSporeForCausalLM"  # NPUs; its inner model comes from another package
        assert refused.status.startswith("cannot be asked: ") and "inner model" in refused.status and refused.no_ids is None

    def test_rules_read_by_hand(self, rules):
        """design.md and SGLang 0.5.23's files, read."""
        said = {r.architecture: (r.explicit, r.no_ids) for r in rules}
        usual = "capture points 2, N//2, N-3"
        for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Glm4MoeForCausalLM", "BailingMoeForCausalLM", "Gemma3ForCausalLM",
                     "LongcatFlashForCausalLM"):
            assert said[name] == ("layer outputs", usual)
        for name in ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Glm4MoeLiteForCausalLM"):
            assert said[name] == ("capture points unless the first id is 1", usual)
        assert said["GptOssForCausalLM"] == ("layer outputs unless max(ids) == N", usual)
        assert said["MiniMaxM3SparseForConditionalGeneration"][1] == "capture points 3, N//2+1, N-2"
        assert said["Qwen2MoeForCausalLM"][0] == "layer outputs; fails if max(ids) >= N-1"  # marks layer objects

    def test_the_packaged_table_is_what_the_command_prints(self, rules):
        if sglang_models.sglang_version() != json.loads(RECORDED.read_text())["version"]:
            pytest.skip("the table is of the tested version")
        assert json.loads(json.dumps(layer_rules.as_json(rules))) == json.loads(RECORDED.read_text()), (
            "python -m pipeline.layers.layer_rules --json > pipeline/data/layer_rules.json")

    @pytest.mark.parametrize("width", [72, 100, 200])
    def test_the_table_fits_the_screen_and_names_every_class_once(self, rules, width):
        text = layer_rules.as_text(rules, width)
        assert max(map(len, text.splitlines())) <= max(width, 100)
        words = text.replace("*", "").replace(",", " ").replace(":", " ").split()
        assert all(words.count(r.architecture) == 1 for r in rules)
        table = layer_rules.as_markdown(rules)
        assert table.count("\n") == len(rules) + 1 and all(line.count("|") == 6 for line in table.splitlines())

    def test_one_target_for_its_own_number_of_layers(self, tmp_path, capsys, monkeypatch):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config("DeepseekV3ForCausalLM", 61)))
        monkeypatch.setattr(vllm_env, "installed", lambda: False)
        assert layer_rules.main(["--config", str(path), "--json"]) == 0
        row = json.loads(capsys.readouterr().out)
        assert row["num_layers"] == 61 and row["no_ids_layer_outputs"] == [1, 29, 57] and row["status"] == "proven"
        assert row["default_layers"]["sglang_ids"] == [1, 29, 57] and row["default_layers"]["vllm_ids"] == [2, 30, 58]
        assert layer_rules.main(["--config", str(path)]) == 0
        assert "capture points unless the first id is 1" in capsys.readouterr().out
        path.write_text(json.dumps(config("MindSporeForCausalLM", 61)))
        assert layer_rules.main(["--config", str(path)]) == 1
        assert "target.layer_id_rule" in capsys.readouterr().err


# ---------------------------------------------------------------- another version of SGLang


@pytest.mark.slow
class TestAnotherVersion:
    @pytest.fixture
    def llama(self, monkeypatch):
        """Llama's class of an SGLang 0.9.9 that is otherwise the installed one."""
        cls = sglang_models.sglang_classes()["LlamaForCausalLM"]
        monkeypatch.setattr(sglang_models, "sglang_version", lambda: "0.9.9")
        return lambda method: monkeypatch.setattr(cls, METHOD, method)

    def test_asked_afresh_and_answers_as_before(self, llama):
        answer = derive_sglang_ids(LLAMA, [2, 15, 27])
        assert answer.ids == (2, 15, 27) and answer.version == "0.9.9" and not answer.proven
        assert answer.note.startswith(
            "SGLang 0.9.9 was asked afresh; LlamaForCausalLM answers as in 0.5.23: explicit ids are layer outputs, "
            "no ids are capture points 2, N//2, N-3.")
        assert "No model was compared with transformers in 0.9.9" in answer.note

    def test_a_rule_that_changed_is_followed_and_said(self, llama):
        def literal(self, layer_ids=None):
            self.model.layers_to_capture = list(layer_ids or [2, 5, 7])

        llama(literal)
        answer = derive_sglang_ids(LLAMA, [2, 15, 27])
        assert answer.ids == answer.capture_points == (3, 16, 28)
        assert "LlamaForCausalLM differs: explicit ids are capture points (in 0.5.23: layer outputs); no ids are" in answer.note

    def test_a_class_that_was_not_there(self, monkeypatch, llama):
        monkeypatch.setattr(sglang_models, "recorded_rules", lambda: {"version": "0.5.23", "classes": {}})
        assert "the table recorded with 0.5.23 does not know LlamaForCausalLM" in derive_sglang_ids(LLAMA, [2, 15, 27]).note

    def test_a_method_with_another_signature_is_refused(self, llama):
        def newer(self, layer_ids, mode):
            pass

        llama(newer)
        with pytest.raises(PipelineError, match=r"the API changed: SGLang 0.9.9's LlamaForCausalLM.* 'mode'") as e:
            derive_sglang_ids(LLAMA, [2, 15, 27], "layer_output")  # nor does a stated rule help
        assert "sglang==0.5.23" in e.value.fix and not isinstance(e.value, CannotBeAsked)

    def test_a_method_that_is_gone_is_refused(self, llama):
        llama(None)
        with pytest.raises(PipelineError, match=r"has no set_eagle3_layers.*SGLang 0.5.23 has it: the API changed"):
            derive_sglang_ids(LLAMA, [2, 15, 27])

    def test_a_method_that_writes_elsewhere_cannot_be_asked(self, llama):
        def elsewhere(self, layer_ids=None):
            self.aux_layers = layer_ids

        llama(elsewhere)
        with pytest.raises(CannotBeAsked, match=r"tested: SGLang 0.5.23; the API may have changed.*nothing was set"):
            derive_sglang_ids(LLAMA, [2, 15, 27])
        assert derive_sglang_ids(LLAMA, [2, 15, 27], "layer_output").ids == (2, 15, 27)

    def test_nothing_is_said_of_a_tested_version(self):
        assert "afresh" not in derive_sglang_ids(LLAMA, [2, 15, 27]).note
        assert layer_stubs.is_askable(sglang_models.sglang_classes()["LlamaForCausalLM"], read_target_config(LLAMA))
