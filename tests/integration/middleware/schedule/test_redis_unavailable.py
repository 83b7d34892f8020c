"""Schedulers and workers that lose Redis between any two steps of a tick, or find it empty (S1, S3, S5, F7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import dramatiq
import pytest
import redis

from housekeeping import Settings
from tests.faults import Where, at_step, lose_connection, redis_fault
from tests.integration.middleware.applications import at, close_all, queued, rows, wake_up
from tests.integration.middleware.schedule.ticking import Account
from tests.integration.middleware.step_worker import StepWorker, delivered_again
from tests.internals.core import shared_redis
from tests.internals.database import Database
from tests.internals.middleware import TickStore
from tests.rabbitmq_look import on_rabbitmq


@pytest.fixture
def own(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[Settings]:
    yield settings
    close_all()


def _lost(point: str, where: Where) -> AbstractContextManager[object]:
    """Break the connection before Redis receives this step, or after its effect and before the answer."""
    return redis_fault("enqueue", where) if point == "enqueue" else at_step(TickStore, point, where, lose_connection)


def lose_broker() -> None:
    raise dramatiq.errors.ConnectionClosed("the broker closed the connection")


POINTS = ["state_of", "claim", "enqueue", "record", "notes", "remove"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("where", ["before", "after"], ids=["not_heard", "not_answered"])
def test_scheduler_that_loses_redis_anywhere_leaves_each_tick_one_outcome(
    own: Settings, point: str, where: Where, caplog: pytest.LogCaptureFixture
) -> None:
    account = Account(own, "0 * * * *")
    wake_up(account.process(), at(6))
    broker = account.process()

    with _lost(point, where):
        wake_up(broker, at(10))
    for moment in (at(10, 1), at(11), at(11, 1)):
        wake_up(broker, moment)
    account.drain()

    assert account.ran == account.recorded == {at(6), at(10), at(11)}
    assert account.missed == 3
    assert any(record.levelname == "ERROR" for record in caplog.records), "it says so"


@pytest.mark.parametrize("point", ["state_of", "claim", "enqueue"])
@pytest.mark.parametrize("catch_up", ["latest", "none"])
def test_missed_ticks_of_an_outage_are_not_blamed_on_the_scheduler(own: Settings, point: str, catch_up: str) -> None:
    account = Account(own.model_copy(update={"catch_up": catch_up}), "0 * * * *")
    broker = account.process()
    lost_on_rabbitmq = point == "enqueue" and on_rabbitmq(broker)
    wake_up(broker, at(10))

    with at_step(broker, "put", "before", lose_broker) if lost_on_rabbitmq else _lost(point, "before"):
        for hour in (11, 12, 13):
            wake_up(broker, at(hour))
    wake_up(broker, at(13, 20))
    wake_up(broker, at(14))

    last = 12 if catch_up == "latest" else 13
    assert rows("swept") == [("missed", "servers_unavailable", at(last), {"missed": last - 10})]


def test_worker_that_records_the_gap_knows_of_the_outage(own: Settings) -> None:
    account = Account(own, "0 * * * *")
    broker = account.process()
    wake_up(broker, at(10))
    account.drain()
    with _lost("state_of", "before"):
        wake_up(broker, at(11))

    with _lost("record", "before"):
        wake_up(broker, at(12))
    account.drain()
    wake_up(broker, at(12, 1))

    assert ("missed", "servers_unavailable", at(11), {"missed": 1}) in rows("swept")


def test_ticks_missed_before_the_scheduler_began_have_no_scheduler(own: Settings) -> None:
    account = Account(own, "0 * * * *")
    wake_up(account.process(), at(10))
    late = account.process()

    with _lost("state_of", "before"):
        for moment in (at(12, 30), at(13), at(14)):
            wake_up(late, moment)
    wake_up(late, at(15))

    assert rows("swept") == [("missed", "no_scheduler", at(14), {"missed": 4})]


def test_outage_that_is_over_explains_no_later_gap(own: Settings) -> None:
    account = Account(own, "0 * * * *")
    broker = account.process()
    wake_up(broker, at(10))
    with _lost("state_of", "before"):
        wake_up(broker, at(11))
    wake_up(broker, at(11, 1))

    wake_up(broker, at(14))  # the process was suspended meanwhile

    assert rows("swept") == [("missed", "no_scheduler", at(13), {"missed": 2})]


def test_ticks_of_a_new_actor_are_recorded_though_redis_is_down_at_start(
    own: Settings,
) -> None:
    # S5: neither Redis nor the ledger knows the actor yet
    account = Account(own, "* * * * *")
    broker = account.process()

    with _lost("state_of", "before"):
        for minute in (0, 1, 2):
            wake_up(broker, at(10, minute))
    wake_up(broker, at(10, 3))
    account.drain()

    assert account.ran == account.recorded == {at(10, 3)}
    assert account.missed == 3


def test_tick_queued_twice_runs_once(own: Settings) -> None:
    # The answer to the enqueue was lost, so the next minute repeats it; the actor is not idempotent.
    account = Account(own, "0 * * * *")
    broker = account.process()
    with _lost("enqueue", "after"):
        wake_up(broker, at(10))
    wake_up(broker, at(10, 1))
    in_the_queue = len(queued(broker))

    account.drain()

    assert (in_the_queue, account.runs) == (2, {at(10): 1})
    assert rows("swept") == [("done", None, at(10), {})]


def test_queued_tick_is_not_dropped_for_its_own_message(own: Settings) -> None:
    # Deduplication finds the message in the queue. That does not mean that the tick was skipped.
    account = Account(own, "0 * * * *", idempotent=True, deduplicate="until_executed")
    broker = account.process()
    with _lost("record", "before"):
        wake_up(broker, at(10))
    wake_up(broker, at(10, 1))

    account.drain()

    assert account.runs == {at(10): 1}
    assert rows("swept") == [("done", None, at(10), {})]


def test_message_whose_tick_cannot_be_read_does_not_run_unprotected(own: Settings) -> None:
    account = Account(own, "0 * * * *")
    broker = account.process()
    wake_up(broker, at(10))

    with _lost("record", "before"):
        account.drain()
    ran = dict(account.runs)
    account.come_due()

    assert ran == {}
    assert account.runs == {at(10): 1}


def test_worker_killed_during_a_tick_leaves_it_to_the_next_delivery(own: Settings) -> None:
    account = Account(own, "0 * * * *")
    broker = account.process()
    wake_up(broker, at(10))
    message = StepWorker(broker).fetch()
    assert message is not None
    broker.emit_before("process_message", message)

    account.run(delivered_again(message))

    assert rows("swept") == [("done", None, at(10), {})]
    assert account.ran == {at(10)}


def test_outcome_of_a_tick_is_that_of_its_last_row(own: Settings) -> None:
    account = Account(own, "0 * * * *")
    account.failures = iter([ValueError("no"), ValueError("not yet"), None])
    wake_up(account.process(), at(10))

    account.drain()
    account.come_due()
    wake_up(account.process(), at(11))
    account.failures = iter([])
    account.come_due()
    account.drain()

    assert [(row[0], row[2]) for row in rows("swept")] == [
        ("failed", at(10)),
        ("failed", at(10)),
        ("done", at(10)),
        ("done", at(11)),
    ]


def test_redis_emptied_between_two_ticks_makes_no_difference(own: Settings) -> None:
    account = Account(own, "* * * * *")
    for minute in (0, 1):
        wake_up(account.process(), at(10, minute))
        account.drain()

    _empty(account)
    wake_up(account.process(), at(10, 1, 30))
    wake_up(account.process(), at(10, 2))
    account.drain()

    assert account.ran == account.recorded == {at(10), at(10, 1), at(10, 2)}
    assert account.missed == 0


def test_queued_tick_lost_by_redis_is_missed_or_caught_up(own: Settings) -> None:
    account = Account(own, "* * * * *")
    wake_up(account.process(), at(10))
    account.drain()

    wake_up(account.process(), at(10, 1))
    _empty(account)
    wake_up(account.process(), at(10, 1, 30))
    _empty(account)
    wake_up(account.process(), at(10, 4))
    account.drain()

    assert account.ran == account.recorded == {at(10), at(10, 4)}
    assert account.missed == 3


def _empty(account: Account) -> None:
    client = shared_redis.get()
    client.delete(*client.scan_iter(match=f"{account.settings.namespace}:*"))
