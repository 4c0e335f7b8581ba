"""The live probe on a tiny Llama in the real engine: a right export, doctored manifests, doctored exports.

The comparison itself is tested in test_slot_match.py.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dump_cases import make_config, make_run
from forked_engine import EngineHost
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama
from torch import nn

import pipeline.verify.observe
from pipeline.dump.capture_plan import PROBE, RequestTag
from pipeline.dump.dump import dump
from pipeline.dump.target_states import TargetStates, record_states
from pipeline.engines.engine import prepare_environment
from pipeline.export.export import write_sglang
from pipeline.files import make_dir
from pipeline.layers.layer_ids import derive_sglang_ids
from pipeline.manifest import bind_slots, load_manifest
from pipeline.samples import Sample
from pipeline.stage import run_stage
from pipeline.target import open_target
from pipeline.train.drafter import Drafter
from pipeline.train.drafter_config import drafter_config
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.live_judge import judge_observation, row_problems
from pipeline.verify.live_probe import live_probe_check, probe_prompts, serve_observed
from pipeline.verify.observe import DECODE, PREFILL, Observation, ObservePlan, Observer, Rows, observed_rows, read_observation
from pipeline.verify.serve_check import engine_options
from pipeline.verify.states import candidates

N, H, LAYERS, TOKENS = 8, 64, [1, 3, 5], 12


# ---------------------------------------------------------------- the plugin, without an engine


def batch(*, decode: bool, rids: list[str], lengths: list[int], accepted: list[int] | None = None, width: int = 3 * H):
    rows = sum(lengths)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: not decode, is_draft_extend_v2=lambda: decode),
        rids=rids, extend_seq_lens_cpu=lengths, positions=torch.arange(100, 100 + rows),
        input_ids=torch.arange(rows), spec_info=SimpleNamespace(
            hidden_states=torch.arange(float(rows))[:, None].expand(rows, width),
            num_accept_tokens=torch.tensor(accepted or [])))


def tag(name: str, attempt: str = "a1") -> str:
    return str(RequestTag.of(attempt, PROBE, name, [1, 2]))


def test_rows_of_refused_drafts_and_of_other_requests_are_left_out():
    rids = [tag("x"), "warm-up", tag("y")]
    prefill = batch(decode=False, rids=rids, lengths=[3, 2, 4])
    assert [(t.sample_id, *rest) for t, *rest in observed_rows(prefill, "a1")] == [("x", 0, 3), ("y", 5, 4)]
    decode = batch(decode=True, rids=rids, lengths=[4, 4, 4], accepted=[2, 4, 1])
    assert [(t.sample_id, *rest) for t, *rest in observed_rows(decode, "a1")] == [("x", 0, 2), ("y", 8, 1)]
    own_step = batch(decode=True, rids=rids, lengths=[1, 1, 1])
    own_step.forward_mode = SimpleNamespace(is_extend_without_speculative=lambda: False, is_draft_extend_v2=lambda: False)
    assert observed_rows(own_step, "a1") == []


class HandMadeDrafter(nn.Module):
    """The part of SGLang's drafter that the plugin looks at: skips fc where the widths agree, may norm before it."""

    def __init__(self, norm: bool = False):
        super().__init__()
        self.model = nn.Module()
        self.model.fc = nn.Linear(3 * H, H, bias=False)
        self.model.input_norm = nn.RMSNorm(3 * H) if norm else None
        self.model.norm_output = False

    def forward(self, hidden):
        if hidden.shape[-1] == H:
            return hidden
        return self.model.fc(hidden if self.model.input_norm is None else self.model.input_norm(hidden))


@pytest.fixture
def observer(tmp_path, monkeypatch) -> Observer:
    monkeypatch.setattr(pipeline.verify.observe, "is_writing_rank", lambda: True)
    return Observer(ObservePlan("a1", str(tmp_path)))


def run_forward(observer: Observer, model: nn.Module, forward_batch, *, draft: bool = True):
    return observer.around_forward(lambda runner, b: runner.model(b.spec_info.hidden_states),
                                   SimpleNamespace(is_draft_worker=draft, model=model), forward_batch)


