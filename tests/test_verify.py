"""Stage 6 as a whole: every check runs, what it found is kept, doctored exports are named; table and page."""

import html.parser
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import pipeline.verify.verify as verify_module
from pipeline.errors import PipelineError
from pipeline.export.export import export
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.states import describe
from pipeline.verify.verify import CHECKS, draft_contents, run_check, verify
from pipeline.verify.verify_report import html as page
from pipeline.verify.verify_report import terminal
from tests.conftest import LEARNED_SETTINGS
from tests.tiny_disk import fill, tiny_disk
from tests.tiny_run import TinyRun

OFFLINE = ["files", "replay", "wiring"]


@pytest.fixture
def draft(learned, tmp_path) -> Path:
    """A copy of the export to doctor."""
    return shutil.copytree(learned.folder / "export" / "sglang", tmp_path / "draft")


def run_verify(run: TinyRun, folder: Path, draft: Path | None = None, checks: list[str] = OFFLINE):
    target, config = run.config(**LEARNED_SETTINGS, **{"verify.checks": checks, "verify.draft": draft and str(draft)})
    return verify(config, target, run.manifest, run.folder, folder)


def problems(run: TinyRun, folder: Path, draft: Path, checks: list[str] = OFFLINE) -> dict[str, list[str]]:
    """Check → problems of an export that must not pass."""
    with pytest.raises(PipelineError, match="did not pass"):
        run_verify(run, folder, draft, checks)
    found = json.loads((folder / "verify.json").read_text())
    assert found["holds"] is False and found["draft"] == str(draft)
    return {name: check["problems"] for name, check in found["checks"].items() if not check["holds"]}


def change_config(draft: Path, **changes: object) -> None:
    path = draft / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(draft: Path, changes: dict) -> None:
    weights = load_file(draft / "model.safetensors")
    save_file({k: v for k, v in (weights | changes).items() if v is not None}, draft / "model.safetensors")


# ---------------------------------------------------------------- the stage


def test_an_export_that_is_right_passes_and_is_recorded(learned, tmp_path, capsys):
    result = run_verify(learned, tmp_path)
    found = json.loads((tmp_path / "verify.json").read_text())
    assert found["holds"] and list(found["checks"]) == OFFLINE and set(found["not_run"]) == set(CHECKS) - set(OFFLINE)
    assert result.outputs == [tmp_path / "verify.json", tmp_path / "verify.html"]
    assert result.metrics["replay.replayed_accuracy"] == found["checks"]["replay"]["measured"]["replayed_accuracy"]
    assert result.counts["wiring.mistakes_better"] == 0
    said = capsys.readouterr().out
    assert "verify: replay (2 of 3)" in said
    for name in OFFLINE:
        assert re.search(rf"^  {name} +holds ", said, re.M)
    assert re.search(r"^  serve +not run +not asked for", said, re.M)


def test_all_checks_run_when_one_fails_or_breaks(learned, tmp_path, monkeypatch, capsys):
    def refuses(subject):
        raise PipelineError("the engine did not start", fix="look at its log")

    def breaks(subject):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(verify_module, "CHECKS", {
        "files": f"{__name__}:_refuses", "replay": f"{__name__}:_breaks", "wiring": CHECKS["wiring"]})
    monkeypatch.setitem(globals(), "_refuses", refuses)
    monkeypatch.setitem(globals(), "_breaks", breaks)
    found = problems(learned, tmp_path, learned.folder / "export" / "sglang")
    assert found == {"files": ["the engine did not start\n  mend:  look at its log"],
                     "replay": ["the check broke off: ZeroDivisionError: division by zero"]}
    said = capsys.readouterr().out
    assert re.search(r"^  wiring +holds ", said, re.M) and "    mend:  look at its log" in said


def test_every_registered_check_can_be_imported():
    for name, where in CHECKS.items():
        module, function = where.split(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function)), name


