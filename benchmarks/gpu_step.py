"""Our training step beside the peers' on one GPU: tokens/s, peak memory, MFU. One prepared run of less than 8 minutes.

    python benchmarks/gpu_step.py                       # with the peers whose environments make bench-peers has built
    python benchmarks/gpu_step.py --device cpu --tiny   # the same lines of code, on a CPU

The shape of an 8B target: H=4096, S=4096, T=7, draft vocabulary 32000, bf16. MFU is the FLOPs that the result needs
("pruned" in workload.py) per second, over the peak of the device; `gflops_matmul` is what a large matmul reaches on it.
Prints a JSON line per implementation, then a table, and writes benchmarks/results/gpu_step.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from pipeline.train.throughput import named_peak  # noqa: E402

SHAPE = {"seq-len": 4096, "ttt": 7, "draft-vocab": 32000, "hidden": 4096, "heads": 32, "kv-heads": 8, "head-dim": 128,
         "intermediate": 14336, "target-vocab": 128256, "dtype": "bf16"}  # fmt: skip
TINY = SHAPE | {"seq-len": 64, "ttt": 3, "draft-vocab": 256, "hidden": 64, "heads": 4, "kv-heads": 2, "head-dim": 16,
                "intermediate": 128, "target-vocab": 512}  # fmt: skip


def matmul_gflops(device: str) -> float:
    import torch

    size = 8192 if device == "cuda" else 512
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = float("inf")
    for _ in range(10):
        wait()
        start = time.perf_counter()
        a @ a
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--minutes", type=float, default=7.5, help="for all of it; what does not fit in is left out")
    p.add_argument("--speculators", help="interpreter; .venv-speculators, or this one where that does not exist")
    p.add_argument("--specforge", default=str(ROOT / ".venv-specforge" / "bin" / "python"))
    args = p.parse_args()

    theirs = ROOT / ".venv-speculators" / "bin" / "python"
    args.speculators = args.speculators or (str(theirs) if theirs.exists() else sys.executable)
    until = time.monotonic() + 60 * args.minutes
    flags = [part for k, v in (TINY if args.tiny else SHAPE).items() for part in (f"--{k}", str(v))]
    python = {"ours": sys.executable, "speculators": args.speculators, "specforge": args.specforge}
    rate, lines = matmul_gflops(args.device), []
    for impl, interpreter in python.items():
        if not Path(interpreter).exists():
            print(f"{impl}: no environment ({interpreter}); make bench-peers builds it")
            continue
        script = HERE / ("train_step.py" if impl == "ours" else f"{impl}_step.py")
        command = [interpreter, "-W", "ignore", str(script), *flags, "--device", args.device,
                   "--warmup", "2", "--steps", "5", "--seconds", "20"]  # fmt: skip
        try:
            run = subprocess.run(command, cwd=HERE, capture_output=True, text=True,
                                 timeout=max(1.0, until - time.monotonic()))  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{impl}: not done within {args.minutes} minutes")
            continue
        found = [line for line in run.stdout.splitlines() if line.startswith("{")]
        if run.returncode or not found:
            print(f"{impl} failed:\n{run.stderr[-1500:]}")
            continue
        line = json.loads(found[-1])
        peak = named_peak(line.get("device", ""))
        gflops = peak / 1e9 if peak else None
        line |= {"gflops_matmul": round(rate), "gflops_peak": gflops,
                 "mfu": round(line["gflop_pruned"] / line["s_per_step"] / (gflops or rate), 4)}  # fmt: skip
        print(json.dumps(line), flush=True)
        lines.append(line)
    if not args.tiny and lines:
        (HERE / "results").mkdir(exist_ok=True)
        with open(HERE / "results" / "gpu_step.jsonl", "a") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
    print("\n| | s/step | tok/s | peak MiB | MFU |\n| --- | --: | --: | --: | --: |")
    for x in lines:
        print(f"| {x['impl']} | {x['s_per_step']:.3f} | {x['tok_per_s']:.0f} | "
              f"{x.get('peak_gpu_mib', x['peak_rss_mib'])} | {x['mfu']:.1%} |")  # fmt: skip


if __name__ == "__main__":
    main()
