"""The wiring table: which wirings are tried, what is counted, which differences count, and that faults are named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import PipelineError
from pipeline.manifest import Manifest, bind_slots
from pipeline.target import load_embedding, load_output_head
from pipeline.train.drafter_config import DrafterConfig
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.replay import ExportedDrafter
from pipeline.verify.wiring import (
    BETTER,
    DOUBLED,
    MISSING,
    UNDECIDED,
    WORSE,
    Difference,
    Wiring,
    differences,
    measure,
    read_probes,
    verdict,
    wiring_check,
    wirings,
)
from tests.conftest import LEARNED
from tests.dense_reference import ttt
from tests.tiny_run import TinyRun


def check(run: TinyRun, draft: Path | None = None, manifest: Manifest | None = None) -> CheckResult:
    target, config = run.config()
    return wiring_check(Subject(config, target, manifest or run.manifest, run.folder, run.folder / "verify",
                                draft or run.folder / "export" / "sglang"))


def verdicts(result: CheckResult) -> dict[str, str]:
    return {row["mistake"]: row["verdict"] for row in result.measured["table"][1:]}


# ---------------------------------------------------------------- what is tried


def test_wirings_of_two_slots_by_hand():
    found = {w.mistake: w.sources for w in wirings([0, 4], 6)}
    e, final = "embedding", "final_hidden"
    assert found == {
        "": ("layer_output.0", "layer_output.4"),
        "the teacher's final norm missing": ("layer_output.0", "layer_output.4"),
        "the teacher's final norm doubled": ("layer_output.0", "layer_output.4"),
        "fc.0 one layer early": (e, "layer_output.4"),
        "fc.1 one layer early": ("layer_output.0", "layer_output.3"),
        "fc.0 one layer late": ("layer_output.1", "layer_output.4"),
        "fc.1 one layer late": ("layer_output.0", "layer_output.5"),
        "all slots one layer early": (e, "layer_output.3"),
        "all slots one layer late": ("layer_output.1", "layer_output.5"),
        "slots in the order 1, 0": ("layer_output.4", "layer_output.0"),
        "embedding first": (e, "layer_output.0"),
        "final hidden last": ("layer_output.4", final),
        "final hidden in the last slot": ("layer_output.0", final),
    }


@pytest.mark.parametrize("layers, orders", [([2, 30, 58], 5), ([1, 9, 17, 25, 33], 15), ([1, 9, 17, 25], 10)])
def test_every_permutation_of_three_slots_and_of_more_swaps_rotations_and_the_reversal(layers, orders):
    tried = wirings(layers, 61)
    assert sum(w.mistake.startswith("slots in the order") for w in tried) == orders
    assert len({(w.sources, w.teacher) for w in tried}) == len(tried)  # each once
    assert all(len(w.sources) == len(layers) for w in tried)


@pytest.mark.parametrize("order", ["1, 2, 3, 4, 0", "3, 4, 0, 1, 2", "4, 3, 2, 1, 0", "0, 3, 2, 1, 4"])
def test_orders_of_five_slots(order):
    [found] = [w for w in wirings([1, 9, 17, 25, 33], 61) if w.mistake == f"slots in the order {order}"]
    assert found.sources == tuple(f"layer_output.{[1, 9, 17, 25, 33][int(i)]}" for i in order.split(", "))


def test_a_layer_that_does_not_exist_is_not_tried():
    assert not any("all slots one layer late" == w.mistake for w in wirings([1, 5], 6))


def test_a_wiring_says_what_is_other_than_declared():
    declared = Wiring("", ("layer_output.1", "layer_output.14"))
    assert Wiring("x", ("layer_output.1", "layer_output.13")).differs(declared) == "fc.1 = layer output 13"
    assert Wiring("x", ("embedding", "layer_output.1")).differs(declared) == "fc.0 = the embedding, fc.1 = layer output 1"
    assert Wiring("x", declared.sources, MISSING).differs(declared) == "a teacher with the final norm missing"


# ---------------------------------------------------------------- what is counted


@pytest.mark.parametrize("sources", [("layer_output.1", "layer_output.2", "layer_output.3"),
                                     ("embedding", "layer_output.5", "final_hidden")])
def test_counts_against_the_dense_reference(learned, sources):
    """Accuracy and loss of one probe, with explicit masks and nothing shared with the pipeline's forward."""
    target, _ = learned.config()
    draft = learned.folder / "export" / "sglang"
    drafter, head = ExportedDrafter(draft, load_embedding(target)), load_output_head(target)
    probe = next(read_probes(learned.manifest, learned.folder))
    states = {s: probe.state(s) if s != "embedding" else load_embedding(target)[probe.ids] for s in sources}
    weights = load_file(draft / "model.safetensors")
    draft_ids = weights["d2t"] + torch.arange(256)
    sample = {"input_ids": probe.ids, "features": torch.cat([states[s] for s in sources], -1),
              "final_hidden": probe.state("final_hidden"),
              "loss_mask": [0] * (int(probe.rows[0]) + 1) + [1] * (len(probe.ids) - int(probe.rows[0]) - 1)}
    shape = DrafterConfig(**json.loads((learned.folder / "train" / "config.json").read_text()))
    expected = ttt(weights, shape, sample, load_embedding(target), head.weight, draft_ids, 1)
    logits = expected.logits[0][probe.rows]
    answers = {
        "declared": probe.state("final_hidden") @ head.weight.T,
        MISSING: probe.state("layer_output.5") @ head.weight.T,
        DOUBLED: head.norm(probe.state("final_hidden")) @ head.weight.T,
    }
    tried = [Wiring("", sources, teacher) for teacher in answers]
    counts = measure(drafter, probe, tried, head, pre_norm=False, last_layer=5)
    for (hits, rows, loss, loss_rows), scores in zip(counts.tolist(), answers.values()):
        answer = scores[probe.rows + 1].argmax(-1).tolist()
        inside = [a in draft_ids for a in answer]
        positions = [draft_ids.tolist().index(a) if i else -1 for a, i in zip(answer, inside)]
        assert rows == len(probe.rows) and loss_rows == sum(inside)
        assert hits == sum(int(logits[n].argmax()) == p for n, p in enumerate(positions))
        nll = [-logits[n].double().log_softmax(-1)[p].item() for n, p in enumerate(positions) if p >= 0]
        assert loss == pytest.approx(sum(nll), rel=1e-4)
    if sources[0] != "embedding":
        assert counts[0, 0] == expected.hits[0]


