"""What is to be asked next, of many conversations at once: a turn as soon as the one before it is answered.

Conversations are opened one by one as there is room for questions, so that memory holds those under way and no others.
A turn that follows an answer comes first where engines keep a cache of prefixes (`take`). Prompts that are the same
(conversations that open alike) are asked once. In which order answers come back changes nothing but the journal's
order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from pipeline.errors import PipelineError
from pipeline.prompts.dialogue import Dialogue
from pipeline.prompts.journal import Answer, Journal, Request

# Failures in a row that cannot be the questions' fault. After an interruption those that failed before it come first, all in
# a row: more are borne where much was answered.
_FAILED_IN_A_ROW, _MOST_IN_A_ROW, _SHARE = 32, 1000, 1 / 20


class Agenda:
    """Questions of `dialogues` that the journal does not answer.

    Args:
        progress: called with the number of conversations that ended and the answers that came with that; None instead
            of these where the journal had them all.

    Attributes:
        failures: `Request.key` → why there is no answer.
    """

    def __init__(self, dialogues: Iterable[Dialogue], journal: Journal,
                 progress: Callable[[int, list[Answer] | None], None] = lambda ended, answers: None):
        self._unopened, self._journal, self._progress = iter(dialogues), journal, progress
        self._opening: deque[Request] = deque()  # the first question of a conversation in this run
        self._going_on: list[Request] = []  # turns that follow an answer of this run
        self._waiting: dict[str, list[Dialogue]] = {}
        self._failed_in_a_row = 0
        self.failures: dict[str, str] = {}

    @property
    def done(self) -> bool:
        """Whether nothing is left to ask: no engine need be started."""
        self._fill(1)
        return not self._waiting

    def take(self, most: int) -> list[Request]:
        """Up to `most` questions; none: wait for answers, or if none is outstanding, all is done."""
        self._fill(most)
        taken = [self._going_on.pop() for _ in range(min(most, len(self._going_on)))]  # whose prefix was cached last
        return taken + [self._opening.popleft() for _ in range(min(most - len(taken), len(self._opening)))]

    def take_longest(self, most: int, among: int) -> list[Request]:
        """The longest of `among` questions: a batch of prompts of similar length wastes least.

        Turns that follow an answer wait until they fill a batch, or nothing else is left: a few of them, longer than any
        opening, would have a batch of openings padded to their length. Of either kind the longest come first, so that
        too large a batch fails early.
        """
        self._fill(among)
        questions = self._going_on if len(self._going_on) >= most or not self._opening else self._opening
        ordered = sorted(questions, key=lambda request: -len(request.prompt_ids))
        questions.clear()
        questions.extend(ordered[most:])
        return ordered[:most]

    def store(self, answers: list[tuple[Request, Answer]]) -> None:
        """Put answers in the journal, and go on with the conversations that waited for them."""
        if not answers:
            return
        self._journal.add(answers)
        self._failed_in_a_row = 0
        ended = 0
        for request, answer in answers:
            for dialogue in self._waiting.pop(request.key):
                dialogue.answer(answer)
                ended += self._advance(dialogue, going_on=True)
        self._progress(ended, [answer for _, answer in answers])

    def fail(self, request: Request, why: str) -> None:
        """There is no answer, whatever is tried.

        Raises:
            PipelineError: so many in a row that it cannot be the questions.
        """
        self.failures[request.key] = why
        self._progress(len(self._waiting.pop(request.key)), [])
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= max(_FAILED_IN_A_ROW, min(_MOST_IN_A_ROW, _SHARE * len(self._journal))):
            raise PipelineError(
                f"{self._failed_in_a_row} requests in a row failed for good, the last one: {why}",
                field="prompts.base_url", fix="look at the server; then run the same command again, it goes on where it was")

    def _fill(self, most: int) -> None:
        while len(self._opening) + len(self._going_on) < most and (dialogue := next(self._unopened, None)) is not None:
            if self._advance(dialogue, going_on=False):
                self._progress(1, None)

    def _advance(self, dialogue: Dialogue, *, going_on: bool) -> bool:
        """Replay what the journal has; whether the conversation has come to its end."""
        while (request := dialogue.request) is not None:
            if (answer := self._journal.get(request)) is not None:
                dialogue.answer(answer)
                continue
            key = request.key
            if key in self.failures:
                return True
            if key not in self._waiting:
                (self._going_on if going_on else self._opening).append(request)
            self._waiting.setdefault(key, []).append(dialogue)
            return False
        return True


async def keep_busy(agenda: Agenda, ask: Callable[[Request], Awaitable[Answer | str]], at_once: int) -> None:
    """Ask all questions, never more than `at_once` at the same time and never fewer while there are any.

    Args:
        ask: gives the answer, or says why there is none.
    """
    running: dict[asyncio.Task, Request] = {}
    try:
        while True:
            for request in agenda.take(at_once - len(running)):
                running[asyncio.create_task(ask(request))] = request
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            found = [(running.pop(task), task) for task in done]
            whole = [(request, task.result()) for request, task in found if task.exception() is None]
            agenda.store([(request, answer) for request, answer in whole if isinstance(answer, Answer)])
            for request, why in whole:
                if isinstance(why, str):
                    agenda.fail(request, why)
            for _, task in found:
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
