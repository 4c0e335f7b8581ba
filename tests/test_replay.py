"""The replay: its forward against the trainer's, its walk against hand-worked and brute-force ones."""

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pipeline.errors import PipelineError
from pipeline.export import export
from pipeline.replay import Accuracy, ExportedDrafter, gated_rows, tau, teacher_forced_accuracy, walk
from pipeline.samples import Sample
from pipeline.serve_check import Served, compare, last_answer
from pipeline.target import load_embedding
from pipeline.verify import _samples, replay_check, verify
from tests.tiny_disk import fill, tiny_disk
from tests.tiny_run import TinyRun, tiny_run


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> TinyRun:
    run = tiny_run(tmp_path_factory.mktemp("run"), vocab=512)
    settings = {"train.epochs": 12, "train.lr": 5e-3, "drafter.draft_vocab_size": 256}
    run.stage("standardize", **settings)
    run.stage("train", **settings)
    target, config = run.config(**settings, **{"export.engines": ["sglang"]})
    export(config, target, run.manifest, run.folder, run.folder / "export")
    return run


def test_replayed_accuracy_is_the_trainers(exported):
    target, config = exported.config()
    result, problems = replay_check(
        config, target, exported.manifest, exported.folder, exported.folder / "export" / "sglang"
    )
    assert problems == []
    assert result["replayed_accuracy"] == pytest.approx(result["trainer_accuracy"], abs=1e-9)
    assert result["tau_row_replayed@3"] == pytest.approx(result["tau_row_trainer@3"], abs=1e-9)


def test_a_capped_replay_takes_the_same_samples_and_allows_for_the_choice(exported):
    target, config = exported.config(**{"verify.replay_samples": 4})
    draft = exported.folder / "export" / "sglang"
    result, problems = replay_check(config, target, exported.manifest, exported.folder, draft)
    assert problems == [] and (result["replayed_samples"], result["heldout_samples"]) == (4, 6)
    assert "3 standard errors" in result["compared_within"]
    assert replay_check(config, target, exported.manifest, exported.folder, draft)[0] == result
    _, config = exported.config(**{"verify.replay_samples": None})
    everything, _ = replay_check(config, target, exported.manifest, exported.folder, draft)
    assert everything["replayed_samples"] == 6 and everything["compared_within"] == "rounding"
    assert result["replayed_rows"] < everything["replayed_rows"]
    assert all(a >= b for a, b in zip(result["allowed_difference"], everything["allowed_difference"]))


def test_standard_error_by_hand():
    """Two samples of 10 rows, 5 and 7 hits where 0.5 per row were expected: off by 0 and 2, so √4 / 20."""
    counts = torch.tensor([[[10], [5], [5]], [[10], [7], [5]]])
    assert Accuracy(counts).standard_error("hits", [0.5]) == pytest.approx([0.1])
    assert Accuracy(counts).standard_error("prefix", [0.5]) == [0.0]
    nothing = Accuracy(torch.tensor([[[10], [0], [0]]] * 64))  # no hit in 64 samples where 0.3 per row were expected
    assert 3 * nothing.standard_error("hits", [0.3])[0] < 0.3


@pytest.mark.parametrize("trained_steps", [1, 5])
def test_the_steps_of_the_training_are_replayed_whatever_this_command_says(tmp_path, trained_steps):
    run = tiny_run(tmp_path)
    run.stage("standardize")
    run.stage("train", **{"train.epochs": 1, "train.ttt_steps": trained_steps})
    target, config = run.config(**{"export.engines": ["sglang"]})
    export(config, target, run.manifest, run.folder, run.folder / "export")
    result, problems = replay_check(config, target, run.manifest, run.folder, run.folder / "export" / "sglang")
    assert problems == [] and len(result["replayed_accuracy"]) == max(3, trained_steps)
    assert result["tau_row_replayed@3"] == pytest.approx(result["tau_row_trainer@3"], abs=1e-9)


