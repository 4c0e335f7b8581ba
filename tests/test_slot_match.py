"""Naming what a slot receives, on hand-made tensors: no engine and no model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeline.dump.dump_checks import rounding_bound
from pipeline.store import FINAL_HIDDEN, layer_output
from pipeline.verify.slot_match import applied_norms, judge_slot, score_slots, sentence, two_digits
from pipeline.verify.states import EMBEDDING, candidates, describe, short

N, H, DECLARED = 8, 48, [1, 3, 5]
BOUND = rounding_bound(torch.float32)


def states(rows: int = 20, step: float = 0.3, seed: int = 0) -> dict[str, torch.Tensor]:
    """A residual stream: every layer adds `step` of its length; the first row is far larger, as in many targets."""
    rng = torch.Generator().manual_seed(seed)
    norm = torch.rand(H, generator=rng) + 0.5
    stream = torch.randn(rows, H, generator=rng)
    made = {EMBEDDING: stream}
    for layer in range(N):
        stream = stream + step * torch.randn(rows, H, generator=rng) * stream.norm(dim=-1, keepdim=True) / H**0.5
        if layer == 0:
            stream[0] *= 300
        made[layer_output(layer)] = stream
    for layer in DECLARED:
        made[f"normed.{layer_output(layer)}"] = nn.functional.rms_norm(made[layer_output(layer)], (H,), norm, 1e-5)
    made[FINAL_HIDDEN] = nn.functional.rms_norm(stream, (H,), norm, 1e-5)
    return made


def judge(received: list[torch.Tensor], made: dict[str, torch.Tensor], bound: float = BOUND, declared=DECLARED):
    """Verdicts and sentences of all slots; the rows arrive in two pieces."""
    wide = torch.cat(received, -1)
    pieces = [(wide[rows], lambda key, rows=rows: made[key][rows]) for rows in (slice(0, 7), slice(7, None))]
    slots = score_slots(pieces, candidates(N, declared), H)
    verdicts = [judge_slot(s, layer_output(layer), bound) for s, layer in zip(slots, declared)]
    return verdicts, [sentence(f"fc.{i}", v, s, N) for i, (v, s) in enumerate(zip(verdicts, slots))]


def test_what_was_declared_holds_without_a_word():
    made = states()
    verdicts, sentences = judge([made[layer_output(layer)] for layer in DECLARED], made)
    assert all(v.right for v in verdicts) and sentences == [None] * 3


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_wiring_is_named_exactly(data):
    """Whatever the slots receive, also twice the same, each slot is named, in fp32 and under the noise of 16 bits."""
    made = states(rows=data.draw(st.integers(8, 30)), seed=data.draw(st.integers(0, 1000)))
    keys = candidates(N, DECLARED)
    wired = data.draw(st.lists(st.sampled_from(keys), min_size=3, max_size=3))
    dtype, noise = data.draw(st.sampled_from([(torch.float32, 1e-6), (torch.bfloat16, 2e-2)]))
    received = [made[k] + noise * torch.randn(made[k].shape) * made[k].norm(dim=-1, keepdim=True) / H**0.5 for k in wired]
    verdicts, sentences = judge(received, made, rounding_bound(dtype))
    assert [v.found for v in verdicts] == wired
    for key, layer, text in zip(wired, DECLARED, sentences):
        assert (text is None) == (key == layer_output(layer))
        if text is not None:
            assert f"receives {describe(key, N)} (relative error " in text


def test_a_neighbour_within_the_bound_of_16_bits_is_still_named():
    """Late layers of a deep target differ by less than the bound: the nearer one is what arrived."""
    made = states(step=0.03)
    received = [made[layer_output(layer)].bfloat16() for layer in (1, 4, 5)]
    verdicts, sentences = judge(received, made, rounding_bound(torch.bfloat16))
    assert [v.found for v in verdicts] == ["layer_output.1", "layer_output.4", "layer_output.5"]
    assert sentences[1].startswith("slot fc.1 receives layer output 4 (relative error 0.00")
    assert sentences[1].endswith("; the manifest says 3 (relative error 0.03)")


def test_the_sentence_of_an_off_by_one():
    made = {key: torch.full((1, 2), 100.0) for key in candidates(30, [1, 14, 26])}
    made["layer_output.1"], made["layer_output.26"] = torch.tensor([[7.0, 0]]), torch.tensor([[0, 9.0]])
    made["layer_output.13"], made["layer_output.14"] = torch.tensor([[1.0, 0]]), torch.tensor([[1 / 1.21, 0]])
    received = torch.tensor([[7.0, 0, 1.0, 2e-7, 0, 9.0]])
    slots = score_slots([(received, made.__getitem__)], list(made), 2)
    verdict = judge_slot(slots[1], "layer_output.14", BOUND)
    assert sentence("fc.1", verdict, slots[1], 30) == (
        "slot fc.1 receives layer output 13 (relative error 2e-7); the manifest says 14 (relative error 0.21)")


@pytest.mark.parametrize(("received", "named"), [
    (["layer_output.2", "layer_output.3", "layer_output.5"], {0: "layer output 2"}),
    (["layer_output.0", "layer_output.3", "layer_output.5"], {0: "layer output 0"}),
    (["layer_output.3", "layer_output.1", "layer_output.5"], {0: "layer output 3", 1: "layer output 1"}),
    ([EMBEDDING, "layer_output.1", "layer_output.3"], {0: "the embedding", 1: "layer output 1", 2: "layer output 3"}),
    (["layer_output.1", "layer_output.3", "layer_output.7"],
     {2: "layer output 7 (the final hidden state before the norm)"}),
    (["layer_output.1", "layer_output.3", FINAL_HIDDEN], {2: "the final hidden state after the norm"}),
    (["normed.layer_output.1", "layer_output.3", "layer_output.5"], {0: "layer output 1 after the final norm"}),
])
def test_mistakes_people_make_are_named(received, named):
    made = states()
    _, sentences = judge([made[key] for key in received], made)
    for slot, text in enumerate(sentences):
        if slot in named:
            assert text.startswith(f"slot fc.{slot} receives {named[slot]} (relative error 0); the manifest says ")
        else:
            assert text is None


def test_noise_is_none_of_the_targets_states():
    made = states()
    received = [made["layer_output.1"], torch.randn(20, H), made["layer_output.5"]]
    verdicts, sentences = judge(received, made)
    assert verdicts[1].found is None
    assert sentences[1].startswith("slot fc.1 receives none of the target's states; the nearest is ")
    assert "cosine" in sentences[1] and sentences[0] is sentences[2] is None


def test_one_wrong_row_among_many_is_no_rounding():
    made = states(rows=200)
    received = [made[layer_output(layer)].clone() for layer in DECLARED]
    received[2][100] = made["layer_output.4"][100]
    verdicts, sentences = judge(received, made)
    assert [v.found for v in verdicts] == ["layer_output.1", "layer_output.3", None]
    assert sentences[2].startswith("slot fc.2 receives none of the target's states; the nearest is layer output 5 (")


def test_a_state_at_another_length_is_recognised():
    """A norm without weights, or an embedding scaled by its family's factor."""
    made = states()
    received = [made[EMBEDDING] * 24, *(nn.functional.rms_norm(made[layer_output(layer)], (H,)) for layer in (3, 5))]
    _, sentences = judge(received, made)
    assert sentences[0].startswith("slot fc.0 receives the embedding at another length (cosine 1.000000, row norms ")
    assert sentences[1].startswith("slot fc.1 receives layer output 3 at another length (cosine 1.000000, row norms 6.9 ")
    assert "; the manifest says layer output 3 (relative error " in sentences[1]


