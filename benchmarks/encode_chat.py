"""How fast conversations become samples, against a plain `apply_chat_template` loop, and in what memory.

    python benchmarks/encode_chat.py [--target DIR] [--conversations 20000] [--workers 2] [--rounds 3]
    python benchmarks/encode_chat.py --stage --conversations 100000

Synthetic conversations of one to four exchanges, mean 600 tokens of the embedded SmolLM2, in words of the built-in
prompts. The loop runs in one process and gives token ids alone. The pipeline's workers are started, read the same
conversations from a spool, and ids, masks and text are written as Parquet: all of that is in its time. Both run in
turn, and the medians are compared; so are the ids. With --stage stage 1 itself runs on a file of the conversations,
once: reading, removal of copies and contamination, encoding and writing, with the memory of all its processes, sampled,
beside the loop over a part of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil

from pipeline.prompts.records import Record
from pipeline.prompts.sources import BUILTIN
from pipeline.prompts.spool import open_spool
from pipeline.prompts.workers import encode_in_workers
from pipeline.samples import read_samples, write_batches
from pipeline.target import EMBEDDED, load_tokenizer, local_folder

STAGE = Path(__file__).resolve().parent.parent / "stages" / "01_generate_prompts.py"
_LOOP = 5000  # conversations of the loop beside the stage


def conversations(count: int, seed: int = 0) -> Iterator[list[dict]]:
    """Mean of about 600 tokens: 420 words."""
    rng = random.Random(seed)
    said_before = [m["content"] for line in BUILTIN.read_text().splitlines() for m in json.loads(line)["messages"]]
    words = " ".join(said_before).split(" ")

    def said(mean: float) -> str:
        length = 3 + int(rng.expovariate(1 / mean))
        at = rng.randrange(len(words))
        return " ".join((words[at:] + words)[:length] if at + length > len(words) else words[at:at + length])

    for _ in range(count):
        turns = 2 * rng.randint(1, 4)
        yield [{"role": ("user", "assistant")[k % 2], "content": said(420 / turns)} for k in range(turns)]


def plain_loop(tokenizer, some: list[list[dict]]) -> tuple[float, list[list[int]]]:
    begin = time.perf_counter()
    ids = [tokenizer.apply_chat_template(messages)["input_ids"] for messages in some]
    return time.perf_counter() - begin, ids


def side_by_side(folder: Path, tokenizer, count: int, workers: int, rounds: int, tmp: Path) -> None:
    some = list(conversations(count))
    seconds: dict[str, list[float]] = {"plain loop": [], "pipeline": []}
    with open_spool(tmp) as spool:
        places = [spool.add(Record(f"{k:016x}", None, "train", said, "")) for k, said in enumerate(some)]
        spool.flush()
        setup = {"tokenizer": str(folder), "trust_remote_code": False,
                 "chat": {"eos_token_ids": [tokenizer.eos_token_id]},
                 "rows": {"spool": str(spool.path), "max_length": 1 << 20, "truncate": "skip",
                          "vocab_size": len(tokenizer)}}
        for _ in range(rounds):
            took, plain = plain_loop(tokenizer, some)
            seconds["plain loop"].append(took)
            begin = time.perf_counter()
            write_batches(tmp / "samples.parquet", (found.rows for found in encode_in_workers(workers, setup, places)))
            seconds["pipeline"].append(time.perf_counter() - begin)
    tokens = 0
    for sample, ids in zip(read_samples(tmp / "samples.parquet"), plain, strict=True):
        assert sample.input_ids == ids
        tokens += len(ids)
    print(f"{count} conversations of {tokens / count:.0f} tokens on average, {workers} workers")
    rates = {name: count / statistics.median(times) for name, times in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:12} {rate:8.0f} conversations/s  {rate * tokens / count:10.0f} tok/s")
    print(f"pipeline / plain loop: {rates['pipeline'] / rates['plain loop']:.2f}")


def whole_stage(tokenizer, count: int, workers: int, tmp: Path) -> None:
    source = tmp / "source.jsonl"
    with open(source, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": said}) + "\n" for said in conversations(count))
    took, _ = plain_loop(tokenizer, list(islice(conversations(count), _LOOP)))
    loop = min(count, _LOOP) / took
    begin = time.perf_counter()
    stage = subprocess.Popen([
        sys.executable, str(STAGE), f"run.root={tmp}", "run.name=bench", f"prompts.source={source}",
        "prompts.respond=keep", f"prompts.workers={workers}", "target.context_length=8192"])
    peak = 0
    process = psutil.Process(stage.pid)
    while stage.poll() is None:
        try:
            peak = max(peak, sum(p.memory_info().rss for p in (process, *process.children(recursive=True))))
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.1)
    took = time.perf_counter() - begin
    assert stage.returncode == 0
    kept = json.loads((tmp / "bench" / "manifest.json").read_text())["stages"]["prompts"]["counts"]
    print(f"stage 1 of {count} conversations, {workers} workers: {took:.0f} s, {count / took:.0f} conversations/s; "
          f"plain loop {loop:.0f}; ratio {count / took / loop:.2f}; {peak / 2**30:.2f} GiB in all processes; {kept}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="folder of a target (default: the embedded one)")
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stage", action="store_true", help="stage 1 as a whole, on the embedded target")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: the workers are the parallelism
    folder = Path(args.target) if args.target else local_folder(EMBEDDED)
    tokenizer = load_tokenizer(folder, False)
    with tempfile.TemporaryDirectory() as tmp:
        if args.stage:
            whole_stage(tokenizer, args.conversations, args.workers, Path(tmp))
        else:
            side_by_side(folder, tokenizer, args.conversations, args.workers, args.rounds, Path(tmp))


if __name__ == "__main__":
    main()
