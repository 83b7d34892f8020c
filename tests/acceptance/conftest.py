"""Fixtures of the tests that start real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.queues import queues as queues
from tests.command_processes import CommandProcesses
from tests.internals.database import Database


@dataclass(frozen=True)
class Measured:
    """Result and costs of a finished ``housekeeping run NAME --json``."""

    result: dict[str, Any]
    resident_mb: float


RunMeasured = Callable[..., Measured]
#: Runs the command line until it ends.
Command = Callable[..., subprocess.CompletedProcess[str]]


#: The command line, which writes its peak of resident memory in kilobytes to a file. Not `ru_maxrss`: a new process
#: inherits it from the one that started it, here pytest.
_MEASURED: Final = """
import atexit, os, re
from pathlib import Path
from housekeeping.cli.main import main

def write_peak():
    status = Path("/proc/self/status").read_text()
    Path(os.environ["PEAK_FILE"]).write_text(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])

atexit.register(write_peak)
main()
"""


@pytest.fixture
def run_measured(environment: dict[str, str], tmp_path: Path) -> RunMeasured:
    """Run a worker in a process and measure its peak of resident memory."""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc on this system")

    def run(*arguments: str, **settings: str) -> Measured:
        peak = tmp_path.with_name(f"{tmp_path.name}-peak")
        finished = subprocess.run(
            [sys.executable, "-c", _MEASURED, "run", *arguments, "--json"],
            env=environment | settings | {"PEAK_FILE": str(peak)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return Measured(json.loads(finished.stdout), int(peak.read_text()) / 1024)

    return run


@pytest.fixture
def command(environment: dict[str, str], command_processes: CommandProcesses, tmp_path: Path) -> Command:
    """Run ``housekeeping`` in an empty folder; keyword arguments are settings on top of the test's own."""

    def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        own = {f"HOUSEKEEPING_{name}": value for name, value in settings.items()}
        return command_processes.run(list(arguments), environment | own, tmp_path, timeout_s=60)

    return run


@pytest.fixture
def without_redis(environment: dict[str, str], postgres: Database) -> None:
    """The processes of the test have only PostgreSQL."""
    del environment["HOUSEKEEPING_REDIS_URL"], environment["HOUSEKEEPING_BROKER_URL"]


@pytest.fixture
def made(postgres: Database) -> None:
    """Create the tables of ``init --with-tables``, only faster."""
    postgres.create_tables([UserStatus])


@pytest.fixture
def add(made: None, admin: Connection, settings: Settings) -> Callable[[int], None]:
    """Return a function that adds this many due statuses."""

    def insert(count: int) -> None:
        with admin.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {settings.namespace}.user_statuses (user_id, clear_status_at) "
                f"SELECT n, now() - interval '1 second' * n FROM generate_series(1, {count}) AS n"
            )

    return insert