def test_by_default_all_checks_run_but_a_vllm_that_is_not_there(learned, tmp_path, monkeypatch):
    target, config = learned.config()
    assert config.verify.checks is None and config.verify.draft is None
    subject = Subject(config, target, learned.manifest, learned.folder, tmp_path, tmp_path)
    for installed, why in ((False, "make install-vllm"), (True, "no vLLM export")):
        monkeypatch.setattr("pipeline.engines.vllm_env.installed", lambda installed=installed: installed)
        names, left_out = verify_module._selected(subject)
        assert names == [n for n in CHECKS if n != "serve_vllm"] and why in left_out["serve_vllm"]


def test_no_export_at_all(learned, tmp_path):
    with pytest.raises(PipelineError, match="no SGLang export"):
        run_verify(learned, tmp_path, tmp_path / "nowhere")


def test_another_export_is_checked_anew_when_its_files_change(learned, draft):
    _, config = learned.config(**{"verify.draft": str(draft)})
    before = draft_contents(config)
    assert set(before) == {"draft/config.json", "draft/model.safetensors"}
    change_config(draft, rms_norm_eps=1e-5)
    assert draft_contents(config) != before
    assert draft_contents(learned.config()[1]) is None


def test_a_full_disk_is_one_message(learned, tmp_path):
    with tiny_disk(tmp_path / "verify", "64k"):
        fill(tmp_path / "verify")
        with pytest.raises(PipelineError, match="disk is full"):
            run_verify(learned, tmp_path / "verify", checks=["replay"])
        assert [p.name for p in (tmp_path / "verify").iterdir()] == ["filler"]


# ---------------------------------------------------------------- doctored exports


def test_ids_of_another_convention(learned, tmp_path, draft):
    change_config(draft, eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]})
    found = problems(learned, tmp_path, draft)
    assert found == {"files": ["slot fc.2: ids [0, 2, 3] make the installed SGLang capture layer output 3; the manifest says 4"]}


def test_ids_in_another_order_are_the_same_wiring(learned, tmp_path, draft):
    change_config(draft, eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [4, 0, 2]})
    run_verify(learned, tmp_path, draft)