@pytest.mark.parametrize("norm", [False, True])
def test_what_the_plugin_keeps_is_what_fc_was_given(observer, tmp_path, norm):
    model = HandMadeDrafter(norm)
    run_forward(observer, model, batch(decode=False, rids=[tag("x")], lengths=[3]))
    run_forward(observer, model, batch(decode=False, rids=[tag("x"), tag("y")], lengths=[2, 2]))
    run_forward(observer, model, batch(decode=True, rids=[tag("y"), tag("x")], lengths=[4, 4], accepted=[1, 3]))
    found = read_observation(tmp_path)
    assert found.errors == [] and found.forwards == found.fc_calls == {PREFILL: 2, DECODE: 1}
    assert found.drafter == {"class": "HandMadeDrafter", "fc": [3 * H, H], "norms": ["input_norm"] if norm else [],
                             "norm_output": False, "received": 3 * H}
    x = found.rows[PREFILL]["x"]
    assert x.positions.tolist() == [100, 101, 102, 100, 101] and x.tokens.tolist() == [0, 1, 2, 0, 1]
    assert x.received[:, 7].tolist() == [0, 1, 2, 0, 1]
    assert found.rows[DECODE]["y"].tokens.tolist() == [0] and found.rows[DECODE]["x"].tokens.tolist() == [4, 5, 6]
    expected = nn.functional.rms_norm(x.received, (3 * H,)) if norm else x.received
    assert torch.allclose(x.fc_input, expected) and not model.model.fc._forward_pre_hooks


def test_the_plugin_says_when_fc_was_skipped(observer, tmp_path):
    run_forward(observer, HandMadeDrafter(), batch(decode=False, rids=[tag("x")], lengths=[3], width=H))
    found = read_observation(tmp_path)
    assert found.forwards[PREFILL] == 1 and found.fc_calls[PREFILL] == 0 and found.drafter["received"] == H


def test_widths_that_do_not_fit_are_reported_though_the_forward_fails(observer, tmp_path):
    with pytest.raises(RuntimeError):
        run_forward(observer, HandMadeDrafter(), batch(decode=False, rids=[tag("x")], lengths=[3], width=2 * H))
    assert read_observation(tmp_path).drafter["received"] == 2 * H


def test_an_error_of_the_plugin_does_not_reach_the_engine(observer, tmp_path):
    broken = batch(decode=False, rids=[tag("x")], lengths=[3])
    broken.positions = None
    assert run_forward(observer, HandMadeDrafter(), broken).shape == (3, H)
    assert "NoneType" in read_observation(tmp_path).errors[0]


def test_the_first_error_of_the_plugin_is_kept(observer, tmp_path):
    for positions in (None, "text"):
        broken = batch(decode=False, rids=[tag("x")], lengths=[3])
        broken.positions = positions
        run_forward(observer, HandMadeDrafter(), broken)
    [said] = read_observation(tmp_path).errors
    assert "NoneType" in said and "'str'" not in said


def rows_of(positions: range) -> Rows:
    tokens, width = torch.tensor(positions) + 1, 3 * H
    return Rows(tokens - 1, tokens, torch.zeros(len(tokens), width), torch.zeros(len(tokens), width))


@pytest.mark.parametrize("seen, problem", [
    (range(5, 16), None), (range(5, 20), None),  # the last verification may accept up to four tokens, which get no row
    (range(5, 15), "has 10 rows at positions 5 to 14; 5 to 15 are its tokens"),
    (range(5, 6), "has 1 rows at positions 5 to 5; 5 to 15 are its tokens"),
    (range(5, 5), "has 0 rows; 5 to 15 are its tokens"), (range(6, 20), "has 14 rows at positions 6 to 19"),
])
def test_decoding_is_observed_to_the_last_verification(seen, problem):
    rows = {PREFILL: {"x": rows_of(range(5))}, DECODE: {"x": rows_of(seen)}}
    found = row_problems(Observation({}, {}, rows, {}, {}, []), {"x": 5}, {"x": list(range(20))}, draft_steps=3)
    assert found == [] if problem is None else len(found) == 1 and problem in found[0]


def test_a_drafter_that_could_not_be_described_is_a_problem_and_no_crash(learned, tmp_path):
    target, config = learned.config()
    subject = Subject(config, target, learned.manifest, learned.folder, tmp_path, learned.folder / "export" / "sglang")
    rows = {PREFILL: {"x": rows_of(range(5))}, DECODE: {"x": rows_of(range(5, 20))}}
    counts = {PREFILL: 1, DECODE: 3}
    observation = Observation({"model_class": "Llama", "capture_points": [1, 3, 5]}, {}, rows, counts, counts,
                              ["Traceback\nAttributeError: no fc"])
    states = TargetStates(target, tmp_path, "transformers", torch.float32)
    result = judge_observation(subject, observation, {"x": 5}, {"x": list(range(20))}, states, torch.float32)
    assert result.problems == ["observing failed inside the engine: AttributeError: no fc",
                               "the live drafter could not be described, so that nothing it received can be judged"]


