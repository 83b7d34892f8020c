"""A database that is sick rather than away (F8): locks on hot rows, statements that take too long, a failover to a
server that is read-only, no connection left. A run ends in bounded time and says why, as far as the ledger can be
reached; the next one goes on where it stopped, and nothing is done or counted twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg2
import pytest
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn

from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed
from tests.integration.conftest import AddStatuses, Locked, Plant
from tests.internals.database import Database, connect_to, database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Counts, Run
from tests.internals.workers import status_sweep as sweep
from tests.session_settings import set_in_session

_DIRECT = pytest.mark.direct_only(reason="it ends or counts the server's connections, which a pooler hides")

SMALL = changed(sweep, batch=10)
DUE = "now() - interval '1 hour' + interval '1 millisecond' * n"
#: Makes the deletion of each status from the 21st on do this first, in PL/pgSQL.
Sicken = Callable[[str], None]
#: The library's connections are cut, and new ones made with these further options.
FailOver = Callable[[str], None]


@pytest.fixture
def resumed(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    """Whether the last run went on where the one before it stopped."""
    caplog.set_level("INFO")
    return lambda: [record.resumed for record in caplog.records if record.message == "Run started"][-1]  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def fifty(add_statuses: AddStatuses) -> None:
    add_statuses(50, DUE)


@pytest.fixture
def sicken(plant: Plant) -> Sicken:
    return partial(plant, "DELETE ON user_statuses", "OLD.user_id > 20")


@pytest.fixture
def fail_over(postgres: Database, admin: Connection) -> FailOver:
    def cut(options: str) -> None:
        connection: Any = postgres.connection()
        with admin.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", (connection.get_backend_pid(),))
        postgres.connect_params["options"] += f" {options}"

    return cut


@pytest.fixture
def as_nobody_special(settings: Settings, postgres: Database, admin: Connection) -> Iterator[Database]:
    """The library's connections are those of a role that may have two at a time."""
    role, secret = f"role_{uuid4().hex[:12]}", uuid4().hex
    schemas = f"{settings.namespace}, {settings.schema_name}"
    with admin.cursor() as cursor:
        cursor.execute(
            f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 2 PASSWORD '{secret}';"
            f"GRANT ALL ON SCHEMA {schemas} TO {role};"
            f"GRANT ALL ON ALL TABLES IN SCHEMA {schemas} TO {role};"
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schemas} TO {role}"
        )
    limited = connect_to(make_dsn(settings.database_url, user=role, password=secret))
    database.initialize(limited)
    yield limited
    limited.close()
    database.initialize(postgres)
    with admin.cursor() as cursor:
        cursor.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_row_that_stays_locked_fails_the_run_and_the_next_continues(
    resumed: Callable[[], bool], sicken: Sicken, locked: Locked, admin: Connection, last_run: Callable[[], Run]
) -> None:
    # Each deletion counts down a row of the application's, which another session holds.
    with admin.cursor() as cursor:
        cursor.execute("CREATE TABLE totals (number integer); INSERT INTO totals VALUES (50)")
    sicken("UPDATE totals SET number = number - 1")
    set_in_session(database, "lock_timeout = '50ms'")

    with locked("UPDATE totals SET number = number"):
        held = run_sweep(SMALL)
        row = last_run()
    free = run_sweep(SMALL)

    assert (held.outcome, held.counts["deleted_rows"]) == ("failed", 20)
    assert (row.outcome, row.reason) == ("failed", "database: canceling statement due to lock timeout")
    assert (free.outcome, free.counts["deleted_rows"], resumed()) == ("done", 30, True)
    assert _totals() == 50


@pytest.mark.slow
def test_statement_timeout_fails_the_run_and_the_next_continues(
    resumed: Callable[[], bool], sicken: Sicken, last_run: Callable[[], Run]
) -> None:
    sicken("PERFORM pg_sleep(600)")
    set_in_session(database, "statement_timeout = '1s'")

    slow = run_sweep(SMALL)
    row = last_run()
    sicken("PERFORM 1")
    quick = run_sweep(SMALL)

    assert (slow.outcome, slow.counts["deleted_rows"]) == ("failed", 20)
    assert (row.outcome, row.reason) == ("failed", "database: canceling statement due to statement timeout")
    assert (quick.outcome, quick.counts["deleted_rows"], resumed()) == ("done", 30, True)
    assert _totals() == 50


def test_session_timeouts_end_a_batch_before_its_run_counts_as_dead(postgres: Database) -> None:
    limits = [
        postgres.execute_sql(f"SHOW {name}").fetchone()[0]
        for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    ]

    assert limits == ["30s", "10s", "1min"]


