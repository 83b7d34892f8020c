"""Real processes, started like an operator's and ended with the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

PATIENCE_S: Final = 90.0
SCHEDULER: Final = [str(Path(sys.executable).with_name("periodiq"))]
WORKER: Final = [sys.executable, "-m", "dramatiq"]

#: Beginning of an application's own module, with the library's middleware and none of its workers.
APPLICATION: Final = """
import time
from pathlib import Path

import dramatiq

import housekeeping
from housekeeping.brokers import message_broker
from housekeeping.core import logs
from housekeeping.core.redis import shared_redis
from housekeeping.core.settings import Settings

settings = Settings.load()
logs.configure(settings.log_level, settings.log_format)
broker = message_broker(settings)
dramatiq.set_broker(broker)
housekeeping.install(broker, settings, workers=False)
"""
#: A module whose actor hangs in its first run, and whose broker has a short heartbeat timeout.
HANGS_ONCE: Final = f"""{APPLICATION}
broker.heartbeat_timeout = 2000  # of Redis'; RabbitMQ sees at once that a connection is gone


@dramatiq.actor(max_retries=0)
def hang_once(name):
    if shared_redis.get().rpush(f"{{settings.namespace}}:began:{{name}}", "x") > 1:
        return
    while True:
        time.sleep(0.01)


if __name__ == "__main__":
    hang_once.send("it")
    broker.close()
"""


class Process:
    """Running program and what it has written to stderr."""

    def __init__(self, running: subprocess.Popen[bytes], log: Path) -> None:
        self.running = running
        self._log = log

    def text(self) -> str:
        return self._log.read_text()

    def lines(self) -> list[dict[str, Any]]:
        """Return its JSON log lines so far."""
        return [json.loads(line) for line in self.text().splitlines() if line.startswith("{") and line.endswith("}")]

    def said(self, event: str) -> bool:
        return any(line["event"].startswith(event) for line in self.lines())

    def terminate(self) -> int:
        """Send SIGTERM to the program only, like a service manager; return its exit status."""
        self.running.terminate()
        return self.running.wait(PATIENCE_S)

    def pause(self) -> None:
        """Send SIGSTOP to the program and its children."""
        os.killpg(self.running.pid, signal.SIGSTOP)

    def unpause(self) -> None:
        """Send SIGCONT to the program and its children."""
        os.killpg(self.running.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to the program and its children."""
        os.killpg(self.running.pid, signal.SIGKILL)
        self.running.wait(PATIENCE_S)


@contextmanager
def started(arguments: list[str], environment: Mapping[str, str], log: Path) -> Iterator[Process]:
    """Run a program in a session of its own; kill it at the end of the block if it still runs."""
    with log.open("wb") as stream:
        running = subprocess.Popen(
            arguments,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    process = Process(running, log)
    try:
        yield process
    finally:
        try:
            os.killpg(running.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        running.wait(PATIENCE_S)


def eventually(holds: Callable[[], object], *processes: Process, patience_s: float = PATIENCE_S) -> None:
    """Wait until the condition holds; after the time limit fail with the processes' logs."""
    deadline = time.monotonic() + patience_s
    while not holds():
        logs = "\n".join(process.text() for process in processes)
        assert time.monotonic() < deadline, f"it did not come true in time; the logs:\n{logs}"
        time.sleep(0.05)


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Read the lines on a process's stderr until one contains the text."""
    assert process.stderr is not None
    assert any(text in line for line in process.stderr)


def read_terminal(controller: int) -> bytes:
    """Return what a process has written to a terminal; nothing once the terminal is closed."""
    try:
        return os.read(controller, 4096)
    except OSError:  # Linux reports a closed terminal in this way
        return b""
