"""How fast answers are written without an engine, against transformers' own `generate` over the same batches.

    python benchmarks/generate.py [--target DIR] [--batches 3] [--max-new-tokens 96] [--dtype bf16]

The built-in prompts are sorted by length and cut into batches of `--batch-size`, as stage 1 does; of these some are
answered, evenly spread, greedily. Tokens per second count what is kept of an answer (up to its end-of-turn token);
time includes reading the prompts. Both run in turn, twice, and the better counts. How many answers are the same is
printed too: in fp32 all but near ties, in bf16 two right computations part sooner.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch

import pipeline  # noqa: F401  lets transformers be imported beside a CPU build of torch
from pipeline.prompts.decode import generate_batch, use_grouped_attention
from pipeline.prompts.sources import BUILTIN
from pipeline.target import DTYPES, EMBEDDED, load_tokenizer, local_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=EMBEDDED, help="folder of a target (default: the embedded one)")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ours-only", action="store_true")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    folder = local_folder(args.target)
    tokenizer = load_tokenizer(folder, False)
    conversations = [json.loads(line)["messages"] for line in BUILTIN.read_text(encoding="utf-8").splitlines()]
    prompts = sorted((tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)
                      for m in conversations), key=len, reverse=True)
    batches = [prompts[i:i + args.batch_size] for i in range(0, len(prompts), args.batch_size)]
    batches = [batches[len(batches) * (2 * i + 1) // (2 * args.batches)] for i in range(args.batches)]
    prompts = [p for batch in batches for p in batch]
    ends = [tokenizer.eos_token_id]

    def load():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPES[args.dtype])).eval()

    model, plain = load(), load()
    use_grouped_attention(model)

    def ours() -> list[list[int]]:
        return [r.ids for batch in batches for r in generate_batch(
            model, batch, max_new_tokens=args.max_new_tokens, eos_token_ids=ends)]

    @torch.inference_mode()
    def theirs() -> list[list[int]]:
        answers = []
        for batch in batches:
            width = max(map(len, batch))
            ids = torch.tensor([ends * (width - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            out = plain.generate(ids, attention_mask=mask, max_new_tokens=args.max_new_tokens, do_sample=False,
                                 eos_token_id=ends[0], pad_token_id=ends[0])[:, width:].tolist()
            answers += [row[:row.index(ends[0]) + 1] if ends[0] in row else row for row in out]
        return answers

    ways = {"ours": ours} if args.ours_only else {"ours": ours, "generate": theirs}
    seconds = dict.fromkeys(ways, float("inf"))
    answers = {}
    for _ in range(args.repeats):
        for name, way in ways.items():
            started = time.perf_counter()
            answers[name] = way()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    rates = {name: sum(map(len, answers[name])) / seconds[name] for name in ways}
    print(json.dumps({
        "prompts": len(prompts), "prompt_tokens": sum(map(len, prompts)),
        "answer_tokens": sum(map(len, answers["ours"])),
        "batch_size": args.batch_size, "dtype": args.dtype, "threads": torch.get_num_threads(), "cpus": os.cpu_count(),
        **{f"{name}_tok_per_s": round(rate, 1) for name, rate in rates.items()},
        **({} if args.ours_only else {"ratio": round(rates["ours"] / rates["generate"], 2), "same_answers": sum(
            a == b for a, b in zip(answers["ours"], answers["generate"], strict=True))})}))


if __name__ == "__main__":
    main()
