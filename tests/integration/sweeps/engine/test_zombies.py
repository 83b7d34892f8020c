"""Runs that sleep, hang, or lose their lease or the answer to a COMMIT (L2, L3; scenarios F1, F2, F4)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis
from peewee import DataError, PostgresqlDatabase
from psycopg2.extensions import connection as Connection

from housekeeping.core.errors import LeaseLost, RunTakenOver
from housekeeping.core.settings import Settings
from housekeeping.core.telemetry.context import MessageContext, current_message
from housekeeping.database.connection import Database, database
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.sweeps import Sweep
from housekeeping.sweeps.checks.unique_keys import stages_of
from housekeeping.sweeps.engine.one_round_trip import REFUSED, OneRoundTrip
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.lease_config import LeaseConfig
from housekeeping.sweeps.ledger import batch_row, run_start
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.sweeps.stages.stage import Batch
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.workers.user_status_cleanup.models import UserStatus
from housekeeping.workers.user_status_cleanup.worker import sweep
from tests.faults import Where, at_number, at_step
from tests.integration.conftest import AddStatuses
from tests.integration.own_stages import in_transactions

TTL = timedelta(minutes=10)
SHORT = timedelta(seconds=3)
LEASED = dataclasses.replace(sweep, batch_size=10, lease=LeaseConfig("statuses", TTL))
DUE = "now() - interval '1 hour' + interval '1 millisecond' * n"
PATIENCE_S = 20
LONG_ENOUGH_S = 8  # several of the shortest ttl


@pytest.fixture
def audited(statuses: object, admin: Connection, settings: Settings) -> Callable[[], dict[str, Any]]:
    """What was committed, noted by triggers: which row was deleted how often, and by which epochs, in order."""
    runs_table = f"{settings.schema_name}.runs"
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE deletions (user_id bigint); CREATE TABLE commits (id serial, epoch bigint);"
            "CREATE FUNCTION note_deletion() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO deletions VALUES (OLD.user_id); RETURN OLD; END $$;"
            "CREATE TRIGGER note AFTER DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION note_deletion();"
            f"CREATE FUNCTION {settings.schema_name}.note_epoch() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN INSERT INTO {settings.namespace}.commits (epoch) VALUES (NEW.epoch); RETURN NEW; END $$;"
            # Not what closes a row that broke off: that is no effect, and comes after the successor's.
            f"CREATE TRIGGER note AFTER UPDATE ON {runs_table} FOR EACH ROW WHEN (NEW.error IS NULL) "
            f"EXECUTE FUNCTION {settings.schema_name}.note_epoch();"
        )

    def noted() -> dict[str, Any]:
        with admin.cursor() as cursor:
            cursor.execute("SELECT count(*), count(DISTINCT user_id) FROM deletions")
            deleted, different = cursor.fetchone() or (0, 0)
            cursor.execute("SELECT epoch FROM commits ORDER BY id")
            epochs = [epoch for (epoch,) in cursor.fetchall()]
            cursor.execute(f"SELECT coalesce(sum((counts->>'deleted_rows')::int), 0) FROM {runs_table}")
            (counted,) = cursor.fetchone() or (0,)
        return {"deleted": deleted, "different": different, "counted": counted, "epochs": epochs}

    return noted


def lose_the_lease(client: redis.Redis, settings: Settings) -> None:
    assert client.delete(f"{settings.namespace}:lease:statuses")


def test_zombie_that_wakes_within_a_batch_commits_nothing(
    add_statuses: AddStatuses,
    audited: Callable[[], dict[str, Any]],
    redis_client: redis.Redis,
    settings: Settings,
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
        lose_the_lease(redis_client, settings)
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


#: A pooler would use another server, so that the client keeps its connection.
_ENDS_ITS_SERVER = pytest.mark.direct_only(reason="it ends the server process of a connection")


def breaks(admin: Connection) -> Callable[[], None]:
    """Return a fault that ends this thread's connection, which then notices it."""

    def end() -> None:
        with admin.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 20000)", (database.connection().info.backend_pid,))
        assert database.obj is not None
        PostgresqlDatabase.execute_sql(database.obj, "SELECT 1")

    return end


def performed_twice(sweep: Sweep = LEASED) -> tuple[RunResult, RunResult]:
    """A run of a message, and of its retry."""
    message = current_message.set(MessageContext("message-1"))
    try:
        return run_sweep(sweep), run_sweep(sweep)
    finally:
        current_message.reset(message)


