"""No stage of a run: join the shards of stage 1 that several machines made into one run.

Reads:   runs/<shard>/manifest.json, runs/<shard>/prompts/, of every shard
Writes:  runs/joined/{manifest.json,prompts/,responses/}
Launch:  make prompts RUN=a ARGS="prompts.shard=0/2 …"     # on one machine
         make prompts RUN=b ARGS="prompts.shard=1/2 …"     # on another; copy runs/b here, then
         make merge RUNS="a b" RUN=joined
"""

import argparse
import sys
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.merge import merge


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="names of the shards' runs")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="folder that holds the runs")
    parser.add_argument("--into", default="joined", help="name of the new run")
    args = parser.parse_args()
    try:
        manifest = merge([args.root / name for name in args.runs], args.root / args.into)
    except PipelineError as e:
        sys.exit(f"error: {e}")
    counts = manifest.stages["prompts"].counts
    print(f"merge: {args.root / args.into} holds {counts['kept']} conversations of {counts['read']} read, "
          f"{counts['train_samples']} samples to train on and {counts['heldout_samples']} held out\n"
          f"next: make dump RUN={args.into}")


if __name__ == "__main__":
    main()
