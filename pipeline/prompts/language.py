"""The language of a text, by py3langid: a small model that comes with the package."""

from __future__ import annotations

from pipeline.errors import PipelineError

_LETTERS = 20  # fewer say little about the language
_CHARS = 2000  # more do not change the answer


def language_of(text: str) -> str | None:
    """ISO 639-1 code of a text's language; None where it is too short to tell.

    Raises:
        PipelineError: py3langid is not installed.
    """
    try:
        import py3langid
    except ImportError as e:
        raise PipelineError("the language filter needs py3langid, which is not installed", field="prompts.languages",
                            fix='.venv/bin/pip install "py3langid>=0.4,<1"') from e
    text = text[:_CHARS]
    if sum(map(str.isalpha, text)) < _LETTERS:
        return None
    return py3langid.classify(text)[0]
