"""Supervisor process, which starts the servers for its client process and stops them when the client ends.

It reads JSON objects from stdin, one per line, and answers each with one line. The first object says which servers to
start. The others are commands (``{"do": "restart", "server": "redis"}``). When stdin closes, the supervisor stops the
servers and removes their folder. It imports little, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from housekeeping.core.errors import EmbeddedServerError
from housekeeping.embedded import folders
from housekeeping.embedded.processes import stop_all_in, unprivileged_account
from housekeeping.embedded.server import Postgres, Redis, Server, release_shared_memory

_POLL_SECONDS: Final = 0.01

logger = logging.getLogger(__name__)


class Ended(Exception):
    """The client closed its pipe, or a signal arrived, so the supervisor ends."""


class Pipe:
    """Pipe to the client process. A signal counts as the end of the client."""

    def __init__(self) -> None:
        # Unbuffered, so that no request waits where select does not see it.
        self._requests = open(0, "rb", buffering=0)
        self._answers = open(1, "wb", buffering=0)
        # A signal is only recorded and checked while waiting. An exception at any point could come between the start
        # of a server and its registration.
        self._signals, wakeup = os.pipe()
        self._inputs = [self._requests.fileno(), self._signals]
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: None)

    def receive(self) -> Any:
        """Return the next request.

        Raises:
          Ended: The client has ended.
        """
        if self._signals in select.select(self._inputs, [], [])[0]:
            raise Ended
        line = self._requests.readline()
        if not line.endswith(b"\n"):
            raise Ended
        return json.loads(line)

    def answer(self, **values: Any) -> None:
        """Answer the last request.

        Raises:
          Ended: The client has ended.
        """
        try:
            self._answers.write(json.dumps(values).encode() + b"\n")
        except BrokenPipeError:
            raise Ended from None

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition is True, at most `seconds`; return whether it is.

        Raises:
          Ended: The client has ended.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            # No request is sent before the last one is answered, so readable input means the end of the pipe.
            if select.select(self._inputs, [], [], _POLL_SECONDS)[0]:
                raise Ended
        return True


def main() -> None:
    """Start the requested servers and execute commands until stdin closes or a signal arrives."""
    with contextlib.suppress(Ended):
        _supervise(Pipe())


def _supervise(pipe: Pipe) -> None:
    plan = pipe.receive()
    os.chdir("/")
    parents = [Path(parent) for parent in plan["parents"]]
    servers: dict[str, Server] = {}
    try:
        clear_leftovers(parents)
        account = unprivileged_account()
        folder = folders.create(parents, account)
    except (EmbeddedServerError, OSError) as error:
        pipe.answer(error=f"cannot start embedded servers: {error}")
        return
    try:
        for name, kind in (("postgres", Postgres), ("redis", Redis)):
            if plan[name]:
                servers[name] = kind(Path(plan[name]), folder.path, account, pipe.wait)
        for server in servers.values():
            server.create()
        for server in reversed(servers.values()):
            server.launch()
        for server in servers.values():
            server.await_ready()
        pipe.answer(folder=str(folder.path))
        while True:
            _execute(pipe, servers)
    except EmbeddedServerError as error:
        pipe.answer(error=str(error))
    except OSError as error:
        pipe.answer(error=f"cannot start embedded servers: {error}")
    finally:
        for server in servers.values():
            server.discard()
        folder.remove()


def _execute(pipe: Pipe, servers: dict[str, Server]) -> None:
    request = pipe.receive()
    server = servers[request["server"]]
    try:
        if request["do"] in ("stop", "restart"):
            server.stop()
        if request["do"] in ("start", "restart"):
            server.start()
        if request["do"] == "kill":
            server.kill()
    except EmbeddedServerError as error:
        pipe.answer(error=str(error))
        return
    pipe.answer()


def clear_leftovers(parents: Iterable[Path]) -> None:
    """Stop the servers that a killed supervisor left in folders of `parents`, and remove the folders.

    Failures are logged and do not keep a new run from starting.
    """
    account = unprivileged_account()
    for folder in folders.abandoned(parents):
        if not stop_all_in(folder.path):
            folder.release()
            logger.warning("Could not stop the servers in %s; the folder is kept", folder.path)
            continue
        release_shared_memory(folder.path, account)
        try:
            folder.remove()
        except OSError as error:
            folder.release()
            logger.warning("Could not remove %s: %s", folder.path, error)
