"""Server that receives pings and webhooks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, NamedTuple

PATIENCE_S: Final = 30.0
SECRET: Final = "4f0c-secret"


class Received(NamedTuple):
    """A request, with the names of its headers in small letters."""

    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """Server that receives requests.

    Attributes:
      answers: Statuses of the next answers; 200 for those that follow.
      hangs: Whether it answers nothing until it is closed.
      before_answer: Called before each answer.
    """

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.hangs = False
        self.before_answer: Callable[[], object] = bool
        self.at_once = 0
        self.most_at_once = 0
        self._received: queue.Queue[Received] = queue.Queue()
        self._closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.at_once += 1
                outer.most_at_once = max(outer.most_at_once, outer.at_once)
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = self.rfile.read(int(headers.get("content-length", 0)))
                outer._received.put(Received(self.path, headers, body))
                outer.before_answer()
                if outer.hangs:
                    outer._closing.wait(PATIENCE_S)
                outer.at_once -= 1
                self.send_response(outer.answers.pop(0) if outer.answers else 200)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/{SECRET}"

    def take(self) -> Received:
        """Wait for a request."""
        return self._received.get(timeout=PATIENCE_S)

    def taken(self) -> list[Received]:
        """Return the requests that were not read yet."""
        return [self.take() for _ in range(self._received.qsize())]

    def next(self) -> str:
        """Wait for a request and return its path after the secret."""
        return self.take().path.removeprefix(f"/{SECRET}")

    def waiting(self) -> list[str]:
        """Return the paths of the requests that were not read yet."""
        return [self.next() for _ in range(self._received.qsize())]

    def answer(self) -> None:
        """Answer all further requests."""
        self.hangs = False
        self._closing.set()

    def close(self) -> None:
        self.answer()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Receive requests within the block."""
    server = Receiver()
    try:
        yield server
    finally:
        server.close()
