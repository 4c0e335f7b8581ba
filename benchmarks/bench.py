"""Our training step beside speculators' and SpecForge's: every configuration, one process per measurement.

    make bench                                    # the whole grid, about 30 minutes on two idle cores
    make bench BENCH="--quick"                    # four configurations
    .venv/bin/python benchmarks/bench.py --only S=2048,T=7,dtype=bf16
    .venv/bin/python benchmarks/bench.py --only S=512 --rounds 3
    .venv/bin/python benchmarks/bench.py --report # tables and plot of what is there, nothing is run

Appends a line per measurement to benchmarks/results/train_step.jsonl and skips what this machine has measured there with
as many threads, so an interrupted run goes on and nobody compares with another machine's lines. For each configuration
ours and both peers follow one another; in bf16 the faster peer then runs again with an allocator that keeps freed memory
("tuned"). Lines measured while other processes took more than 5 % of the machine are marked `busy` in the table:
delete them from the file and run again. Where steps are short, the load of the host makes one measurement differ from the
next by a fifth: ask for several `--rounds`.

The same job is asked of all: see workload.py, and the docstrings of the *_step.py. That it is the same is checked: the
mean KL of the first TTT step on the initial weights (`kl_first`) must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

RESULTS = HERE / "results" / "train_step.jsonl"
# glibc keeps what is freed, instead of unmapping every block above 32 MiB.
TUNED = ("glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:"
         "glibc.malloc.top_pad=268435456")  # fmt: skip
PEERS = ("speculators", "specforge")
KEYS = ("S", "T", "Vd", "dtype", "mask_frac")
GRID = [dict(zip(KEYS, c)) for c in product((1024, 2048, 512), (7, 3), (8192, 32000), ("bf16", "fp32"), (0.6,))]
GRID += [dict(zip(KEYS, (2048, 7, 8192, dtype, 0.1))) for dtype in ("bf16", "fp32")]
QUICK = [dict(zip(KEYS, c)) for c in ((1024, 7, 8192, "bf16", 0.6), (1024, 7, 8192, "fp32", 0.6),
                                      (512, 3, 8192, "bf16", 0.6), (2048, 7, 8192, "bf16", 0.1))]  # fmt: skip


def wanted_ratio(c: dict) -> float:
    """How many times as fast as the better peer as shipped a step is to be."""
    if c["mask_frac"] == 0.1:
        return 8.0
    if c["dtype"] == "fp32":
        return 2.0
    return 4.0 if (c["S"], c["T"]) == (2048, 7) else 3.0


def pythons(args: argparse.Namespace) -> dict[str, str]:
    found = {"ours": sys.executable, "speculators": args.speculators, "specforge": args.specforge}
    missing = [name for name, python in found.items() if not Path(python).exists()]
    if missing:
        raise SystemExit(f"no environment for {', '.join(missing)}: make bench-peers builds them")
    return found


def environment(tuned: bool, threads: int) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | {"OMP_NUM_THREADS": str(threads)}
    return env | ({"GLIBC_TUNABLES": TUNED} if tuned else {})


def measure(impl: str, python: str, c: dict, tuned: bool, args: argparse.Namespace) -> dict:
    """Run one step script in its own process; the line it printed, with where and how it was measured."""
    script = HERE / ("train_step.py" if impl == "ours" else f"{impl}_step.py")
    command = [python, "-W", "ignore", str(script), "--seq-len", str(c["S"]), "--ttt", str(c["T"]), "--draft-vocab",
               str(c["Vd"]), "--dtype", c["dtype"], "--mask-frac", str(c["mask_frac"]), "--threads", str(args.threads),
               "--warmup", "1", "--steps", "5", "--seconds", str(args.seconds)]  # fmt: skip
    run = subprocess.run(command, env=environment(tuned, args.threads), cwd=HERE, capture_output=True, text=True)
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not lines:
        raise SystemExit(f"{impl} failed at {c}:\n{run.stderr[-2000:]}")
    line = json.loads(lines[-1])
    if impl != "ours" and line["torch"].split("+")[0] != args.torch:
        raise SystemExit(f"{impl} runs on torch {line['torch']}, this pipeline on {args.torch}: not comparable")
    return line | c | {"tuned": tuned, "at": time.strftime("%Y-%m-%dT%H:%M:%S"), **machine()}


def machine() -> dict:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {"machine": machine_name(), "commit": commit}


def machine_name() -> str:
    """Cores, model, its family, and the widest instructions: hypervisors give machines of different rates one model name."""
    info = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    info = {key.strip(): value.strip() for key, value in info.items()}
    widest = next((x for x in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if x in info.get("flags", "").split()), "")
    family = f"family {info['cpu family']} model {info['model']}" if "cpu family" in info else ""
    return " ".join(f"{os.cpu_count()} × {info.get('model name', platform.machine())} {family} {widest}".split())


def matmul_rates(threads: int) -> dict:
    """The highest rate of torch's own matmul over the shapes of the work and a large square, in GFLOP/s; for fp32 by
    whichever of the libraries that training chooses from is faster."""
    code = (
        "import contextlib, json, time, torch\n"
        "from pipeline.products import fast_fp32\n"
        f"torch.set_num_threads({threads})\n"
        "found = {}\n"
        "for name, dtype, library in (('fp32', torch.float32, contextlib.nullcontext), ('fp32', torch.float32, fast_fp32),\n"
        "                             ('bf16', torch.bfloat16, contextlib.nullcontext)):\n"
        "    for m, k, n in ((2048, 2048, 2048), (1024, 576, 8192), (1024, 1152, 576), (1024, 576, 1536)):\n"
        "        a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)\n"
        "        best, end = 1e9, time.perf_counter() + 1.0\n"
        "        with library():\n"
        "            while time.perf_counter() < end:\n"
        "                start = time.perf_counter(); a @ b.t(); best = min(best, time.perf_counter() - start)\n"
        "        found[name] = max(found.get(name, 0.0), 2 * m * k * n / best / 1e9)\n"
        "print(json.dumps({k: round(v, 1) for k, v in found.items()}))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], env=environment(False, threads), cwd=ROOT, capture_output=True,
                         text=True, check=True)  # fmt: skip
    return {"kind": "rates", "gflops": json.loads(run.stdout), "threads": threads, **machine()}


def read(where: tuple[str, int] | None = None) -> list[dict]:
    """Lines of one (machine, threads), by default of those measured last."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    where = where or (lines and (lines[-1]["machine"], lines[-1]["threads"]))
    return [x for x in lines if (x["machine"], x["threads"]) == where]


