"""Runs whose connection breaks, also between a COMMIT and its answer (scenario F4)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from peewee import DataError, PostgresqlDatabase
from psycopg2.extensions import connection as Connection

from housekeeping import Sweep
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed
from tests.faults import Where, at_number, at_step
from tests.integration.conftest import AddStatuses
from tests.integration.own_stages import in_transactions
from tests.integration.statements import end_session
from tests.integration.sweeps.engine import sizing
from tests.integration.sweeps.engine.audited import LEASED
from tests.integration.sweeps.engine.audited import audited as audited
from tests.integration.sweeps.engine.executed import DUE
from tests.integration.sweeps.orders import Order, Outside, add, sweep
from tests.internals.core import MessageContext, current_message
from tests.internals.database import Database, database
from tests.internals.engine import REFUSED, Commit, RunResult, run_sweep
from tests.internals.ledger import Run, runs
from tests.internals.sweeps import Batch, TableStage, stages_of

#: A pooler would use another server, so that the client keeps its connection.
_ENDS_ITS_SERVER = pytest.mark.direct_only(reason="it ends the server process of a connection")


def breaks(admin: Connection) -> Callable[[], None]:
    """Return a fault that ends this thread's connection, which then notices it."""

    def end() -> None:
        with admin.cursor() as cursor:
            end_session(cursor, database.connection().info.backend_pid)
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
@pytest.mark.parametrize(("commit", "ends"), [(1, "failed"), (2, "failed"), (3, "done")])
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
@pytest.mark.parametrize("number", [2, 3, 4], ids=["first", "second", "last"])  # the run's row is number 1
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


@_ENDS_ITS_SERVER
@pytest.mark.parametrize("where", ["before", "after"], ids=["lost before", "lost after"])
def test_batch_that_looks_before_its_commit_survives_a_lost_connection(
    add_statuses: AddStatuses,
    audited: Callable[[], dict[str, Any]],
    redis_client: redis.Redis,
    admin: Connection,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
    where: Where,
) -> None:
    # F4: it has a COMMIT of its own, after the look at sessions that wait for its locks
    add_statuses(35, sizing.DUE)
    adaptive = changed(LEASED, batch_takes=timedelta(seconds=1.5))

    with at_step(Database, "commit", where, at_number(1, breaks(admin))):
        result = run_sweep(adaptive, clock=clock, on_batch=lambda counts: clock.advance(timedelta(seconds=1.1)))

    assert (result.outcome, result.counts["deleted_rows"], result.counts["batches"]) == ("done", 35, 4)
    assert "The connection was lost, the run continues" in [each.message for each in caplog.records]
    noted = audited()
    assert (noted["deleted"], noted["different"], noted["counted"]) == (35, 35, 35)


@_ENDS_ITS_SERVER
def test_run_with_a_row_limit_ends_after_the_unanswered_batch_that_reaches_it(
    add_statuses: AddStatuses, redis_client: redis.Redis, admin: Connection
) -> None:
    # F4
    add_statuses(25, DUE)

    with at_step(Database, "fetch_at_once", "after", at_number(3, breaks(admin))):
        result = run_sweep(LEASED, max_rows=20)

    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("partial", "limit", 20)
    assert (UserStatus.select().count(), Run.get().outcome) == (5, "partial")


def test_statement_that_outlives_its_connection_commits_nothing(
    add_statuses: AddStatuses, audited: Callable[[], dict[str, Any]], redis_client: redis.Redis, postgres: Database
) -> None:
    # The server still executes a batch when the run already continues on a new connection.
    add_statuses(5, DUE)
    begun = runs.begin("w", message_id=None, tick=None, trigger="cli", lease=None)
    assert begun is not None and begun.heartbeat_at is not None
    late = Commit("w", begun, LEASED.texts)
    (stage,) = [each for each in stages_of(LEASED) if isinstance(each, TableStage)]
    batch = Batch("w", begun.run_id, begun.started_at)
    counts = {"deleted_rows": 0, "batches": 0}

    assert runs.resynchronize(begun.run_id, begun.heartbeat_at) is None
    with pytest.raises(DataError, match=REFUSED):
        late.in_one_statement(stage, batch, counts=counts, cursor=None, ends_run=True, all_stages=())

    assert UserStatus.select().count() == 5


@_ENDS_ITS_SERVER
def test_retry_closes_the_row_of_an_unanswered_begin(
    add_statuses: AddStatuses, redis_client: redis.Redis, admin: Connection
) -> None:
    # F4
    add_statuses(25, DUE)

    with at_step(Database, "fetch_at_once", "after", at_number(1, breaks(admin))):
        broken, retried = performed_twice()

    assert (broken.outcome, retried.outcome, retried.counts["deleted_rows"]) == ("failed", "done", 25)
    assert [run.outcome for run in Run.select().order_by(Run.id)] == ["lost", "done"]


@_ENDS_ITS_SERVER
def test_failed_rows_of_an_unanswered_commit_are_counted(postgres: Database, admin: Connection) -> None:
    # F4
    postgres.create_tables([Order])
    add(4)
    refusing = sweep(Outside(1, 2, 3, 4), batch=2)

    with at_step(Database, "commit", "after", at_number(3, breaks(admin))):
        broken = run_sweep(refusing)

    assert (broken.outcome, broken.counts["failed"]) == ("failed", 4)