def test_the_plugin_is_inert_unless_switched_on():
    code = "import sys, pipeline.verify.observe as o; o.register(); sys.exit(any(m in sys.modules for m in ('sglang', 'transformers')))"
    env = {k: v for k, v in os.environ.items() if k != pipeline.verify.observe.PLAN_ENV}
    assert subprocess.run([sys.executable, "-c", code], env=env, cwd=Path(__file__).parent.parent, check=False).returncode == 0


# ---------------------------------------------------------------- one observed run of a right export


def samples() -> list[Sample]:
    """Prompts of 9 to 30 random tokens, each with an answer of 8, also random."""
    rng, made = torch.Generator().manual_seed(0), []
    for i in range(8):
        prompt = 9 + (7 * i) % 22
        made.append(Sample(id=f"chat/{i}", split="heldout" if i % 2 else "train", category=None, messages=[],
                           input_ids=torch.randint(4, 512, (prompt + 8,), generator=rng).tolist(),
                           loss_mask=[0] * prompt + [1] * 8, finish_reason="length"))
    return made


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Subject:
    """A dump with probes, and an untrained drafter exported for SGLang: weights do not matter, what reaches them does.

    With no ids SGLang captures layer outputs 1, 3, 4 of these eight layers.
    """
    prepare_environment("cpu", threads=1)
    root = tmp_path_factory.mktemp("live")
    target_dir = tiny_llama(root / "target", layers=N, hidden=H)
    run_dir = make_run(target_dir, root, samples())
    target, config = open_target(make_config(target_dir, root, "dump.engine=transformers", "drafter.draft_vocab_size=128",
                                             f"verify.live_tokens={TOKENS}", "verify.live_prompts=3"))
    run_stage("dump", run_dir, target=target.record, config={}, seed=0, work=lambda manifest, folder: dump(
        config, target, manifest, run_dir, folder, slot_layers=LAYERS, layers=LAYERS))
    shape = drafter_config(config, target, num_fc_inputs=3, draft_vocab_size=128)
    drafter = Drafter(shape, torch.arange(128))
    drafter.init_weights(0, None)
    draft = run_dir / "export" / "sglang"
    write_sglang(draft, shape, {k: v.detach() for k, v in drafter.state_dict().items()},
                 derive_sglang_ids(target.path, LAYERS), dtype="float32", context=2048, target_text=target.text)
    return Subject(config, target, load_manifest(run_dir), run_dir, make_dir(run_dir / "verify"), draft)


@dataclass
class Observed:
    subject: Subject
    observation: Observation
    prompts: dict[str, list[int]]
    sequences: dict[str, list[int]]
    states: TargetStates

    def judge(self, subject: Subject | None = None, observation: Observation | None = None) -> CheckResult:
        return judge_observation(subject or self.subject, observation or self.observation,
                                 {i: len(p) for i, p in self.prompts.items()}, self.sequences, self.states, torch.float32)


@pytest.fixture(scope="module")
def observed(subject, tmp_path_factory) -> Observed:
    """One engine start, whose rows many tests judge."""
    folder, options = tmp_path_factory.mktemp("observed"), engine_options(subject)
    prompts = probe_prompts(subject)
    outputs = serve_observed(subject, prompts, folder, options)
    sequences = {i: [*p, *o] for (i, p), o in zip(prompts.items(), outputs)}
    states = record_states(subject, sequences, folder / "states", options["device"])
    return Observed(subject, read_observation(folder), prompts, sequences, states)


def with_layers(subject: Subject, layers: list[int]) -> Subject:
    """The manifest bound to other layers, as a wrong edit or a wrong convention would leave it."""
    return replace(subject, manifest=subject.manifest.model_copy(update={"slots": bind_slots(layers, H)}))


def slot_problems(result: CheckResult) -> list[str]:
    return [p for p in result.problems if ": slot fc." in p and "receives" in p]


