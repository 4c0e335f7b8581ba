"""Answers from OpenAI-compatible servers that serve the target: SGLang, vLLM, or what speaks as they do.

Asked is `/v1/completions` with the prompt's token ids, so that the template and its tokens are ours, and
`return_token_ids`, which SGLang (0.5.23) and vLLM (0.10.2 and later) both answer with the very tokens they generated.
Of a server that gives text alone the answer is tokenized anew and marked so. Every sampling setting is sent: servers
take those that are missing from the target's `generation_config.json`, where the in-process engines do not.

A request goes to the server with the fewest outstanding ones. 408, 429, 5xx, time-outs and broken connections are tried
again, later each time and at a server that is not resting: one that refuses connections or says 429 or 503 gets no
request before the same back-off is over, nor before its `Retry-After`. 429 and 503 do not count as tries while other
requests are answered: fewer are taken than `prompts.concurrency`, and all will be. Any other 4xx is the request's own
fault and final; 401, 403 and 404 mean that no request will do better, and stop the stage.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import os
import random
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from pipeline.config import Config, PromptsConfig
from pipeline.errors import PipelineError
from pipeline.prompts.journal import Answer, Request
from pipeline.target import Target

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0  # seconds
_LONGEST_RETRY_AFTER = 600.0
_GIVE_UP = (401, 403, 404)
_RESTING = (429, 503)
_TRANSIENT = (200, 408, 429)  # beside 5xx; 200: with something else than an answer


@dataclass
class _Server:
    url: str
    model: str = ""
    outstanding: int = 0
    rests_until: float = 0.0
    troubles: int = 0
    """rests since it last answered"""

    def rest(self, seconds: float | None) -> None:
        """Give it no request for longer each time, and for so long at least."""
        now = time.monotonic()
        if now >= self.rests_until:  # else the same trouble, seen by another request
            seconds = max(_back_off(self.troubles), seconds or 0.0)
            self.troubles += 1
        self.rests_until = max(self.rests_until, now + (seconds or 0.0))


class Servers:
    """The servers of `prompts.base_url`. Use as an async context manager, which asks each what it serves.

    Raises:
        PipelineError: no key in the environment, or a server that cannot be reached or serves several models.
    """

    def __init__(self, config: Config, target: Target):
        prompts = config.prompts
        self._prompts, self._seed, self._record, self._ends = prompts, config.seed, target.record, target.eos_token_ids
        self._tokenizer = target.tokenizer()
        self._servers = [_Server(url) for url in base_urls(prompts)]
        self._answers = 0
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
        self._client = httpx.AsyncClient(
            headers=_authorization(prompts), timeout=httpx.Timeout(prompts.request_timeout, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0))

    @property
    def at_once(self) -> int:
        """Requests that all servers together are given."""
        return self._prompts.concurrency * len(self._servers)

    async def __aenter__(self) -> Servers:
        try:
            for server in self._servers:
                server.model = await self._served_model(server)
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    async def ask(self, request: Request) -> Answer | str:
        """The answer, or why there is none whatever is tried.

        Raises:
            PipelineError: no request can be answered as things are.
        """
        body = {
            "prompt": request.prompt_ids, "max_tokens": self._prompts.max_new_tokens, "n": 1, "stream": False,
            "temperature": self._prompts.temperature, "top_p": self._prompts.top_p, "top_k": -1, "min_p": 0.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
            "stop_token_ids": self._ends, "skip_special_tokens": False, "return_token_ids": True}
        if self._prompts.temperature > 0:
            body["seed"] = request.seed(self._seed)
        attempts, counted, answers = 0, 0, self._answers
        while True:
            server = await self._least_busy()
            reply = wait = None
            server.outstanding += 1
            try:
                reply = await self._client.post(f"{server.url}/completions", json={"model": server.model, **body})
                if (problem := self._problem(reply, server)) is None:
                    answer = self._read(reply, request, server)
                    server.troubles = 0
                    self._answers += 1
                    return answer
                wait = _retry_after(reply)
                unreachable = reply.status_code in _RESTING
            except _Garbled as e:
                problem, unreachable = str(e), False
            except httpx.RequestError as e:  # time-outs among them
                problem = f"{server.url}: {type(e).__name__} {e}".rstrip()
                unreachable = isinstance(e, (httpx.ConnectError, httpx.ConnectTimeout))
            finally:
                server.outstanding -= 1
            if reply is not None and reply.status_code < 500 and reply.status_code not in _TRANSIENT:
                return problem
            busy = reply is not None and reply.status_code in _RESTING and self._answers > answers
            attempts, counted, answers = attempts + 1, counted + (not busy), self._answers
            if unreachable:
                server.rest(wait)
            if counted > self._prompts.retries:
                return f"{problem} (tried {attempts} times)"
            if not (unreachable and self._working()):
                await asyncio.sleep(max(_back_off(attempts - 1), wait or 0.0))

    def _working(self) -> list[_Server]:
        now = time.monotonic()
        return [server for server in self._servers if server.rests_until <= now]

    async def _least_busy(self) -> _Server:
        while not (working := self._working()):
            until = min(server.rests_until for server in self._servers)
            await asyncio.sleep(max(0.0, until - time.monotonic()) + random.uniform(0, 0.05))
        return min(working, key=lambda server: server.outstanding)

    def _problem(self, reply: httpx.Response, server: _Server) -> str | None:
        if reply.status_code == 200:
            return None
        said = " ".join(reply.text.split())[:300]
        if key := self._client.headers.get("authorization", "").removeprefix("Bearer "):
            said = said.replace(key, "…")
        if reply.status_code in _GIVE_UP:
            raise PipelineError(
                f"{server.url} answers {reply.status_code}: {said}", field="prompts.base_url", value=server.url,
                fix="name the environment variable that holds the server's key in prompts.api_key_env"
                if reply.status_code != 404 else "give the address that ends in /v1; is the model name right "
                f"({server.model!r}, prompts.server_model)?")
        return f"{server.url} answers {reply.status_code}: {said}"

    def _read(self, reply: httpx.Response, request: Request, server: _Server) -> Answer:
        try:
            [choice] = reply.json()["choices"]
            reason, ids, prompt_ids = choice["finish_reason"], choice.get("token_ids"), choice.get("prompt_token_ids")
            text = choice["text"] if ids is None else ""
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise _Garbled(f"{server.url} does not answer as /v1/completions does: {e!r}") from e
        if reason not in ("stop", "length"):
            raise _Garbled(f"{server.url} ended an answer with {reason!r}")
        if prompt_ids is not None and prompt_ids != request.prompt_ids:
            raise PipelineError(f"{server.url} puts other tokens before the target than it was given",
                                field="prompts.base_url", value=server.url,
                                fix="use a server that takes token ids as they are")
        if ids is None:
            ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            if reason == "stop" and ids[-1:] not in [[end] for end in self._ends]:
                ids.append(self._end_of_turn())
            return self._checked(Answer(ids, reason, retokenised=True), server)
        return self._checked(Answer(ids, reason), server)

    def _end_of_turn(self) -> int:
        own = self._tokenizer.eos_token_id
        return own if own in self._ends else self._ends[0]

    def _checked(self, answer: Answer, server: _Server) -> Answer:
        if not answer.ids:
            raise _Garbled(f"{server.url} gave an empty answer")
        if max(answer.ids) >= self._record.vocab_size:
            raise PipelineError(f"{server.url} answers with token {max(answer.ids)}, the target has "
                                f"{self._record.vocab_size}: it serves another model", field="prompts.base_url",
                                value=server.url, fix="serve the target there")
        return answer

    async def _served_model(self, server: _Server) -> str:
        if self._prompts.server_model is not None:
            return self._prompts.server_model
        try:
            reply = await self._client.get(f"{server.url}/models", timeout=30.0)
        except httpx.TransportError as e:
            raise PipelineError(f"no server answers at {server.url}: {type(e).__name__} {e}", field="prompts.base_url",
                                value=server.url, fix="start it, or give its address") from e
        if (problem := self._problem(reply, server)) is not None:
            raise PipelineError(problem, field="prompts.base_url", value=server.url, fix="look at the server")
        try:
            served = [model["id"] for model in reply.json()["data"]]
        except (ValueError, KeyError, TypeError) as e:
            raise PipelineError(f"{server.url}/models does not answer as OpenAI's does", field="prompts.base_url",
                                value=server.url,
                                fix="give the address of an OpenAI-compatible server, ending in /v1") from e
        if len(served) != 1:
            raise PipelineError(f"{server.url} serves {len(served)} models: {', '.join(served)[:300]}",
                                field="prompts.server_model", value=None, fix="name the target's there")
        return served[0]


def _back_off(attempt: int) -> float:
    """Seconds: each later than the one before, and no two requests at the same time."""
    return min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(attempt, 30)) * random.uniform(0.5, 1.5)


class _Garbled(Exception):
    """A reply that is no answer; the next one may be."""


def base_urls(prompts: PromptsConfig) -> list[str]:
    """The servers' addresses, each ending in /v1.

    Raises:
        PipelineError: there are none, one is no address, or holds a password, which would be recorded and logged.
    """
    given = [prompts.base_url] if isinstance(prompts.base_url, str) else prompts.base_url or []
    urls = []
    for url in given:
        try:
            parts = urlsplit(url)
            address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # brackets, a port that is none
            address = False
        if not address:
            raise PipelineError("not the address of a server", field="prompts.base_url", value=url.rpartition("@")[2],
                                fix="prompts.base_url=http://127.0.0.1:30000/v1")
        if parts.username or parts.password or parts.query:
            raise PipelineError("an address with a key in it would be recorded and logged", field="prompts.base_url",
                                value=parts.hostname, fix="put the key in an environment variable and name that in "
                                "prompts.api_key_env")
        urls.append(url.rstrip("/") if url.rstrip("/").endswith("/v1") else url.rstrip("/") + "/v1")
    if not urls:
        raise PipelineError("no server is given", field="prompts.base_url", value=prompts.base_url,
                            fix="prompts.base_url=http://127.0.0.1:30000/v1")
    return urls


def _authorization(prompts: PromptsConfig) -> dict[str, str]:
    if prompts.api_key_env is None:
        return {}
    key = os.environ.get(prompts.api_key_env, "").strip()  # what was read from a file may end in a newline
    if not key:
        raise PipelineError("the environment holds no such variable", field="prompts.api_key_env",
                            value=prompts.api_key_env, fix=f"export {prompts.api_key_env}=<the server's key>")
    if not (key.isascii() and key.isprintable()):  # httpx would say so, and quote the key
        raise PipelineError("the variable holds no key: it has letters other than printable ASCII",
                            field="prompts.api_key_env", value=prompts.api_key_env,
                            fix=f"export {prompts.api_key_env}=<the server's key>")
    return {"Authorization": f"Bearer {key}"}


def _retry_after(reply: httpx.Response) -> float | None:
    """Seconds to wait that the server asks for: a number, or a date."""
    said = reply.headers.get("retry-after", "")
    try:
        seconds = float(said)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(said).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(0.0, seconds), _LONGEST_RETRY_AFTER)