@_ENDS_ITS_SERVER
@pytest.mark.parametrize(("commit", "ends"), [(2, "failed"), (3, "failed"), (4, "done")])
def test_batch_with_an_unanswered_commit_is_counted_once(
    add_statuses: AddStatuses,
    audited: Callable[[], dict[str, Any]],
    redis_client: redis.Redis,
    admin: Connection,
    commit: int,
    ends: str,
) -> None:
    # F4: the last batch's COMMIT closes the run, which is done, whatever its process saw
    add_statuses(25, DUE)

    with at_step(Database, "commit", "after", at_number(commit, breaks(admin))):
        broken, retried = performed_twice(in_transactions(LEASED))

    assert broken.outcome == ends
    assert (retried.outcome, retried.reason) == (("skipped", "already_done") if ends == "done" else ("done", None))
    assert Run.select().where(Run.outcome == "done").count() == 1
    noted = audited()
    assert (noted["deleted"], noted["different"], noted["counted"]) == (25, 25, 25)


@_ENDS_ITS_SERVER
@pytest.mark.parametrize("where", ["before", "after"], ids=["lost before", "lost after"])
@pytest.mark.parametrize("number", [1, 2, 3], ids=["first", "second", "last"])
def test_batch_in_one_round_trip_survives_a_lost_connection(
    add_statuses: AddStatuses,
    audited: Callable[[], dict[str, Any]],
    redis_client: redis.Redis,
    admin: Connection,
    number: int,
    where: Where,
) -> None:
    # F4: the run reads what the batch has written, and continues
    add_statuses(25, DUE)

    with at_step(Database, "fetch_at_once", where, at_number(number, breaks(admin))):
        first, second = performed_twice()

    assert (first.outcome, first.counts["deleted_rows"], first.counts["batches"]) == ("done", 25, 3)
    assert (second.outcome, second.reason) == ("skipped", "already_done")
    noted = audited()
    assert (noted["deleted"], noted["different"], noted["counted"]) == (25, 25, 25)


def test_statement_that_outlives_its_connection_commits_nothing(
    add_statuses: AddStatuses, audited: Callable[[], dict[str, Any]], redis_client: redis.Redis, postgres: Database
) -> None:
    # The server still executes a batch when the run already continues on a new connection.
    add_statuses(5, DUE)
    begun = run_start.begin("w", message_id=None, tick=None, trigger="cli", lease=None)
    assert begun is not None and begun.heartbeat_at is not None
    late = OneRoundTrip("w", begun)
    (stage,) = [each for each in stages_of(LEASED) if isinstance(each, TableStage)]
    batch = Batch("w", begun.run_id, begun.started_at)
    counts = {"deleted_rows": 0, "batches": 0}

    assert batch_row.resynchronize(begun.run_id, begun.heartbeat_at) is None
    with pytest.raises(DataError, match=REFUSED):
        late.commit(stage, batch, counts=counts, cursor=None, ends_run=True)

    assert UserStatus.select().count() == 5


def test_zombie_that_wakes_before_its_statement_commits_nothing(
    add_statuses: AddStatuses,
    audited: Callable[[], dict[str, Any]],
    redis_client: redis.Redis,
    settings: Settings,
) -> None:
    # F1, L3
    add_statuses(50, DUE)
    successors: list[RunResult] = []

    def asleep() -> None:
        lose_the_lease(redis_client, settings)
        with ThreadPoolExecutor(1) as another:
            successors.append(another.submit(_run_and_disconnect).result(PATIENCE_S))

    with at_step(Database, "fetch_at_once", "before", at_number(3, asleep)):
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


@_ENDS_ITS_SERVER
def test_retry_closes_the_row_of_an_unanswered_first_commit(
    add_statuses: AddStatuses, redis_client: redis.Redis, admin: Connection
) -> None:
    # F4
    add_statuses(25, DUE)

    with at_step(Database, "commit", "after", at_number(1, breaks(admin))):
        broken, retried = performed_twice()

    assert (broken.outcome, retried.outcome, retried.counts["deleted_rows"]) == ("failed", "done", 25)
    assert [run.outcome for run in Run.select().order_by(Run.id)] == ["lost", "done"]


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
    add_statuses: AddStatuses,
    redis_client: redis.Redis,
    settings: Settings,
    last_run: Callable[[], Run],
) -> None:
    # L2
    add_statuses(25, DUE)

    def hang() -> None:
        lose_the_lease(redis_client, settings)
        never = threading.Event()
        for _ in range(LONG_ENOUGH_S * 100):
            never.wait(0.01)

    short = dataclasses.replace(LEASED, max_runtime=timedelta(seconds=2), lease=LeaseConfig("statuses", SHORT))
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
        dead = ExclusiveLease("statuses", TTL, with_epoch=False, worker=LEASED.name)
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
    beginning = ExclusiveLease("statuses", TTL, with_epoch=False, worker=LEASED.name)
    assert beginning.try_obtain() is not None
    current_message.reset(message)

    assert run_sweep(LEASED).reason == "lease_held"
    assert beginning.renew()