@pytest.mark.slow
def test_a_right_export_holds_in_prefill_and_in_decode(observed):
    result = observed.judge()
    assert result.problems == [] and result.notes == []
    assert result.summary.startswith("fc receives layer output 1, layer output 3, layer output 5 in prefill (")
    measured = result.measured
    json.dumps(measured)
    assert measured["live_target"] == {"model_class": "LlamaForCausalLM", "capture_points": [2, 4, 6]}
    assert measured["live_drafter"] == {"class": "LlamaForCausalLMEagle3", "fc": [3 * H, H], "norms": [],
                                        "norm_output": False, "received": 3 * H}
    assert measured["fc_calls"] == measured["forwards"] and min(measured["forwards"].values()) > 0
    prompt_rows = sum(map(len, observed.prompts.values()))
    for i, layer in enumerate(LAYERS):
        slot = measured["slots"][f"fc.{i}"]
        assert slot["declared"] == f"layer output {layer}" and slot[PREFILL]["rows"] == prompt_rows
        assert len(observed.prompts) * (TOKENS - 4) <= slot[DECODE]["rows"] <= len(observed.prompts) * (TOKENS + 4)
        for phase in (PREFILL, DECODE):
            found = slot[phase]
            assert found["holds"] and found["found"] == f"layer output {layer}" and found["relative_error"] < 1e-5
            assert found["first_five"]["received"] == pytest.approx(found["first_five"]["declared"], rel=1e-4, abs=1e-5)
            others = {c["name"]: c["relative_error"] for c in found["candidates"] if c["name"] != f"layer output {layer}"}
            assert len(others) == N + 1 + len(LAYERS) and min(others.values()) > 0.05
        assert slot["dump"]["rows"] == prompt_rows and slot["dump"]["relative_error"] < 1e-5
        assert slot["dump"]["fingerprint_error"] < 1e-4 and len(slot["dump"]["fingerprints"]) >= len(observed.prompts)