def write(line: dict) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    with open(RESULTS, "a") as f:
        f.write(json.dumps(line) + "\n")


def find(lines: list[dict], c: dict, impl: str, tuned: bool = False) -> dict | None:
    """The measurement of median time, the faster of two."""
    same = sorted(find_all(lines, c, impl, tuned), key=lambda x: x["s_per_step"])
    return same[(len(same) - 1) // 2] if same else None


def find_all(lines: list[dict], c: dict, impl: str, tuned: bool = False) -> list[dict]:
    return [x for x in lines if x.get("impl") == impl and x["tuned"] == tuned and all(x[k] == c[k] for k in KEYS)]


def better_peer(lines: list[dict], c: dict) -> dict | None:
    peers = [x for x in (find(lines, c, impl) for impl in PEERS) if x]
    return min(peers, key=lambda x: x["s_per_step"], default=None)


def run(configurations: list[dict], args: argparse.Namespace) -> None:
    python, started, here = pythons(args), time.time(), (machine_name(), args.threads)
    if not any(x.get("kind") == "rates" for x in read(here)):
        write(matmul_rates(args.threads))
    for c in configurations:
        plan = [(impl, False, n) for n in range(args.rounds) for impl in ("ours", *PEERS)]
        plan += [("better", True, n) for n in range(args.rounds)] if c["dtype"] == "bf16" else []
        for impl, tuned, before in plan:
            if impl == "better":
                impl = better_peer(read(here), c)["impl"]
            if len(find_all(read(here), c, impl, tuned)) > before:
                continue
            if args.minutes and time.time() - started > 60 * args.minutes:
                return
            line = measure(impl, python[impl], c, tuned, args)
            write(line)
            print(f"{time.time() - started:5.0f} s  {describe(c):34} {impl + ' tuned' * tuned:18} "
                  f"{line['s_per_step']:8.3f} s/step {line['peak_rss_mib']:6} MiB", flush=True)  # fmt: skip
        check_same_work(read(here), c)


def check_same_work(lines: list[dict], c: dict) -> None:
    ours, bound = find(lines, c, "ours"), 5e-3 if c["dtype"] == "bf16" else 5e-4
    for peer in filter(None, (find(lines, c, impl) for impl in PEERS)):
        if abs(ours["kl_first"][0] - peer["kl_first"][0]) > bound:
            raise SystemExit(f"not the same work at {c}: the first step's KL is {ours['kl_first'][0]} here and "
                             f"{peer['kl_first'][0]} in {peer['impl']}")  # fmt: skip


def describe(c: dict) -> str:
    return f"S={c['S']} T={c['T']} Vd={c['Vd']} {c['dtype']}" + (" 90 % prompt" if c["mask_frac"] == 0.1 else "")


def compared(lines: list[dict], configurations: list[dict]) -> Iterator[tuple[dict, dict, list[dict]]]:
    """Configurations that all three have lines of, with our line and the peers'."""
    for c in configurations:
        ours, theirs = find(lines, c, "ours"), [find(lines, c, impl) for impl in PEERS]
        if ours and all(theirs):
            yield c, ours, theirs


def report(configurations: list[dict], where: tuple[str, int] | None) -> None:
    """The table of these configurations, and a plot beside the results of all that is there."""
    lines = read(where)
    rates = next((x["gflops"] for x in lines if x.get("kind") == "rates"), None)
    if rates is None:
        raise SystemExit(f"nothing is measured in {RESULTS}: make bench")
    print(f"\n{lines[0]['machine']}, {lines[0]['threads']} threads: matmul {rates['fp32']:.0f} GFLOP/s fp32, "
          f"{rates['bf16']:.0f} bf16\nMiB above what the process held before the first step; × limit: over the time of "
          "the pruned FLOPs at\nthe matmul rate; ratio: the better peer's time over ours, as shipped and with its "
          "allocator tuned\n")
    print("| configuration | ours tok/s | MiB | × limit | speculators tok/s | MiB | SpecForge tok/s | MiB | ratio | "
          "wanted | tuned | MiB ratio |")  # fmt: skip
    print("| --- |" + " --: |" * 11)
    for c, ours, theirs in compared(lines, configurations):
        peer = better_peer(lines, c)
        tuned = find(lines, c, peer["impl"], True)
        over = ours["s_per_step"] * rates[c["dtype"]] / ours["gflop_pruned"]
        memory = [x["peak_rss_mib"] - x["rss_before_mib"] for x in (ours, *theirs)]
        speeds = " | ".join(f"{x['tok_per_s']:.0f} | {mib}" for x, mib in zip(theirs, memory[1:], strict=True))
        against_tuned = f"{tuned['s_per_step'] / ours['s_per_step']:.2f}" if tuned else ""
        busy = any(x["other_cpu_frac"] > 0.05 for x in (ours, *theirs))
        print(f"| {describe(c)}{' (busy)' * busy} | {ours['tok_per_s']:.0f} | {memory[0]} | {over:.2f} | {speeds} | "
              f"{peer['s_per_step'] / ours['s_per_step']:.2f} | {wanted_ratio(c):.0f} | {against_tuned} | "
              f"{memory[0] / min(memory[1:]):.2f} |")  # fmt: skip
    if done := [(c, ours, better_peer(lines, c)) for c, ours, _ in compared(lines, GRID)]:
        plot(done)


def plot(done: list[tuple[dict, dict, dict]]) -> None:
    from pipeline.files import write_text
    from pipeline.verify.svg import grouped_bars

    bars = grouped_bars([describe(c) for c, _, _ in done], {
        "this pipeline, tokens/s": [ours["tok_per_s"] for _, ours, _ in done],
        "the better of speculators and SpecForge": [peer["tok_per_s"] for _, _, peer in done]}, digits=0)  # fmt: skip
    style = ("<style>text{font:12px sans-serif;fill:#222}.soft{fill:#666}.a{fill:#2b6cb0}.b{fill:#c98b2e}"
             "@media(prefers-color-scheme:dark){text{fill:#ddd}.soft{fill:#999}}</style>")  # fmt: skip
    head, rest = bars.split("\n", 1)
    path = RESULTS.with_suffix(".svg")
    write_text(path, head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ') + style + rest + "\n")
    print(f"\nplot: {path.relative_to(ROOT)}")


def parse_only(text: str) -> list[dict]:
    """S=2048,T=7 → the configurations of the grid that have these values."""
    asked = dict(part.split("=", 1) for part in text.split(","))
    if unknown := asked.keys() - set(KEYS):
        raise SystemExit(f"--only knows {', '.join(KEYS)}, not {', '.join(unknown)}")
    return [c for c in GRID if all(str(c[k]) == v for k, v in asked.items())]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="four configurations")
    p.add_argument("--only", help="configurations with these values: S=2048,T=7,Vd=8192,dtype=bf16,mask_frac=0.1")
    p.add_argument("--report", action="store_true", help="run nothing")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--seconds", type=float, default=8.0, help="2 to 5 timed steps, no more after this time")
    p.add_argument("--rounds", type=int, default=1, help="how often all are measured, in turn; the table shows medians")
    p.add_argument("--minutes", type=float, help="start no further measurement after this time")
    p.add_argument("--speculators", default=sys.executable, help="interpreter; .venv has speculators, without a GPU")
    p.add_argument("--specforge", default=str(ROOT / ".venv-specforge" / "bin" / "python"))
    args = p.parse_args()
    args.torch = version("torch").split("+")[0]  # its metadata do not say which CUDA, torch.__version__ does
    configurations = parse_only(args.only) if args.only else QUICK if args.quick else GRID
    if not args.report:
        run(configurations, args)
    report(configurations, None if args.report else (machine_name(), args.threads))


if __name__ == "__main__":
    main()