def test_a_teacher_that_was_dumped_before_its_norm(learned):
    """Then the declared teacher is normed once, the missing norm is the tensor as it is."""
    target, _ = learned.config()
    draft = learned.folder / "export" / "sglang"
    drafter, head = ExportedDrafter(draft, load_embedding(target)), load_output_head(target)
    probe = next(read_probes(learned.manifest, learned.folder))
    tried = wirings([1, 2, 3], 6)[:3]
    post = measure(drafter, probe, tried, head, pre_norm=False, last_layer=5)

    class Before:
        ids, rows = probe.ids, probe.rows

        def state(self, name):
            return probe.state("layer_output.5" if name == "final_hidden" else name)

    pre = measure(drafter, Before(), tried, head, pre_norm=True, last_layer=5)
    assert torch.allclose(pre, post)


# ---------------------------------------------------------------- which differences count


def test_differences_of_samples_that_agree_have_no_spread():
    part, whole = torch.tensor([[[2.0, 4], [3, 6]], [[10, 20], [10, 20]]], dtype=torch.float64)
    zero, other = differences(part, whole)
    assert zero == Difference(0, 0, 0)
    assert [other.value, other.low, other.high] == pytest.approx([0.1, 0.1, 0.1])


def test_intervals_are_those_of_the_normal_approximation():
    """Of 400 samples of equal size the mean difference is normal: ± 2.97 standard errors hold 99.7 %."""
    rng = torch.Generator().manual_seed(1)
    whole = torch.full((2, 400), 50.0, dtype=torch.float64)
    part = torch.stack([torch.full((400,), 20.0), 22 + 4 * torch.randn(400, generator=rng)]).double()
    found = differences(part, whole)[1]
    mean, error = (part[1].mean() - 20) / 50, part[1].std() / 50 / 400**0.5
    assert found.value == pytest.approx(mean.item())
    assert found.low == pytest.approx((mean - 2.97 * error).item(), abs=0.3 * error.item())
    assert found.high == pytest.approx((mean + 2.97 * error).item(), abs=0.3 * error.item())


@pytest.mark.parametrize("accuracy, loss, expected", [
    ((-0.1, -0.2, -0.05), (0.3, 0.2, 0.4), WORSE),
    ((0.1, 0.05, 0.2), (0.3, 0.2, 0.4), BETTER),
    ((0.0135, 0.0025, 0.0265), (0.009, -0.016, 0.027), UNDECIDED),  # layer 0 for 1 in a demo: 16 more hits of 1182
    ((-0.01, -0.03, 0.01), (0.3, 0.2, 0.4), WORSE),  # the loss decides
    ((0.01, -0.01, 0.03), (-0.3, -0.4, -0.2), BETTER),
    ((-0.01, -0.03, 0.01), (-0.3, -0.4, -0.2), UNDECIDED),  # noise makes an overconfident drafter's loss fall
    ((-0.01, -0.03, 0.01), (0.1, -0.1, 0.3), UNDECIDED),
    ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), UNDECIDED),
])
def test_verdicts(accuracy, loss, expected):
    assert verdict(Difference(*accuracy), Difference(*loss)) == expected


# ---------------------------------------------------------------- a trained drafter


def test_the_declared_wiring_wins(learned):
    result = check(learned)
    assert result.problems == [] and result.notes == []
    found = verdicts(result)
    assert set(found.values()) == {WORSE} and len(found) == len(wirings([0, 2, 4], 6)) - 1
    assert result.measured["mistakes_worse"] == len(found)
    table = [row for row in result.measured["table"] if not row["mistake"].startswith("the teacher")]
    assert max(table, key=lambda row: row["accuracy"]) is min(table, key=lambda row: row["loss"]) is table[0]


