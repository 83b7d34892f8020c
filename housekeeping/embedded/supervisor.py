"""The process that owns the servers, and ends them when the one that asked for them ends.

It reads one JSON object a line and answers each with one: first what to start, then commands
(``{"do": "restart", "server": "redis"}``). When its input closes, it stops the servers and removes
the folder. It imports little, so that it is up in a moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from housekeeping.core.errors import EmbeddedServerError
from housekeeping.embedded import folders
from housekeeping.embedded.postgres import Postgres
from housekeeping.embedded.processes import unprivileged_account
from housekeeping.embedded.redis import Redis
from housekeeping.embedded.server import Server
from housekeeping.embedded.stale_cleanup import clear_leftovers

_POLL_SECONDS: Final = 0.01


class Ended(Exception):
    """Nobody needs the servers any more."""


class Line:
    """The pipe to the process that wants the servers; a signal counts as its end."""

    def __init__(self) -> None:
        # Unbuffered, so that what select says is the whole truth.
        self._requests = open(0, "rb", buffering=0)
        self._answers = open(1, "wb", buffering=0)
        # A signal is only noted, and looked at while waiting: an exception out of the blue could
        # come right between starting a server and remembering it.
        self._signals, woken = os.pipe()
        self._awaited = [self._requests.fileno(), self._signals]
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: None)

    def receive(self) -> Any:
        """The next request.

        Raises:
          Ended: When there will be none.
        """
        if self._signals in select.select(self._awaited, [], [])[0]:
            raise Ended
        line = self._requests.readline()
        if not line.endswith(b"\n"):
            raise Ended
        return json.loads(line)

    def answer(self, **values: Any) -> None:
        """Answer the last request.

        Raises:
          Ended: When nobody is there to hear it.
        """
        try:
            self._answers.write(json.dumps(values).encode() + b"\n")
        except BrokenPipeError:
            raise Ended from None

    def wait(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Wait as `server.wait` does, but no longer than somebody is there to wait for.

        Raises:
          Ended: When nobody is.
        """
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                return False
            # Nobody sends a request before the last one is answered: this is the end of the pipe.
            if select.select(self._awaited, [], [], _POLL_SECONDS)[0]:
                raise Ended
        return True


def main() -> None:
    """Keep the servers that the first line asks for until the pipe closes or a signal says to end."""
    with contextlib.suppress(Ended):
        _keep(Line())


def _keep(line: Line) -> None:
    plan = line.receive()
    os.chdir("/")
    parents = [Path(parent) for parent in plan["parents"]]
    servers: dict[str, Server] = {}
    try:
        clear_leftovers(parents)
        account = unprivileged_account()
        folder = folders.make(parents, account)
    except (EmbeddedServerError, OSError) as error:
        line.answer(error=f"cannot start embedded servers: {error}")
        return
    try:
        if plan["postgres"]:
            servers["postgres"] = Postgres(Path(plan["postgres"]), folder.path, account, line.wait)
        if plan["redis"]:
            servers["redis"] = Redis(Path(plan["redis"]), folder.path, account, line.wait)
        _start_all(list(servers.values()))
        line.answer(folder=str(folder.path))
        while True:
            _obey(line, servers)
    except EmbeddedServerError as error:
        line.answer(error=str(error))
    except OSError as error:
        line.answer(error=f"cannot start embedded servers: {error}")
    finally:
        for server in servers.values():
            server.discard()
        folder.remove()


def _start_all(servers: list[Server]) -> None:
    for server in servers:
        server.create()
    for server in reversed(servers):
        server.launch()
    for server in servers:
        server.await_ready()


def _obey(line: Line, servers: dict[str, Server]) -> None:
    request = line.receive()
    server = servers[request["server"]]
    try:
        if request["do"] in ("stop", "restart"):
            server.stop()
        if request["do"] in ("start", "restart"):
            server.start()
        if request["do"] == "kill":
            server.kill()
    except EmbeddedServerError as error:
        line.answer(error=str(error))
        return
    line.answer()