def test_verify_on_a_full_disk_is_one_message(exported, tmp_path):
    target, config = exported.config(**{"verify.checks": ["replay"]})
    with tiny_disk(tmp_path / "verify", "64k"):
        fill(tmp_path / "verify")
        with pytest.raises(PipelineError, match="disk is full"):
            verify(config, target, exported.manifest, exported.folder, tmp_path / "verify")
        assert [p.name for p in (tmp_path / "verify").iterdir()] == ["filler"]


@pytest.mark.parametrize("what", ["weights", "embedding", "slots", "rope"])
def test_replay_notices_a_wrong_export(exported, what):
    """On the training samples, where the drafter is good enough for a fault to show. (A random target's drafter hardly
    uses embedding and positions, so that there only the counts differ.)"""
    target, _ = exported.config()
    manifest = exported.manifest
    samples = list(_samples(target, manifest, exported.folder, "train"))
    drafter = ExportedDrafter(exported.folder / "export" / "sglang", load_embedding(target))
    right = teacher_forced_accuracy(drafter, samples, 3)
    if what == "weights":
        drafter.weights["fc.weight"] = drafter.weights["fc.weight"].roll(1, 0)
    elif what == "embedding":
        drafter.embedding = drafter.embedding.roll(1, 0)
    elif what == "slots":
        samples = [(ids, mask, features.roll(64, -1), argmax) for ids, mask, features, argmax in samples]
    else:
        drafter._rotate = lambda x, position: x
    wrong = teacher_forced_accuracy(drafter, samples, 3)
    assert right.rows == wrong.rows and (right.hits, right.prefix) != (wrong.hits, wrong.prefix)
    if what in ("weights", "slots"):
        assert right.tau_row(3) > 1.3 and wrong.tau_row(3) < right.tau_row(3) - 0.05


def test_verify_writes_what_it_found_and_refuses_a_fault(exported, tmp_path):
    target, config = exported.config(**{"verify.checks": ["replay"]})
    run = tmp_path / "run"
    shutil.copytree(exported.folder, run)
    result = verify(config, target, exported.manifest, run, run / "verify")
    found = json.loads((run / "verify" / "verify.json").read_text())
    assert found["problems"] == [] and result.outputs == [run / "verify" / "verify.json"]
    assert result.metrics["replayed_accuracy"] == found["checks"]["replay"]["replayed_accuracy"]

    path = run / "export" / "sglang" / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"].roll(1, 0)}, path)  # fit in form, wrong in content
    with pytest.raises(PipelineError, match="did not pass"):
        verify(config, target, exported.manifest, run, run / "verify")
    assert json.loads((run / "verify" / "verify.json").read_text())["problems"]

    save_file(weights | {"d2t": weights["d2t"] + 1}, path)
    with pytest.raises(PipelineError, match="not fit to serve"):
        verify(config, target, exported.manifest, run, run / "verify")


def test_free_running_drafts_equal_forced_ones_along_the_accepted_prefix(exported):
    """Which is why one walk may use either: past the first miss nothing is accepted."""
    target, _ = exported.config()
    drafter = ExportedDrafter(exported.folder / "export" / "sglang", load_embedding(target))
    accepted = 0
    for ids, mask, features, _ in _samples(target, exported.manifest, exported.folder, "train"):
        rows = torch.tensor(gated_rows(mask, 0))
        free, forced = (drafter.draft(ids, features, rows, 3, forced=f) for f in (False, True))
        for n, row in enumerate(rows.tolist()):
            for j in range(3):
                assert free[n, j] == forced[n, j]
                if row + 2 + j >= len(ids) or free[n, j] != ids[row + 2 + j]:
                    break
                accepted += 1
    assert accepted > 50


