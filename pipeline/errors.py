"""The one error type a user of the pipeline is meant to see."""

from __future__ import annotations


class PipelineError(Exception):
    """Something the user can mend. Stages print it as one message, without a traceback, and exit with 1.

    Args:
        what: the sentence that says what is wrong.
        field: the config key, manifest field or file that is wrong, e.g. ``slots.layers`` or ``dump/shard-00002.safetensors``.
        value: what was found there.
        fix: the command (or the sentence) that mends it, e.g. ``make dump ARGS="slots.layers=[3,30,58]"``.
    """

    def __init__(self, what: str, *, field: str | None = None, value: object = None, fix: str | None = None):
        self.what, self.field, self.value, self.fix = what, field, value, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        if self.field is not None:
            lines.append(f"  where: {self.field}" + ("" if self.value is None else f" = {self.value}"))
        if self.fix is not None:
            lines.append(f"  mend:  {self.fix}")
        return "\n".join(lines)
