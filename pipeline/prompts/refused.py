"""Why a record or a conversation cannot become a sample."""

from __future__ import annotations


class Refused(Exception):
    """A conversation that cannot become a sample.

    Attributes:
        reason: one word for counting, e.g. ``template``.
        detail: the sentence for people.
    """

    def __init__(self, reason: str, detail: str):
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class BadRecord(Exception):
    """A record that cannot be used because it is damaged or of unknown form.

    Attributes:
        reason: one word for counting, e.g. ``json``.
        detail: the sentence for people; it follows the place, as in "a.jsonl:3 is not JSON".
        raw: the beginning of what was found there.
        fix: what mends it.
    """

    def __init__(self, reason: str, detail: str, raw: object = "", fix: str = "repair or remove that record"):
        self.reason, self.detail, self.fix = f"bad_{reason}", detail[:500], fix  # it may quote what was found
        self.raw = raw[:1000].decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else str(raw)[:1000]
        super().__init__(self.detail)
