"""Answers from servers: every way in which a real HTTP peer can fail, and what became of each request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from pipeline.errors import PipelineError
from pipeline.prompts import generate, server
from pipeline.prompts.journal import Request, journal_path
from pipeline.samples import Sample, read_samples
from tests.http_peer import DROP, EOS, Peer, answer_ids
from tests.test_respond import setup
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "target", layers=1)


@pytest.fixture
def peer():
    with Peer() as peer:
        yield peer


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server, "_FIRST_WAIT", 0.01)


def questions(folder: Path, count: int) -> Path:
    """Conversations of one to three turns."""
    path = folder / "questions.jsonl"
    with open(path, "w") as file:
        for k in range(count):
            turns = [{"role": ("user", "assistant")[i % 2], "content": f"{k} {i}"} for i in range(1 + 2 * (k % 3))]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def ask(tiny: Path, source: Path, folder: Path, *peers: Peer, **changes) -> tuple[list[Sample], dict]:
    options = {"concurrency": 8, "request_timeout": 5, "retries": 5, "heldout_fraction": 0,
               "decontaminate_words": "null"}
    urls = ",".join(peer.url for peer in peers)
    config, target = setup(tiny, source, "prompts.respond_engine=server", f"prompts.base_url=[{urls}]",
                           *(f"prompts.{name}={value}" for name, value in (options | changes).items()))
    result = generate(config, target, folder / "prompts")
    counts = result.counts
    assert counts["answers_asked"] == counts["answers_success"] + counts["answers_failed"] + counts["answers_skipped"]
    assert counts["read"] == counts["kept"] + counts["duplicates"] + sum(
        n for name, n in counts.items() if name.startswith("skipped_"))
    return list(read_samples(result.outputs[0])), counts


def test_answers_are_the_servers_tokens_to_the_prompts_tokens(tmp_path, tiny, peer):
    samples, counts = ask(tiny, questions(tmp_path, 6), tmp_path, peer, temperature=0.7, top_p=0.9)
    assert len({sample.id.split("#")[0] for sample in samples}) == counts["kept"] == 6
    assert counts["answers_success"] == counts["answers_asked"] == len(peer.asked) == 2 * (1 + 2 + 3)
    answers = {tuple(body["prompt"] + answer_ids(body["prompt"], 8)[0]) for body in peer.asked}
    for sample in samples:  # each ends with an answer, and what is trained are answers
        assert tuple(sample.input_ids) in answers
    assert sum(sum(s.loss_mask) for s in samples) == sum(len(answer_ids(b["prompt"], 8)[0]) for b in peer.asked)
    body = peer.asked[0]
    # What is left out would be taken from the target's generation_config.json.
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 8}
    assert settings.items() <= {name: body[name] for name in settings}.items()
    assert body["model"] == "tiny" and EOS in body["stop_token_ids"]
    assert body["seed"] == Request("", body["prompt"]).seed(0)


@pytest.mark.parametrize("trouble", [
    (429, {}, "busy"), (500, {}, "oh"), (503, {"Retry-After": "0"}, "loading"), (408, {}, ""), DROP,
    (200, {}, "no JSON"), (200, {}, '{"choices": []}'),
    (200, {}, '{"choices": [{"finish_reason": "abort", "text": "", "token_ids": [5]}]}')], ids=str)
def test_what_may_pass_is_tried_again(tmp_path, tiny, peer, trouble):
    source = questions(tmp_path, 4)
    undisturbed, _ = ask(tiny, source, tmp_path / "undisturbed", peer)
    asked = len(peer.asked)
    with Peer() as other:
        other.trouble = lambda body, times: trouble if times < 2 else None
        samples, counts = ask(tiny, source, tmp_path / "disturbed", other)
        assert len(other.asked) == 3 * asked
    assert samples == undisturbed and counts["answers_failed"] == 0


def test_an_answer_that_takes_too_long_is_asked_again(tmp_path, tiny, peer):
    peer.trouble = lambda body, times: time.sleep(2.5) if times == 0 else None
    _, counts = ask(tiny, questions(tmp_path, 3), tmp_path, peer, request_timeout=1.5)  # a busy machine answers within it
    assert counts["answers_success"] == 6 and len(peer.asked) == 12


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_waited_for(tmp_path, tiny, peer, form):
    begin = time.monotonic()
    after = {"seconds": "1", "date": formatdate(time.time() + 2, usegmt=True)}[form]  # a date has whole seconds
    peer.trouble = lambda body, times: (429, {"Retry-After": after}, "") if times == 0 else None
    arrived = []
    original = peer._answer
    peer._answer = lambda body: arrived.append(time.monotonic() - begin) or original(body)
    ask(tiny, questions(tmp_path, 1), tmp_path, peer)
    assert len(peer.asked) == 2 and arrived[0] >= 0.99


def test_a_request_that_the_server_refuses_is_listed_and_not_tried_again(tmp_path, tiny, peer):
    source = questions(tmp_path, 6)
    refused = []

    def trouble(body, times):
        if not refused or body["prompt"] in refused:
            refused.append(body["prompt"])
            return 400, {}, '{"message": "too long for me"}'

    peer.trouble = trouble
    samples, counts = ask(tiny, source, tmp_path, peer, concurrency=1)
    assert len(refused) == 1 and counts["kept"] == 5
    assert counts["answers_failed"] == counts["skipped_request_failed"] == 1
    [line] = map(json.loads, (tmp_path / "prompts" / "skipped.jsonl").read_text().splitlines())
    assert line["reason"] == "request_failed" and 'answers 400: {"message": "too long' in line["detail"]
    # Later it is answered, and only it and what follows it are asked.
    peer.trouble = lambda body, times: None
    asked = len(peer.asked)
    (tmp_path / "prompts" / "samples.parquet").unlink()
    samples, counts = ask(tiny, source, tmp_path, peer)
    assert counts["answers_success"] == 12 and len(peer.asked) == 13 and len(peer.asked) > asked


def test_a_request_that_fails_however_often_it_is_tried_is_listed(tmp_path, tiny, peer):
    peer.trouble = lambda body, times: (500, {}, "oh") if body["prompt"] == peer.asked[0]["prompt"] else None
    _, counts = ask(tiny, questions(tmp_path, 2), tmp_path, peer, concurrency=1, retries=2)
    assert counts["answers_failed"] == 1 and "(tried 3 times)" in (tmp_path / "prompts" / "skipped.jsonl").read_text()


def test_a_server_that_fails_always_stops_the_stage_and_what_it_answered_is_kept(tmp_path, tiny, peer):
    source = questions(tmp_path, 60)
    peer.trouble = lambda body, times: (500, {}, "out of memory") if len(peer.asked) > 10 else None
    with pytest.raises(PipelineError, match="32 requests in a row failed for good, the last one: .*out of memory"):
        ask(tiny, source, tmp_path, peer, retries=0, concurrency=1)  # one by one: the first ten are answered and stored
    answered = {repr(body["prompt"]) for body in peer.asked[:10]}
    peer.trouble = lambda body, times: None
    peer.asked.clear()
    _, counts = ask(tiny, source, tmp_path, peer)
    assert counts["answers_success"] == counts["answers_asked"] == 120 and len(peer.asked) == 110
    assert answered.isdisjoint(repr(body["prompt"]) for body in peer.asked)


@pytest.mark.parametrize("status, mends", [
    (401, "prompts.api_key_env"), (403, "prompts.api_key_env"), (404, "ends in /v1")])
def test_a_server_that_refuses_everything_is_one_message(tmp_path, tiny, peer, monkeypatch, capsys, status, mends):
    monkeypatch.setenv("THE_KEY", "sk-very-secret")
    peer.trouble = lambda body, times: (status, {}, "not you: sk-very-secret")
    with pytest.raises(PipelineError, match=f"answers {status}") as caught:
        ask(tiny, questions(tmp_path, 40), tmp_path, peer, api_key_env="THE_KEY")
    assert mends in caught.value.fix and len(peer.asked) <= 8
    assert "sk-very" not in str(caught.value) + "".join(capsys.readouterr())


def test_the_key_goes_to_the_server_and_nowhere_else(tmp_path, tiny, peer, monkeypatch, capsys):
    monkeypatch.setenv("THE_KEY", "sk-very-secret\n")  # as from a file
    ask(tiny, questions(tmp_path, 2), tmp_path, peer, api_key_env="THE_KEY")
    assert {headers["Authorization"] for headers in peer.headers} == {"Bearer sk-very-secret"}
    assert b"sk-very" not in b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert "sk-very" not in "".join(capsys.readouterr())
    monkeypatch.delenv("THE_KEY")
    with pytest.raises(PipelineError, match="no such variable"):
        ask(tiny, questions(tmp_path, 2), tmp_path / "again", peer, api_key_env="THE_KEY")


@pytest.mark.parametrize("key, problem", [
    ("sk-s\u00e9cret", "printable ASCII"), ("sk-secret\nHost: x", "printable ASCII"), (" \n", "no such variable")])
def test_a_key_that_no_header_can_hold_is_not_shown(tmp_path, tiny, peer, monkeypatch, key, problem):
    monkeypatch.setenv("THE_KEY", key)
    with pytest.raises(PipelineError, match=problem) as caught:
        ask(tiny, questions(tmp_path, 1), tmp_path, peer, api_key_env="THE_KEY")
    assert "cret" not in str(caught.value) and not peer.asked


@pytest.mark.parametrize("url, problem", [
    ("http://me:secret@127.0.0.1:9/v1", "a key in it"), ("127.0.0.1:9", "not the address"),
    ("me:secret@127.0.0.1:9", "not the address"), ("http://127.0.0.1:99999/v1", "not the address"),
    ("http://127.0.0.1:port/v1", "not the address"), ("http://[::1/v1", "not the address"),
    ("http://127.0.0.1:9/v1", "no server answers")])
def test_addresses(tmp_path, tiny, url, problem):
    config, target = setup(tiny, questions(tmp_path, 1), "prompts.respond_engine=server", f"prompts.base_url='{url}'")
    with pytest.raises(PipelineError, match=problem) as caught:
        generate(config, target, tmp_path / "prompts")
    assert "secret" not in str(caught.value)


def test_never_more_and_never_fewer_requests_than_asked_for(tmp_path, tiny, peer):
    peer.delay = 0.3
    _, counts = ask(tiny, questions(tmp_path, 12), tmp_path, peer, concurrency=6)
    assert (peer.most_at_once, counts["answers_success"]) == (6, 24)


def test_the_server_with_fewer_requests_gets_the_next_one(tmp_path, tiny, peer):
    with Peer() as slow:
        slow.delay, peer.delay = 0.4, 0.02
        ask(tiny, questions(tmp_path, 45), tmp_path, slow, peer, concurrency=4)
        assert len(slow.asked) >= 4 and len(peer.asked) > len(slow.asked)
        assert len(slow.asked) + len(peer.asked) == 90


def test_a_server_that_takes_fewer_requests_than_it_is_given_answers_all(tmp_path, tiny, peer):
    peer.delay, peer.takes = 0.02, 2
    _, counts = ask(tiny, questions(tmp_path, 30), tmp_path, peer, concurrency=24, retries=2)
    assert counts["answers_success"] == counts["answers_asked"] == 60 < len(peer.asked)


def test_a_server_that_says_retry_at_once_and_never_answers_is_given_up(tmp_path, tiny, peer):
    peer.trouble = lambda body, times: (429, {"Retry-After": "0"}, "busy")
    with pytest.raises(PipelineError, match="none of 4 .*4 × request_failed.*answers 429: busy .tried 3 times"):
        ask(tiny, questions(tmp_path, 4), tmp_path, peer, retries=2)
    assert len(peer.asked) == 3 * 4


def test_waits_are_bounded_however_long_a_server_is_dead():
    assert all(server._back_off(attempt) <= 1.5 * server._LONGEST_WAIT for attempt in (0, 30, 10**5))


def test_a_shard_that_asked_in_vain_is_an_error(tmp_path, tiny, peer):
    peer.trouble = lambda body, times: (400, {}, "no")
    with pytest.raises(PipelineError, match="none of 8 conversations can be trained on .*request_failed"):
        ask(tiny, questions(tmp_path, 8), tmp_path, peer, shard="0/2")


def test_a_dead_server_beside_a_living_one_costs_nothing_but_time(tmp_path, tiny, peer):
    with Peer() as dying:
        dying.delay = peer.delay = 0.02

        def die():
            while len(dying.asked) < 8:
                time.sleep(0.01)
            dying.__exit__()
            dying.trouble = lambda body, times: DROP

        dead = threading.Thread(target=die, daemon=True)
        dead.start()
        _, counts = ask(tiny, questions(tmp_path, 60), tmp_path, dying, peer, concurrency=4, retries=8)
        dead.join()
    assert counts["answers_success"] == counts["answers_asked"] == 120


def test_text_alone_is_tokenized_anew_and_counted(tmp_path, tiny, peer):
    config, target = setup(tiny, questions(tmp_path, 1))
    tokenizer = target.tokenizer()
    peer.text_of = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    samples, counts = ask(tiny, questions(tmp_path, 3), tmp_path, peer)
    assert counts["answers_retokenised"] == counts["answers_success"] == 6
    prompt = next(body["prompt"] for body in peer.asked
                  if body["prompt"] == samples[0].input_ids[:len(body["prompt"])])
    ids, reason = answer_ids(prompt, 8)
    assert tokenizer.decode(samples[0].input_ids[len(prompt):]) == tokenizer.decode(ids)
    assert (samples[0].input_ids[-1] == EOS) == (reason == "stop")


def test_a_server_of_another_model_is_refused(tmp_path, tiny, peer):
    peer._answer = lambda body: {"choices": [{"finish_reason": "length", "text": "", "token_ids": [512]}]}
    with pytest.raises(PipelineError, match="token 512, the target has 512: it serves another model"):
        ask(tiny, questions(tmp_path, 1), tmp_path, peer)
    peer._answer = lambda body: {"choices": [{"finish_reason": "length", "text": "", "token_ids": [5],
                                              "prompt_token_ids": [1, *body["prompt"]]}]}
    with pytest.raises(PipelineError, match="other tokens before the target"):
        ask(tiny, questions(tmp_path, 1), tmp_path, peer)
    peer.models = ["a", "b"]
    with pytest.raises(PipelineError, match="serves 2 models: a, b"):
        ask(tiny, questions(tmp_path, 1), tmp_path, peer)


CLIENT = """
import sys, json
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.test_server import ask, Peer
peer = Peer(); peer.url = {url!r}
ask(Path({tiny!r}), Path({source!r}), Path({folder!r}), peer, concurrency=4)
"""


def test_a_client_killed_with_signal_9_goes_on_and_asks_for_no_stored_answer_again(tmp_path, tiny, peer):
    source = questions(tmp_path, 30)
    undisturbed, _ = ask(tiny, source, tmp_path / "undisturbed", peer)
    peer.asked.clear()
    peer.delay = 0.02
    folder = tmp_path / "killed"
    code = CLIENT.format(root=str(Path(__file__).parent.parent), url=peer.url, tiny=str(tiny), source=str(source),
                         folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while len(peer.asked) < 25 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.002)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    config, target = setup(tiny, source, "prompts.respond_engine=server", f"prompts.base_url={peer.url}")
    journal = journal_path(folder, config, target, "server").read_bytes()
    stored = {json.loads(line)["prompt"] for line in journal.split(b"\n")[:-1]}
    assert 10 <= len(stored) < 60
    peer.asked.clear()
    samples, counts = ask(tiny, source, folder, peer)
    assert samples == undisturbed and counts["answers_success"] == 60
    again = [Request("", body["prompt"]).key for body in peer.asked]
    assert stored.isdisjoint(again) and len(set(again)) == len(again) == 60 - len(stored)
