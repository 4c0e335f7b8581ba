"""The draft vocabulary: a case worked by hand, and invariants for any counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.files import save_safetensors
from pipeline.vocab import build_vocab, check_vocab, read_vocab


def test_by_hand():
    """V = 10, five wanted: 9 is forced, 4 and 2 are the most trained, 7 and 3 tie and the lower one wins, then 7."""
    trained = torch.tensor([0, 0, 5, 1, 8, 0, 0, 1, 0, 0])
    vocab = build_vocab(trained, trained, 5, always=[9])
    assert vocab.target_ids().tolist() == [2, 3, 4, 7, 9]
    assert vocab.d2t.tolist() == [2, 2, 2, 4, 5]
    assert vocab.t2d.tolist() == [False, False, True, True, True, False, False, True, False, True]
    assert vocab.coverage(trained) == 1.0
    assert build_vocab(trained, trained, 3, always=[9]).target_ids().tolist() == [2, 4, 9]
    assert build_vocab(trained, trained, 3, always=[9]).coverage(trained) == 13 / 15


def test_fewer_trained_tokens_than_wanted_are_filled_up():
    """One trained token (6); the corpus uses 3 more often than 8; then the lowest unused ids 0 and 1."""
    trained, corpus = torch.zeros(10, dtype=torch.int64), torch.zeros(10, dtype=torch.int64)
    trained[6] = 1
    corpus[6], corpus[3], corpus[8] = 1, 4, 2
    assert build_vocab(trained, corpus, 5).target_ids().tolist() == [0, 1, 3, 6, 8]
    assert build_vocab(trained, corpus, 2).target_ids().tolist() == [3, 6]


@pytest.mark.parametrize("size", [10, 11, 1000])
def test_clamped_to_the_whole_vocabulary_is_the_identity(size):
    vocab = build_vocab(torch.ones(10, dtype=torch.int64), torch.ones(10, dtype=torch.int64), size, always=[3])
    assert vocab.target_ids().tolist() == list(range(10)) and vocab.d2t.eq(0).all() and vocab.t2d.all()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_invariants(data):
    v = data.draw(st.integers(2, 60))
    counts = st.lists(st.integers(0, 4), min_size=v, max_size=v)
    trained = torch.tensor(data.draw(counts))
    corpus = trained + torch.tensor(data.draw(counts))
    always = data.draw(st.lists(st.integers(0, v - 1), max_size=3))
    size = data.draw(st.integers(max(1, len(set(always))), v + 5))
    vocab = build_vocab(trained, corpus, size, always=always)
    ids = vocab.target_ids()
    assert vocab.size == min(size, v) == int(vocab.t2d.sum())
    assert vocab.t2d[ids].all() and vocab.t2d[list(always)].all()
    assert (ids[1:] > ids[:-1]).all() and 0 <= int(ids[0]) and int(ids[-1]) < v
    # No token outside was more wanted than one inside that was not forced in.
    free = [i for i in ids.tolist() if i not in always]
    outside = (~vocab.t2d).nonzero().flatten().tolist()
    rank = lambda i: (int(trained[i]), int(corpus[i]), -i)  # noqa: E731
    assert not free or not outside or min(map(rank, free)) > max(map(rank, outside))
    check_vocab(vocab.d2t, vocab.t2d, where="test")


def test_no_room_for_end_of_turn():
    with pytest.raises(PipelineError, match="draft_vocab_size"):
        build_vocab(torch.ones(10), torch.ones(10), 1, always=[3, 4])


def test_reading_names_what_is_wrong(tmp_path):
    vocab = build_vocab(torch.arange(10), torch.arange(10), 4)
    path = tmp_path / "vocab.safetensors"
    with pytest.raises(PipelineError, match="make standardize"):
        read_vocab(path)
    save_safetensors(path, {"t2d": vocab.t2d})
    with pytest.raises(PipelineError, match="lacks d2t"):
        read_vocab(path)
    save_safetensors(path, {"t2d": vocab.t2d, "d2t": vocab.d2t + 1})
    with pytest.raises(PipelineError, match="same ascending set"):
        read_vocab(path)
    save_safetensors(path, {"t2d": vocab.t2d, "d2t": vocab.d2t})
    assert read_vocab(path).target_ids().tolist() == [6, 7, 8, 9]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(PipelineError, match="cannot be read"):
        read_vocab(path)
