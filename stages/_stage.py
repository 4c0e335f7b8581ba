"""Shared by the stage scripts: Hydra in, library call, manifest out. Errors are one message, not a traceback."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

from pipeline.config import Config, load_config
from pipeline.errors import PipelineError
from pipeline.manifest import Manifest, load_manifest
from pipeline.stage import package_versions, run_stage
from pipeline.train import ranks

if TYPE_CHECKING:
    from pipeline.target import Target

CONF = Path(__file__).resolve().parent.parent / "conf"


def stage_main(name: str, depends_on: Callable[[Config, Manifest | None], dict], work: Callable,
               when_current: Callable[[Config, Manifest], bool] | None = None) -> None:
    """Run a stage from the Hydra command line.

    Args:
        depends_on: ``(config, manifest)`` → what the stage's result depends on besides target, seed and inputs, as plain
            values. Operational keys (free space to leave, logging intervals, …) stay out, so that changing them does
            not throw away finished or half-finished work.
        work: ``(config, target, manifest, run_dir, folder) -> StageResult``.
        when_current: called if there is nothing to do; returns whether it changed the manifest.
    """

    hydra_main(lambda config, overrides: _run(name, config, depends_on, work, when_current))


def hydra_main(body: Callable[[Config, list[str]], None]) -> None:
    """Call `body` with the checked configuration and the overrides that were typed."""

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def main(cfg: DictConfig) -> None:
        with ranks.leaving_at_once():
            try:
                body(load_config(_plain(cfg)), list(HydraConfig.get().overrides.task))
            except PipelineError as e:
                e.fix = complete_commands(e.fix, str(cfg.run.name), HydraConfig.get().overrides.task)
                if not ranks.is_main_process():
                    time.sleep(10)  # rank 0 says the same, and the launcher then ends this rank
                sys.exit(f"error: {e}")
            except KeyboardInterrupt:
                sys.exit("stopped; the same command goes on from here")

    main()


def _plain(cfg: DictConfig) -> dict:
    try:
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as e:
        key = str(e).split(":")[-1].strip()
        raise PipelineError(f"{key} has no default", field=key, fix=f'ARGS="{key}=…"') from e


def complete_commands(fix: str | None, run: str, overrides: list[str]) -> str | None:
    """Make the commands in a mend work as typed: with the RUN=, ROOT=, GPUS= and ARGS of the command that was refused."""
    if fix is None:
        return None
    given = {key: value.strip("\"'") for key, value in (o.split("=", 1) for o in overrides if "=" in o)}
    variables = {"RUN": run if run != "demo" else None, "ROOT": given.get("run.root"), "GPUS": given.get("gpus")}
    usual = {"ROOT": "runs", "GPUS": "1"}
    kept = [o for o in overrides if not o.startswith(("run.", "gpus=", "force=", "hydra.", "diagnose."))]

    def complete(match: re.Match) -> str:
        named, arguments = match["variables"], match["arguments"] or ""
        words = [match["command"] + named]
        words += [f"{k}={v}" for k, v in variables.items() if v not in (None, usual.get(k)) and f" {k}=" not in named]
        if "target=<" not in arguments:  # a target for the user to fill in
            missing = [o for o in kept if o.split("=")[0] + "=" not in arguments]
            missing = [_word(o) for o in missing]
            if missing:
                arguments = (arguments[:-1] + " " if arguments else ' ARGS="') + " ".join(missing) + '"'
        return " ".join(words) + arguments

    stages = "prompts|dump|standardize|train|export|verify"
    return re.sub(rf'(?P<command>\bmake (?:{stages})\b)(?P<variables>(?: [A-Z]+=(?!")\S+)*)(?P<arguments> ARGS="[^"]*")?',
                  complete, fix)


def _word(override: str) -> str:
    """An override as a word inside ARGS="…"."""
    if re.fullmatch(r"[\w.,:/@%+=\[\]…-]+", override):
        return override
    return f'\\"{override}\\"' if "'" in override else f"'{override}'"


def _run(name: str, config: Config, depends_on: Callable, work: Callable, when_current: Callable | None) -> None:
    target, config, device = opened(config)
    run_dir = Path(config.run.root) / config.run.name
    if not ranks.is_main_process():
        if ranks.wait_for_rank_0(device):
            work(config, target, load_manifest(run_dir), run_dir, run_dir / name)
        return
    run_stage(name, run_dir, target=target.record, seed=config.seed, force=config.force,
              full_check=config.check_inputs == "full",
              config={"seed": config.seed, **depends_on(config, load_manifest(run_dir))},
              work=lambda manifest, folder: work(config, target, manifest, run_dir, folder),
              when_current=when_current and (lambda manifest: when_current(config, manifest)))
    ranks.dismiss(device)


def opened(config: Config) -> tuple[Target, Config, str]:
    """The target, the configuration with its facts filled in, and the device; the process is fit for engines after it."""
    from pipeline.engines.engine import prepare_environment, resolve_device

    # Before anything imports transformers or SGLang.
    device = resolve_device(config.device)
    prepare_environment(device, threads=config.threads)
    from transformers.utils import logging

    from pipeline.target import open_target

    logging.disable_progress_bar()  # the stages have their own
    if device == "cuda":
        check_gpus(config.gpus)
    return *open_target(config), device


def check_gpus(asked: int) -> None:
    import torch

    if asked > (found := torch.cuda.device_count()):
        raise PipelineError(f"{asked} GPUs were asked for, {found} were found", field="gpus", value=asked,
                            fix=f"GPUS={found}, or look at CUDA_VISIBLE_DEVICES")


def engine_facts(config: Config) -> dict:
    """What derived ids, launch lines and checks rest on besides files: other engines, or another device, redo them."""
    from pipeline.engines import vllm_env
    from pipeline.engines.engine import resolve_device

    return {"device": resolve_device(config.device),
            "versions": package_versions(("sglang", "speculators")) | {"vllm": vllm_env.version()}}


def without(section: dict, *operational: str) -> dict:
    """A configuration section without the keys that do not change the result."""
    return {k: v for k, v in section.items() if k not in operational}
