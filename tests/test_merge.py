"""Shards of stage 1 joined: what one machine makes, byte by byte; and refused where they do not belong together."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.manifest import Manifest, load_manifest, save_manifest
from pipeline.merge import merge
from pipeline.prompts import generate
from pipeline.prompts.shard import owner
from pipeline.prompts.sources import fingerprint
from pipeline.samples import read_samples
from pipeline.stage import run_stage
from pipeline.target import Target, open_target
from tests.test_chat import turns
from tests.tiny_models import tiny_llama
from tests.tiny_run import ROOT, tiny_config

FILES = ("samples.parquet", "skipped.jsonl", "quarantine.jsonl")
WORDS = "Hi ok hm yes no How many apples two three are there".split()


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"), layers=1)


def opened(target_dir: Path, root: Path, **prompts) -> tuple[Target, Config]:
    keys = {"respond": "keep", "truncate": "split", "max_length": 60, "heldout_fraction": 0.3, **prompts}
    return open_target(tiny_config(target_dir, root, **{f"prompts.{k}": v for k, v in keys.items()},
                                   **{"slots.layers": [0], "target.slots_layers": [0]}))


def stage_1(target_dir: Path, run_dir: Path, **prompts) -> Manifest:
    """Stage 1 as its script runs it."""
    target, config = opened(target_dir, run_dir.parent, **prompts)
    depends_on = {"seed": config.seed, "context_length": config.target.context_length,
                  "source_sha256": fingerprint(config.prompts), "prompts": config.prompts.model_dump(mode="json")}
    return run_stage("prompts", run_dir, target=target.record, seed=config.seed, config=depends_on,
                     work=lambda manifest, folder: generate(config, target, folder))


def some_source(path: Path, seed: int, size: int) -> Path:
    """Conversations of all kinds: copies, near copies, too long, rows of tokens, damaged and useless records."""
    rng, records = random.Random(seed), []
    for _ in range(size):
        said = [" ".join(rng.choices(WORDS, k=rng.randint(1, 40))) for _ in range(2 * rng.randint(1, 3))]
        records.append({"messages": turns(*said), "category": rng.choice("ab")})
        if rng.random() < 0.2:
            records.append(rng.choice(records))
        if rng.random() < 0.2:
            records.append({"messages": turns(*said[:-1], said[-1] + " ok")})
        if rng.random() < 0.2:
            ids = rng.choices(range(5, 500), k=rng.randint(2, 80))
            records.append({"input_ids": ids, "loss_mask": [rng.randint(0, 1) for _ in ids]})
        if rng.random() < 0.1:
            records.append(rng.choice([{"messages": [{"role": "user", "content": "Hi"}]}, {"unknown": 1},
                                       {"input_ids": [10**6, 1], "loss_mask": [0, 1]}]))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def assert_same(joined: Path, alone: Path) -> None:
    for name in FILES:
        assert (joined / "prompts" / name).read_bytes() == (alone / "prompts" / name).read_bytes(), name
    a, b = (load_manifest(run).stages["prompts"] for run in (joined, alone))
    assert (a.counts, a.metrics, a.config, a.config_sha256) == (b.counts, b.metrics, b.config, b.config_sha256)
    assert [(f.path, f.sha256) for f in a.outputs] == [(f.path, f.sha256) for f in b.outputs]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), sizes=st.tuples(st.integers(2, 12), st.integers(2, 12)), count=st.integers(1, 4),
       truncate=st.sampled_from(["skip", "split", "cut"]),
       choice=st.sampled_from([{}, {"limit": 5}, {"near_duplicates": 0.6}, {"decontaminate_words": 3, "limit": 8}]),
       mixture=st.sampled_from([{}, {"cap": 3}, {"weight": 2}]))
def test_shards_joined_are_what_one_machine_makes(target_dir, seed, sizes, count, truncate, choice, mixture):
    with TemporaryDirectory() as folder:
        root = Path(folder)
        source = [{"path": str(some_source(root / f"{k}.jsonl", seed + k, size)), **mixture}
                  for k, size in enumerate(sizes)]
        chosen = {"source": source, "truncate": truncate, "on_bad_record": "skip", **choice}
        try:
            alone = stage_1(target_dir, root / "alone", **chosen)
        except PipelineError as e:
            assert "nothing left to mix" in e.what or "can be trained on" in e.what
            return
        names = [root / f"shard-{k}" for k in range(count)]
        shards = [stage_1(target_dir, name, shard=f"{k}/{count}", **chosen) for k, name in enumerate(names)]
        for k, (name, manifest) in enumerate(zip(names, shards)):
            samples = list(read_samples(name / "prompts" / "samples.parquet"))
            assert {owner(sample.id.partition("#")[0], count) for sample in samples} <= {k}
            counts = manifest.stages["prompts"].counts
            assert counts["read"] == counts["kept"] + counts["duplicates"] + counts.get("other_shards", 0) + sum(
                n for reason, n in counts.items() if reason.startswith("skipped_"))
            assert counts["read"] == alone.stages["prompts"].counts["read"]
        merge(names[::-1], root / "joined")
        assert_same(root / "joined", root / "alone")


@pytest.fixture(scope="module")
def halves(target_dir, tmp_path_factory):
    """Two shards that the target answered, and the run of one machine."""
    root = tmp_path_factory.mktemp("halves")
    path = root / "source.jsonl"
    prompts = [" ".join(random.Random(k).choices(WORDS, k=3 + k % 5)) for k in range(10)]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in [*prompts, "Hi " * 200]))
    asked = {"source": str(path), "respond": "target", "respond_engine": "transformers", "max_new_tokens": 4}
    for name, shard in (("a", "0/2"), ("b", "1/2"), ("alone", None)):
        stage_1(target_dir, root / name, shard=shard, **asked)
    return root, asked


def copied(halves, tmp_path: Path) -> Path:
    shutil.copytree(halves[0], tmp_path / "runs")
    return tmp_path / "runs"


def test_answered_shards_joined_by_the_command_and_nothing_is_asked_again(halves, target_dir, tmp_path, monkeypatch):
    runs = copied(halves, tmp_path)
    for path in runs.glob("?/prompts/*"):  # copied from another machine: other times, the same bytes
        path.touch()
    done = subprocess.run([sys.executable, ROOT / "stages" / "merge.py", "--root", runs, "--into", "joined", "b", "a"],
                          capture_output=True, text=True)
    assert done.returncode == 0 and "10 conversations of 11 read" in done.stdout, done.stderr
    assert_same(runs / "joined", runs / "alone")
    with pytest.raises(PipelineError, match="is a run of its own"):
        merge([runs / "a", runs / "b"], runs / "joined")
    # With the answers of both, other settings that ask the same questions ask nobody.
    from pipeline.prompts import decode

    monkeypatch.setattr(decode, "generate_batch", None)
    again = stage_1(target_dir, runs / "joined", **halves[1], heldout_fraction=0.5)
    assert again.stages["prompts"].counts["answers_success"] == 10


def changed(run: Path, change) -> None:
    manifest = load_manifest(run)
    change(manifest)
    save_manifest(run, manifest)


def _set(mapping: dict, key: str, value: object) -> None:
    mapping[key] = value


@pytest.mark.parametrize("change, field, values", [
    (lambda m: setattr(m.target, "chat_template_sha256", "bb"), "target.chat_template_sha256", "is '.*, 'bb' in"),
    (lambda m: setattr(m.target, "config_sha256", "cc"), "target.config_sha256", "is '.*, 'cc' in"),
    (lambda m: _set(m.stages["prompts"].config["prompts"], "max_length", 61), "prompts.max_length", "is 60 .*, 61 in"),
    (lambda m: _set(m.stages["prompts"].config, "seed", 7), "seed", "is 0 in .*, 7 in"),
    (lambda m: _set(m.stages["prompts"].config, "source_sha256", "x"), "prompts.source, sha256 of its files", "'x' in"),
    (lambda m: _set(m.stages["prompts"].metrics["responses"], "engine", "sglang"), "responses.engine", "'sglang' in"),
    (lambda m: _set(m.stages["prompts"].config["prompts"], "shard", "1/3"), "number of shards", "is 2 in .*, 3 in"),
    (lambda m: _set(m.stages["prompts"].config["prompts"], "shard", None), "prompts.shard", "is no shard"),
    (lambda m: _set(m.stages["prompts"].config["prompts"], "shard", "0/2"), "prompts.shard", "0/2 is given twice"),
    (lambda m: _set(m.stages, "dump", m.stages["prompts"]), "stages.dump", "has hidden states already"),
])
def test_shards_that_do_not_belong_together_are_refused(halves, tmp_path, change, field, values):
    runs = copied(halves, tmp_path)
    changed(runs / "b", change)
    with pytest.raises(PipelineError, match=values) as e:
        merge([runs / "a", runs / "b"], runs / "joined")
    assert e.value.field.endswith(field) and not (runs / "joined").exists()


def test_missing_unfinished_and_damaged_shards_are_refused(halves, tmp_path):
    runs = copied(halves, tmp_path)
    with pytest.raises(PipelineError, match="shard 1/2 is missing"):
        merge([runs / "a"], runs / "joined")
    with pytest.raises(PipelineError, match="holds no finished stage 1"):
        merge([runs / "a", runs / "c"], runs / "joined")
    path = runs / "b" / "prompts" / "samples.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PipelineError, match="b/prompts/samples.parquet has .* truncated or altered"):
        merge([runs / "a", runs / "b"], runs / "joined")
    assert not (runs / "joined").exists()


@pytest.mark.parametrize("shard", ["2/2", "1", "a/b", "0/0", "-1/2"])
def test_a_shard_that_does_not_exist_is_refused(target_dir, tmp_path, shard):
    with pytest.raises(PipelineError, match="shard") as e:
        opened(target_dir, tmp_path, shard=shard)
    assert "prompts" in e.value.field
