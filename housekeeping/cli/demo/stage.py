"""What the demo plays on: real servers, the tables, and real worker and scheduler processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from housekeeping import embedded
from housekeeping.foundation.db import database
from housekeeping.foundation.errors import HousekeepingError
from housekeeping.foundation.settings import PREFIX, Settings
from housekeeping.installation import use_database
from housekeeping.sweeps import schema
from housekeeping.sweeps.declaration import Sweep
from housekeeping.workers import BUILT_IN, configured_sweeps

_END_SECONDS: Final = 15  # a worker ends after its batch, which takes milliseconds here


@dataclass(frozen=True, slots=True)
class Stage:
    """The demo's surroundings, all of them gone when it ends."""

    servers: embedded.Servers
    settings: Settings
    sweeps: dict[str, Sweep]
    environment: dict[str, str]

    @contextmanager
    def process(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """A real ``housekeeping worker`` or ``scheduler``, ended on leaving the block."""
        with self.log(name).open("wb") as log:
            running = subprocess.Popen(
                [sys.executable, "-m", "housekeeping", name],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C goes to the demo alone, which then ends its processes in order.
                start_new_session=True,
            )
        try:
            yield running
        finally:
            end(running)

    def log(self, name: str) -> Path:
        """The log of a process."""
        return self.servers.folder / f"{name}.log"

    def check(self, name: str, running: subprocess.Popen[bytes]) -> None:
        """Return while the process runs.

        Raises:
          HousekeepingError: When it has ended; the text shows the end of its log.
        """
        if running.poll() is not None:
            last = self.log(name).read_text(errors="replace").strip().splitlines()[-1:]
            raise HousekeepingError(f"the {name} process ended with {running.returncode}: {' '.join(last)}")


def end(running: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, and after a while make it."""
    if running.poll() is None:
        # Only the first process: a worker that hears of it twice, from its group as well, ends at once.
        running.terminate()
        try:
            running.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


@contextmanager
def stage() -> Iterator[Stage]:
    """Servers with the schema and the tables made; settings of the environment are left aside.

    Raises:
      EmbeddedServerError: When a server is not found or does not start.
    """
    with embedded.start() as servers:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        ours = {
            "DATABASE_URL": servers.database_url,
            "REDIS_URL": servers.redis_url,
            "LOG_FORMAT": "json",
        }
        # The defaults and nothing else: neither the environment nor a .env file has a say here.
        settings = Settings.model_construct(database_url=servers.database_url, redis_url=servers.redis_url)
        use_database(settings)
        schema.init()
        for module in BUILT_IN:
            database.create_tables(list(module.MODELS.values()))
        try:
            yield Stage(
                servers,
                settings,
                configured_sweeps(settings),
                kept | {f"{PREFIX}{name}": value for name, value in ours.items()},
            )
        finally:
            database.close()