@pytest.mark.slow
def test_rows_are_the_states_of_the_tokens_themselves(observed):
    """Against transformers, without any of the probe's own code in between."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(observed.subject.target.path, dtype=torch.float32)
    for request, tokens in observed.sequences.items():
        with torch.inference_mode():
            hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[layer + 1][0] for layer in LAYERS], -1)
        prompt = len(observed.prompts[request])
        prefill, decode = (observed.observation.rows[phase][request] for phase in (PREFILL, DECODE))
        assert prefill.positions.tolist() == list(range(prompt))
        for rows in (prefill, decode):
            known = rows.positions < len(tokens) - 1
            assert torch.allclose(rows.received[known], expected[rows.positions[known]], rtol=1e-3, atol=1e-4)
            assert rows.tokens[known].tolist() == [tokens[p + 1] for p in rows.positions[known].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "named"), [
    ([2, 3, 5], {0: "receives layer output 1 (relative error {0}); the manifest says 2 (relative error "}),
    ([0, 3, 5], {0: "receives layer output 1 (relative error {0}); the manifest says 0 (relative error "}),
    ([1, 4, 5], {1: "receives layer output 3 (relative error {0}); the manifest says 4 (relative error "}),
    ([1, 2, 5], {1: "receives layer output 3 (relative error {0}); the manifest says 2 (relative error "}),
    ([1, 3, 6], {2: "receives layer output 5 (relative error {0}); the manifest says 6 (relative error "}),
    ([2, 4, 6], {i: "receives layer output" for i in range(3)}),
    ([3, 1, 5], {0: "receives layer output 1 (", 1: "receives layer output 3 ("}),
    ([5, 1, 3], {i: f"receives layer output {layer} (" for i, layer in enumerate(LAYERS)}),
])
def test_every_wrong_slot_of_a_manifest_is_named_in_both_phases(observed, layers, named):
    """A config mistake and a manifest mistake are the same to a slot: declared and received differ."""
    result = observed.judge(with_layers(observed.subject, layers))
    problems = slot_problems(result)
    assert len(problems) == len(named) and not result.holds
    for (slot, text), problem in zip(named.items(), problems):
        start, _, end = text.partition("{0}")
        assert problem.startswith(f"prefill and decode: slot fc.{slot} {start}") and end in problem
    assert not [p for p in result.problems if "slot fc" in p and not any(f"fc.{i}" in p for i in named)]


@pytest.mark.slow
def test_states_that_arrive_elsewhere_or_otherwise_are_named(observed):
    """The rows of the same run, rewired: swapped, the embedding, the final hidden, a norm, noise in one phase only."""
    def rewired(change, phases=(PREFILL, DECODE)) -> CheckResult:
        rows = {phase: {request: (change(request, r) if phase in phases else r) for request, r in of_phase.items()}
                for phase, of_phase in observed.observation.rows.items()}
        return observed.judge(observation=replace(observed.observation, rows=rows))

    def slot(i: int, key: str):
        def change(request, rows):
            received = rows.received.clone()
            received[:, i * H:(i + 1) * H] = observed.states.rows(request, key, rows.positions)
            return replace(rows, received=received, fc_input=received)
        return change

    def swapped(request, rows):
        received = rows.received[:, torch.arange(3 * H).view(3, H)[[1, 0, 2]].flatten()]
        return replace(rows, received=received, fc_input=received)

    def only(result: CheckResult) -> list[str]:
        return [p.partition(" (relative")[0] for p in slot_problems(result)]

    assert only(rewired(swapped)) == ["prefill and decode: slot fc.0 receives layer output 3",
                                      "prefill and decode: slot fc.1 receives layer output 1"]
    assert only(rewired(slot(0, "embedding"))) == ["prefill and decode: slot fc.0 receives the embedding"]
    assert only(rewired(slot(2, "final_hidden"), [DECODE])) == [
        "decode: slot fc.2 receives the final hidden state after the norm"]
    assert only(rewired(slot(2, "layer_output.7"))) == [
        "prefill and decode: slot fc.2 receives layer output 7 (the final hidden state before the norm)"]
    assert only(rewired(slot(1, "normed.layer_output.3"), [PREFILL])) == [
        "prefill: slot fc.1 receives layer output 3 after the final norm"]

    def late(request, rows):
        return replace(rows, received=rows.received.roll(1, 0), fc_input=rows.fc_input.roll(1, 0))

    problems = slot_problems(rewired(late, [PREFILL]))
    assert len(problems) == 3 and all("receives none of the target's states" in p for p in problems)


@pytest.mark.slow
def test_rows_that_are_missing_or_read_another_token_are_problems(observed):
    request = next(iter(observed.prompts))
    rows = observed.observation.rows[PREFILL][request]

    def judge(changed):
        others = observed.observation.rows[PREFILL] | {request: changed}
        return observed.judge(observation=replace(observed.observation, rows=observed.observation.rows | {PREFILL: others}))

    short = replace(rows, **{f: getattr(rows, f)[:-1] for f in ("positions", "tokens", "received", "fc_input")})
    count = len(rows.positions)
    assert judge(short).problems == [f"prefill: request {request!r} has {count - 1} rows at positions 0 to {count - 2}; "
                                     f"0 to {count - 1} are its tokens"]
    gone = {r: rows for r, rows in observed.observation.rows[PREFILL].items() if r != request}
    without = replace(observed.observation, rows=observed.observation.rows | {PREFILL: gone})
    assert observed.judge(observation=without).problems == [f"prefill: no row of 1 of 3 requests, such as {request!r}"]
    unshifted = replace(rows, tokens=torch.tensor(observed.prompts[request]))
    assert "read another token than the next one, the first at position 0" in judge(unshifted).problems[0]


@pytest.mark.slow
def test_a_dump_of_other_numbers_under_the_right_name_is_noticed(observed, tmp_path):
    """Manifest and engine agree, but the rows that training read are another layer's."""
    run_dir = Path(shutil.copytree(observed.subject.run_dir, tmp_path / "run"))
    [shard] = [p for p in (run_dir / "dump").glob("shard-*")]
    tensors = load_file(shard)
    tensors["layer_output.3"], tensors["layer_output.5"] = tensors["layer_output.5"], tensors["layer_output.3"]
    from safetensors import safe_open

    save_file({k: v.clone() for k, v in tensors.items()}, shard, safe_open(shard, "pt").metadata())
    result = observed.judge(replace(observed.subject, run_dir=run_dir))
    assert [p.partition(" (")[0] for p in result.problems] == [
        "prefill: slot fc.1 differs from the rows that were dumped of layer_output.3",
        "prefill: slot fc.2 differs from the rows that were dumped of layer_output.5"]


# ---------------------------------------------------------------- real engine runs of doctored exports


@pytest.fixture(scope="module")
def host() -> EngineHost:
    return EngineHost()


def probe_doctored(host: EngineHost, subject: Subject, folder: Path, **eagle_config) -> CheckResult:
    """The whole check on the export with other entries of `eagle_config`; None takes one out."""
    draft = Path(shutil.copytree(subject.draft, folder / "draft"))
    config = json.loads((draft / "config.json").read_text())
    config["eagle_config"] = {k: v for k, v in (config["eagle_config"] | eagle_config).items() if v is not None}
    (draft / "config.json").write_text(json.dumps(config))
    doctored = replace(subject, draft=draft, folder=make_dir(folder / "verify"))
    return host.call(live_probe_check, doctored, log=folder / "log")


