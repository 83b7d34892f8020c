"""Killed workers and schedulers in `status` and `why`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.conftest import Command
from tests.acceptance.processes import APPLICATION, SCHEDULER, WORKER, eventually, started
from tests.acceptance.queues import Queues
from tests.internals.database import Database
from tests.internals.ledger import Run

pytestmark = pytest.mark.slow

STATUSES = "user_status_cleanup.batch"
HOUSEKEEPING = [sys.executable, "-m", "housekeeping"]
OWN = (
    APPLICATION
    + """

@dramatiq.actor(schedule="* * * * *", queue_name="mails")
def nothing():
    pass
"""
)

Status = Callable[[], dict[str, Any]]


@pytest.fixture
def quick(environment: dict[str, str], tmp_path: Path) -> None:
    """Shorten heartbeats to half a second and their timeout to four, in every process of the test."""
    folders = [str(Path(__file__).with_name("quick_heartbeats")), str(tmp_path), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))


@pytest.fixture
def status(quick: None, command: Command, postgres: Database) -> Status:
    postgres.create_tables([UserStatus])
    return lambda: json.loads(command("status", "--json").stdout)


def alive(status: Status, kind: str) -> list[dict[str, Any]]:
    return [each for each in status()["processes"] if each["kind"] == kind and each["alive"]]


def alerts(status: Status, name: str) -> list[str]:
    return [each["text"] for each in status()["alerts"] if each["name"] == name]


def killed_before_the_last_tick(client: redis.Redis, environment: dict[str, str]) -> None:
    """Let the last heartbeats be a minute older."""
    key = f"{environment['HOUSEKEEPING_NAMESPACE']}:process_heartbeats"
    processes: Any = client.zrange(key, 0, -1)
    for each in processes:
        client.zincrby(key, -60, each)


def test_installation_without_processes_says_so_once(status: Status, command: Command) -> None:
    said = [(each["name"], each["text"]) for each in status()["alerts"]]

    assert said == [
        ("no_worker", "no worker has sent a heartbeat yet: start `housekeeping worker`"),
        ("no_scheduler", "no scheduler has sent a heartbeat yet: start `housekeeping scheduler`"),
    ]
    headline, shown = status()["headline"], command("status").stdout
    assert headline.startswith("No worker process has been seen yet. Start housekeeping worker (")
    assert "ALERT no worker has sent a heartbeat yet" in shown and not re.search("since|ended", headline)


def test_killed_worker_is_dead_its_queue_alerts_and_its_run_is_lost(
    status: Status,
    command: Command,
    environment: dict[str, str],
    postgres: Database,
    queues: Queues,
    tmp_path: Path,
) -> None:
    postgres.execute_sql(
        "INSERT INTO user_statuses (user_id, clear_status_at) "
        "SELECT n, now() - n * interval '1 minute' FROM generate_series(1, 10000) AS n"
    )
    postgres.execute_sql(
        "CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.01); RETURN OLD; END $$"
    )
    postgres.execute_sql("CREATE TRIGGER slow BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION be_slow()")
    environment["HOUSEKEEPING_WORKERS"] = json.dumps({STATUSES: {"batch_size": 1}})
    queues.put("cronjob", STATUSES)

    with started([*HOUSEKEEPING, "worker", "-t", "2"], environment, tmp_path / "worker") as worker:
        eventually(lambda: [each["busy"] for each in alive(status, "worker")] == [1], worker)
        eventually(lambda: not alerts(status, "no_worker"), worker)
        [seen] = [each for each in status()["processes"] if each["kind"] == "worker"]
        eventually(lambda: Run.select().where(Run.cursor.is_null(False)).exists(), worker)
        worker.kill()
    eventually(lambda: alerts(status, "no_worker"))
    eventually(lambda: "lost? no heartbeat for" in command("status").stdout)

    assert (seen["queues"], seen["threads"]) == (["cronjob", "git_refs"], 2)
    run = Run.select().where(Run.cursor.is_null(False)).get()
    assert (run.host, run.pid) == (seen["host"], seen["pid"])
    assert alive(status, "worker") == []
    [alert] = [text for text in alerts(status, "no_worker") if "'cronjob'" in text]
    assert alert.startswith("no worker serves the queue 'cronjob' since ") and "start `housekeeping worker`" in alert
    shown = command("status").stdout
    assert "dead? no heartbeat for" in shown


def test_killed_scheduler_is_missed_by_status_and_why(
    status: Status, command: Command, environment: dict[str, str], redis_client: redis.Redis, tmp_path: Path
) -> None:
    namespace = environment["HOUSEKEEPING_NAMESPACE"]
    with started([*SCHEDULER, "housekeeping.app"], environment, tmp_path / "scheduler") as scheduler:
        eventually(lambda: alive(status, "scheduler"), scheduler)
        eventually(lambda: not alerts(status, "no_scheduler"), scheduler)
        scheduler.kill()
    killed_before_the_last_tick(redis_client, environment)
    eventually(lambda: alerts(status, "no_scheduler"))
    redis_client.zremrangebyrank(f"{namespace}:ticks:{STATUSES}", 1, -1)
    redis_client.delete(f"{namespace}:tick_claim:{STATUSES}")
    Run.delete().where(Run.worker == STATUSES).execute()
    why = command("why", STATUSES).stdout

    [alert] = alerts(status, "no_scheduler")
    assert alert.startswith("no scheduler is alive since ") and alert.endswith("start `housekeeping scheduler`")
    assert "not_sent" in why and "no scheduler is alive since " in why and "look again" not in why


@pytest.mark.parametrize(
    ("program", "kind", "number"),
    [
        ([*HOUSEKEEPING, "worker", "-p", "2", "-t", "1"], "worker", 2),
        ([*WORKER, "housekeeping.app", "-p", "2", "-t", "1"], "worker", 2),
        ([*WORKER, "own_broker", "-p", "1", "-t", "1"], "worker", 1),
        ([*HOUSEKEEPING, "scheduler"], "scheduler", 1),
        ([*SCHEDULER, "housekeeping.app"], "scheduler", 1),
        ([*SCHEDULER, "own_broker"], "scheduler", 1),
    ],
    ids=["worker", "dramatiq", "own worker", "scheduler", "periodiq", "own scheduler"],
)
def test_each_process_is_listed_and_a_stopped_one_is_not(
    status: Status, environment: dict[str, str], tmp_path: Path, program: list[str], kind: str, number: int
) -> None:
    (tmp_path / "own_broker.py").write_text(OWN)

    with started(program, environment, tmp_path / "log") as process:
        eventually(lambda: len(alive(status, kind)) == number, process)
        assert process.terminate() == 0

    assert status()["processes"] == []
    assert [each["name"] for each in status()["alerts"]].count("no_worker") >= 1
