"""Shared by the stage scripts: Hydra in, library call, manifest out. Errors are one message, not a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from pipeline import ranks
from pipeline.config import Config, load_config
from pipeline.errors import PipelineError
from pipeline.manifest import Manifest, load_manifest
from pipeline.stage import run_stage

CONF = Path(__file__).resolve().parent.parent / "conf"


def stage_main(name: str, depends_on: Callable[[Config, Manifest | None], dict], work: Callable) -> None:
    """Run a stage from the Hydra command line.

    Args:
        depends_on: ``(config, manifest)`` → what the stage's result depends on besides target, seed and inputs, as plain
            values. Operational keys (free space to leave, logging intervals, …) stay out, so that changing them does
            not throw away finished or half-finished work.
        work: ``(config, target, manifest, run_dir, folder) -> StageResult``.
    """

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def main(cfg: DictConfig) -> None:
        try:
            _run(name, load_config(OmegaConf.to_container(cfg, resolve=True)), depends_on, work)
        except PipelineError as e:
            sys.exit(f"error: {e}")
        except KeyboardInterrupt:
            sys.exit("stopped; the same command goes on from here")

    main()


def _run(name: str, config: Config, depends_on: Callable, work: Callable) -> None:
    from pipeline.engine import prepare_environment, resolve_device

    # Before anything imports transformers or SGLang.
    device = resolve_device(config.device)
    prepare_environment(device, threads=config.threads)
    from transformers.utils import logging

    from pipeline.target import open_target

    logging.disable_progress_bar()  # the stages have their own
    target, config = open_target(config)
    run_dir = Path(config.run.root) / config.run.name
    if not ranks.is_main_process():
        if ranks.wait_for_rank_0(device):
            work(config, target, load_manifest(run_dir), run_dir, run_dir / name)
        return
    run_stage(name, run_dir, target=target.record, seed=config.seed, force=config.force,
              full_check=config.check_inputs == "full",
              config={"seed": config.seed, **depends_on(config, load_manifest(run_dir))},
              work=lambda manifest, folder: work(config, target, manifest, run_dir, folder))
    ranks.dismiss(device)


def without(section: dict, *operational: str) -> dict:
    """A configuration section without the keys that do not change the result."""
    return {k: v for k, v in section.items() if k not in operational}