@pytest.mark.slow
@pytest.mark.parametrize(("ids", "points", "named"), [
    ([2, 4, 6], [3, 5, 7], {0: "layer output 2", 1: "layer output 4", 2: "layer output 6"}),
    (None, [2, 4, 5], {2: "layer output 4"}),
    ([-1, 3, 5], [0, 4, 6], {0: "the embedding"}),
])
def test_a_doctored_export_is_served_and_named(subject, host, tmp_path, ids, points, named):
    """All ids shifted by one; no ids, so that SGLang takes its defaults; -1, which captures the embedding."""
    result = probe_doctored(host, subject, tmp_path, eagle_aux_hidden_state_layer_ids=ids)
    assert result.problems[0] == (f"the live LlamaForCausalLM captures points {points}; the manifest's slots are points "
                                  "[2, 4, 6]")
    problems = slot_problems(result)
    assert len(problems) == len(named)
    for (i, what), problem in zip(named.items(), problems):
        found = result.measured["slots"][f"fc.{i}"]
        errors = {phase: {c["name"]: c["relative_error"] for c in found[phase]["candidates"]} for phase in (PREFILL, DECODE)}
        says = f"layer output {LAYERS[i]}" if what == "the embedding" else str(LAYERS[i])
        phase = max(errors, key=lambda p: errors[p][what])
        assert errors[phase][what] < 1e-5 and errors[phase][f"layer output {LAYERS[i]}"] > 0.05
        assert problem == (f"prefill and decode: slot fc.{i} receives {what} (relative error "
                           f"{errors[phase][what]:.2g}); the manifest says {says} (relative error "
                           f"{errors[phase][f'layer output {LAYERS[i]}']:.2g})").replace("e-0", "e-")
    assert len(result.problems) == 1 + len(named)


@pytest.mark.slow
def test_a_single_id_makes_sglang_skip_fc_which_is_said(subject, host, tmp_path):
    """One captured state is as wide as the drafter's own: nothing crashes, and fc is never called."""
    result = probe_doctored(host, subject, tmp_path, eagle_aux_hidden_state_layer_ids=[3])
    assert ("the drafter receives 64 columns (1 x 64), its fc takes 192; the manifest binds 3 slots of 64"
            in result.problems)
    assert any(p.startswith("prefill: fc was called in 0 of ") for p in result.problems)
    assert "prefill: the drafter receives layer output 3; the manifest binds 3 slots" in result.problems


@pytest.mark.slow
def test_an_export_that_the_engine_cannot_run_is_a_problem_not_a_crash(subject, host, tmp_path):
    result = probe_doctored(host, subject, tmp_path, eagle_aux_hidden_state_layer_ids=[3, 5])
    assert any("receives 128 columns (2 x 64), its fc takes 192" in p for p in result.problems)
    assert result.problems[-1].startswith("the export was not served: SGLang died while it was running")


@pytest.mark.slow
def test_norms_that_are_switched_on_or_off_are_noticed(subject, host, tmp_path):
    """norm_before_fc in the config of a drafter that was trained without: SGLang norms with weights of one."""
    result = probe_doctored(host, subject, tmp_path, norm_before_fc=True)
    assert slot_problems(result) == []
    assert result.problems[0] == "the live drafter has input_norm before fc; its weights were trained with no norm"
    assert any(p.startswith("prefill: fc reads its input after input_norm (relative error ") for p in result.problems)
    assert any(p.startswith("decode: fc reads its input after input_norm (relative error ") for p in result.problems)


@pytest.mark.slow
def test_states_come_from_the_engine_where_transformers_is_not_known_to_agree(observed, host, tmp_path):
    """As for targets without a transformers path, or of which SGLang captures something else than the residual stream."""
    dumped = observed.subject.manifest.dump.model_copy(update={"engine": "sglang"})
    unknown = replace(observed.subject, manifest=observed.subject.manifest.model_copy(update={"dump": dumped}))
    states = host.call(record_states, unknown, observed.sequences, tmp_path, "cpu", log=tmp_path / "log")
    assert states.source == "sglang" and observed.states.source == "transformers"
    for request, tokens in observed.sequences.items():
        positions = torch.arange(len(tokens))
        for key in candidates(N, LAYERS):
            assert torch.allclose(states.rows(request, key, positions), observed.states.rows(request, key, positions),
                                  rtol=1e-3, atol=1e-4), key
