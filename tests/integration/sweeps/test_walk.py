"""The engine: what holds for every sweep, shown on one."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.foundation import events
from housekeeping.foundation.db import Database, database
from housekeeping.foundation.settings import Settings
from housekeeping.sweeps.ledger import Counts
from housekeeping.sweeps.own_tables import Run
from housekeeping.sweeps.results import RunResult
from housekeeping.sweeps.run import perform
from housekeeping.testing import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from housekeeping.workers.user_status_cleanup.worker import sweep
from tests.integration.conftest import AddStatuses

SMALL = dataclasses.replace(sweep, batch_size=10)
DUE = "now() - interval '1 hour' + interval '1 millisecond' * n"


@pytest.fixture
def refuse_deletion_of(admin: Connection, statuses: type[UserStatus]) -> Callable[[str], None]:
    """Make the database refuse to delete the rows of a condition, as a foreign key or trigger would."""

    def refuse(condition: str) -> None:
        with admin.cursor() as cursor:
            cursor.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN IF {condition} THEN RAISE EXCEPTION 'still needed'; END IF; RETURN OLD; END $$;"
                "CREATE TRIGGER refuse BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION refuse()"
            )

    return refuse


def test_one_poison_row_costs_itself_only(
    add_statuses: AddStatuses, refuse_deletion_of: Callable[[str], None], reported: list[dict[str, Any]]
) -> None:
    add_statuses(10_000, DUE)
    refuse_deletion_of("OLD.user_id = 5005")

    result = perform(sweep)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 9_999, 1)
    assert [row.user_id for row in UserStatus.select()] == [5005]
    assert [about["user_id"] for about in reported] == [5005]


def test_a_batch_of_nothing_but_poison_is_passed(
    add_statuses: AddStatuses, refuse_deletion_of: Callable[[str], None]
) -> None:
    add_statuses(35, DUE)
    refuse_deletion_of("OLD.user_id BETWEEN 11 AND 20")

    result = perform(SMALL)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 25, 10)


def test_each_batch_is_one_transaction_with_its_counts(
    add_statuses: AddStatuses, admin: Connection, last_run: Callable[[], Run]
) -> None:
    add_statuses(25, DUE)
    seen: list[tuple[int, int]] = []

    def look(counts: Counts) -> None:
        with admin.cursor() as cursor:
            cursor.execute("SELECT 25 - count(*) FROM user_statuses")
            gone = cursor.fetchall()[0][0]
        seen.append((gone, last_run().counts["deleted_rows"]))

    perform(SMALL, on_batch=look)

    assert seen == [(10, 10), (20, 20), (25, 25)]


def test_a_run_costs_five_statements_a_batch_and_one_commit(
    add_statuses: AddStatuses, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_statuses(95, DUE)
    statements: list[str] = []
    execute_sql = Database.execute_sql

    def execute_and_note(self: Database, sql: str, params: Any = None) -> Any:
        statements.append(sql)
        return execute_sql(self, sql, params)

    monkeypatch.setattr(Database, "execute_sql", execute_and_note)

    perform(SMALL)

    deletes = [sql for sql in statements if "DELETE FROM" in sql]
    updates = [sql for sql in statements if sql.startswith("UPDATE") and '"counts"' in sql]
    assert (len(deletes), len(updates)) == (10, 10)
    # The rest does not grow with the batches: pause, lost runs, the last runs, the row, the gates, the backlog.
    assert len(statements) - len(deletes) - len(updates) <= 7


def test_a_shutdown_ends_the_run_after_its_batch_and_the_next_goes_on_there(
    add_statuses: AddStatuses, admin: Connection
) -> None:
    # R5
    add_statuses(50, DUE)
    stopping = threading.Event()

    first = perform(SMALL, stopping=stopping, on_batch=lambda counts: stopping.set())
    add_statuses(1, "now() - interval '2 hours'", first_id=1000)
    second = perform(SMALL)
    third = perform(SMALL)

    assert (first.outcome, first.reason, first.counts["deleted_rows"]) == ("partial", "shutdown", 20)
    assert (second.outcome, second.counts["deleted_rows"]) == ("done", 30)
    assert third.counts["deleted_rows"] == 1, "a run after one that ended well starts at the front again"


def test_a_run_cut_off_from_the_database_is_failed_with_true_counts(
    add_statuses: AddStatuses, admin: Connection, postgres: Database, last_run: Callable[[], Run]
) -> None:
    add_statuses(50, DUE)

    def cut(counts: Counts) -> None:
        if counts["batches"] == 2:
            with admin.cursor() as cursor:
                cursor.execute(
                    "CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS "
                    "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN OLD; END $$;"
                    "CREATE TRIGGER cut BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION cut()"
                )

    result = perform(SMALL, on_batch=cut)

    assert result.outcome == "failed" and result.reason is not None and result.reason.startswith("database: ")
    assert result.counts["deleted_rows"] == 20
    assert (last_run().outcome, last_run().counts["deleted_rows"]) == ("failed", 20)
    assert UserStatus.select().count() == 30


def test_the_run_after_a_failed_one_goes_on_from_its_cursor(
    add_statuses: AddStatuses, last_run: Callable[[], Run]
) -> None:
    add_statuses(50, DUE)
    result = perform(SMALL, on_batch=_raise_after(2))

    assert (result.outcome, result.reason) == ("failed", "the disk is full")
    again = perform(SMALL)
    assert (again.outcome, again.counts["deleted_rows"]) == ("done", 30)


def _raise_after(batches: int) -> Callable[[Counts], None]:
    def fail(counts: Counts) -> None:
        if counts["batches"] == batches:
            raise OSError("the disk is full")

    return fail


def test_a_zombie_commits_nothing_once_another_run_took_over(
    add_statuses: AddStatuses, admin: Connection, settings: Settings
) -> None:
    # design.md, State in PostgreSQL: a run that was only asleep ends without a row of its own.
    add_statuses(50, DUE)
    others: list[RunResult] = []

    def sleep_and_be_taken_over(counts: Counts) -> None:
        if counts["batches"] == 1 and not others:
            with admin.cursor() as cursor:
                cursor.execute(f"UPDATE {settings.schema_name}.runs SET heartbeat_at = now() - interval '61 seconds'")
            others.append(perform(SMALL))

    zombie = perform(SMALL, on_batch=sleep_and_be_taken_over)

    assert (others[0].outcome, others[0].counts["deleted_rows"]) == ("done", 40)
    assert (zombie.outcome, zombie.reason) == ("lost_lease", "taken_over")
    rows = list(Run.select(Run.outcome, Run.counts).order_by(Run.id))
    assert [row.outcome for row in rows] == ["lost", "done"]
    assert sum(row.counts["deleted_rows"] for row in rows) == 50


def test_a_run_that_still_gives_signs_of_life_is_not_taken_over(add_statuses: AddStatuses) -> None:
    add_statuses(50, DUE)
    others: list[RunResult] = []

    def run_beside(counts: Counts) -> None:
        if not others:
            others.append(perform(SMALL))

    result = perform(SMALL, on_batch=run_beside)

    assert (result.outcome, others[0].outcome) == ("done", "done")


def test_the_alarms_ring_at_their_limit_and_not_before(
    add_statuses: AddStatuses, locked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    few = dataclasses.replace(SMALL, alarms=dataclasses.replace(sweep.alarms, backlog=10))
    add_statuses(11, DUE)

    with locked("SELECT * FROM user_statuses WHERE user_id <= 10 FOR UPDATE"):
        perform(few)
        at_the_limit = alarms(caplog)
        add_statuses(1, DUE, first_id=100)
        with locked("SELECT * FROM user_statuses WHERE user_id = 100 FOR UPDATE"):
            perform(few)

    assert at_the_limit == []
    assert alarms(caplog) == ["backlog"]


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "alarm", "") for record in caplog.records if record.message == "Alarm"]


def test_a_run_over_its_longest_time_rings(add_statuses: AddStatuses, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(tick=sweep.max_runtime * 3)
    add_statuses(1, "timestamptz '2025-01-01 00:00:00+00'")

    perform(sweep, clock=clock)

    assert alarms(caplog) == ["longest_run"]


def test_a_paused_worker_is_skipped_and_the_tick_says_so(
    add_statuses: AddStatuses, admin: Connection, settings: Settings, last_run: Callable[[], Run]
) -> None:
    add_statuses(5, DUE)
    with admin.cursor() as cursor:
        cursor.execute(f"INSERT INTO {settings.schema_name}.switches VALUES ('{sweep.name}', 'paused', 'migration')")

    result = perform(sweep)

    assert (result.outcome, result.reason, result.exit_code) == ("skipped", "paused", 0)
    assert (last_run().outcome, last_run().reason) == ("skipped", "paused")
    assert perform(sweep, force=True).counts["deleted_rows"] == 5


def test_a_deadlock_costs_the_batch_another_try_and_nothing_else(
    add_statuses: AddStatuses, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    # F8. The first deletion ends as a deadlock's victim does; the sequence survives its rollback.
    add_statuses(25, DUE)
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE SEQUENCE tries; CREATE FUNCTION once() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN IF nextval('tries') = 1 THEN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END IF;"
            " RETURN OLD; END $$;"
            "CREATE TRIGGER once BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION once()"
        )

    result = perform(SMALL)

    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("done", None, 25)
    assert [record.message for record in caplog.records].count("A batch is tried again") == 1


def test_a_deadlock_at_every_try_fails_the_run(add_statuses: AddStatuses, admin: Connection) -> None:
    add_statuses(25, DUE)
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION always() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$;"
            "CREATE TRIGGER always BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION always()"
        )

    result = perform(SMALL)

    assert (result.outcome, result.reason) == ("failed", "database: deadlock")


def test_a_hot_lock_fails_the_run_in_bounded_time_and_the_next_goes_on(
    add_statuses: AddStatuses, admin: Connection, settings: Settings, locked: Any
) -> None:
    # F8. Another session holds the whole table; the wait is the session's lock_timeout, here shortened.
    add_statuses(25, DUE)
    database.execute_sql("SET lock_timeout = '50ms'")

    with locked("LOCK TABLE user_statuses IN ACCESS EXCLUSIVE MODE"):
        held = perform(SMALL)
    free = perform(SMALL)

    assert (held.outcome, held.reason) == ("failed", "database: canceling statement due to lock timeout")
    assert (free.outcome, free.counts["deleted_rows"]) == ("done", 25)


def test_a_run_logs_one_line_when_it_starts_and_one_when_it_ends(
    add_statuses: AddStatuses, caplog: pytest.LogCaptureFixture
) -> None:
    add_statuses(25, DUE)

    with caplog.at_level("INFO"):
        result = perform(SMALL)

    started, ended = (record for record in caplog.records if record.message in ("Run started", "Run ended"))
    assert (started.message, vars(started)["run_id"], vars(started)["worker"]) == (
        "Run started",
        result.run_id,
        "user_status_cleanup.batch",
    )
    fields = ("outcome", "deleted_rows", "batches", "out_of_time", "run_id")
    assert [vars(ended)[name] for name in fields] == ["done", 25, 3, False, result.run_id]


def test_subscribers_hear_of_each_batch_after_its_commit_and_one_that_raises_harms_nothing(
    add_statuses: AddStatuses, reported: list[dict[str, Any]]
) -> None:
    add_statuses(25, DUE)
    heard: list[tuple[int, int]] = []

    def fail(sender: str, **event: Any) -> None:
        raise OSError("the mail server is away")

    def listen(sender: str, *, rows: list[dict[str, Any]], worker: str, run_id: int) -> None:
        assert not database.in_transaction()
        heard.append(
            (len(rows), UserStatus.select().where(UserStatus.user_id.in_([r["user_id"] for r in rows])).count())
        )

    with events.user_status_cleared.connected_to(fail), events.user_status_cleared.connected_to(listen):
        result = perform(SMALL)

    assert result.outcome == "done"
    assert heard == [(10, 0), (10, 0), (5, 0)]
    assert {str(about["error"]) for about in reported} == {"the mail server is away"}
