"""An OpenAI-compatible server without a model, of the standard library alone, that can be made to misbehave.

    with Peer() as peer:                        # answers each prompt with tokens that depend on it alone
        peer.trouble = lambda asked, times: (429, {"Retry-After": "1"}, "busy") if times == 0 else None
        ... peer.url ...
        peer.asked                              # the bodies it was sent, in order
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EOS = 2
DROP = "drop"
"""a trouble: the connection is closed without a reply"""
Trouble = tuple[int, dict[str, str], str] | str | None


def answer_ids(prompt: list[int], most: int) -> tuple[list[int], str]:
    """What the peer answers: ids and finish reason."""
    rng = random.Random(repr(prompt))
    length = rng.randint(2, most + 2)
    ids = [rng.randrange(300, 400) for _ in range(length)]
    return (ids[:most], "length") if length > most else ([*ids[:-1], EOS], "stop")


class Peer:
    """Attributes:
        trouble: (body, how often this prompt was asked before) → what goes wrong: status, headers and text, or DROP;
            None.
        delay: seconds that an answer takes.
        takes: requests that are worked on at once; what comes on top of them gets 429 at once. None: any number.
        asked, headers: of every request for an answer.
        most_at_once: requests in flight.
    """

    def __init__(self):
        self.trouble: Callable[[dict, int], Trouble] = lambda asked, times: None
        self.delay = 0.0
        self.takes: int | None = None
        self.text_of: Callable[[list[int]], str] | None = None
        """give the text alone, as servers do that know no token ids"""
        self.models = ["tiny"]
        self.asked: list[dict] = []
        self.headers: list[dict] = []
        self.most_at_once = self._in_flight = 0
        self._times: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> Peer:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args):
                pass

            def do_GET(self):
                self.reply(200, {}, json.dumps({"data": [{"id": name} for name in owner.models]}))

            def do_POST(self):
                owner._post(self)

            def reply(self, status: int, headers: dict[str, str], text: str):
                data = text.encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Server(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 128

            def handle_error(self, request, client_address):
                pass  # a client that was killed

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _post(self, handler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        key = repr(body["prompt"])
        with self._lock:
            self.asked.append(body)
            self.headers.append(dict(handler.headers))
            times, self._times[key] = self._times[key], self._times[key] + 1
            if self._in_flight == self.takes:  # what is refused takes nobody's place
                handler.reply(429, {"Retry-After": "0"}, "busy")
                return
            self._in_flight += 1
            self.most_at_once = max(self.most_at_once, self._in_flight)
        try:
            time.sleep(self.delay)
            trouble = self.trouble(body, times)
            if trouble == DROP:
                handler.close_connection = True
            elif trouble is not None:
                handler.reply(*trouble)
            else:
                handler.reply(200, {}, json.dumps(self._answer(body)))
        finally:
            with self._lock:
                self._in_flight -= 1

    def _answer(self, body: dict) -> dict:
        assert handler_knows(body)
        ids, reason = answer_ids(body["prompt"], body["max_tokens"])
        choice = {"index": 0, "finish_reason": reason}
        if self.text_of is not None:
            choice["text"] = self.text_of(ids)
        else:
            choice |= {"text": "", "token_ids": ids, "prompt_token_ids": body["prompt"]}
        return {"object": "text_completion", "choices": [choice]}


def handler_knows(body: dict) -> bool:
    return isinstance(body["prompt"], list) and body["return_token_ids"] and body["n"] == 1