def test_rows_do_not_see_the_future(exported):
    target, _ = exported.config()
    drafter = ExportedDrafter(exported.folder / "export" / "sglang", load_embedding(target))
    ids, mask, features, _ = next(_samples(target, exported.manifest, exported.folder, "heldout"))
    row = torch.tensor([3])
    changed = features.clone()
    changed[4:] = 7.0
    later = ids.clone()
    later[5:] = 1
    assert torch.equal(
        drafter.draft(ids, features, row, 3, forced=False), drafter.draft(later, changed, row, 3, forced=False)
    )


def test_gate_on_two_turns():
    #            user     assistant  user  assistant
    generated = [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert gated_rows(generated, 0) == [2, 3, 7]  # row 2 reads the first response token (3) and predicts the second (4)
    assert gated_rows(generated, 1) == [2]
    assert gated_rows(generated, 2) == []


def test_walk_by_hand():
    """Prompt 10 11 12, output 1 2 3 4 5 6, end of turn 6; then the target would say 7 8 9."""
    sequence = [10, 11, 12, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    drafts = torch.tensor(
        [
            [2, 3, 0],  # row 2 reads token 1: two accepted, the bonus token is 4
            [0, 0, 0],  # rows 3 and 4 are never drafted from
            [0, 0, 0],
            [0, 6, 7],  # row 5 reads token 4: nothing accepted, the bonus token is 5
            [6, 7, 8],  # row 6 reads token 5: three accepted, of which one is inside the output
            [0, 0, 0],
        ]
    )
    found = walk(drafts, sequence, first_row=2, end=8)
    assert found.accepted == [2, 0, 3] and found.clipped == [2, 0, 1] and found.cycles == 3
    assert tau(found.accepted) == 1 + 5 / 3 and tau([]) == 1.0


def test_an_output_of_one_token_needs_no_verification():
    assert walk(torch.empty(0, 3), [10, 11, 1, 2, 3, 4], first_row=1, end=2).cycles == 0


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_walk_against_an_engine_loop(length, steps, random):
    """The engine as a loop over an output list: draft, compare, append, stop when the length is reached."""
    prompt, truth = [0, 0], [random.randint(0, 1) for _ in range(length + steps + 1)]
    sequence = prompt + truth
    drafts = torch.tensor([[random.randint(0, 1) for _ in range(steps)] for _ in range(length)])
    output, verifications, correct = truth[:1], 0, 0
    while len(output) < length:
        draft, true = drafts[len(output) - 1].tolist(), truth[len(output) :]
        a = next((n for n in range(steps) if draft[n] != true[n]), steps)
        verifications, correct = verifications + 1, correct + a
        output += true[: a + 1]
    found = walk(drafts, sequence, first_row=1, end=1 + length)
    assert (found.cycles, sum(found.accepted)) == (verifications, correct)
    assert sum(found.clipped) + found.cycles >= length - 1 and all(
        c <= a for c, a in zip(found.clipped, found.accepted)
    )


def test_compare_with_the_engines_counters():
    sequence = [10, 11, 1, 2, 3, 4, 5, 6]
    found = walk(torch.tensor([[2, 3, 0], [0, 0, 0], [0, 0, 0]]), sequence, first_row=1, end=4)
    request = Served(
        prompt=[10, 11],
        output=[1, 2, 3],
        plain=[1, 2, 3],
        beyond=[4, 5, 6],
        verifications=1,
        correct=2,
        histogram=[0, 0, 1, 0],
    )
    same = compare([request], [found], 3)
    assert same["counters_identical"] and same["tau_engine"] == same["tau_replayed"] == same["tau_walk@3"] == 3.0
    other = compare([Served(**{**request.__dict__, "correct": 1, "histogram": [0, 1]})], [found], 3)
    assert (
        not other["counters_identical"] and other["tau_engine"] == 2.0 and other["requests_with_other_counters"] == [0]
    )


def test_the_last_answer_is_served():
    sample = Sample("s", "heldout", None, [], list(range(9)), [0, 0, 1, 1, 0, 1, 1, 1, 0], None)
    assert last_answer(sample) == 5
