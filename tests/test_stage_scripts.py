"""The wrapper around every stage: messages carry commands that work as typed, missing values are named."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "stages"))

from _stage import complete_commands  # noqa: E402


@pytest.mark.parametrize("run, overrides, fix, expected", [
    ("demo", [], "make dump", "make dump"),
    ("demo", ["train.lr=1"], 'make dump ARGS="force=true"', 'make dump ARGS="force=true"'),
    ("mine", [], "make dump", "make dump RUN=mine"),
    ("mine", [], "make dump RUN=other", "make dump RUN=other"),
    ("kimi", ["target=kimi_k25", "target.path=/models/k"], "make dump",
     'make dump RUN=kimi ARGS="target=kimi_k25 target.path=/models/k"'),
    ("kimi", ["target=kimi_k25"], 'make dump RUN=kimi ARGS="slots.layers=[3,30,58]"',
     'make dump RUN=kimi ARGS="slots.layers=[3,30,58] target=kimi_k25"'),
    ("kimi", ["target=kimi_k25"], 'make train ARGS="target=llama31_8b"', 'make train RUN=kimi ARGS="target=llama31_8b"'),
    ("mine", [], "make prompts, then make dump", "make prompts RUN=mine, then make dump RUN=mine"),
    ("mine", ["target=kimi_k25"], "make install", "make install"),
    ("mine", [], "rm a/shard-00001.safetensors, then: make dump (only its samples are dumped again)",
     "rm a/shard-00001.safetensors, then: make dump RUN=mine (only its samples are dumped again)"),
    ("demo", ["run.root=runs"], "make dump", "make dump"),
    ("mine", ["run.root=/data"], "make dump", "make dump RUN=mine ROOT=/data"),
    ("mine", [], None, None),
])
def test_commands_in_a_mend_keep_run_and_target(run, overrides, fix, expected):
    assert complete_commands(fix, run, overrides) == expected
