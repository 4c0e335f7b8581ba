"""The replay: its forward against the trainer's, its walk against hand-worked and brute-force ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.dump.target_states import state_source
from pipeline.errors import PipelineError
from pipeline.export.export import export
from pipeline.samples import Sample
from pipeline.standardize import full_vocabulary_argmax
from pipeline.target import OutputHead, load_embedding
from pipeline.verify.checks import CheckResult, Subject
from pipeline.verify.replay import Accuracy, ExportedDrafter, gated_rows, tau, teacher_forced_accuracy, walk
from pipeline.verify.replay_check import replay_check, teacher_forced_samples
from pipeline.verify.served import Served, compare, judge, last_answer, redump
from tests.tiny_run import TinyRun, tiny_run


def checked(run: TinyRun, **overrides) -> dict:
    """What the replay check measured; it must hold."""
    target, config = run.config(**overrides)
    folder = run.folder / "export" / "sglang"
    result = replay_check(Subject(config, target, run.manifest, run.folder, run.folder / "verify", folder))
    assert result.problems == []
    return result.measured


def test_replayed_accuracy_and_accepted_prefixes_are_the_trainers(learned):
    found = checked(learned, **{"verify.replay_samples": None})
    assert found["replayed_accuracy"] == pytest.approx(found["trainer_accuracy"], abs=1e-9)
    assert found["replayed_conditional_accuracy"] == pytest.approx(found["trainer_conditional_accuracy"], abs=1e-9)
    assert found["tau_row_replayed@3"] == pytest.approx(found["tau_row_trainer@3"], abs=1e-9)
    assert found["replayed_accepted_prefixes"] == [
        round(share * reached) for share, reached in zip(found["trainer_conditional_accuracy"], found["reached_rows"])
    ]


def test_a_capped_replay_takes_the_same_samples_and_allows_for_the_choice(learned):
    found = checked(learned, **{"verify.replay_samples": 4})
    assert (found["replayed_samples"], found["heldout_samples"]) == (4, 6)
    assert "3 standard errors" in found["compared_within"]
    assert checked(learned, **{"verify.replay_samples": 4}) == found
    everything = checked(learned, **{"verify.replay_samples": None})
    assert everything["replayed_samples"] == 6 and everything["compared_within"] == "rounding"
    assert found["replayed_rows"] < everything["replayed_rows"]
    assert all(found["allowed_differences"][k] >= allowed for k, allowed in everything["allowed_differences"].items())


def test_standard_error_by_hand():
    """Two samples of 10 rows, 5 and 7 hits where 0.5 per row were expected: off by 0 and 2, so √4 / 20."""
    counts = torch.tensor([[[10], [5], [8], [4]], [[10], [7], [4], [2]]])  # rows, hits, reached, prefix
    assert Accuracy(counts).standard_error("hits", "rows", [0.5]) == pytest.approx([0.1])
    assert Accuracy(counts).standard_error("prefix", "reached", [0.5]) == [0.0]
    nothing = Accuracy(torch.tensor([[[10], [0], [0], [0]]] * 64))  # no hit in 64 samples where 0.3 per row were expected
    assert 3 * nothing.standard_error("hits", "rows", [0.3])[0] < 0.3


def test_counts_by_hand():
    """A sample of which the target wrote all but token 0: rows 0, 1, 2 at step 0, rows 0, 1 at step 1, row 0 at step 2."""

    class Drafts:
        def draft(self, ids, features, rows, steps, *, forced):
            assert forced and rows.tolist() == [0, 1, 2] and steps == 3
            return torch.tensor([[12, 13, 0], [0, 14, 0], [14, 0, 0]])

    argmax = torch.tensor([0, 12, 13, 14, 0])  # at token p, of token p + 1
    sample = (torch.arange(5), [0, 1, 1, 1, 1], torch.zeros(5, 1), argmax)
    found = teacher_forced_accuracy(Drafts(), [sample], 3)
    # Row 0 is right at steps 0 and 1, row 1 at step 1 only, row 2 at step 0; row 0 draws 0 at step 2, where it is 14.
    assert found.rows == [3, 2, 1] and found.hits == [2, 2, 0]
    assert found.reached == [3, 1, 1] and found.prefix == [2, 1, 0]
    assert found.conditional() == pytest.approx([2 / 3, 1, 0]) and found.tau_row(3) == pytest.approx(1 + 2 / 3 + 1 / 2)


@pytest.mark.parametrize("trained_steps", [1, 5])
def test_the_steps_of_the_training_are_replayed_whatever_this_command_says(tmp_path, trained_steps):
    run = tiny_run(tmp_path)
    run.stage("standardize")
    run.stage("train", **{"train.epochs": 1, "train.ttt_steps": trained_steps})
    target, config = run.config(**{"export.engines": ["sglang"]})
    export(config, target, run.manifest, run.folder, run.folder / "export")
    found = checked(run)
    assert len(found["replayed_accuracy"]) == max(3, trained_steps)
    assert found["tau_row_replayed@3"] == pytest.approx(found["tau_row_trainer@3"], abs=1e-9)


@pytest.mark.parametrize("what", ["weights", "embedding", "slots", "rope"])
def test_replay_notices_a_wrong_export(learned, what):
    """On the training samples, where the drafter is good enough for a fault to show. (A random target's drafter hardly
    uses embedding and positions, so that there only the counts differ.)"""
    target, _ = learned.config()
    manifest = learned.manifest
    samples = list(teacher_forced_samples(target, manifest, learned.folder, "train"))
    drafter = ExportedDrafter(learned.folder / "export" / "sglang", load_embedding(target))
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


def test_free_running_drafts_equal_forced_ones_along_the_accepted_prefix(learned):
    """Which is why one walk may use either: past the first miss nothing is accepted."""
    target, _ = learned.config()
    drafter = ExportedDrafter(learned.folder / "export" / "sglang", load_embedding(target))
    accepted = 0
    for ids, mask, features, _ in teacher_forced_samples(target, learned.manifest, learned.folder, "train"):
        rows = torch.tensor(gated_rows(mask, 0))
        free, forced = (drafter.draft(ids, features, rows, 3, forced=f) for f in (False, True))
        for n, row in enumerate(rows.tolist()):
            for j in range(3):
                assert free[n, j] == forced[n, j]
                if row + 2 + j >= len(ids) or free[n, j] != ids[row + 2 + j]:
                    break
                accepted += 1
    assert accepted > 50


def test_rows_do_not_see_the_future(learned):
    target, _ = learned.config()
    drafter = ExportedDrafter(learned.folder / "export" / "sglang", load_embedding(target))
    ids, _, features, _ = next(teacher_forced_samples(target, learned.manifest, learned.folder, "heldout"))
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
    assert same["accepted_per_position_engine"] == same["accepted_per_position_replayed"] == [1, 1, 0]
    other = compare([Served(**{**request.__dict__, "correct": 1, "histogram": [0, 1]})], [found], 3)
    assert (
        not other["counters_identical"] and other["tau_engine"] == 2.0 and other["requests_with_other_counters"] == [0]
    )


def judged(run: TinyRun, folder, texts: list[bool], **served) -> CheckResult:
    """One request per entry; False: its text with the drafter is another one."""
    target, config = run.config()
    prompt, plain = [5, 6, 7, 8], [9, 10, 11, 12]
    request = {"prompt": prompt, "plain": plain, "beyond": [1, 2, 3, 4], "verifications": 3, "correct": 0, "histogram": [3]}
    requests = [Served(**request, output=plain if same else plain[::-1]) for same in texts]
    draft = run.folder / "export" / "sglang"
    return judge(Subject(config, target, run.manifest, run.folder, folder, draft), requests, engine="SGLang", **served)


def test_texts_that_all_differ_prove_nothing(learned, tmp_path):
    result = judged(learned, tmp_path, [False] * 3, dtype="bfloat16", exact=False)
    assert len(result.problems) == 1 and "the same for 0 of 3 requests only" in result.problems[0]
    assert not result.measured["counters_identical"]
    assert result.notes == ["counters of 0 of 3 requests compared: the texts of the others differ"]


@pytest.mark.parametrize("others, few", [(3, False), (4, True)])
def test_a_quarter_of_the_texts_must_be_comparable(learned, tmp_path, others, few):
    result = judged(learned, tmp_path, [True] + [False] * others, dtype="float32", exact=True)
    assert any("too few to judge SGLang's counters by" in p for p in result.problems) == few
    assert result.measured["requests_compared"] == 1
    assert f"counters of 1 of {1 + others} requests compared: the texts of the others differ" in result.notes


@pytest.mark.parametrize("equal, by", [(True, "transformers"), (False, "sglang"), (None, "sglang")])
def test_the_replay_is_fed_what_the_drafter_was_trained_on(learned, tmp_path, monkeypatch, equal, by):
    """SGLang captures something else than transformers has, or nobody knows: then the engine computes the states."""
    manifest = learned.manifest
    assert state_source(manifest, exact=True) == {"engine": "transformers", "dtype": "fp32"}  # dumped by transformers
    manifest.dump.engine = "sglang"
    for slot in manifest.fc_slots():
        slot.equals_transformers = equal
    assert state_source(manifest, exact=True) == {"engine": by, "dtype": "fp32"}
    assert state_source(manifest, exact=False) == {"engine": "sglang", "dtype": "target"}

    def dump_sequences(*_, engine, **__):
        raise PipelineError(engine)

    monkeypatch.setattr("pipeline.verify.served.dump_sequences", dump_sequences)
    target, config = learned.config()
    with pytest.raises(PipelineError, match=f"^{by}"):
        redump([], config, target, manifest, [0, 2, 4], tmp_path, exact=True)


@pytest.mark.parametrize("rows_at_once", [1, 3])
def test_forced_logits_hold_the_scores_of_a_few_rows_at_a_time(learned, monkeypatch, rows_at_once):
    target, _ = learned.config()
    drafter = ExportedDrafter(learned.folder / "export" / "sglang", load_embedding(target))
    ids, fused, rows = torch.arange(3, 23), torch.randn(19, 64), torch.arange(2, 15)
    expected, held = drafter.forced_logits(ids, fused, rows, 3), []
    unroll = ExportedDrafter._unroll
    monkeypatch.setattr("pipeline.verify.replay._SCORES", rows_at_once * drafter.config["num_attention_heads"] * len(ids))
    monkeypatch.setattr(ExportedDrafter, "_unroll", lambda self, part, *a: (held.append(len(part)), unroll(self, part, *a))[1])
    assert torch.allclose(drafter.forced_logits(ids, fused, rows, 3), expected, atol=1e-5)
    assert max(held) == rows_at_once and sum(held) == len(rows)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns inside the block."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


def test_the_targets_answers_need_no_copy_of_a_large_head_in_fp32():
    """H = 7168 and 40,960 tokens in bf16: in fp32 1.2 GB, of which a part of the vocabulary is held."""
    hidden, vocab = 7168, 40_960
    weight = torch.zeros(vocab, 1, dtype=torch.bfloat16)
    weight[30_000] = 1.0
    head = OutputHead(weight.expand(vocab, hidden), torch.ones(hidden), 1e-6)
    with Largest() as largest:
        assert full_vocabulary_argmax(torch.ones(3, hidden), head).tolist() == [30_000] * 3
    assert largest.bytes < 0.25e9


def test_replay_check_takes_the_argmax_in_parts(learned, monkeypatch):
    monkeypatch.setattr(OutputHead, "logits", None)  # of the whole vocabulary
    checked(learned)


def test_the_last_answer_is_served():
    sample = Sample("s", "heldout", None, [], list(range(9)), [0, 0, 1, 1, 0, 1, 1, 1, 0], None)
    assert last_answer(sample) == 5
