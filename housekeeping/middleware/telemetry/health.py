"""Health pages beside the metrics: ``/-/live`` and ``/-/ready``."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.core.errors import HousekeepingError
from housekeeping.core.redis.client import redis_client, translate_redis_errors
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.database.connection import close_databases
from housekeeping.sweeps.ledger import schema
from housekeeping.sweeps.processes.heartbeats import Kind, read_processes

#: Seconds for which an answer is repeated, so that probes cannot burden the servers.
_REPEATED_S: Final = 1.0


class Readiness:
    """Whether this process, or the worker that this process serves metrics for, can do its work.

    Parameters:
      kind: ``worker`` or ``scheduler``.
    """

    def __init__(self, settings: Settings, kind: Kind) -> None:
        self._settings = settings
        self._kind = kind
        self._client = redis_client(settings.require_redis_url())
        self._lock = threading.Lock()
        self._known: tuple[float, list[str]] | None = None

    def problems(self) -> list[str]:
        """Return what keeps it from working, one line each; empty if it is ready. Answers are a second old at most."""
        with self._lock:
            if self._known is None or time.monotonic() - self._known[0] > _REPEATED_S:
                self._known = time.monotonic(), list(self._look())
            return self._known[1]

    def _look(self) -> Iterator[str]:
        has_database = self._settings.database_url is not None
        try:
            for check in (self._ping, schema.require_all) if has_database else (self._ping,):
                try:
                    check()
                except (HousekeepingError, PeeweeException) as error:
                    yield error_line(error)
            processes = read_processes(self._client, self._settings.namespace, datetime.now(UTC))
        finally:
            if has_database:
                close_databases()
        alive = [each.heartbeat for each in processes.every if each.alive and each.heartbeat.kind == self._kind]
        here = [each for each in alive if each.host == socket.gethostname()]
        if not here:
            yield f"no {self._kind} on this host sends heartbeats"
        elif self._kind == "worker" and not any(each.queues for each in here):
            yield "no worker on this host consumes a queue"

    def _ping(self) -> None:
        with translate_redis_errors():
            self._client.ping()


class PageServer(http.server.ThreadingHTTPServer):
    """Server of these pages, also on an IPv6 address."""

    daemon_threads = True

    def __init__(self, host: str, port: int, page: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), page)


def with_health(page: Any, readiness: Readiness) -> type[http.server.BaseHTTPRequestHandler]:
    """Return a handler like `page` which also answers the health pages.

    ``/-/live`` has status 200. ``/-/ready`` has 200, or 503 and a line for each problem.
    """
    inherited: type[http.server.BaseHTTPRequestHandler] = page

    class Page(inherited):  # type: ignore[misc, valid-type]
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/-/live":
                self._answer([])
            elif path == "/-/ready":
                self._answer(readiness.problems())
            else:
                super().do_GET()

        def _answer(self, problems: list[str]) -> None:
            body = "".join(f"{line}\n" for line in problems or ["ok"]).encode()
            self.send_response(503 if problems else 200)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Page
