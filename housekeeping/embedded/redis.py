"""A Redis-compatible server in a temporary folder, on a unix socket."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Final

from housekeeping.embedded.copies import runnable_program
from housekeeping.embedded.folders import create_inside
from housekeeping.embedded.processes import kill_group
from housekeeping.embedded.server import Server

_START_SECONDS: Final = 30
_ANSWER_SECONDS: Final = 1


class Redis(Server):
    """Redis or Valkey without persistence; a restart empties it."""

    title = "Redis"

    def create(self) -> None:
        create_inside(self._folder / "r", self._account)
        if self._account is not None:
            self._program = runnable_program(self._program, self._account, self._folder)

    def launch(self) -> None:
        place = self._folder / "r"
        command: list[str | Path] = [self._program, "--port", "0", "--unixsocket", socket_path(self._folder)]
        command += ["--unixsocketperm", "700", "--dir", place, "--save", "", "--appendonly", "no", "--daemonize", "no"]
        self._spawn([*command, "--maxmemory-policy", "noeviction"], cwd=place)

    def await_ready(self) -> None:
        self._await(self._answers, _START_SECONDS)

    def stop(self) -> None:
        self._signal_and_wait(signal.SIGTERM)

    def kill(self) -> None:
        if self._process is not None:
            kill_group(self._process)

    def discard(self) -> None:
        # It has no state outside of its folder, so there is no need for an orderly end.
        self.kill()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_ANSWER_SECONDS)
            try:
                client.connect(str(socket_path(self._folder)))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False


def socket_path(folder: Path) -> Path:
    """Return the socket's path for the run in `folder`."""
    return folder / "r" / "redis.sock"