@pytest.mark.parametrize("changes, words", [
    ({"norm_output": True}, "norm_output = True, the drafter was trained without it"),
    ({"use_aux_norm": True}, "use_aux_norm = True, the drafter was trained without it"),
    ({"partial_rotary_factor": 0.5}, "SGLang would rotate only a part of each head"),
    ({"rope_is_neox_style": False}, "SGLang would rotate neighbouring pairs"),
    ({"quantization_config": {"quant_method": "fp8"}}, "the drafter was trained without it"),
    ({"norm_before_residual": True}, "norm_before_residual = True, the drafter was trained without it"),
    ({"model_type": "no-such-model"}, "SGLang cannot read config.json"),
    ({"rms_norm_eps": 1e-3}, "rms_norm_eps = 0.001"),
    ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope"),
    ({"architectures": ["LlamaForCausalLM"]}, "SGLang picks the drafter's class by it"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"max_position_embeddings": 100}, "must be at least the served context"),
    ({"fc_norm": True}, "fc_norm is set, but its weight is not there"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_fields_that_were_changed(learned, tmp_path, draft, changes, words):
    change_config(draft, **changes)
    assert any(words in problem for problem in problems(learned, tmp_path, draft)["files"])


@pytest.mark.parametrize("text, words", [
    ('{"eagle_config": [1]}', "eagle_config = [1] is not an object"),
    ('{"rope_parameters": "yarn"}', "rope_parameters = 'yarn' is not an object"),
    ('{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [NaN, 2]}}', "it holds NaN"),
    ('{"model_type": "\\ud800"}', "surrogates not allowed"),
    ("[" * 100_000, "recursion"),
])
def test_a_config_that_nobody_could_have_written_is_refused_by_every_check(learned, tmp_path, draft, text, words):
    (draft / "config.json").write_text(text)
    found = problems(learned, tmp_path, draft)
    assert all(words in found[check][0] and "make export" in found[check][0] for check in OFFLINE)


@pytest.mark.parametrize("rope", [None, {"rope_type": "yarn", "rope_theta": 1e4}, {"rope_type": "no-such-rope"}])
def test_a_rope_that_cannot_be_built_is_named_by_the_replay(learned, tmp_path, draft, rope):
    change_config(draft, rope_parameters=rope)
    found = problems(learned, tmp_path, draft, ["files", "replay"])
    assert not any("broke off" in p for ps in found.values() for p in ps), found
    assert "files" in found


def test_the_head_under_a_name_that_sglang_does_not_know(learned, tmp_path, draft):
    weights = load_file(draft / "model.safetensors")
    change_weights(draft, {"lm_head.weight": None, "model.lm_head.weight": weights["lm_head.weight"]})
    found = problems(learned, tmp_path, draft, ["files", "replay"])
    assert any(p.startswith("lm_head.weight = missing") for p in found["files"]) and "replay" in found


def test_a_tensor_in_two_files(learned, tmp_path, draft):
    save_file({"norm.weight": torch.ones(64)}, draft / "a.safetensors")
    found = problems(learned, tmp_path, draft)
    assert all("norm.weight, as another file of the folder does" in found[check][0] for check in OFFLINE)


def test_weights_that_were_changed(learned, tmp_path, draft):
    weights = load_file(draft / "model.safetensors")
    blocks = weights["fc.weight"].chunk(3, 1)
    change_weights(draft, {"fc.weight": torch.cat([blocks[2], blocks[1], blocks[0]], 1),
                           "norm.weight": torch.ones_like(weights["norm.weight"])})
    found = problems(learned, tmp_path, draft)
    assert "the columns of the slots lie in the order fc.2, fc.1, fc.0" in found["files"][0]
    assert "norm.weight" in found["files"][1] and "as if the norm had not been exported" in found["files"][1]
    assert "replayed from the exported files" in found["replay"][0]
    assert any("fc.0 = layer output 4, fc.2 = layer output 0 better than the declared" in p for p in found["wiring"])


@pytest.mark.parametrize("name", ["d2t", "midlayer.mlp.up_proj.weight"])
def test_a_missing_tensor_fails_every_check_that_needs_it_by_name(learned, tmp_path, draft, name):
    change_weights(draft, {name: None})
    found = problems(learned, tmp_path, draft)
    assert any(problem.startswith(f"{name} = missing") for problem in found["files"])
    assert all(f"{name} is absent" in found[check][0] for check in ("replay", "wiring"))


@pytest.mark.parametrize("doctored", [
    lambda text: text.replace("--speculative-algorithm EAGLE3", "--speculative-algorithm EAGLE"),
    lambda text: text.replace("--speculative-algorithm EAGLE3", "--speculative-algorithm=EAGLE"),
    lambda text: text.rstrip() + " \\\n  --speculative-algorithm EAGLE\n",
    lambda text: text.replace("--speculative-algorithm EAGLE3", "") + "# --speculative-algorithm EAGLE3\n",
], ids=["other", "equals", "a later one wins", "in a comment"])
def test_a_launch_script_for_another_algorithm(learned, tmp_path, doctored):
    draft = shutil.copytree(learned.folder / "export", tmp_path / "export") / "sglang"
    script = draft.parent / "launch_sglang.sh"
    before = draft_contents(learned.config(**{"verify.draft": str(draft)})[1])
    script.write_text(doctored(script.read_text()))
    assert draft_contents(learned.config(**{"verify.draft": str(draft)})[1]) != before  # so that verify runs again
    assert problems(learned, tmp_path, draft, ["files"])["files"] == [
        "launch_sglang.sh: --speculative-algorithm EAGLE3 is missing: EAGLE takes an EAGLE-3 drafter, and accepts nothing "
        "(sglang 21272)"]


def test_the_vllm_export_is_read_without_vllm(learned, tmp_path):
    """Ids of SGLang's convention, and a norm that was not exported, in the folder beside the one that is verified."""
    target, config = learned.config(**LEARNED_SETTINGS, **{"export.engines": ["sglang", "vllm"]})
    export(config, target, learned.manifest, learned.folder, tmp_path / "export")
    draft, vllm = tmp_path / "export" / "sglang", tmp_path / "export" / "vllm"
    run_verify(learned, tmp_path, draft, ["files"])
    weights = load_file(vllm / "model.safetensors")
    change_weights(vllm, {"norm.weight": torch.ones_like(weights["norm.weight"])})
    change_config(vllm, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    assert problems(learned, tmp_path, draft, ["files"])["files"] == [
        "vLLM export: slot fc.2: ids [1, 3, 4] make vLLM capture layer output 3; the manifest says 4",
        "vLLM export: norm.weight: 64 of 64 values are not the trained ones: all are 1, as if the norm had not been exported"]
    change_config(vllm, rms_norm_eps=1e-2)
    assert any("rms_norm_eps = 0.01" in p for p in problems(learned, tmp_path, draft, ["files"])["files"])
    change_weights(vllm, {"norm.weight": None})
    assert any("norm.weight = missing" in p for p in problems(learned, tmp_path, draft, ["files"])["files"])


def test_offsets_that_are_one_too_high(learned, tmp_path, draft):
    change_weights(draft, {"d2t": load_file(draft / "model.safetensors")["d2t"] + 1})
    found = problems(learned, tmp_path, draft)
    assert "files" in found and "replay" in found


def test_a_config_that_is_not_there(learned, tmp_path, draft):
    (draft / "config.json").unlink()
    found = problems(learned, tmp_path, draft)
    assert set(found) == set(OFFLINE) and all("cannot be read" in p[0] for p in found.values())


# ---------------------------------------------------------------- table and page


class Tags(html.parser.HTMLParser):
    """Every opened element is closed, in order; collects references to anything outside."""

    def __init__(self):
        super().__init__()
        self.open, self.references, self.text = [], [], ""

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)
        self.references += [v for k, v in attributes if k in ("href", "src", "srcset", "data", "action", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_and_loads_nothing(learned, tmp_path):
    target, config = learned.config(**LEARNED_SETTINGS)
    subject = Subject(config, target, learned.manifest, learned.folder, tmp_path, learned.folder / "export" / "sglang")
    results = {name: run_check(name, subject) for name in OFFLINE}
    results["live"], results["serve"] = CheckResult(_LIVE, "fc receives …"), CheckResult(_SERVE, "16 prompts")
    results["files"].problems.append("a <field> & more")
    text = page(subject, results, {"serve_vllm": "not installed"})
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and tags.references == []
    assert not re.search(r"https?:|url\(|@import|<script|<img|<link", text)
    assert "a <field> & more" in tags.text
    for words in (*CHECKS, "not installed", "slots in the order 2, 1, 0", "fc.1: layer output 2", "draft 3",
                  "[9.5735, -45.1657]"):
        assert words in tags.text, words
    assert text.count("<svg") == 1 + 2 + 1 + 2 and "NaN" not in text and "nan" not in text


def test_problems_and_notes_are_printed_in_full():
    said = terminal({"files": CheckResult({}, "3 tensors", problems=["one\ntwo"]),
                     "wiring": CheckResult({}, "fine", notes=["cannot tell"])}, {"serve": "not asked for"})
    assert said.splitlines()[:3] == [
        "  files   FAILS    3 tensors", "  wiring  holds    fine", "  serve   not run  not asked for"]
    assert "  problem, files: one\n    two" in said and "  note, wiring: cannot tell" in said


_PHASE = {"found": None, "nearest": "layer output 3", "rows": 9, "cosine": 1.0,
          "norm_received": {"mean": 3.0, "std": 1.0}, "norm_declared": {"mean": 3.0, "std": 1.0},
          "candidates": [{"key": key, "name": describe(key), "relative_error": error, "cosine": 0.5} for key, error in (
              ("embedding", 1.0), ("layer_output.2", 0.2), ("layer_output.3", 0.0), ("final_hidden", 2.0),
              ("normed.layer_output.2", 1.5))],
          "first_five": {"row": "s3[4]", "received": [9.5735, -45.1657], "declared": [9.5736, -45.1658]}}
_LIVE = {"slots": {"fc.0": {"declared": "layer output 1"},
                   "fc.1": {"declared": "layer output 2", "prefill": _PHASE, "decode": _PHASE}}}
_SERVE = {"tau_engine": 1.42, "tau_replayed": 1.42, "accepted_per_position_engine": [9, 4, 1],
          "accepted_per_position_replayed": [9, 4, 1]}
