"""What the two servers have in common: a process, a log, and a bounded way up and down."""

from __future__ import annotations

import abc
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from housekeeping.core.errors import EmbeddedServerError
from housekeeping.embedded.processes import Account, kill_group, spawn

_STOP_SECONDS: Final = 10  # a server asked to end is killed after that
_POLL_SECONDS: Final = 0.01
_TAIL_LINES: Final = 6


class Wait(Protocol):
    """How a server waits: until something is so, or seconds have passed; True when it is so."""

    def __call__(self, reached: Callable[[], bool], seconds: float) -> bool: ...


def wait(reached: Callable[[], bool], seconds: float) -> bool:
    """Wait and look at nothing else meanwhile."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class Server(abc.ABC):
    """One server in a temporary folder, started and stopped as often as one likes.

    Parameters:
      program: The executable.
      folder: The run's folder, where the server makes what it needs.
      account: Who it runs as; None for oneself.
      wait: How to wait for it to come up.
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
        """Make what `launch` needs, once; it may go on in the background.

        Raises:
          EmbeddedServerError: When a program cannot be run at all.
        """

    @abc.abstractmethod
    def launch(self) -> None:
        """Start the process, and do not wait until it answers."""

    @abc.abstractmethod
    def await_ready(self) -> None:
        """Return when the server takes connections.

        Raises:
          EmbeddedServerError: When it ends or takes too long instead; it may still be running.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """End the server in good order; it can be started again."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End the server as SIGKILL does, with all its processes; it can be started again."""

    @abc.abstractmethod
    def discard(self) -> None:
        """End the server as fast as it goes without leaving anything outside its folder."""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers; nothing happens when it runs.

        Raises:
          EmbeddedServerError: When it does not come up; the text ends with the end of its log.
        """
        if not self.running:
            self.launch()
            self.await_ready()

    def _spawn(self, command: list[str | Path], cwd: Path) -> subprocess.Popen[bytes]:
        self._process = spawn(command, self._account, cwd, self._log)
        return self._process

    def _await(self, ready: Callable[[], bool], seconds: float) -> None:
        if not self._wait(lambda: not self.running or ready(), seconds):
            raise self._failure(f"did not answer within {seconds:.0f} s")
        if not self.running:
            raise self._failure("ended at once")

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