def test_what_cannot_be_told_apart_is_a_note_and_no_success(learned, tmp_path):
    """A drafter that does not read its slots is as good with any."""
    draft = shutil.copytree(learned.folder / "export" / "sglang", tmp_path / "sglang")
    weights = load_file(draft / "model.safetensors")
    save_file(weights | {"fc.weight": torch.zeros_like(weights["fc.weight"])}, draft / "model.safetensors")
    result = check(learned, draft)
    found = {mistake: v for mistake, v in verdicts(result).items() if not mistake.startswith("the teacher")}
    assert set(found.values()) == {UNDECIDED} and result.measured["mistakes_not_distinguishable"] >= len(found)
    note = result.notes[0]
    assert note.startswith("not distinguishable by accuracy") and note.endswith("the live probe decides")
    assert all(mistake in note for mistake in found) and "the teacher" not in note
    assert all(n.startswith("not distinguishable by accuracy: the teacher") and "the live probe" not in n
               for n in result.notes[1:])


def test_permuted_columns_are_named(learned, tmp_path):
    draft = shutil.copytree(learned.folder / "export" / "sglang", tmp_path / "sglang")
    weights = load_file(draft / "model.safetensors")
    blocks = weights["fc.weight"].chunk(3, 1)
    save_file(weights | {"fc.weight": torch.cat([blocks[1], blocks[0], blocks[2]], 1)}, draft / "model.safetensors")
    result = check(learned, draft)
    assert not result.holds
    assert result.problems[0].startswith(
        "the weights fit fc.0 = layer output 2, fc.1 = layer output 0 better than the declared layer output 0, layer output 2")


@pytest.mark.parametrize("layers, named", [([0, 2, 5], "fc.2 = layer output 4 better than the declared layer output 5"),
                                           ([1, 2, 4], "fc.0 = layer output 0 better than the declared layer output 1")])
def test_a_manifest_that_is_off_by_one_is_named(learned, layers, named):
    result = check(learned, manifest=learned.manifest.model_copy(update={"slots": bind_slots(layers, 64)}))
    assert len(result.problems) == 1 and named in result.problems[0]


def test_a_final_hidden_without_its_norm_is_seen_in_the_numbers(learned, tmp_path):
    copy = TinyRun(learned.target_dir, tmp_path)
    shutil.copytree(learned.folder, copy.folder)
    path = copy.folder / "dump" / "probes.safetensors"
    states = load_file(path)
    save_file(states | {f"{i}/final_hidden": states[f"{i}/layer_output.5"].clone() for i in LEARNED}, path)
    result = check(copy)
    assert result.problems[0].startswith("slot teacher holds the final hidden before the final norm")
    assert "the manifest says after it" in result.problems[0]


@pytest.mark.parametrize("held, words", [
    ("twice", "slot teacher holds the final hidden after the final norm was applied twice (relative error "),
    ("noise", "slot teacher is not the last layer's output, neither before the final norm nor after it, once or twice"),
])
def test_a_final_hidden_that_is_normed_twice_or_something_else(learned, tmp_path, held, words):
    copy = TinyRun(learned.target_dir, tmp_path)
    shutil.copytree(learned.folder, copy.folder)
    target, _ = learned.config()
    path, head = copy.folder / "dump" / "probes.safetensors", load_output_head(target)
    states = load_file(path)
    finals = {f"{i}/final_hidden": states[f"{i}/final_hidden"] for i in LEARNED}
    change = head.norm if held == "twice" else (lambda x: x + 0.5 * x.flip(0))
    save_file(states | {name: change(x) for name, x in finals.items()}, path)
    assert check(copy).problems[0].startswith(words)


def test_a_drafter_that_learned_from_a_teacher_without_its_norm_is_named(learned, tmp_path):
    """What it learned from is taken for the state before the norm here, so that the norm comes on top of it."""
    copy = TinyRun(learned.target_dir, tmp_path)
    shutil.copytree(learned.folder, copy.folder)
    target, _ = learned.config()
    path, head = copy.folder / "dump" / "probes.safetensors", load_output_head(target)
    states = load_file(path)
    finals = {i: states[f"{i}/final_hidden"] for i in LEARNED}
    save_file(states | {f"{i}/layer_output.5": f.clone() for i, f in finals.items()}
              | {f"{i}/final_hidden": head.norm(f) for i, f in finals.items()}, path)
    result = check(copy)
    assert len(result.problems) == 1
    assert "the weights fit a teacher with the final norm missing better than the declared one" in result.problems[0]


def test_too_few_probes_say_so_and_decide_nothing(learned):
    manifest = learned.manifest
    result = check(learned, manifest=manifest.model_copy(update={
        "dump": manifest.dump.model_copy(update={"probe_ids": LEARNED[:4]})}))
    assert set(verdicts(result).values()) == {UNDECIDED} and "4 probe samples are too few" in result.notes[0]


def test_a_dump_without_probes_is_refused(learned):
    manifest = learned.manifest
    with pytest.raises(PipelineError, match="no probe samples"):
        check(learned, manifest=manifest.model_copy(update={"dump": manifest.dump.model_copy(update={"probe_ids": []})}))
