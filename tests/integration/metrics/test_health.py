"""Health pages of real processes, for probes of a container platform or a load balancer."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.acceptance.processes import eventually, started
from tests.integration.metrics.pages import free_port, metered
from tests.internals.database import Database
from tests.internals.middleware import Readiness


def answer(port: int, path: str) -> tuple[int, str]:
    """Return status and text of a page at this local port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def is_ready(port: int) -> Callable[[], bool]:
    def look() -> bool:
        try:
            return answer(port, "/-/ready") == (200, "ok\n")
        except OSError:
            return False  # it does not listen yet

    return look


@pytest.mark.slow
def test_worker_is_ready_until_its_schema_is_gone(
    environment: dict[str, str], tmp_path: Path, postgres: Database, admin: Connection, settings: Settings
) -> None:
    with metered(environment, tmp_path) as (process, port):
        eventually(is_ready(port), process)
        with admin.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {settings.schema_name}.migrations RENAME TO gone")
        eventually(lambda: not is_ready(port)(), process)
        ready, live = answer(port, "/-/ready"), answer(port, "/-/live")
        with admin.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {settings.schema_name}.gone RENAME TO migrations")
        eventually(is_ready(port), process)

    assert ready[0] == 503 and "run: housekeeping init" in ready[1]
    assert live == (200, "ok\n")


@pytest.mark.slow
def test_scheduler_is_ready_once_it_is_awake(
    environment: dict[str, str], tmp_path: Path, postgres: Database, settings: Settings
) -> None:
    port = free_port()
    own = {"HOUSEKEEPING_SCHEDULER_METRICS_PORT": str(port)}
    with started(
        [sys.executable, "-m", "housekeeping", "scheduler"], environment | own, tmp_path / "scheduler"
    ) as process:
        eventually(is_ready(port), process)

        assert answer(port, "/-/live") == (200, "ok\n")
        assert "# HELP" in answer(port, "/metrics")[1]


def test_each_server_that_does_not_answer_is_a_line(settings: Settings, postgres: Database) -> None:
    away = settings.model_copy(update={"redis_url": f"redis://:secret@127.0.0.1:{free_port()}/0"})

    problems = Readiness(away, "worker").problems()

    assert [line.partition(":")[0] for line in problems] == [
        "Redis did not answer",
        "no worker on this host sends heartbeats",
    ]
    assert "secret" not in "".join(problems)
