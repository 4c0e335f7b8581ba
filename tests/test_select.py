"""What is chosen: counts add up, nothing depends on order or files, and what is left out is left out for its reason."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.prompts.decontaminate import Protected
from pipeline.prompts.mixture import Candidate, quotas, spread
from pipeline.prompts.near import Signatures
from pipeline.prompts.text import grams, words
from tests.source_files import jsonl, selected, settings, skipped

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok"}
SYSTEM, MORE = {"role": "system", "content": "Be kind"}, {"role": "user", "content": "hm"}
SLOW_DISK = hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def texts(records) -> list[str]:
    return [r.messages[-1]["content"] for r in records]


def ids(records) -> set[str]:
    return {r.id for r in records}


# --- one conversation

def test_what_is_answered_and_what_is_kept(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"messages": [SYSTEM, USER, ANSWER, MORE]}, {"messages": [SYSTEM]})

    def contents(respond, **options):
        records, account = selected(path, tmp_path / "out", respond=respond, **options)
        return [[m["content"] for m in r.messages] for r in records], account.reasons

    assert contents("target", answer="last") == ([["Be kind", "Hi", "ok", "hm"]], {"no_user_turn": 1})
    assert contents("target") == ([["Be kind", "Hi", "", "hm"]], {"no_user_turn": 1})
    assert contents("keep") == ([["Be kind", "Hi", "ok"]], {"no_assistant_turn": 1})
    path = jsonl(path, {"messages": [USER, ANSWER]})
    assert contents("target", system_prompt="Be brief") == ([["Be brief", "Hi"]], {})


def test_names_and_the_split_are_of_the_content_alone(tmp_path):
    plain = {"prompt": "How many apples?"}
    path = jsonl(tmp_path / "a.jsonl", plain, {"id": 7, "messages": [USER], "category": "x"}, {"id": 7, "prompt": "another"})
    first, _ = selected(path, tmp_path / "out")
    assert len(ids(first)) == 3  # the source's own ids may repeat, above all between sources
    more, _ = selected(jsonl(path, {"prompt": "new"}, {"prompt": "Hi"}, plain), tmp_path / "out", system_prompt="Be brief",
                       heldout_fraction=0.1)
    assert {first[0].id, first[1].id} <= ids(more)


def test_heldout_by_hash_has_the_asked_share_and_keeps_openings_together(tmp_path):
    questions = [f"question {i}" for i in range(1000)]
    path = jsonl(tmp_path / "a.jsonl", *({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": str(k)},
                                                      MORE]} for k in range(2) for q in questions))
    records, _ = selected(path, tmp_path / "out", answer="last")
    heldout = {r.messages[0]["content"] for r in records if r.split == "heldout"}
    train = {r.messages[0]["content"] for r in records if r.split == "train"}
    assert len(records) == 2000 and 0.07 < len(heldout) / 1000 < 0.13 and not heldout & train
    assert all(r.split == "train" for r in selected(path, tmp_path / "out", heldout_fraction=0)[0])


def test_length_filters_count_the_characters_of_a_conversation(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x" * 3}, {"prompt": "x" * 10}, {"prompt": "x" * 30})
    records, account = selected(path, tmp_path / "out", min_chars=5, max_chars=20)
    assert texts(records) == ["x" * 10] and account.reasons == {"too_short": 1, "too_many_chars": 1}
    row = jsonl(tmp_path / "b.jsonl", {"input_ids": [1] * 9, "loss_mask": [0] * 8 + [1]})
    _, account = selected(row, tmp_path / "out", respond="keep", max_chars=8, decode=lambda ids: "x" * len(ids))
    assert account.reasons == {"too_many_chars": 1}


def test_language_filter(tmp_path, monkeypatch):
    sentences = {"en": "Why do cats purr, and is it always a sign that they are content?",
                 "de": "Warum schnurren Katzen, und sind sie dabei wirklich immer zufrieden?",
                 "zh": "为什么猫会打呼噜,这是否总是表示它们感到满足呢?请用简单的语言解释一下原因。", "short": "ok?"}
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": text} for text in sentences.values()))
    records, account = selected(path, tmp_path / "out", languages=["en", "zh"])
    assert texts(records) == [sentences[k] for k in ("en", "zh", "short")] and account.reasons == {"language": 1}
    assert "its language is de" in skipped(tmp_path / "out")[0]["detail"]
    monkeypatch.setitem(__import__("sys").modules, "py3langid", None)
    with pytest.raises(PipelineError, match="py3langid, which is not installed") as e:
        selected(path, tmp_path / "out", languages=["en"])
    assert "pip install" in e.value.fix


# --- copies and near copies

def test_of_copies_a_heldout_one_is_used_then_the_first_sources(tmp_path):
    first = jsonl(tmp_path / "a.jsonl", {"prompt": "Hi", "category": "b", "split": "train"}, {"prompt": "ok", "category": "b"},
                  {"prompt": "ok", "category": "a"})
    second = jsonl(tmp_path / "b.jsonl", {"prompt": "Hi", "category": "c", "split": "heldout"}, {"prompt": "ok"})
    records, account = selected([{"path": str(first)}, {"path": str(second)}], tmp_path / "out", heldout_fraction=0)
    assert [(texts([r])[0], r.category, r.split, r.source) for r in records] == [
        ("ok", "a", "train", 0), ("Hi", "c", "heldout", 1)]
    assert account.by_source == [{"read": 3, "duplicates": 2}, {"read": 2, "duplicates": 1}]


def test_conversations_that_differ_in_what_the_target_writes_anew_are_copies(tmp_path):
    other = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    path = jsonl(tmp_path / "a.jsonl", {"messages": [USER, ANSWER, MORE]},
                 {"messages": [USER, other, MORE, ANSWER], "split": "heldout"},
                 {"messages": [ANSWER, USER, ANSWER, MORE]}, {"messages": [USER, MORE]})
    for answer, kept in (("all", 3), ("last", 4)):
        records, account = selected(path, tmp_path / "out", respond="target", answer=answer, heldout_fraction=0,
                                    decontaminate_words=None)
        assert len(records) == len(ids(records)) == kept and account.total["duplicates"] == 4 - kept
        assert {r.split for r in records if r.messages[0] == USER and len(r.messages) == 3} >= {"heldout"}


BASE = ("A farmer has seventeen sheep and twelve goats in a field beside the river, and every morning he counts them twice "
        "before he lets them out. One day a storm breaks the fence and nine animals run away into the hills. ")
NEAR = [  # a pair, and the Jaccard similarity of its sets of five-word runs, counted by hand: 41 words, 37 runs
    (BASE, BASE.upper().replace(",", ";"), 1.0),
    (BASE, BASE + "How many?", 37 / 39),
    (BASE, BASE.replace("seventeen", "18"), 33 / 41),  # the fourth word: four runs differ
    (BASE, BASE.replace("twelve", "four").replace("storm", "wind"), 27 / 47),
    (BASE, "Write a poem about the sea, with a storm and a fisherman who counts the waves.", 0.0),
]


@pytest.mark.parametrize("a, b, similarity", NEAR)
def test_near_duplicates_of_hand_made_pairs(a, b, similarity):
    x, y = (set(grams(words(text), 5).tolist()) for text in (a, b))
    assert len(x & y) / len(x | y) == pytest.approx(similarity)
    signatures = Signatures(2)
    signatures.set(0, a)
    signatures.set(1, b)
    for threshold in (0.5, 0.7, 0.9):
        if abs(similarity - threshold) > 0.12:  # twice the estimate's deviation and more
            assert list(signatures.near_duplicates([0, 1], threshold)) == ([(1, 0)] if similarity > threshold else [])
    assert list(signatures.near_duplicates([1, 0], 0.3)) == ([(0, 1)] if similarity > 0.42 else [])


def test_near_duplicates_are_off_unless_asked_and_listed(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": text, "split": "train"} for text in (BASE, BASE + "How many?", "Hello you")),
                 {"prompt": BASE + "How many are left?", "split": "heldout"})
    assert len(selected(path, tmp_path / "out", decontaminate_words=None)[0]) == 4
    records, account = selected(path, tmp_path / "out", near_duplicates=0.7, decontaminate_words=None)
    assert texts(records) == ["Hello you", BASE + "How many are left?"]  # the held-out one is preferred
    assert account.total == {"read": 4, "skipped_near_duplicate": 2}
    assert {line["detail"] for line in skipped(tmp_path / "out")} == {f"it is nearly {records[1].id}"}


# --- held-out and benchmark prompts

BENCH = [  # the shapes of GSM8K, HumanEval and MT-bench
    {"turns": ["A baker sells 24 loaves on Monday and three times as many on Tuesday. If each loaf costs $4, how much money does "
               "he take in on both days?\nPlease reason step by step, and put your final answer within \\boxed{}."]},
    {"turns": ["Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef longest_run("
               "numbers: List[int]) -> int:\n    \"\"\" Return the length of the longest run of equal neighbours in a list\n"
               "    >>> longest_run([1, 1, 2])\n    2\n    \"\"\"\n```"]},
    {"turns": ["Imagine you are a travel guide.", "Now answer again, as a pirate would."]},
]


def test_what_repeats_a_benchmark_prompt_is_left_out(tmp_path):
    bench = jsonl(tmp_path / "bench.jsonl", *BENCH)
    # Another fourteen questions with the same last sentence: it is the benchmark's wording, not a question.
    ending = BENCH[0]["turns"][0].split("\n")[1]
    jsonl(tmp_path / "folder" / "more.jsonl", *({"turns": [f"What is {i} times {i + 1}?\n{ending}"]} for i in range(14)))
    baker = BENCH[0]["turns"][0].split("\n")[0]
    train = {
        "the question in another wrapping": (f"Q: {baker.upper()} Answer:", True),
        "part of it": ("He sells 24 loaves on Monday and three times as many on Tuesday, if each loaf costs 5", True),
        "too small a part": ("three times as many on Tuesday. If each loaf costs", False),
        "the ending of all questions": (f"What is the capital of Norway? {ending}", False),
        "the docstring": ('Explain: """Return the length of the longest run of equal neighbours in a list"""', True),
        "a short prompt as a whole": ("imagine you are a travel guide", True),
        "a short prompt within another": ("Imagine you are a travel guide. Describe Rome.", False),
        "a short later turn": ("Now answer again, as a pirate would.", False),
    }
    path = jsonl(tmp_path / "a.jsonl",
                 *({"prompt": text, "category": name, "split": "train"} for name, (text, _) in train.items()),
                 {"prompt": baker, "split": "heldout", "category": "held out"})
    records, account = selected(path, tmp_path / "out", decontaminate_against=[str(bench), str(tmp_path / "folder")])
    assert [r.category for r in records] == [*(name for name, (_, repeats) in train.items() if not repeats), "held out"]
    assert account.total == {"read": 9, "skipped_contaminated": 4}
    assert len(selected(path, tmp_path / "out", decontaminate_words=None)[0]) == 9


def test_held_out_prompts_are_protected_the_runs_own_and_the_built_in_ones(tmp_path):
    builtin = next(r for r in selected("builtin", tmp_path / "out")[0] if r.split == "heldout" and len(r.messages) == 1)
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "Please: " + builtin.messages[0]["content"] + " Thank you!", "split": "train"},
                 {"prompt": BASE, "split": "heldout"},
                 {"messages": [USER, ANSWER, {"role": "user", "content": "So: " + BASE}], "split": "train"},
                 {"messages": [USER, {"role": "assistant", "content": BASE}, MORE], "split": "train"})
    records, account = selected(path, tmp_path / "out")
    assert [r.where.rpartition(":")[2] for r in records] == ["2", "4"] and account.reasons == {"contaminated": 2}


def test_rows_of_tokens_are_compared_by_their_text(tmp_path):
    def decode(ids):
        return " ".join(f"word{i}" for i in ids)

    prompt = list(range(20))
    bench = jsonl(tmp_path / "bench.jsonl", {"prompt": decode(prompt)})
    rows = [{"input_ids": [*prompt, 50, 51], "loss_mask": [0] * 20 + [1] * 2, "split": "train"},
            {"input_ids": [90, *prompt], "loss_mask": [0] + [1] * 20, "split": "train"}]  # the target said it
    records, account = selected(jsonl(tmp_path / "a.jsonl", *rows), tmp_path / "out", respond="keep", decode=decode,
                                decontaminate_against=[str(bench)])
    assert [r.input_ids[0] for r in records] == [90] and account.reasons == {"contaminated": 1}


def test_a_benchmark_that_is_not_read_whole_is_an_error(tmp_path):
    bench = jsonl(tmp_path / "bench.jsonl", {"question": "Hi"})
    with pytest.raises(PipelineError, match="bench.jsonl:1 is of unknown form") as e:
        selected("builtin", tmp_path / "out", decontaminate_against=[str(bench)], on_bad_record="skip")
    assert e.value.field == "prompts.decontaminate_against"


@given(st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=30), st.integers(1, 6), st.data())
def test_runs_of_words_are_the_same_numbers_wherever_they_stand(said, n, data):
    whole = grams(said, n).tolist()
    assert len(whole) == max(1, len(said) - n + 1)
    start = data.draw(st.integers(0, len(whole) - 1))
    part = said[start:start + n]
    assert grams(part, n).tolist() == [whole[start]]
    other = [*part[:-1], part[-1] + "d"]
    assert grams(other, n).tolist() != [whole[start]]


def test_words_fold_case_accents_and_scripts_without_blanks():
    assert words("Hi THERE, it's “3.5” — Caf\u00e9 cafe\u0301 ﬁne") == ["hi", "there", "it", "s", "3", "5", "café", "café", "fine"]
    assert words("你好 world") == ["你", "好", "world"]


def test_protected_counts_the_same_prompt_once():
    protected = Protected(3)
    for _ in range(50):
        protected.add(["one two three four"])
    assert len(protected) == 1
    assert protected.repeated_in(["zero one two three"]) and not protected.repeated_in(["two one three"])
    assert not Protected(3).repeated_in(["one two three"]) and not protected.repeated_in([])


# --- limits and mixtures

def candidate(id: str, *, category=None, split="train", source=0) -> Candidate:
    return Candidate(id, source, split, category, 0)


@given(sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=5),
       limit=st.integers(1, 40))
def test_limit_is_even_over_categories_and_keeps_the_heldout_share(sizes, limit):
    there = [candidate(f"{c}-{split}-{i}", category=str(c), split=split)
             for c, counts in enumerate(sizes) for split, n in zip(("train", "heldout"), counts) for i in range(n)]
    if len(there) <= limit:
        return
    ids = spread(there, limit)
    chosen = [c for c in there if c.id in ids]
    assert len(chosen) == limit
    heldout = sum(c.split == "heldout" for c in there)
    got = sum(c.split == "heldout" for c in chosen)
    assert abs(got - limit * heldout / len(there)) <= 1
    for split in ("train", "heldout"):
        all_of = Counter(c.category for c in there if c.split == split)
        taken = Counter(c.category for c in chosen if c.split == split)
        # Even: a category gets fewer than another, by more than one, only if it is used up.
        most = max(taken.values(), default=0)
        assert all(taken[c] >= most - 1 or taken[c] == all_of[c] for c in all_of)


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([0.1, 0.5, 1, 2, 3.7])), min_size=1, max_size=4),
       st.none() | st.integers(1, 60))
def test_quotas_have_the_asked_proportions_and_are_as_large_as_possible(parts, limit):
    available, weights = zip(*parts)
    sizes = quotas(available, weights, limit)
    total = sum(sizes)
    assert all(0 <= size <= there for size, there in zip(sizes, available)) and (limit is None or total <= limit)
    assert all(abs(size - total * w / sum(weights)) < 1 for size, w in zip(sizes, weights))
    one_more = [(total + 1) * w / sum(weights) for w in weights]
    assert total == limit or any(size > there - 1e-9 for size, there in zip(one_more, available))


def numbered(path: Path, name: str, n: int, **fields) -> Path:
    return jsonl(path, *({"prompt": f"{name} {i}", "split": "train", **fields} for i in range(n)))


def test_a_mixture_has_the_asked_weights_and_caps_and_counts_for_each_source(tmp_path):
    a, b = numbered(tmp_path / "a.jsonl", "a", 100), numbered(tmp_path / "b.jsonl", "b", 30)

    def mixed(*sources, **more):
        _, account = (result := selected(list(sources), tmp_path / "out", **more))
        return Counter(r.source for r in result[0]), [dict(c) for c in account.by_source]

    of_a, of_b = {"path": str(a)}, {"path": str(b)}
    assert mixed(of_a | {"weight": 1}, of_b | {"weight": 2}) == (
        {0: 15, 1: 30}, [{"read": 100, "skipped_mixture": 85}, {"read": 30}])
    assert mixed(of_a | {"weight": 1}, of_b | {"weight": 2}, limit=12)[0] == {0: 4, 1: 8}
    assert mixed(of_a | {"cap": 10}, of_b) == ({0: 10, 1: 30}, [{"read": 100, "skipped_cap": 90}, {"read": 30}])
    assert mixed(of_a | {"cap": 10, "weight": 1}, of_b | {"weight": 1})[0] == {0: 10, 1: 10}
    assert mixed(of_a | {"take": 7}, of_b) == ({0: 7, 1: 30}, [{"read": 7}, {"read": 30}])
    everything, counts = mixed(of_a, of_b, limit=26)
    assert everything.total() == 26 and sum(c["skipped_limit"] for c in counts) == 104


def test_a_mixture_that_cannot_be_is_an_error(tmp_path):
    a = {"path": str(numbered(tmp_path / "a.jsonl", "a", 10)), "weight": 1}
    with pytest.raises(ValueError, match="either every source of a mixture has a weight, or none"):
        settings([a, {"path": "builtin"}])
    copy = {"path": str(numbered(tmp_path / "b.jsonl", "a", 10)), "weight": 1}
    with pytest.raises(PipelineError, match="b.jsonl has nothing left to mix"):
        selected([a, copy], tmp_path / "out")


# --- any mixture of records

GOOD = st.builds(lambda i, split, category, n: json.dumps(
    {"prompt": f"question number {i}" + " and so on" * n, "split": split, "category": category}),
    st.integers(0, 30), st.sampled_from([None, "train", "heldout"]), st.sampled_from([None, "x", "y"]), st.integers(0, 2))
BAD = st.sampled_from(['{"prompt": "cut', '{"question": 1}', '{"prompt": "\\ud83d"}', "[]", '{"prompt": "a", "prompt": "a"}'])
UNUSABLE = st.sampled_from(['{"messages": []}', '{"messages": [{"role": "assistant", "content": "ok"}]}', '{"prompt": "x"}'])
LINES = st.lists(GOOD | BAD | UNUSABLE, max_size=40)
CHOICE = st.fixed_dictionaries({
    "limit": st.none() | st.integers(1, 30), "min_chars": st.none() | st.just(5), "near_duplicates": st.none() | st.just(0.6),
    "decontaminate_words": st.none() | st.just(3), "heldout_fraction": st.sampled_from([0.0, 0.3])})


@SLOW_DISK
@given(files=st.lists(LINES, min_size=1, max_size=3), caps=st.lists(st.none() | st.integers(1, 9), min_size=3, max_size=3),
       choice=CHOICE)
def test_counts_add_up_for_any_sources(files, caps, choice):
    with TemporaryDirectory() as folder:
        sources = []
        for k, (lines, cap) in enumerate(zip(files, caps)):
            path = Path(folder) / f"{k}.jsonl"
            path.write_text("".join(line + "\n" for line in lines))
            sources.append({"path": str(path), "cap": cap})
        records, account = selected(sources, Path(folder) / "out", on_bad_record="skip", **choice)
        listed = skipped(Path(folder) / "out") + skipped(Path(folder) / "out", "quarantine.jsonl")
    kept = Counter(r.source for r in records)
    for k, (lines, counts) in enumerate(zip(files, account.by_source)):
        dropped = sum(n for name, n in counts.items() if name.startswith("skipped_"))
        assert counts["read"] == len(lines) == kept[k] + counts["duplicates"] + dropped
    assert Counter(line["reason"] for line in listed) == account.reasons
    assert len(ids(records)) == len(records)


@SLOW_DISK
@given(lines=LINES, choice=CHOICE, seed=st.integers(0, 5), shuffle=st.randoms(use_true_random=False), shards=st.integers(1, 4))
def test_the_selection_depends_neither_on_order_nor_on_sharding(lines, choice, seed, shuffle, shards):
    def chosen(lines: list[str], shards: int) -> set[tuple]:
        with TemporaryDirectory() as folder:
            for k in range(shards):
                (Path(folder) / "in").mkdir(exist_ok=True)
                (Path(folder) / "in" / f"part-{k}.jsonl").write_text("".join(line + "\n" for line in lines[k::shards]))
            records, account = selected(Path(folder) / "in", Path(folder) / "out", on_bad_record="skip", seed=seed, **choice)
            return {(r.id, r.split, r.category) for r in records} | {(r, n) for r, n in account.total.items()}

    shuffled = lines[:]
    shuffle.shuffle(shuffled)
    assert chosen(lines, 1) == chosen(shuffled, shards)


def test_seed_changes_which_are_taken_but_not_what_is_held_out(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": f"question {i}"} for i in range(200)))
    everything = {r.id: r.split for r in selected(path, tmp_path / "out")[0]}
    some = [selected(path, tmp_path / "out", limit=50, seed=seed)[0] for seed in (0, 1)]
    assert ids(some[0]) != ids(some[1]) and all(everything[r.id] == r.split for part in some for r in part)


def test_the_order_of_the_source_is_kept(tmp_path):
    prompts = [f"question {i}" for i in range(50)]
    random.Random(0).shuffle(prompts)
    records, _ = selected(jsonl(tmp_path / "a.jsonl", *({"prompt": p} for p in prompts)), tmp_path / "out", limit=20)
    assert texts(records) == [p for p in prompts if p in texts(records)]
    assert all(re.fullmatch(r".*a.jsonl:\d+", r.where) for r in records)