def test_norms_and_rows_are_added_up_over_pieces():
    made = states()
    slots = score_slots([(made["layer_output.3"][a:b], lambda key, a=a, b=b: made[key][a:b]) for a, b in ((0, 3), (3, 20))],
                        ["layer_output.2", "layer_output.3"], H)
    norms = made["layer_output.3"].double().square().sum(-1).sqrt()
    difference = (made["layer_output.3"] - made["layer_output.2"]).norm(dim=-1) / made["layer_output.2"].norm(dim=-1)
    assert slots[0].rows == 20
    assert slots[0].received.mean == pytest.approx(norms.mean().item(), rel=1e-6)
    assert slots[0].received.std == pytest.approx(norms.var(correction=0).sqrt().item(), rel=1e-5)
    assert slots[0].states["layer_output.2"].error == pytest.approx(difference.mean().item(), rel=1e-5)
    assert slots[0].states["layer_output.3"].cosine == pytest.approx(1, abs=1e-9)


NORM_CASES = [(), ("input_norm",), ("fc_norm",), ("input_norm", "fc_norm")]


@pytest.mark.parametrize("applied", NORM_CASES)
def test_the_norms_before_fc_are_told_apart(applied):
    rng = torch.Generator().manual_seed(0)
    received = torch.randn(10, 3 * H, generator=rng) * 5
    weights = {"input_norm.weight": torch.rand(3 * H, generator=rng) + 0.5}
    weights |= {f"fc_norm.{i}.weight": torch.rand(H, generator=rng) + 0.5 for i in range(3)}
    x = received
    if "input_norm" in applied:
        x = nn.functional.rms_norm(x, (3 * H,), weights["input_norm.weight"], 1e-5)
    if "fc_norm" in applied:
        x = torch.cat([nn.functional.rms_norm(part, (H,), weights[f"fc_norm.{i}.weight"], 1e-5)
                       for i, part in enumerate(x.chunk(3, -1))], -1)
    errors = applied_norms([(received[:4], x[:4]), (received[4:], x[4:])], weights, H, 1e-5)
    assert list(errors) == [(), ("fc_norm",), ("input_norm",), ("input_norm", "fc_norm")]
    assert errors[applied] < 1e-5 and all(e > 0.1 for names, e in errors.items() if names != applied)


def test_numbers_are_short():
    assert [two_digits(x) for x in (0.21, 2e-7, 2.04e-7, 1.0, 313.2, 0.0)] == ["0.21", "2e-7", "2e-7", "1", "3.1e2", "0"]


def test_every_state_has_a_key_words_and_a_label():
    keys = candidates(3, [1])
    assert keys == ["embedding", "layer_output.0", "layer_output.1", "layer_output.2", "final_hidden", "normed.layer_output.1"]
    assert [short(key) for key in keys] == ["E", "0", "1", "2", "F", "n1"]
    assert [describe(key, 3) for key in keys] == [
        "the embedding", "layer output 0", "layer output 1", "layer output 2 (the final hidden state before the norm)",
        "the final hidden state after the norm", "layer output 1 after the final norm"]
    assert describe(keys[3]) == "layer output 2"
