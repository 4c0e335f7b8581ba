"""Print samples with the trained tokens coloured: the quickest way to see a wrong loss mask.

    python -m pipeline.prompts.view runs/demo [-n 3] [--id q-0001]

Without a terminal the trained tokens stand in ⟦brackets⟧.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby, islice
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.manifest import load_manifest
from pipeline.samples import Sample, read_samples
from pipeline.target import load_tokenizer, local_folder

_COLOURS, _BRACKETS = ("\x1b[30;42m", "\x1b[0m"), ("⟦", "⟧")


def show(sample: Sample, tokenizer, *, colour: bool) -> str:
    """The sample's text, special tokens included, with each run of trained tokens marked."""
    begin, end = _COLOURS if colour else _BRACKETS
    parts = []
    for trained, run in groupby(zip(sample.loss_mask, sample.input_ids), key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        parts.append(f"{begin}{text}{end}" if trained else text)
    head = (f"--- {sample.id} ({sample.split}, {sample.category or 'no category'}): {len(sample.input_ids)} tokens, "
            f"{sum(sample.loss_mask)} trained, finish_reason {sample.finish_reason}")
    return f"{head}\n{''.join(parts)}\n"


def _recorded_target(run_dir: Path) -> Path:
    manifest = load_manifest(run_dir)
    if manifest is None:
        raise PipelineError("this run has no manifest", field=str(run_dir), fix=f"make prompts RUN={run_dir.name}")
    return local_folder(manifest.target.path, manifest.target.revision)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.prompts.view", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the run, e.g. runs/demo")
    parser.add_argument("--target", help="folder of the target, for its tokenizer (default: what the run's manifest says)")
    parser.add_argument("-n", type=int, default=3, help="number of samples (default 3)")
    parser.add_argument("--id", help="show this sample only")
    parser.add_argument("--trust-remote-code", action="store_true", help="for tokenizers that need their own code")
    args = parser.parse_args(arguments)
    try:
        tokenizer = load_tokenizer(Path(args.target) if args.target else _recorded_target(args.run), args.trust_remote_code)
        samples = (s for s in read_samples(args.run / "prompts" / "samples.jsonl") if args.id in (None, s.id))
        shown = 0
        for shown, sample in enumerate(islice(samples, args.n), 1):
            print(show(sample, tokenizer, colour=sys.stdout.isatty()))
        if args.id and not shown:
            raise PipelineError("the run has no such sample", field="--id", value=args.id, fix="leave --id out")
    except PipelineError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
