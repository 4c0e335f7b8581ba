"""How fast training's batches are read, beside plain copies of the same bytes out of the page cache.

    python benchmarks/loader.py                     # 1 GiB in a temporary folder, a minute
    python benchmarks/loader.py --hidden 4096 --gib 8 --folder /data

Random shards are written as the dump writes them, samples of a 16th to half of a batch. Both sides take turns, in one
thread:

    loader   `TrainingData.load` over an epoch's batches, in the shuffled order of training
    plain    as many bytes, in pieces of a batch's mean size, each copied from a map of the files, in their order, to a
             new buffer

Prints one JSON line: GB/s of both (median of the rounds) and their ratio.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.files import save_safetensors  # noqa: E402
from pipeline.manifest import bind_slots  # noqa: E402
from pipeline.standardize import layout  # noqa: E402
from pipeline.store import HiddenStore, ShardBuilder, shard_path  # noqa: E402
from pipeline.target import OutputHead  # noqa: E402
from pipeline.train.batches import AlignedFiles, TrainingData, plan_epoch  # noqa: E402

LAYERS = (1, 14, 26)
STATES = len(LAYERS) + 1


def write_shards(folder: Path, hidden: int, tokens: int, dtype: torch.dtype, longest: int) -> HiddenStore:
    """Samples of random states that hold `tokens` tokens in all, and stage 3's files beside them."""
    names = [*(f"layer_output.{layer}" for layer in LAYERS), "final_hidden"]
    rng, random = np.random.default_rng(0), torch.Generator().manual_seed(0)
    states = torch.randn(longest, hidden, generator=random).to(dtype)
    builder, paths, left, sample = ShardBuilder(names, 32768), [], tokens, 0
    while left > 0:
        length = min(left, int(rng.integers(longest // 8, longest + 1)))
        if not builder.has_room(length):
            paths.append(shard_path(folder, len(paths)))
            builder.write(paths[-1])
        builder.add(f"s{sample}", torch.zeros(length, dtype=torch.int32), {n: states[:length] for n in names})
        left, sample = left - length, sample + 1
    paths.append(shard_path(folder, len(paths)))
    builder.write(paths[-1])
    store = HiddenStore(paths)
    for number, path in enumerate(paths):
        refs = [ref for ref in store.samples if ref.shard == number]
        rows = refs[-1].start + refs[-1].length
        aligned = {"loss_mask": torch.ones(rows, dtype=torch.uint8),
                   "teacher_argmax": torch.zeros(rows, dtype=torch.int32)}
        save_safetensors(folder / "aligned" / path.name, aligned, {"checksums": json.dumps({"layout": layout(refs)})})
    return store


def plain_reader(paths: list[Path], piece: int) -> Callable[[], int]:
    """Copies all bytes of the files, `piece` at a time; returns how many."""
    maps = []
    for path in paths:
        with open(path, "rb") as f:
            maps.append(np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), np.uint8))

    def read() -> int:
        for view in maps:
            for start in range(0, len(view), piece):
                part = view[start:start + piece]
                np.copyto(np.empty(len(part), np.uint8), part)
        return sum(len(view) for view in maps)

    return read


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hidden", type=int, default=2048)
    p.add_argument("--gib", type=float, default=1.0, help="size of all states; should fit into memory twice")
    p.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    p.add_argument("--batch-tokens", type=int, default=4096)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--folder", help="where the shards go for the time of the run; default: the system's")
    args = p.parse_args()
    torch.set_num_threads(1)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    row = args.hidden * STATES * dtype.itemsize
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        store = write_shards(folder, args.hidden, int(args.gib * 2**30) // row, dtype, args.batch_tokens // 2)
        head = OutputHead(torch.ones(1, args.hidden), torch.ones(args.hidden), 1e-5)
        data = TrainingData(store, AlignedFiles(folder / "aligned", store), bind_slots(list(LAYERS), args.hidden),
                            [ref.id for ref in store.samples], head, dtype)
        plan = plan_epoch(data.lengths, batch_tokens=args.batch_tokens, seed=0, epoch=0)
        batches = [micro.samples for step in plan for micro in step[0]]

        def loader() -> int:
            for samples in batches:
                data.load(samples)
            return sum(data.lengths) * row

        sides = {"loader": loader, "plain": plain_reader(store.paths, sum(data.lengths) * row // len(batches))}
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(args.rounds + 1):  # the first round maps the files
            for side, read in sides.items():
                started = time.perf_counter()
                count = read()
                if number:
                    rates[side].append(count / (time.perf_counter() - started) / 1e9)
    found = {side: round(statistics.median(values), 3) for side, values in rates.items()}
    print(json.dumps({"hidden": args.hidden, "dtype": args.dtype, "gib": args.gib, "batch_tokens": args.batch_tokens,
                      "rounds": args.rounds, **{f"{side}_gb_s": rate for side, rate in found.items()},
                      "ratio": round(found["loader"] / found["plain"], 3), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
