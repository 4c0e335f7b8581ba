"""Show samples with the trained tokens coloured: the quickest way to see a wrong loss mask.

    python -m pipeline.prompts.show runs/demo [-n 3] [--id ID]

The same goes to `prompts/samples.html` in the run's folder, a page of its own with every token to be pointed at. Without
a terminal the trained tokens stand in ⟦brackets⟧.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from itertools import groupby, islice
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.manifest import load_manifest
from pipeline.samples import Sample, read_samples, samples_file
from pipeline.target import load_tokenizer, local_folder

_COLOURS, _BRACKETS = ("\x1b[30;42m", "\x1b[0m"), ("⟦", "⟧")
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em }}
h2 {{ font-size: 1em; margin: 2em 0 .3em }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8886; padding: .8em; border-radius: .4em }}
span {{ outline: 1px solid #8883 }}
span.t {{ background: #7d78; outline-color: #2a28 }}
</style>
<h1>{title}</h1>
<p><span class="t">Trained tokens</span> are what the target generates; the others are only read. Point at a token for its
place and id.</p>
{samples}
</html>
"""


def show(sample: Sample, tokenizer, *, colour: bool) -> str:
    """The sample's text, special tokens included, with each run of trained tokens marked."""
    begin, end = _COLOURS if colour else _BRACKETS
    parts = []
    for trained, run in groupby(zip(sample.loss_mask, sample.input_ids), key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        parts.append(f"{begin}{text}{end}" if trained else text)
    return f"--- {_head(sample)}\n{''.join(parts)}\n"


def page(samples: list[Sample], tokenizer, *, title: str) -> str:
    """A self-contained HTML page of samples, token by token."""
    def token(place: int, token_id: int, trained: int) -> str:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        shown = escape(text).replace("\n", "↵\n") or "∅"
        return f'<span{" class=t" if trained else ""} title="{place}: {token_id}">{shown}</span>'

    return _PAGE.format(title=escape(title), samples="\n".join(
        f"<h2>{escape(_head(sample))}</h2>\n<pre>"
        + "".join(token(i, *pair) for i, pair in enumerate(zip(sample.input_ids, sample.loss_mask))) + "</pre>"
        for sample in samples))


def _head(sample: Sample) -> str:
    return (f"{sample.id} ({sample.split}, {sample.category or 'no category'}): {len(sample.input_ids)} tokens, "
            f"{sum(sample.loss_mask)} trained, finish_reason {sample.finish_reason}")


def _recorded_target(run_dir: Path) -> Path:
    manifest = load_manifest(run_dir)
    if manifest is None:
        raise PipelineError("this run has no manifest", field=str(run_dir), fix=f"make prompts RUN={run_dir.name}")
    return local_folder(manifest.target.path, manifest.target.revision)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.prompts.show", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the run, e.g. runs/demo")
    parser.add_argument("--target", help="folder of the target, for its tokenizer (default: what the run's manifest says)")
    parser.add_argument("-n", type=int, default=3, help="number of samples (default 3)")
    parser.add_argument("--id", help="show this sample only")
    parser.add_argument("--trust-remote-code", action="store_true", help="for tokenizers that need their own code")
    args = parser.parse_args(arguments)
    try:
        tokenizer = load_tokenizer(Path(args.target) if args.target else _recorded_target(args.run), args.trust_remote_code)
        wanted = (s for s in read_samples(samples_file(args.run)) if args.id in (None, s.id))
        samples = list(islice(wanted, args.n))
        if args.id and not samples:
            raise PipelineError("the run has no such sample", field="--id", value=args.id, fix="leave --id out")
        for sample in samples:
            print(show(sample, tokenizer, colour=sys.stdout.isatty()))
        html = args.run / "prompts" / "samples.html"
        write_text(html, page(samples, tokenizer, title=f"Samples of {args.run.name}"))
        print(f"the same as a page: {html}")
    except PipelineError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
