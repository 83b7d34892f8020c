"""Ready-made application's processes with RabbitMQ as the broker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.conftest import Command
from tests.acceptance.processes import HANGS_ONCE, SCHEDULER, WORKER, eventually, started
from tests.internals.brokers import message_broker
from tests.internals.database import Database
from tests.internals.ledger import Run
from tests.internals.workers import BUILT_IN
from tests.rabbitmq_look import remove

APP = "housekeeping.app"
STATUSES = "user_status_cleanup.batch"
OTHERS_OFF = json.dumps(
    {sweep.name: {"enabled": False} for family in BUILT_IN for sweep in family.SWEEPS if sweep.name != STATUSES}
)


@pytest.fixture
def broker_url(amqp_url: str) -> str:
    return amqp_url


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[Any]:
    """Return a broker that reads the queues, and delete them after the test."""
    broker: Any = message_broker(settings)
    for queue in ("default", *{sweep.queue for family in BUILT_IN for sweep in family.SWEEPS}):
        broker.declare_queue(queue, ensure=True)
    yield broker
    remove(broker)


@pytest.fixture
def trial(tmp_path: Path, environment: dict[str, str], broker: Any) -> list[str]:
    """Return the command of the module, with one message for its actor."""
    environment["HOUSEKEEPING_GRACE_S"] = "1"
    (tmp_path / "trial.py").write_text(HANGS_ONCE)
    subprocess.run([sys.executable, "trial.py"], cwd=tmp_path, env=environment, check=True, timeout=60)
    return [*WORKER, "trial", "-p", "1", "-t", "1", "--path", str(tmp_path)]


def test_due_status_is_cleared_at_the_next_tick(  # S2, B1
    environment: dict[str, str], postgres: Database, broker: Any, tmp_path: Path
) -> None:
    postgres.create_tables([UserStatus])
    postgres.execute_sql("INSERT INTO user_statuses (user_id, clear_status_at) VALUES (1, now()), (2, now() + '1 day')")
    environment["HOUSEKEEPING_WORKERS"] = OTHERS_OFF
    with (
        started([*SCHEDULER, APP], environment, tmp_path / "scheduler") as scheduler,
        started([*WORKER, APP, "-p", "1", "-t", "2"], environment, tmp_path / "worker") as worker,
    ):
        eventually(lambda: UserStatus.select().count() == 1, scheduler, worker, patience_s=180)
        eventually(lambda: Run.select().where(Run.outcome == "done").exists(), worker)
        assert worker.terminate() == 0

    run = Run.select().where(Run.outcome == "done").first()
    assert (run.trigger, run.counts["deleted_rows"]) == ("schedule", 1)


def test_messages_of_a_killed_worker_run_again_at_once(  # B1
    trial: list[str], environment: dict[str, str], redis_client: redis.Redis, settings: Settings, tmp_path: Path
) -> None:
    began = f"{settings.namespace}:began:it"
    with started(trial, environment, tmp_path / "first") as first:
        eventually(lambda: redis_client.llen(began) == 1, first)
        first.kill()

    with started(trial, environment, tmp_path / "second") as second:
        eventually(lambda: redis_client.llen(began) == 2, second)


def test_status_shows_queue_lengths_of_rabbitmq(made: None, trial: list[str], command: Command) -> None:
    said = command("status", "--json")

    assert json.loads(said.stdout)["queues"]["cronjob"] == {
        **dict.fromkeys(("waiting", "delayed", "dead"), 0),
        **dict.fromkeys(("oldest_at", "died_at")),
    }
    assert said.stderr == ""


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "REDIS_URL",
            "",
            "HOUSEKEEPING_REDIS_URL is not set; it should be a URL such as redis://",
        ),
        ("BROKER_URL", "amqp://me:hunter2@127.0.0.1:1/", "RabbitMQ did not answer: [Errno 111] Connection refused"),
        ("BROKER_URL", "amqp://me:hunter2@host/?nope=1", "HOUSEKEEPING_BROKER_URL: pika says: Unknown URL parameter"),
        ("BROKER_URL", "amqp:/me:hunter2@host", "HOUSEKEEPING_BROKER_URL is "),
    ],
)
def test_invalid_url_ends_the_worker_command_with_one_line(
    made: None, command: Command, name: str, value: str, line: str
) -> None:
    ended = command("worker", **{name: value})

    [said] = ended.stderr.splitlines()
    assert said.startswith(f"housekeeping: {line}")
    assert "hunter2" not in said
    assert ended.returncode in (1, 2)
