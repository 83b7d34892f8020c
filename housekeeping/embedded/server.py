"""Base class of the two servers: a process, a log, and start and stop in bounded time."""

from __future__ import annotations

import abc
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from housekeeping.core.errors import EmbeddedServerError
from housekeeping.embedded.processes import Account, kill_group, spawn

_STOP_SECONDS: Final = 10  # after that a server is killed
_POLL_SECONDS: Final = 0.01
_TAIL_LINES: Final = 6


class Wait(Protocol):
    """Wait for a condition for at most so many seconds; return whether it came true."""

    def __call__(self, condition: Callable[[], bool], seconds: float) -> bool: ...


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for the condition, without reacting to anything else."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class Server(abc.ABC):
    """Server in a temporary folder that can be started and stopped repeatedly.

    Parameters:
      program: The executable.
      folder: The run's folder; the server creates its files there.
      account: The account it runs as; None for the current user.
      wait: The function that waits for its start.
    """

    title: str

    def __init__(self, program: Path, folder: Path, account: Account | None, wait: Wait = wait) -> None:
        self._program = program
        self._folder = folder
        self._account = account
        self._wait = wait
        self._process: subprocess.Popen[bytes] | None = None

    @abc.abstractmethod
    def create(self) -> None:
        """Prepare the first `launch`; may continue in the background.

        Raises:
          EmbeddedServerError: When a program cannot be run.
        """

    @abc.abstractmethod
    def launch(self) -> None:
        """Start the process without waiting until it accepts connections."""

    @abc.abstractmethod
    def await_ready(self) -> None:
        """Wait until the server accepts connections.

        Raises:
          EmbeddedServerError: When it ends or takes too long; it may still be running.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Shut the server down in order; it can be started again."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill the server with all its processes, as SIGKILL does; it can be started again."""

    @abc.abstractmethod
    def discard(self) -> None:
        """End the server as fast as possible without leaving anything outside of its folder."""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it accepts connections; do nothing if it is running.

        Raises:
          EmbeddedServerError: When it does not start; the text ends with the end of its log.
        """
        if not self.running:
            self.launch()
            self.await_ready()

    def _spawn(self, command: list[str | Path], cwd: Path) -> subprocess.Popen[bytes]:
        self._process = spawn(command, self._account, cwd, self._log)
        return self._process

    def _await(self, ready: Callable[[], bool], seconds: float) -> None:
        if not self._wait(lambda: not self.running or ready(), seconds):
            raise self._failure(f"did not accept connections within {seconds:.0f} s")
        if not self.running:
            raise self._failure("ended immediately")

    def _signal_and_wait(self, number: int) -> bool:
        if self._process is None or not self.running:
            return True
        self._process.send_signal(number)
        if wait(lambda: not self.running, _STOP_SECONDS):
            return True
        kill_group(self._process)
        return False

    def _failure(self, what: str) -> EmbeddedServerError:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
        return EmbeddedServerError(f"{self.title} {what}; its log ends: {' | '.join(lines) or '(empty)'}")

    @property
    def _log(self) -> Path:
        return self._folder / f"{type(self).__name__.lower()}.log"
