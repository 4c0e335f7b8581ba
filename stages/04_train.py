"""Stage 4: train the drafter with training-time test (TTT).

Reads:   runs/<name>/dump/, runs/<name>/standardize/
Writes:  runs/<name>/train/{drafter.safetensors,config.json,metrics.jsonl,checkpoints/}
Launch:  make train                                       # one process, CPU or GPU
         make train RUN=llama GPUS=8 ARGS="target=llama31_8b drafter=large train=large"   # accelerate launch
"""

from pathlib import Path

from _stage import stage_main, without

from pipeline.config import section
from pipeline.slots import check_bound
from pipeline.train.ranks import number_of_ranks


def depends_on(config, manifest):
    check_bound(config, manifest)
    train = without(section(config, "train")["train"], "checkpoint_every", "keep_checkpoints", "log_every", "spike_factor")
    if config.train.init_from is not None:
        from pipeline.train.warm_start import weights_digest

        own = Path(config.run.root) / config.run.name / "train"
        train["init_from"] = weights_digest(Path(config.train.init_from), own)
    return {"layers": manifest and manifest.fc_layers(), "ranks": number_of_ranks(), "train": train,
            **section(config, "drafter")}


def work(config, target, manifest, run_dir, folder):
    from pipeline.train.train import train

    return train(config, target, manifest, run_dir, folder)


if __name__ == "__main__":
    stage_main("train", depends_on, work)