def test_locked_ledger_row_is_closed_by_the_next_run(
    resumed: Callable[[], bool], locked: Locked, admin: Connection, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    # Neither the batch nor the end of the run can be written.
    set_in_session(database, "lock_timeout = '50ms'")

    with ExitStack() as stack:
        holder = locked(f"SELECT * FROM {settings.schema_name}.runs FOR UPDATE")
        held = run_sweep(SMALL, on_batch=_after(2, lambda: stack.enter_context(holder)))
    _silence(admin, settings)
    free = run_sweep(SMALL)

    assert (held.outcome, held.reason) == ("failed", "database: canceling statement due to lock timeout")
    assert "Could not close the run" in [record.message for record in caplog.records]
    assert _outcomes() == [("lost", "taken_over"), ("done", None)]
    assert (free.counts["deleted_rows"], resumed(), _totals()) == (30, True, 50)


def test_full_disk_is_the_reason_even_if_the_traceback_does_not_fit(
    sicken: Sicken, plant: Plant, last_run: Callable[[], Run], settings: Settings
) -> None:
    full = "RAISE 'could not extend file' USING ERRCODE = 'disk_full'"
    sicken(full)
    plant(f"UPDATE ON {settings.schema_name}.runs", "NEW.traceback IS NOT NULL", full)

    failed = run_sweep(SMALL)

    row = last_run()
    assert (failed.outcome, failed.reason) == ("failed", "disk full: could not extend file")
    assert (row.outcome, row.reason, row.traceback) == ("failed", failed.reason, None)


@_DIRECT
@pytest.mark.one_server_only(reason="a URL of several hosts rejects a server that is read-only")
def test_failover_to_a_read_only_server_fails_the_run_but_no_row(
    resumed: Callable[[], bool],
    fail_over: FailOver,
    postgres: Database,
    admin: Connection,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
    reported: list[dict[str, Any]],
) -> None:
    given = postgres.connect_params["options"]

    failed_over = run_sweep(SMALL, on_batch=_after(2, lambda: fail_over("-c default_transaction_read_only=on")))
    meanwhile = run_sweep(SMALL)
    postgres.connect_params["options"] = given
    fail_over("")
    _silence(admin, settings)
    promoted = run_sweep(SMALL)

    assert failed_over.outcome == meanwhile.outcome == "failed"
    assert failed_over.reason is not None and failed_over.reason.endswith("in a read-only transaction")
    assert meanwhile.reason is not None and meanwhile.reason.endswith("in a read-only transaction")
    said = [record.message for record in caplog.records]
    assert "Could not close the run" in said and "A batch failed and is bisected" not in said
    assert [about for about in reported if "user_id" in about] == []
    assert _outcomes() == [("lost", "taken_over"), ("done", None)]
    assert (promoted.counts["deleted_rows"], resumed(), _totals()) == (30, True, 50)


def test_session_that_becomes_read_only_fails_the_run_but_no_row(
    postgres: Database, reported: list[dict[str, Any]], last_run: Callable[[], Run]
) -> None:
    # What a pooler in front does, which holds our connection while the servers behind it change.
    def become_read_only() -> None:
        set_in_session(postgres, "default_transaction_read_only = on")

    failed = run_sweep(SMALL, on_batch=_after(2, become_read_only))
    set_in_session(postgres, "default_transaction_read_only = off")

    assert (failed.outcome, failed.counts["deleted_rows"]) == ("failed", 20)
    assert "failed" not in failed.counts
    assert [about for about in reported if "user_id" in about] == []
    assert last_run().outcome is None, "the next one marks it lost"


@_DIRECT
def test_no_free_connection_at_the_start_fails_the_run_only(
    as_nobody_special: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with _all_connections_of(as_nobody_special):
        refused = run_sweep(SMALL)
    free = run_sweep(SMALL)

    assert refused.outcome == "failed" and refused.reason is not None
    assert "too many connections for role" in refused.reason
    assert (refused.run_id, refused.exit_code) == (None, 1)
    assert (free.outcome, free.counts["deleted_rows"], _outcomes()) == ("done", 50, [("done", None)])


@_DIRECT
def test_no_free_connection_in_a_run_fails_it_and_the_next_continues(
    resumed: Callable[[], bool],
    as_nobody_special: Database,
    admin: Connection,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExitStack() as stack:

        def cut_and_take() -> None:
            as_nobody_special.close()
            stack.enter_context(_all_connections_of(as_nobody_special))

        refused = run_sweep(SMALL, on_batch=_after(2, cut_and_take))
    _silence(admin, settings)
    free = run_sweep(SMALL)

    assert refused.outcome == "failed" and refused.reason is not None
    assert "too many connections for role" in refused.reason
    assert "Could not close the run" in [record.message for record in caplog.records]
    assert _outcomes() == [("lost", "taken_over"), ("done", None)]
    assert (free.counts["deleted_rows"], resumed(), _totals()) == (30, True, 50)


def _after(batches: int, do: Callable[[], object]) -> Callable[[Counts], None]:
    def maybe(counts: Counts) -> None:
        if counts["batches"] == batches:
            do()

    return maybe


@contextmanager
def _all_connections_of(limited: Database) -> Iterator[None]:
    """Another program of the same role has both connections."""
    held = [_connected(limited) for _ in range(2)]
    try:
        yield
    finally:
        for each in held:
            each.close()
        _connected(limited).close()


def _connected(limited: Database) -> Connection:
    # The server may be a moment behind in counting who has gone.
    deadline = time.monotonic() + 20
    while True:
        try:
            connection: Connection = psycopg2.connect(dbname=limited.database, **limited.connect_params)
            return connection
        except psycopg2.OperationalError:
            if time.monotonic() > deadline:
                raise


def _silence(admin: Connection, settings: Settings) -> None:
    """A minute passes, in which the run that is open gives no sign of life."""
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE {settings.schema_name}.runs SET heartbeat_at = now() - interval '61 seconds'")


def _outcomes() -> list[tuple[str | None, str | None]]:
    found: Any = Run.select(Run.outcome, Run.reason).order_by(Run.id).tuples()
    return list(found)


def _totals() -> int:
    """Return the deleted rows that the ledger counts, after comparing them with the table."""
    counted: int = sum(run.counts["deleted_rows"] for run in Run.select())
    assert counted == 50 - UserStatus.select().count()
    return counted
