"""Outcomes of ticks while the database is unavailable (S5, F8)."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta

import dramatiq
import pytest
import redis
from dramatiq.middleware import SkipMessage

from housekeeping import ExclusiveLease, Lease, Settings
from tests.faults import at_step, lose_connection, lose_database
from tests.integration.middleware.applications import at, close_all, installed, rows, scheduler, wake_up
from tests.integration.middleware.schedule.ticking import Account
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.database import Database, connect_to, database
from tests.internals.engine import register
from tests.internals.ledger import runs
from tests.internals.middleware import TickStore
from tests.internals.workers import status_sweep as sweep


@pytest.fixture
def own(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[Settings]:
    yield settings
    close_all()


def test_unwritten_outcome_is_written_by_the_next_scheduler(own: Settings) -> None:
    # The worker that ran the tick may be gone by then.
    account = Account(own, "0 * * * *")
    wake_up(account.process(), at(10))
    with _database_away():
        account.drain()

    wake_up(account.process(), at(10, 1))

    assert rows("swept") == [("done", None, at(10), {})]


def test_tick_of_a_sweep_without_a_row_failed_once_the_database_returns(own: Settings) -> None:
    broker = installed(own)
    register(broker, sweep)
    wake_up(broker, at(10))
    connected = database.obj

    database.initialize(connect_to("postgresql://nobody@127.0.0.1:1/nothing"))
    StepWorker(broker, sweep.queue).run()
    database.initialize(connected)
    wake_up(broker, at(10, 1))

    [(outcome, reason, tick, _)] = rows(sweep.name)
    assert (outcome, tick) == ("failed", at(10))
    assert reason is not None and reason.startswith("database: ")


def test_skipped_tick_without_a_record_is_retried(own: Settings) -> None:
    broker = installed(own)
    register(broker, dataclasses.replace(sweep, lease=Lease("statuses", timedelta(minutes=10))))
    wake_up(broker, at(10))
    step_worker = StepWorker(broker, sweep.queue)
    assert ExclusiveLease("statuses", timedelta(minutes=10)).try_obtain() is not None
    with _database_away():
        step_worker.run()

    step_worker.come_due()
    step_worker.run()

    assert rows(sweep.name) == [("skipped", "lease_held", at(10), {})]


def test_outcome_without_database_and_redis_is_written_at_the_next_message(
    own: Settings,
) -> None:
    worker = scheduler(own)
    other = dramatiq.actor(broker=worker, actor_name="other")(lambda: None)
    wake_up(scheduler(own), at(10))
    step_worker = StepWorker(worker)
    with _database_away(), at_step(TickStore, "note", "before", lose_connection):
        step_worker.run()
        other.send()
        step_worker.run()

    other.send()
    step_worker.run()
    wake_up(scheduler(own), at(10, 1))

    assert rows("swept") == [("done", None, at(10), {})]


@pytest.mark.parametrize("text", ["caf\udce9", "a\0b"], ids=["undecodable", "nul"])
@pytest.mark.parametrize(("kind", "outcome"), [(ValueError, "failed"), (SkipMessage, "skipped")])
def test_tick_whose_reason_the_database_refuses_has_its_outcome(
    own: Settings, text: str, kind: type[Exception], outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Dramatiq logs the text unescaped; pytest-xdist cannot transfer that.
    caplog.set_level(logging.CRITICAL, "dramatiq")
    account = Account(own, "0 * * * *", max_retries=0)
    account.failures = iter([kind(text)])
    wake_up(account.process(), at(10))

    account.drain()

    assert [(row[0], row[2]) for row in rows("swept")] == [(outcome, at(10))]


@pytest.mark.parametrize(
    ("field", "row"),
    [
        ("nothing that we know", {}),
        ("row.1:no time:swept", {}),
        ("row.1:1:swept", {}),
        ("row.1:1:swept", None),
        ("row.1:1:swept", {"outcome": "failed", "reason": "caf\udce9", "message_id": "1"}),
        ("row.1:1:swept", {"outcome": "failed", "reason": "x", "message_id": "1", "of_a_newer_release": 1}),
    ],
    ids=["no_note", "no_time", "no_row", "null", "undecodable", "newer"],
)
def test_unwritable_note_affects_no_other_note(
    own: Settings, redis_client: redis.Redis, field: str, row: object
) -> None:
    account = Account(own, "0 * * * *")
    wake_up(account.process(), at(10))
    with _database_away():
        account.drain()
    redis_client.hset(f"{own.namespace}:tick_notes", field, json.dumps(row))

    wake_up(account.process(), at(11))
    account.drain()

    assert rows("swept") == [("done", None, at(10), {}), ("done", None, at(11), {})]
    assert redis_client.hkeys(f"{own.namespace}:tick_notes") == [field.encode()], "another release may know it"


def test_failed_sweep_with_its_own_row_has_one_row(own: Settings) -> None:
    # Its table does not exist.
    broker = installed(own)
    register(broker, sweep)
    wake_up(broker, at(10))

    StepWorker(broker, sweep.queue).run()

    assert [(row[0], row[2]) for row in rows(sweep.name)] == [("failed", at(10))]


def _database_away() -> AbstractContextManager[None]:
    """Lose the database whenever an outcome is written."""
    return at_step(runs, "record", "before", lose_database)
