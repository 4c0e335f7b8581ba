"""The target's responses: batching changes no text, an interrupted run asks nothing twice, and stage 1 adds up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks.respond import sglang_server
from pipeline.config import load_config
from pipeline.engines.engine import resolve_device
from pipeline.errors import PipelineError
from pipeline.manifest import load_manifest
from pipeline.prompts import decode, generate, respond
from pipeline.prompts.decode import Response, _sample, generate_batch, use_grouped_attention
from pipeline.prompts.journal import Answer, Journal, Request, journal_path
from pipeline.samples import read_samples
from pipeline.stage import run_stage
from pipeline.target import open_target
from tests.test_capture import small_disk
from tests.tiny_models import tiny_llama

CONF = Path(__file__).parent.parent / "conf"
EOS = [2, 3]


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                         initializer_range=0.5, eos_token_id=EOS,
                         pad_token_id=2)
    return LlamaForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def prompts():
    random = torch.Generator().manual_seed(1)
    return [torch.randint(4, 32, (n,), generator=random).tolist() for n in (3, 9, 4, 4, 17, 6, 11, 5)]


@pytest.mark.parametrize("grouped", [False, True])
def test_greedy_batch_equals_one_by_one_with_transformers_generate(model, prompts, grouped):
    if grouped:
        use_grouped_attention(model)
    found = generate_batch(model, prompts, max_new_tokens=10, eos_token_ids=EOS)
    model.set_attn_implementation("sdpa")
    for prompt, response in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        reference = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False,
                                   eos_token_id=EOS, pad_token_id=2)[0, len(prompt):].tolist()
        assert response == Response(reference, "stop" if reference[-1] in EOS else "length")
    # The case is worth something only if rows end at different times.
    assert {r.finish_reason for r in found} == {"stop", "length"}
    assert len({len(r.ids) for r in found}) > 3


def test_sampled_answers_depend_on_their_seed_alone(model, prompts):
    options = dict(max_new_tokens=12, eos_token_ids=EOS, temperature=1.0, top_p=0.9)
    seeds = list(range(len(prompts)))
    together = generate_batch(model, prompts, seeds=seeds, **options)
    alone = [generate_batch(model, [p], seeds=[s], **options)[0] for p, s in zip(prompts, seeds)]
    assert together == alone
    assert generate_batch(model, prompts, seeds=[s + 100 for s in seeds], **options) != together


def test_sampling_follows_the_distribution_cut_at_top_p():
    probs = torch.tensor([0.1, 0.5, 0.05, 0.35])
    uniform = (torch.arange(1000) + 0.5) / 1000

    def draw(temperature, top_p):
        return _sample(probs.log().expand(1000, 4), uniform, temperature, top_p)[:, 0].bincount(minlength=4) / 1000

    torch.testing.assert_close(draw(1.0, 1.0), probs, atol=2e-3, rtol=0)
    # 0.5 + 0.35 reach 0.8 first: the others are cut and the rest is scaled up.
    torch.testing.assert_close(draw(1.0, 0.8), torch.tensor([0, 0.5, 0, 0.35]) / 0.85, atol=2e-3, rtol=0)
    torch.testing.assert_close(draw(0.5, 1.0), probs**2 / (probs**2).sum(), atol=2e-3, rtol=0)
    assert draw(1.0, 1e-6)[1] == 1


A, B, C = (Request(name, ids) for name, ids in (("a", [1, 2]), ("b", [3]), ("c", [4])))


def test_journal_drops_a_torn_last_line_and_goes_on(tmp_path):
    path = tmp_path / "responses.jsonl"
    with Journal(path) as journal:
        journal.add([(A, Answer([7, 2], "stop")), (B, Answer([8], "length"))])
    whole = path.read_bytes()
    for cut in range(len(whole.splitlines(keepends=True)[0]), len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(path) as journal:
            assert journal.get(A) == Answer([7, 2], "stop") and journal.get(B) is None
            journal.add([(B, Answer([8], "length"))])
        assert path.read_bytes() == whole


def test_journal_answers_only_the_prompt_it_was_asked(tmp_path):
    with Journal(tmp_path / "r.jsonl") as journal:
        journal.add([(A, Answer([7], "length"))])
        assert journal.get(Request("a", [1, 2, 3])) is None


def test_damaged_journal_line_is_named(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text('{"id": "a"}\n')
    with pytest.raises(PipelineError, match="responses.jsonl:1 is damaged"):
        Journal(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "target")


def setup(tiny: Path, source: Path, *overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides=[
            "target=local", f"target.path={tiny}", "device=cpu", "target.context_length=120",
            f"prompts.source={source}", "prompts.max_new_tokens=8",
            "prompts.batch_size=2", "prompts.respond_dtype=fp32", *overrides])
    target, config = open_target(load_config(OmegaConf.to_container(composed, resolve=True)))
    return config, target


@pytest.fixture
def source(tmp_path):
    records = [
        {"id": "q1", "prompt": "Hello", "category": "chat"},
        {"id": "q2", "prompt": "How many apples?", "split": "heldout"},
        {"id": "same as q1", "prompt": "Hello"},
        {"id": "long", "prompt": "moon " * 100},
        {"id": "no user", "messages": [{"role": "assistant", "content": "ok"}]},
        {"id": "q3", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"},
                                  {"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_stage_with_the_targets_answers(tmp_path, tiny, source, capsys):
    config, target = setup(tiny, source, "prompts.heldout_fraction=0", "prompts.answer=last")
    result = generate(config, target, tmp_path / "prompts")
    assert result.outputs == [
        tmp_path / "prompts" / name for name in ("samples.parquet", "skipped.jsonl", "quarantine.jsonl")]
    samples = list(read_samples(tmp_path / "prompts" / "samples.parquet"))
    assert [(s.messages[0]["content"], s.split, s.category) for s in samples] == [
        ("Hello", "train", "chat"), ("How many apples?", "heldout", None), ("Hi", "train", None)]

    from transformers import LlamaForCausalLM

    tokenizer, model = target.tokenizer(), LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    for sample in samples:
        prompt = tokenizer.apply_chat_template(sample.messages[:-1], add_generation_prompt=True)["input_ids"]
        reference = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False,
                                   eos_token_id=target.eos_token_ids)[0].tolist()
        assert sample.input_ids == reference
        assert sample.loss_mask == [0] * len(prompt) + [1] * (len(reference) - len(prompt))
        assert sample.finish_reason == ("stop" if reference[-1] in target.eos_token_ids else "length")
    assert [m["content"] for m in samples[2].messages[:-1]] == ["Hi", "yes", "more"]  # without the source's "no"

    skipped = [json.loads(line) for line in (tmp_path / "prompts" / "skipped.jsonl").read_text().splitlines()]
    assert {s["where"]: s["reason"] for s in skipped} == {f"{source}:4": "too_long", f"{source}:5": "no_user_turn"}
    assert result.metrics["sources"] == [{"path": str(source), "read": 6, "kept": 3, "duplicates": 1,
                                          "skipped_no_user_turn": 1, "skipped_too_long": 1}]
    assert result.counts == {
        "read": 6, "kept": 3, "duplicates": 1, "skipped_no_user_turn": 1, "skipped_too_long": 1,
        "train_samples": 2, "heldout_samples": 1, "tokens": sum(len(s.input_ids) for s in samples),
        "trained_tokens": sum(sum(s.loss_mask) for s in samples),
        "finish_stop": sum(s.finish_reason == "stop" for s in samples),
        "finish_length": sum(s.finish_reason == "length" for s in samples),
        "answers_asked": 4, "answers_success": 3, "answers_failed": 0, "answers_skipped": 1,
        "answers_length": sum(s.finish_reason == "length" for s in samples)}
    assert ("prompts: 3 of 6 conversations kept (1 duplicates, 1 no_user_turn, 1 too_long): 2 samples to train on, 1 held out; "
            f"{result.counts['trained_tokens']} of {result.counts['tokens']} tokens are trained\n") in capsys.readouterr().out
    assert result.metrics["responses"] == {
        "engine": "transformers", "dtype": "fp32", "answer": "last", "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 8,
        "seed": 0, "stop_token_ids": target.eos_token_ids}


def test_interrupted_stage_goes_on_without_asking_twice(tmp_path, tiny, source, monkeypatch):
    config, target = setup(tiny, source, "prompts.temperature=1.0")
    whole = tmp_path / "whole" / "prompts"
    generate(config, target, whole)

    original = decode.generate_batch

    def killed_after_one_batch(model, prompts, **options):
        if not asked:
            asked.extend(prompts)
            return original(model, prompts, **options)
        raise KeyboardInterrupt

    folder, asked = tmp_path / "killed" / "prompts", []
    monkeypatch.setattr(decode, "generate_batch", killed_after_one_batch)
    with pytest.raises(KeyboardInterrupt):
        generate(config, target, folder)
    journal = the_journal(folder.parent, config, target)
    assert not (folder / "samples.parquet").exists() and journal.read_bytes().count(b"\n") == 2
    journal.write_bytes(journal.read_bytes()[:-5])  # the kill came in the middle of the second line
    stored = json.loads(journal.read_bytes().splitlines()[0])["prompt"]
    wanted = {json.loads(line)["prompt"] for line in the_journal(whole.parent, config, target).read_text().splitlines()}

    monkeypatch.setattr(decode, "generate_batch", original)
    asked = counting(monkeypatch)
    generate(config, target, folder)
    assert sorted(asked) == sorted(wanted - {stored})
    for name in ("samples.parquet", "skipped.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()

    asked.clear()
    generate(config, target, folder)
    assert asked == []


def the_journal(run_dir: Path, config, target) -> Path:
    return journal_path(run_dir, config, target, respond.engine_name(config))


def counting(monkeypatch) -> list[str]:
    """Keys of the prompts that the target is asked from now on."""
    asked, original = [], decode.generate_batch

    def ask(model, prompts, **options):
        asked.extend(Request("", prompt).key for prompt in prompts)
        return original(model, prompts, **options)

    monkeypatch.setattr(decode, "generate_batch", ask)
    return asked


def test_answers_outlive_the_stages_folder(tmp_path, tiny, source, monkeypatch):
    # Another source, limit or held-out share clears the folder; 1,000 prompts more must not ask for 100,000 again.
    asked = counting(monkeypatch)
    folder = tmp_path / "prompts"
    config, target = setup(tiny, source, "prompts.limit=1", "prompts.answer=last")
    generate(config, target, folder)
    first = asked[:]
    assert len(first) == 1
    shutil.rmtree(folder)
    with open(source, "a") as f:
        f.write('{"id": "q4", "prompt": "One more"}\n')
    config, target = setup(tiny, source, "prompts.batch_size=3", "prompts.heldout_fraction=0.5", "prompts.answer=last")
    generate(config, target, folder)
    assert len(asked) == len(set(asked)) == 4 and set(first) < set(asked)

    afresh = tmp_path / "afresh" / "prompts"
    generate(config, target, afresh)
    assert (folder / "samples.parquet").read_bytes() == (afresh / "samples.parquet").read_bytes()


def test_force_asks_anew_once(tmp_path, tiny, source, monkeypatch):
    asked = counting(monkeypatch)
    config, target = setup(tiny, source)
    generate(config, target, make_folder(tmp_path))
    first = len(asked)
    config, target = setup(tiny, source, "force=true")
    generate(config, target, make_folder(tmp_path))
    assert len(asked) == 2 * first
    generate(config, target, tmp_path / "prompts")  # the same forced command after an interruption
    assert len(asked) == 2 * first
    kept = tmp_path / "kept.jsonl"
    kept.write_text('{"instruction": "Hi", "output": "yes"}\n')
    for others in (["prompts.max_new_tokens=9"], ["prompts.respond=keep", f"prompts.source={kept}"]):
        config, target = setup(tiny, source, "force=true", *others)
        generate(config, target, make_folder(tmp_path))  # what was answered with other settings stays
    asked.clear()
    config, target = setup(tiny, source)
    generate(config, target, make_folder(tmp_path))
    assert asked == []


def make_folder(run_dir: Path) -> Path:
    """An empty stage folder, as the stage runner hands it over."""
    folder = run_dir / "prompts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@pytest.mark.parametrize("changed, same", [
    ("prompts.limit=2", True), ("prompts.batch_size=7", True), ("seed=5", True), ("prompts.top_p=0.5", True),
    ("target.context_length=64", True), ("prompts.respond_engine=transformers", True), ("prompts.retries=1", True),
    ("prompts.max_new_tokens=9", False), ("prompts.respond_dtype=bf16", False),
    ("prompts.respond_engine=sglang", False), ("prompts.temperature=0.7", False)])
def test_answers_are_kept_per_way_to_answer(tmp_path, tiny, source, changed, same):
    # The default is greedy: no random number, so no seed.
    paths = [the_journal(tmp_path, *setup(tiny, source, *more)) for more in ((), (changed,))]
    assert (paths[0] == paths[1]) is same
    sampled = [the_journal(tmp_path, *setup(tiny, source, "prompts.temperature=0.7", *more))
               for more in ((), ("seed=5",), ("prompts.top_p=0.5",))]
    assert len(set(sampled)) == 3


def long_answers(tokens: int):
    """A target that answers every prompt with this many tokens, five bytes each in the journal."""
    def ask(model, prompts, **options):  # they do not compress well
        return [Response(random.Random(len(prompt)).choices(range(100, 400), k=tokens), "length") for prompt in prompts]

    return ask


def test_a_full_disk_under_the_journal_is_one_clear_message_and_nothing_is_lost(tmp_path, tiny, source, monkeypatch):
    config, target = setup(tiny, source, "target.context_length=4096", "prompts.answer=last")
    monkeypatch.setattr(decode, "generate_batch", long_answers(1000))
    with small_disk(tmp_path / "disk", "256k") as disk:
        filler = disk / "filler"
        filler.write_bytes(b"x" * (256 - 12) * 1024)  # room for two of the four answers of 5 kB
        with pytest.raises(PipelineError, match=r"cannot write .*/responses/.*jsonl: the disk is full"):
            generate(config, target, disk / "prompts")
        filler.unlink()
        stored = the_journal(disk, config, target).read_bytes().count(b"\n")
        assert stored >= 1
        asked = counting(monkeypatch)
        generate(config, target, disk / "prompts")
        assert len(asked) == 4 - stored and len(list(read_samples(disk / "prompts" / "samples.parquet"))) == 4


def test_a_full_disk_under_the_samples_is_one_clear_message(tmp_path, tiny, source, monkeypatch):
    config, target = setup(tiny, source, "target.context_length=4096", "prompts.answer=last")
    monkeypatch.setattr(decode, "generate_batch", long_answers(3000))
    with small_disk(tmp_path / "disk", "64k") as disk:  # four answers of 15 kB: samples do not fit beside them
        with pytest.raises(PipelineError, match="samples.parquet: the disk is full"):
            generate(config, target, disk / "prompts")
        assert list((disk / "prompts").iterdir()) == []


def test_sglang_is_asked_with_the_engines_settings(tmp_path, tiny, source, monkeypatch):
    from pipeline.engines import engine

    options = {}

    class Llm:
        loop = asyncio.new_event_loop()

        async def async_generate(self, input_ids, sampling_params):
            await asyncio.sleep(0)
            reason = "abort" if len(input_ids) > options.get("most", 1000) else "length"
            return {"output_ids": [5, 5], "meta_info": {"finish_reason": {"type": reason}}}

    @contextlib.contextmanager
    def started(model_path, **given):
        options.update(given)
        yield Llm()

    monkeypatch.setattr(engine, "engine", started)
    config, target = setup(tiny, source, "prompts.respond_engine=sglang", "dump.allow_untested_engine=true",
                           "dump.mem_fraction_static=0.5")
    assert generate(config, target, tmp_path / "prompts").counts["answers_success"] == 4
    assert options["force_version"] is True and options["mem_fraction_static"] == 0.5 and options["tp_size"] == 1
    options.clear()
    generate(config, target, tmp_path / "prompts")
    assert options == {}  # everything is answered: no engine is started
    options["most"] = 0
    with pytest.raises(PipelineError, match="SGLang did not answer a prompt"):
        generate(config, target, tmp_path / "other" / "prompts")


def test_stage_that_keeps_the_sources_answers(tmp_path, tiny, source):
    config, target = setup(tiny, source, "prompts.respond=keep")
    manifest = run_stage("prompts", tmp_path, target=target.record, config={}, seed=0,
                         work=lambda manifest, folder: generate(config, target, folder))
    result = manifest.stages["prompts"]
    assert load_manifest(tmp_path).stages["prompts"].metrics["sources"][0]["read"] == 6
    (_, sample) = read_samples(tmp_path / "prompts" / "samples.parquet")
    assert len(sample.messages) == 4 and sample.finish_reason is None
    tokenizer = target.tokenizer()
    assert sample.input_ids == tokenizer.apply_chat_template(sample.messages)["input_ids"]
    trained = [t for t, m in zip(sample.input_ids, sample.loss_mask) if m]
    assert tokenizer.decode(trained) == "yes<|im_end|>no<|im_end|>"
    assert result.counts["read"] == 6 and result.counts["skipped_no_assistant_turn"] == 4


def test_prompts_without_answers_cannot_be_kept(tmp_path, tiny):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "Hi"}\n{"prompt": "ok"}\n')
    config, target = setup(tiny, path, "prompts.respond=keep")
    with pytest.raises(PipelineError, match="2 × no_assistant_turn") as e:
        generate(config, target, tmp_path / "out")
    assert "prompts.respond=target" in e.value.fix


def test_masks_that_are_all_zero_stop_the_stage(tmp_path, tiny, source, monkeypatch):
    # Model-Optimizer 1965: the template's tags mark nothing, and training on it gave loss 0.
    from transformers import AutoTokenizer

    config, target = setup(tiny, source, "prompts.respond=keep")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = "{% generation %}{% endgeneration %}" + tokenizer.chat_template
    monkeypatch.setattr(type(target), "tokenizer", lambda self: tokenizer)
    with pytest.raises(PipelineError, match="no_trained_tokens") as e:
        generate(config, target, tmp_path / "prompts")
    assert "generation" in e.value.fix and "prompts.respond=target" in e.value.fix
    assert not (tmp_path / "prompts" / "samples.parquet").exists()


def test_empty_source(tmp_path, tiny):
    path = tmp_path / "p.jsonl"
    path.write_text("")
    config, target = setup(tiny, path)
    with pytest.raises(PipelineError, match="holds no records"):
        generate(config, target, tmp_path / "prompts")


@pytest.mark.slow
def test_transformers_sglang_and_a_server_give_the_same_samples(tmp_path, tiny, source):
    # Greedy, fp32. A token that the model does write is made an end-of-turn token, so that both ways to end occur.
    config, target = setup(tiny, source)
    generate(config, target, tmp_path / "first")
    written = [s.input_ids[-8:] for s in read_samples(tmp_path / "first" / "samples.parquet")]
    ends = [*target.eos_token_ids, next(t for t in written[0] if t not in written[1])]
    ending = Path(shutil.copytree(tiny, tmp_path / "target"))
    settings = json.loads((ending / "generation_config.json").read_text())
    settings |= {"eos_token_id": ends, "repetition_penalty": 1.5}
    (ending / "generation_config.json").write_text(json.dumps(settings))

    def answered(name: str, *overrides: str):
        config, target = setup(ending, source, f"prompts.respond_engine={name}", *overrides)
        assert target.eos_token_ids == ends
        counts = generate(config, target, tmp_path / name / "prompts").counts
        assert counts["answers_success"] == 4 and counts["answers_failed"] == 0 and "answers_retokenised" not in counts
        return list(read_samples(tmp_path / name / "prompts" / "samples.parquet"))

    by_transformers = answered("transformers")
    assert answered("sglang") == by_transformers
    assert {s.finish_reason for s in by_transformers} == {"stop", "length"}
    assert all((s.input_ids[-1] in ends) or s.finish_reason == "length" for s in by_transformers)
    if resolve_device("auto") == "cpu":
        with sglang_server(ending, device="cpu", dtype="float32", context_length=120) as url:
            assert answered("server", f"prompts.base_url={url}") == by_transformers
            answered("server", f"prompts.base_url={url}", "prompts.temperature=1.0")  # a seed is taken
