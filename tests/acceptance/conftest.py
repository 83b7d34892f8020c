"""Fixtures of the tests that drive real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.core.settings import Settings
from housekeeping.database.connection import Database
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.queues import queues as queues


@dataclass(frozen=True)
class Measured:
    """What a finished ``housekeeping run NAME --json`` said and took."""

    result: dict[str, Any]
    resident_mb: float


RunMeasured = Callable[..., Measured]
#: Runs the command line to its end.
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_measured(environment: dict[str, str]) -> RunMeasured:
    """Run a worker by the command line, as a process of its own, and measure its resident memory at the peak."""

    def run(*arguments: str, **settings: str) -> Measured:
        command = [sys.executable, "-m", "housekeeping", "run", *arguments, "--json"]
        process = subprocess.Popen(
            command, env=environment | settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stdout.close()
        unit = 1024 * 1024 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, kilobytes elsewhere
        return Measured(json.loads(said), used.ru_maxrss / unit)

    return run


@pytest.fixture
def command(environment: dict[str, str], tmp_path: Path) -> Command:
    """``housekeeping`` with these arguments, in an empty folder; settings by name come on top of this test's own."""

    def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        own = {f"HOUSEKEEPING_{name}": value for name, value in settings.items()}
        return subprocess.run(
            [sys.executable, "-m", "housekeeping", *arguments],
            env=environment | own,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def made(postgres: Database) -> None:
    """The library's own tables and the application's, as ``init --with-tables`` makes them, only faster."""
    postgres.create_tables([UserStatus])


@pytest.fixture
def add(made: None, admin: Connection, settings: Settings) -> Callable[[int], None]:
    """Adds this many due statuses."""

    def insert(count: int) -> None:
        with admin.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {settings.namespace}.user_statuses (user_id, clear_status_at) "
                f"SELECT n, now() - interval '1 second' * n FROM generate_series(1, {count}) AS n"
            )

    return insert
