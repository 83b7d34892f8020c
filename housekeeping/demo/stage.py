"""What the demo plays on: real servers, the tables, and real worker and scheduler processes."""

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
from housekeeping.demo import guard
from housekeeping.demo.scenes import SCENES
from housekeeping.installation import use_database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import schema
from housekeeping.workers import BUILT_IN, configured_sweeps

_END_SECONDS: Final = 15  # a worker ends after its batch, which takes milliseconds here
_PROCESSES: Final = ("worker", "scheduler")


@dataclass(frozen=True, slots=True)
class Stage:
    """The demo's backends, all of them gone when it ends."""

    servers: embedded.Servers
    settings: Settings
    sweeps: dict[str, Sweep]

    @contextmanager
    def processes(self) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
        """A real ``housekeeping worker`` and ``scheduler`` by name, ended on leaving the block."""
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name in _PROCESSES:
                running[name] = self._start(name)
            yield running
        finally:
            end(list(running.values()))

    def log(self, name: str) -> Path:
        """The log of a process."""
        return self.servers.folder / f"{name}.log"

    def check(self, processes: dict[str, subprocess.Popen[bytes]]) -> None:
        """Return while the processes run.

        Raises:
          HousekeepingError: When one has ended; the text shows the end of its log.
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
                # Ctrl-C goes to the demo alone, which then ends its processes in order.
                start_new_session=True,
            )


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ask the processes to end, all at once, and after a while make them."""
    for running in processes:
        running.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for running in processes:
        with suppress(subprocess.TimeoutExpired):
            running.wait(max(0, deadline - time.monotonic()))
        assert running.stdin is not None
        running.stdin.close()  # what still runs is killed by its guard
        running.wait()


@contextmanager
def stage() -> Iterator[Stage]:
    """Servers with the schema and the tables made; what the environment and ``.env`` set for real work is left aside.

    Raises:
      EmbeddedServerError: When a server is not found or does not start.
    """
    with embedded.start() as servers, _settings_of_its_own(servers):
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
def _settings_of_its_own(servers: embedded.Servers) -> Iterator[None]:
    """This process's environment, for as long as the demo: the children inherit it."""
    before, folder = dict(os.environ), Path.cwd()
    for name in [name for name in os.environ if name.upper().startswith(PREFIX)]:
        del os.environ[name]
    ours = {"DATABASE_URL": servers.database_url, "REDIS_URL": servers.redis_url, "LOG_FORMAT": "json"}
    for scene in SCENES:
        ours |= scene.settings(servers.folder)
    os.environ.update({f"{PREFIX}{name}": value for name, value in ours.items()})
    # The very package this file is in, wherever the demo was called.
    here = str(Path(housekeeping.__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    # Where there is no .env file.
    os.chdir(servers.folder)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)
