"""What several test files share because it takes seconds to make."""

import pytest

from pipeline.export.export import export
from tests.tiny_run import TinyRun, tiny_run

LEARNED = [f"s{i}" for i in range(24) if i % 4 != 3]  # the training samples of `learned`, which are its probes
LEARNED_SETTINGS = {"train.epochs": 120, "train.lr": 5e-3, "train.batch_tokens": 512, "train.validate_every_epochs": 10,
                    "drafter.draft_vocab_size": 256, "slots.layers": [0, 2, 4]}


@pytest.fixture(scope="session")
def learned(tmp_path_factory) -> TinyRun:
    """A run whose exported drafter knows its training samples well, so that faults show. Not to be changed.

    The target's weights are large: its layers differ much and its tokens are decided.
    """
    run = tiny_run(tmp_path_factory.mktemp("learned"), vocab=512, probes=LEARNED, copies=True, dumped=(0, 2, 4), std=0.2)
    for stage in ("standardize", "train"):
        run.stage(stage, **LEARNED_SETTINGS)
    target, config = run.config(**LEARNED_SETTINGS, **{"export.engines": ["sglang"]})
    export(config, target, run.manifest, run.folder, run.folder / "export")
    return run
