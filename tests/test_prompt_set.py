"""The prompt set in the repository: well-formed, varied, and with a held-out part that nothing in train repeats."""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

PROMPTS = Path(__file__).parent.parent / "pipeline" / "data" / "prompts.jsonl"
CATEGORIES = {"question", "writing", "code", "maths", "extraction", "summary", "multi-turn"}


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    # split("\n") and not splitlines(): a U+2028 inside a JSON string is text, not the end of a line.
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").rstrip("\n").split("\n")]


def words(prompt: dict) -> list[str]:
    """All words of a conversation, folded so that case, accents' encoding, spacing and punctuation do not matter."""
    text = " ".join(message["content"] for message in prompt["messages"])
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())


def five_grams(tokens: list[str]) -> set[tuple[str, ...]]:
    return {tuple(tokens[i : i + 5]) for i in range(max(1, len(tokens) - 4))}


def test_there_are_enough_prompts_and_each_has_exactly_the_documented_fields(prompts):
    assert len(prompts) >= 400
    for prompt in prompts:
        assert set(prompt) == {"id", "category", "split", "messages"}, prompt["id"]
        assert re.fullmatch(r"q-\d{4}", prompt["id"])
        assert prompt["category"] in CATEGORIES, prompt["id"]
        assert prompt["split"] in {"train", "heldout"}, prompt["id"]


def test_every_category_is_there_in_number(prompts):
    counts = Counter(prompt["category"] for prompt in prompts)
    assert set(counts) == CATEGORIES
    assert min(counts.values()) >= 40, counts


def test_ids_are_unique(prompts):
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)


def test_every_conversation_alternates_and_ends_with_the_user(prompts):
    for prompt in prompts:
        messages = prompt["messages"]
        assert all(set(message) == {"role", "content"} for message in messages), prompt["id"]
        assert all(message["content"] == message["content"].strip() != "" for message in messages), prompt["id"]
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"], prompt["id"]
        # Several user turns are what makes the category, so they occur there and nowhere else.
        assert (len(turns) > 1) == (prompt["category"] == "multi-turn"), prompt["id"]


def test_held_out_prompts_are_the_same_as_ever(prompts):
    # Numbers of different versions are compared on them.
    held_out = [prompt for prompt in prompts if prompt["split"] == "heldout"]
    texts = json.dumps([prompt["messages"] for prompt in held_out], ensure_ascii=False)
    assert (len(held_out), hashlib.sha256(texts.encode()).hexdigest()[:16]) == (52, "125d99f52a757488")


def test_every_category_is_held_out_in_part(prompts):
    total = Counter(prompt["category"] for prompt in prompts)
    held_out = Counter(prompt["category"] for prompt in prompts if prompt["split"] == "heldout")
    shares = {category: held_out[category] / n for category, n in total.items() if n >= 20}
    assert all(0.03 <= share <= 0.15 for share in shares.values()), shares


def test_texts_are_unique_also_between_train_and_held_out(prompts):
    by_text: dict[str, str] = {}
    for prompt in prompts:
        first = by_text.setdefault(" ".join(words(prompt)), prompt["id"])
        assert first == prompt["id"], f"{first} and {prompt['id']} have the same text"


def test_no_pair_is_nearly_the_same(prompts):
    grams = [(prompt["id"], five_grams(words(prompt))) for prompt in prompts]
    near = [(a, b) for (a, x), (b, y) in combinations(grams, 2) if len(x & y) >= 0.7 * len(x | y)]
    assert not near


def test_no_user_message_of_train_is_repeated_in_held_out(prompts):
    # A shared first turn would let a drafter see a part of a held-out conversation in training.
    said: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for prompt in prompts:
        for message in prompt["messages"]:
            if message["role"] == "user":
                said[prompt["split"]].add(" ".join(words({"messages": [message]})))
    assert not said["train"] & said["heldout"]


def test_lengths_are_sane_and_varied(prompts):
    lengths = sorted(sum(len(message["content"].split()) for message in prompt["messages"]) for prompt in prompts)
    assert lengths[0] >= 3 and lengths[-1] <= 220
    # Not all short, not all long: a tenth on either side differs by a factor of four at least.
    tenth = len(lengths) // 10
    assert lengths[-tenth] >= 4 * lengths[tenth]


def test_any_longer_prefix_is_a_mix_with_a_held_out_part(prompts):
    # So that {path: builtin, take: 40} is one too.
    for n in (40, 60, 100):
        assert {prompt["category"] for prompt in prompts[:n]} == CATEGORIES
        assert 0.05 <= sum(prompt["split"] == "heldout" for prompt in prompts[:n]) / n <= 0.2


def test_system_messages_and_other_languages_occur_in_both_splits(prompts):
    for split in ("train", "heldout"):
        texts = [prompt for prompt in prompts if prompt["split"] == split]
        assert any(prompt["messages"][0]["role"] == "system" for prompt in texts)
        assert any(re.search(r"[áéíóúñçèêàäöüß]", prompt["messages"][-1]["content"]) for prompt in texts)
