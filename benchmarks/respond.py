"""How busy our client keeps a server: tokens per second through it against the same prompts in one `Engine.generate`.

    python benchmarks/respond.py [--target DIR] [--prompts 48] [--tokens 32] [--rounds 4]

A real SGLang server is started on this machine (loopback, without a GPU on the CPU) and asked by stage 1's own code
(agenda, journal and all); an engine in this process is given the same token ids in one batch. Greedy in fp32, so both
write the same tokens; this is checked. Both live at the same time, asleep when idle, and take turns, in an order that a
slow drift of the machine does not favour; the first round of each warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pipeline.config import load_config
from pipeline.engines.engine import engine, engine_arguments, generate, prepare_environment, resolve_device
from pipeline.prompts.agenda import Agenda, keep_busy
from pipeline.prompts.chat import ChatEncoder
from pipeline.prompts.dialogue import Dialogue, Rules
from pipeline.prompts.journal import Journal, Request
from pipeline.prompts.records import Record
from pipeline.prompts.server import Servers
from pipeline.prompts.sources import BUILTIN
from pipeline.target import EMBEDDED, Target, open_target

CONF = Path(__file__).resolve().parent.parent / "conf"


@contextlib.contextmanager
def sglang_server(model: Path, **options) -> Iterator[str]:
    """A server of its own processes; the address that ends in /v1. Its output is shown if it does not start.

    Args:
        options: see `engine.engine_arguments`; device and dtype at least.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = engine_arguments(model, **options) | {"host": "127.0.0.1", "port": port, "skip_server_warmup": True}
    flags = [[f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
             for name, value in arguments.items() if value is not False]
    prepare_environment(options["device"])
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-m", "sglang.launch_server", *sum(flags, [])], stdout=log,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            deadline = time.monotonic() + 600
            while not _answers(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"SGLang did not start:\n{log.read().decode(errors='replace')[-4000:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:  # it has processes of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


def opened(folder: str, url: str, concurrency: int, tokens: int):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides=[
            "target=local", f"target.path={folder}", "target.dtype=fp32", "target.context_length=2048",
            "prompts.temperature=0", "prompts.respond_engine=server", f"prompts.base_url={url}", f"prompts.concurrency={concurrency}",
            f"prompts.max_new_tokens={tokens}"])
    return open_target(load_config(OmegaConf.to_container(composed, resolve=True)))


def questions(target: Target, count: int, tokens: int) -> tuple[list[Record], Rules]:
    """The first prompts of the built-in set."""
    lines = BUILTIN.read_text().splitlines()
    records = [Record(str(k), None, "train", json.loads(line)["messages"][:1], "")
               for k, line in enumerate(lines[:count])]
    encoder = ChatEncoder(target.tokenizer(), target.eos_token_ids)
    return records, Rules(encoder, "all", 2048, tokens, target.eos_token_ids)


def through_the_server(config, target: Target, records: list[Record], rules: Rules, folder: Path
                       ) -> tuple[float, list[list[int]]]:
    """Seconds, and the answers in order."""
    async def ask_all(agenda: Agenda) -> None:
        async with Servers(config, target) as servers:
            await keep_busy(agenda, servers.ask, servers.at_once)

    with tempfile.TemporaryDirectory(dir=folder) as fresh, Journal(Path(fresh) / "journal.jsonl") as journal:
        begin = time.perf_counter()
        asyncio.run(ask_all(Agenda((Dialogue(record, rules) for record in records), journal)))
        seconds = time.perf_counter() - begin
        return seconds, [journal.get(request).ids for request in requests(records, rules)]


def requests(records: list[Record], rules: Rules) -> list[Request]:
    return [Dialogue(record, rules).request for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=EMBEDDED, help="folder of a target (default: the embedded one)")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=32, help="most of an answer")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    device = resolve_device("auto")
    target, _ = opened(args.target, "http://127.0.0.1:1", args.prompts, args.tokens)
    records, rules = questions(target, args.prompts, args.tokens)
    prompts = [request.prompt_ids for request in requests(records, rules)]
    # No prefix is kept from round to round: the second would have no prefill to do.
    options = {"device": device, "dtype": "float32", "context_length": 2048,
               "mem_fraction_static": 0.4 if device == "cuda" else None,  # of a GPU both take their part
               "extra": {"disable_radix_cache": True, "sleep_on_idle": True}}
    served: list[tuple[float, list[list[int]]]] = []
    batches: list[tuple[float, list[list[int]]]] = []
    with (tempfile.TemporaryDirectory() as folder, sglang_server(target.path, **options) as url,
          engine(target.path, **options) as llm):
        target, config = opened(args.target, url, args.prompts, args.tokens)
        sampling = {"temperature": 0, "max_new_tokens": args.tokens, "stop_token_ids": target.eos_token_ids}

        def ask_server() -> None:
            served.append(through_the_server(config, target, records, rules, Path(folder)))

        def ask_engine() -> None:
            begin = time.perf_counter()
            outputs = [out["output_ids"] for out in generate(llm, prompts, sampling)]
            batches.append((time.perf_counter() - begin, outputs))

        for number in range(args.rounds + 1):
            for ask in (ask_server, ask_engine)[::1 if number % 2 else -1]:
                ask()
    same = sum(a == b for a, b in zip(served[0][1], batches[0][1], strict=True))
    served, batches = served[1:], batches[1:]
    rates = {name: sum(len(ids) for _, answers in found for ids in answers) / sum(seconds for seconds, _ in found)
             for name, found in (("server", served), ("batch", batches))}
    print(json.dumps({
        "prompts": len(prompts), "prompt_tokens": sum(map(len, prompts)), "answers_equal": same, "device": device,
        "tokens": sum(map(len, batches[0][1])), "server_tok_s": round(rates["server"], 1),
        "batch_tok_s": round(rates["batch"], 1), "server_seconds": [round(s, 2) for s, _ in served],
        "batch_seconds": [round(s, 2) for s, _ in batches],
        "server_over_batch": round(rates["server"] / rates["batch"], 3)}))


if __name__ == "__main__":
    main()
