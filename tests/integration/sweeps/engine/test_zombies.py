"""Runs that sleep, hang, or lose their lease (L2, L3; scenarios F1, F2)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import redis
from psycopg2.extensions import connection as Connection

from housekeeping import ExclusiveLease, Lease, Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed
from tests.faults import at_number, at_step
from tests.integration.conftest import AddStatuses, LoseLease
from tests.integration.own_stages import in_transactions
from tests.integration.sweeps.engine.audited import LEASED, TTL
from tests.integration.sweeps.engine.audited import audited as audited
from tests.integration.sweeps.engine.executed import DUE
from tests.internals.core import LeaseLost, MessageContext, RunTakenOver, current_message
from tests.internals.database import Database, database
from tests.internals.engine import RunResult, run_sweep
from tests.internals.ledger import Counts, Run

SHORT = timedelta(seconds=3)
PATIENCE_S = 20
LONG_ENOUGH_S = 8  # several of the shortest ttl


def test_zombie_that_wakes_within_a_batch_commits_nothing(
    add_statuses: AddStatuses, audited: Callable[[], dict[str, Any]], lose_lease: LoseLease
) -> None:
    # F1, L3: it has deleted its rows, and sleeps before it counts them
    add_statuses(50, DUE)
    asleep, awake, batches = threading.Event(), threading.Event(), list[int]()

    def sleeping() -> None:
        if threading.current_thread() is not threading.main_thread():
            batches.append(1)
            if len(batches) == 3:
                asleep.set()
                assert awake.wait(PATIENCE_S)

    leased = in_transactions(LEASED, sleeping)

    def sleep() -> RunResult:
        try:
            return run_sweep(leased)
        finally:
            database.close()

    with ThreadPoolExecutor(1) as another:
        sleeper = another.submit(sleep)
        assert asleep.wait(PATIENCE_S)
        lose_lease("statuses")
        successor = run_sweep(leased)
        awake.set()
        zombie = sleeper.result(PATIENCE_S)
    last = run_sweep(LEASED)

    assert (zombie.outcome, zombie.reason, zombie.counts["deleted_rows"]) == ("lost_lease", "lease_lost", 20)
    assert (successor.outcome, successor.counts["deleted_rows"]) == ("done", 20)
    assert last.counts["deleted_rows"] == 10, "what the zombie had in hand is done by the next one"
    noted = audited()
    assert noted["epochs"] == sorted(noted["epochs"])
    assert (noted["deleted"], noted["different"], noted["counted"]) == (50, 50, 50)


def test_lost_redis_keys_repeat_attempts_but_no_effect(
    add_statuses: AddStatuses, audited: Callable[[], dict[str, Any]], redis_client: redis.Redis, settings: Settings
) -> None:
    # F2, L1
    add_statuses(100, DUE)
    begun, ended = list[int](), list[RunResult]()

    def lose_everything(counts: Counts) -> None:
        if len(begun) < 3 and counts["batches"] == 2:
            begun.append(1)
            for key in redis_client.scan_iter(match=f"{settings.namespace}:*", count=1000):
                redis_client.delete(key)
            ended.append(run_sweep(LEASED, on_batch=lose_everything))

    ended.append(run_sweep(LEASED, on_batch=lose_everything))

    assert [result.outcome for result in ended] == ["done", "lost_lease", "lost_lease", "lost_lease"]
    noted = audited()
    assert noted["epochs"] == sorted(noted["epochs"])
    assert (noted["deleted"], noted["different"], noted["counted"]) == (100, 100, 100)


def test_zombie_that_wakes_before_its_statement_commits_nothing(
    add_statuses: AddStatuses, audited: Callable[[], dict[str, Any]], lose_lease: LoseLease
) -> None:
    # F1, L3
    add_statuses(50, DUE)
    successors: list[RunResult] = []

    def asleep() -> None:
        lose_lease("statuses")
        with ThreadPoolExecutor(1) as another:
            successors.append(another.submit(_run_and_disconnect).result(PATIENCE_S))

    with at_step(Database, "fetch_at_once", "before", at_number(4, asleep)):
        zombie = run_sweep(LEASED)

    assert (zombie.outcome, zombie.reason, zombie.counts["deleted_rows"]) == ("lost_lease", "lease_lost", 20)
    assert (successors[0].outcome, successors[0].counts["deleted_rows"]) == ("done", 30)
    noted = audited()
    assert (noted["deleted"], noted["different"], noted["counted"]) == (50, 50, 50)


def _run_and_disconnect() -> RunResult:
    try:
        return run_sweep(LEASED)
    finally:
        database.close()


def test_run_that_ended_before_it_lost_its_lease_is_done(
    add_statuses: AddStatuses, redis_client: redis.Redis, settings: Settings, last_run: Callable[[], Run]
) -> None:
    # F4: its row is closed, whatever comes after
    add_statuses(5, DUE)

    def lose_it_at_the_end(counts: Counts) -> None:
        raise LeaseLost("too late")

    result = run_sweep(LEASED, on_batch=lose_it_at_the_end)

    assert (result.outcome, result.reason, result.error) == ("done", None, None)
    assert (last_run().outcome, last_run().counts["deleted_rows"]) == ("done", 5)


def test_hanging_batch_is_interrupted_when_the_lease_is_lost(
    add_statuses: AddStatuses, last_run: Callable[[], Run], lose_lease: LoseLease
) -> None:
    # L2
    add_statuses(25, DUE)

    def hang() -> None:
        lose_lease("statuses")
        never = threading.Event()
        for _ in range(LONG_ENOUGH_S * 100):
            never.wait(0.01)

    short = changed(LEASED, runtime=timedelta(seconds=2), lease=Lease("statuses", SHORT))
    result = run_sweep(in_transactions(short, at_number(2, hang)))

    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("lost_lease", "lease_lost", 10)
    assert isinstance(result.error, LeaseLost), "its message is retried"
    assert (last_run().outcome, last_run().counts["deleted_rows"]) == ("lost_lease", 10)
    assert UserStatus.select().count() == 15


def test_interrupted_run_whose_row_was_closed_is_not_retried(
    add_statuses: AddStatuses, redis_client: redis.Redis, admin: Connection, settings: Settings
) -> None:
    # L2: the one that took over does its work
    add_statuses(25, DUE)

    def taken_over(counts: Counts) -> None:
        with admin.cursor() as cursor:
            cursor.execute(f"UPDATE {settings.schema_name}.runs SET outcome = 'lost', finished_at = now()")
        raise LeaseLost("interrupted")

    result = run_sweep(LEASED, on_batch=taken_over)

    assert (result.outcome, result.reason) == ("lost_lease", "taken_over")
    assert isinstance(result.error, RunTakenOver)


def test_lease_of_an_attempt_without_a_row_goes_to_its_own_message(
    add_statuses: AddStatuses, redis_client: redis.Redis
) -> None:
    # F3: killed between acquiring and the first transaction; no row says that it is dead
    add_statuses(5, DUE)
    message = current_message.set(MessageContext("message-1"))
    try:
        dead = ExclusiveLease("statuses", TTL, worker=LEASED.name)
        assert dead.try_obtain() is not None

        result = run_sweep(LEASED)
    finally:
        current_message.reset(message)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 5)


def test_lease_of_another_message_without_a_row_is_left_alone(
    add_statuses: AddStatuses, redis_client: redis.Redis
) -> None:
    # L1: it may be about to begin
    add_statuses(5, DUE)
    message = current_message.set(MessageContext("message-1"))
    beginning = ExclusiveLease("statuses", TTL, worker=LEASED.name)
    assert beginning.try_obtain() is not None
    current_message.reset(message)

    assert run_sweep(LEASED).reason == "lease_held"
    assert beginning.renew()
