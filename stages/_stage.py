"""Shared by the stage scripts: Hydra in, library call, manifest out. Errors are one message, not a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from pipeline.config import Config, load_config, section
from pipeline.errors import PipelineError


def stage_main(run: Callable[[Config], None]) -> None:
    """Parse the Hydra command line, check the configuration and call `run` with it."""

    @hydra.main(version_base="1.3", config_path="../conf", config_name="config")
    def main(cfg: DictConfig) -> None:
        try:
            run(load_config(OmegaConf.to_container(cfg, resolve=True)))
        except PipelineError as e:
            sys.exit(f"error: {e}")
        except KeyboardInterrupt:
            sys.exit("stopped; the same command goes on from here")

    main()


def run_named_stage(name: str, config: Config, sections: tuple[str, ...], work: Callable) -> None:
    """Open the target and run one stage on its run folder.

    Args:
        sections: configuration sections the stage's result depends on, besides target and seed.
        work: called as ``work(config, target, manifest, run_dir, folder)``.
    """
    from pipeline.engine import prepare_environment, resolve_device
    from pipeline.stage import run_stage

    prepare_environment(resolve_device(config.device), threads=config.threads)
    from pipeline.target import open_target

    target, config = open_target(config)
    run_dir = Path(config.run.root) / config.run.name
    run_stage(name, run_dir, target=target.record, seed=config.seed, force=config.force,
              full_check=config.check_inputs == "full", config=section(config, "seed", *sections),
              work=lambda manifest, folder: work(config, target, manifest, run_dir, folder))


def is_main_process() -> bool:
    """False on the ranks other than 0 of `accelerate launch`."""
    return int(os.environ.get("RANK", "0")) == 0
