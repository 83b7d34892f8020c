"""A run around its walk: leases, epochs, what is away."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Call, Delete, ExclusiveLease, Lease, Settings, Sweep
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.internals.core import MessageContext, current_message, shared_redis
from tests.internals.core import redis_client as make_redis_client
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.leases import LeaseRow
from tests.internals.ledger import Counts, Run, runs
from tests.internals.workers import status_sweep as sweep

TTL = timedelta(minutes=10)
LEASED = changed(sweep, batch=10, lease=Lease("statuses", TTL))
CALLING = changed(LEASED, action=Call(lambda row: None, then=Delete()))
DUE = "now() - interval '1 hour' + interval '1 millisecond' * n"


def test_lease_is_released_after_every_outcome(add_statuses: AddStatuses, redis_client: redis.Redis) -> None:
    add_statuses(25, DUE)

    def fail(counts: Counts) -> None:
        raise OSError("the disk is full")

    assert run_sweep(LEASED, on_batch=fail).outcome == "failed"
    assert not ExclusiveLease("statuses", TTL).exists()
    assert run_sweep(LEASED).outcome == "done"
    assert not ExclusiveLease("statuses", TTL).exists()


def test_each_run_has_a_higher_epoch(add_statuses: AddStatuses, redis_client: redis.Redis) -> None:
    # L3
    for _ in range(3):
        run_sweep(LEASED)

    epochs = [run.epoch or 0 for run in Run.select().order_by(Run.id)]
    assert len(epochs) == 3 and epochs == sorted(set(epochs))


@pytest.mark.parametrize("successor", ["epoch = epoch + 1", "holder = 'another, with the same epoch'"])
@pytest.mark.parametrize("leased", [LEASED, CALLING], ids=["in one statement", "in a transaction"])
def test_holder_is_compared_within_the_batchs_transaction(
    add_statuses: AddStatuses,
    redis_client: redis.Redis,
    admin: Connection,
    settings: Settings,
    leased: Sweep,
    successor: str,
) -> None:
    # L3: the next holder begins after the batch; nothing of the batch may stay. After a failover to a replica that has
    # not received the last epochs, it may have the same one.
    add_statuses(25, DUE)

    def begin(counts: Counts) -> None:
        with admin.cursor() as cursor:
            cursor.execute(f"UPDATE {settings.schema_name}.leases SET {successor}")

    result = run_sweep(leased, on_batch=begin)

    assert (result.outcome, result.counts["deleted_rows"]) == ("lost_lease", 10)
    with admin.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM user_statuses")
        assert cursor.fetchall() == [(15,)]


def test_run_with_a_lease_fails_while_redis_is_away(
    add_statuses: AddStatuses, settings: Settings, last_run: Callable[[], Run]
) -> None:
    # L5
    add_statuses(5, DUE)
    shared_redis.use(make_redis_client("unix:///nowhere/redis.sock"), settings.namespace)

    result = run_sweep(LEASED)

    assert result.outcome == "failed" and result.reason is not None and "Redis did not answer" in result.reason
    assert last_run().outcome == "failed"
    assert LeaseRow.select().count() == 0


def test_completed_message_is_not_run_again_without_redis(add_statuses: AddStatuses) -> None:
    # I1: the completion is the run's row, in the transaction of its last effect.
    add_statuses(5, DUE)
    token = current_message.set(MessageContext("message-1"))
    try:
        first = run_sweep(sweep)
        add_statuses(5, DUE, first_id=100)
        second = run_sweep(sweep)
    finally:
        current_message.reset(token)

    assert first.counts["deleted_rows"] == 5
    assert (second.outcome, second.reason, second.counts["deleted_rows"]) == ("skipped", "already_done", 0)
    assert Run.select().count() == 1


def dead_attempt(redis_client: redis.Redis, settings: Settings, message_id: str, silent_s: int) -> None:
    """Row, lease and message of a worker that was killed during its run."""
    token = ExclusiveLease("statuses", TTL, worker=LEASED.name).try_obtain()
    assert token is not None
    runs.begin(
        LEASED.name,
        message_id=message_id,
        tick=None,
        trigger="enqueue",
        lease=("statuses", token),
        resume="interrupted",
    )
    database.execute_sql(f"UPDATE {settings.schema_name}.runs SET heartbeat_at = now() - interval '{silent_s} seconds'")


def test_lease_of_a_dead_run_is_taken_over_before_its_ttl(
    add_statuses: AddStatuses, redis_client: redis.Redis, settings: Settings
) -> None:
    # B1: else the message that comes back after a minute would find its own dead attempt's lease, and end.
    add_statuses(5, DUE)
    dead_attempt(redis_client, settings, "message-1", silent_s=61)

    result = run_sweep(LEASED)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 5)
    assert [run.outcome for run in Run.select().order_by(Run.id)] == ["lost", "done"]
    assert not ExclusiveLease("statuses", TTL).exists()


def test_lease_of_a_living_run_is_not_taken_over(
    add_statuses: AddStatuses, redis_client: redis.Redis, settings: Settings
) -> None:
    dead_attempt(redis_client, settings, "message-1", silent_s=50)

    result = run_sweep(LEASED)

    assert (result.outcome, result.reason, result.retry_after) == ("skipped", "lease_held", None)


def test_message_blocked_by_its_dead_attempts_lease_is_retried(
    add_statuses: AddStatuses, redis_client: redis.Redis, settings: Settings
) -> None:
    dead_attempt(redis_client, settings, "message-1", silent_s=50)
    token = current_message.set(MessageContext("message-1"))
    try:
        result = run_sweep(LEASED)
    finally:
        current_message.reset(token)

    assert (result.outcome, result.reason) == ("skipped", "lease_held")
    assert result.retry_after == timedelta(seconds=20)
    assert Run.select().count() == 1, "the tick's outcome is still to come"


def test_lease_held_by_application_code_is_never_taken_over(
    add_statuses: AddStatuses, redis_client: redis.Redis
) -> None:
    run_sweep(LEASED)

    with ExclusiveLease("statuses", TTL) as lease:
        assert run_sweep(LEASED).reason == "lease_held"
        lease.check()
