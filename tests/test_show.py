"""Samples as people see them: in the terminal and as a page."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from pipeline.prompts import show
from pipeline.samples import Sample, write_samples
from tests.chat_templates import CHATML
from tests.test_chat import encoder, turns


class Spans(HTMLParser):
    """Text, class and title of every span."""

    def __init__(self, html: str):
        super().__init__()
        self.found: list[list] = []
        self._open = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag == "span" and "title" in dict(attrs):
            self.found.append(["", dict(attrs).get("class"), dict(attrs)["title"]])
            self._open = True

    def handle_endtag(self, tag):
        self._open = self._open and tag != "span"

    def handle_data(self, data):
        if self._open:
            self.found[-1][0] += data


@pytest.fixture
def run(tmp_path):
    chat = encoder(CHATML)
    chat.tokenizer.save_pretrained(tmp_path / "target")
    samples = []
    for name, answer in (("a", "ok"), ("b", "Hi <b>&amp;</b>"), ("c", "hm"), ("d", "hm hm")):
        found = chat.encode(turns("Hi", answer))
        samples.append(Sample(id=name, split="train", category=None, messages=[], input_ids=found.input_ids,
                              loss_mask=found.loss_mask, finish_reason=None))
    (tmp_path / "prompts").mkdir()
    write_samples(tmp_path / "prompts" / "samples.parquet", samples)
    return tmp_path, samples, chat.tokenizer


def test_terminal_and_page_mark_the_same_tokens(run, capsys):
    folder, samples, tokenizer = run
    assert show.main([str(folder), "--target", str(folder / "target"), "-n", "2"]) == 0
    said = capsys.readouterr().out
    assert "<|im_start|>assistant\n⟦Hi <b>&amp;</b><|im_end|>⟧\n" in said
    assert "--- c" not in said and f"the same as a page: {folder / 'prompts' / 'samples.html'}" in said

    html = (folder / "prompts" / "samples.html").read_text()
    spans = Spans(html).found
    tokens = [(i, m) for sample in samples[:2] for i, m in zip(sample.input_ids, sample.loss_mask)]
    assert [(int(title.split(": ")[1]), int(kind == "t")) for _, kind, title in spans] == tokens
    assert "".join(text for text, *_ in spans).replace("↵", "") == "".join(
        tokenizer.decode(sample.input_ids) for sample in samples[:2])
    assert "http" not in html and "src=" not in html  # nothing is loaded from anywhere


def test_one_sample_by_its_id(run, capsys):
    folder, _, _ = run
    options = [str(folder), "--target", str(folder / "target"), "--id"]
    assert show.main([*options, "d"]) == 0
    assert "⟦hm hm<|im_end|>⟧" in capsys.readouterr().out
    assert show.main([*options, "nobody"]) == 1
    assert "no such sample" in capsys.readouterr().err
