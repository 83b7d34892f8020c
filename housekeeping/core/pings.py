"""Pings: requests that tell a monitoring service that the installation is alive.

A dead installation cannot raise its own alarm. A service such as healthchecks.io can: it expects a request after each
tick or run, and raises the alarm if a request is missing, or if the path of a request ends with ``/fail``.

The URL is a secret, because anyone with it could suppress the alarm. No log line and no error contains it.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import housekeeping
from housekeeping.core.logs import error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.settings import Settings

logger = named_logger(__name__)

_TIMEOUT_S: Final = 5.0  # seconds without a byte of the answer
TOTAL_S: Final = 10.0  # seconds of a whole request, in case a service sends its answer byte by byte
_ATTEMPTS: Final = 2
_AT_EXIT_S: Final = 5.0  # seconds that a process waits at its end for the last pings
#: Name under which the URL of the whole installation is kept; workers have their own.
INSTALLATION: Final = ""


class Pings:
    """Pings of this process, sent one after the other by a thread of its own. Thread-safe.

    No caller waits. While requests wait, only the last success and the last failure of each URL are kept, in the order
    in which they happened: so a service that does not answer costs no memory.
    """

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self.wait)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[tuple[str, bool], None] = {}
        self._sender: threading.Thread | None = None
        self._unanswered: set[str] = set()

    def use(self, settings: Settings) -> None:
        """Send pings to the URLs of these settings from now on."""
        given = {name: worker.ping_url for name, worker in settings.workers.items()}
        given[INSTALLATION] = settings.ping_url
        self._urls = {name: url.get_secret_value() for name, url in given.items() if url is not None}

    def send(self, name: str, *, failed: bool) -> None:
        """Ping the URL of a worker or of the `INSTALLATION`, if it has one; returns at once and never raises."""
        if name not in self._urls:
            return
        with self._lock:
            self._due.pop((name, failed), None)
            self._due[name, failed] = None
            if self._sender is not None:
                return
            sender = threading.Thread(target=self._send_due, name="pings", daemon=True)
            try:
                sender.start()
            except RuntimeError as error:  # no more threads, or the interpreter ends
                logger.warning("Ping could not be sent", worker=name or None, reason=error_line(error))
            else:
                self._sender = sender

    def _send_due(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._sender = None
                    return
                name, failed = next(iter(self._due))
                del self._due[name, failed]
            self._send(name, failed)

    def _send(self, name: str, failed: bool) -> None:
        """Request the URL; one that does not answer costs one log line until it answers again."""
        url = self._urls.get(name)
        if url is None:
            return
        problem = ""
        for _ in range(_ATTEMPTS):
            answer = request(_with_fail(url) if failed else url)
            if isinstance(answer, int) and answer < 300:
                self._unanswered.discard(name)
                return
            problem = f"status {answer}" if isinstance(answer, int) else answer
        if name not in self._unanswered:
            self._unanswered.add(name)
            logger.warning("Ping could not be sent", worker=name or None, reason=problem)

    def wait(self, most_s: float = _AT_EXIT_S) -> None:
        """Wait until all pings are sent, for some seconds at most; at the end of the process this happens by itself."""
        sender = self._sender
        if sender is not None:
            sender.join(most_s)


#: The pings of this process.
pings: Final = Pings()


def _with_fail(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/fail"))


def request(url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> int | str:
    """Request a URL, by POST if there is a body. Return the status, or the error as a text without the URL.

    Redirects are not followed, because a redirected POST would become a GET without the body.
    """
    # Imported here, because most processes send no requests.
    import http.client
    import urllib.error
    import urllib.request

    connections: list[Any] = []

    def connected_by(kind: type[http.client.HTTPConnection]) -> Any:
        def connection(*arguments: Any, **options: Any) -> http.client.HTTPConnection:
            connections.append(kind(*arguments, **options))
            return connections[-1]  # type: ignore[no-any-return]

        return connection

    class Http(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> Any:
            return self.do_open(connected_by(http.client.HTTPConnection), req)

    class Https(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> Any:
            return self.do_open(connected_by(http.client.HTTPSConnection), req)

    class Redirects(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req: urllib.request.Request, *answer: Any) -> urllib.request.Request | None:
            return None if req.data is not None else super().redirect_request(req, *answer)

    def give_up() -> None:
        for each in connections:
            if each.sock is not None:
                with suppress(OSError):  # it was closed just now
                    each.sock.shutdown(socket.SHUT_RDWR)

    agent = {"User-Agent": f"housekeeping/{housekeeping.__version__}"}
    sent = urllib.request.Request(url, body, {**agent, **(headers or {})})
    limit = threading.Timer(TOTAL_S, give_up)
    limit.daemon = True
    try:
        limit.start()
        with urllib.request.build_opener(Http, Https, Redirects).open(sent, timeout=_TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except urllib.error.URLError as error:
        return error_line(error.reason) if isinstance(error.reason, OSError) else type(error).__name__
    except OSError as error:
        return error_line(error)
    except Exception as error:
        return type(error).__name__  # the texts of http.client's own errors quote the URL
    finally:
        limit.cancel()
