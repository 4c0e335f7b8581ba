"""Stage 4: train the drafter with training-time test (TTT).

Reads:   runs/<name>/dump/, runs/<name>/standardize/
Writes:  runs/<name>/train/{drafter.safetensors,config.json,metrics.jsonl,checkpoints/}
Launch:  make train                                       # one process, CPU or GPU
         make train RUN=llama GPUS=8 ARGS="target=llama31_8b drafter=large train=large"   # accelerate launch, DDP
"""

from _stage import stage_main, without

from pipeline.config import section
from pipeline.slots import check_bound


def depends_on(config, manifest):
    check_bound(config, manifest)
    train = without(section(config, "train")["train"], "checkpoint_every", "keep_checkpoints", "log_every")
    return {"layers": manifest and manifest.fc_layers(), "gpus": config.gpus, "train": train, **section(config, "drafter")}


def work(config, target, manifest, run_dir, folder):
    from pipeline.train import train

    return train(config, target, manifest, run_dir, folder)


if __name__ == "__main__":
    stage_main("train", depends_on, work)
