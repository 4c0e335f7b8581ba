"""No stage of a run: infer which states of its target somebody's drafter was trained on, and make a run to export it from.

Reads:   the drafter's folder; the target; `diagnose.samples` or `prompts.source`
Writes:  runs/diagnosed/{diagnosis.json,prompts/,dump/}, and where every slot is determined {standardize/,train/}
Launch:  make diagnose DRAFT=/drafters/unknown TARGET=smollm2_135m
         make diagnose DRAFT=/drafters/unknown TARGET=/models/Llama-3.1-8B-Instruct RUN=theirs ARGS="prompts=sglang"
"""

from pathlib import Path

from _stage import complete_commands, hydra_main, opened


def main(config, overrides):
    from pipeline.diagnose.diagnose import diagnose

    target, config, _ = opened(config)
    run = config.run.name
    diagnose(config, target, Path(config.run.root) / run)
    for command in (f"make export RUN={run}", f"make verify RUN={run}"):
        print(f"next: {complete_commands(command, run, overrides)}")


if __name__ == "__main__":
    hydra_main(main)
