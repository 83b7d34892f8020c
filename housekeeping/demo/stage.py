"""Environment of the demo: real servers, tables, and real worker and scheduler processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import housekeeping
from housekeeping import embedded
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.settings import PREFIX, Settings
from housekeeping.database.connection import database
from housekeeping.demo import guard, scenes
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import schema
from housekeeping.sweeps.ledger.schema import use_database
from housekeeping.workers import BUILT_IN, configured_sweeps

_END_SECONDS: Final = 15  # a worker ends after its batch, which takes milliseconds in the demo
_PROCESSES: Final = ("worker", "scheduler")


@dataclass(frozen=True, slots=True)
class Stage:
    """Servers, settings and sweeps of the demo."""

    servers: embedded.Servers
    settings: Settings
    sweeps: dict[str, Sweep]

    @contextmanager
    def processes(self) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
        """Start a real ``housekeeping worker`` and ``scheduler``, by name; they end with the block."""
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name in _PROCESSES:
                running[name] = self._start(name)
            yield running
        finally:
            end(list(running.values()))

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.servers.folder / f"{name}.log"

    def check(self, processes: dict[str, subprocess.Popen[bytes]]) -> None:
        """Check that the processes are running.

        Raises:
          HousekeepingError: When one has ended; the text ends with the last line of its log.
        """
        for name, running in processes.items():
            if running.poll() is not None:
                last = self.log(name).read_text(errors="replace").strip().splitlines()[-1:]
                raise HousekeepingError(f"the {name} process ended with {running.returncode}: {' '.join(last)}")

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        with self.log(name).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-I", guard.__file__, sys.executable, "-m", "housekeeping", name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C must reach only the demo, which then ends its processes in order.
                start_new_session=True,
            )


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Terminate all processes, and kill those that do not end in time."""
    for running in processes:
        running.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for running in processes:
        with suppress(subprocess.TimeoutExpired):
            running.wait(max(0, deadline - time.monotonic()))
        assert running.stdin is not None
        running.stdin.close()  # its guard then kills a process that still runs
        running.wait()


@contextmanager
def stage() -> Iterator[Stage]:
    """Start servers with the schema and tables; settings of the environment and ``.env`` are ignored.

    Raises:
      EmbeddedServerError: When a server is not found or does not start.
    """
    with embedded.start() as servers, _demo_settings(servers):
        settings = Settings.load()
        sweeps = configured_sweeps(settings)
        use_database(settings)
        schema.init()
        for module in BUILT_IN:
            database.create_tables(list(module.MODELS.values()))
        try:
            yield Stage(servers, settings, sweeps)
        finally:
            database.close()


@contextmanager
def _demo_settings(servers: embedded.Servers) -> Iterator[None]:
    """Set the demo's settings in this process's environment, which its children inherit."""
    before, folder = dict(os.environ), Path.cwd()
    for name in [name for name in os.environ if name.upper().startswith(PREFIX)]:
        del os.environ[name]
    settings = {"DATABASE_URL": servers.database_url, "REDIS_URL": servers.redis_url, "LOG_FORMAT": "json"}
    settings |= scenes.settings(servers.folder)
    os.environ.update({f"{PREFIX}{name}": value for name, value in settings.items()})
    # Children import the package of this file, whatever the current folder is.
    here = str(Path(housekeeping.__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    # A folder without an .env file.
    os.chdir(servers.folder)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)
