"""Any error that leaves the connection usable may be that of one row: the row fails alone, whatever the sweep does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import pytest
from peewee import SQL
from psycopg2.extensions import connection as Connection

from housekeeping import Delete, Guard, Limits, Rows, Settings, Sweep, Transition
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed, stage_of
from tests.integration.conftest import AddStatuses, Plant
from tests.integration.purge.conftest import purge
from tests.integration.roles import connected_as_a_role
from tests.integration.sweeps.engine.executed import DUE, SMALL
from tests.integration.sweeps.orders import Order, Outside, add, machine, stuck
from tests.integration.sweeps.orders import sweep as orders_sweep
from tests.integration.sweeps.stages.test_own_actions import Remove
from tests.integration.workers.bulk_imports.conftest import EACH, Tables
from tests.internals.database import Database, restore_declared_key
from tests.internals.engine import PurgeRequest, RunResult, restoration_of, run_sweep
from tests.internals.ledger import Rejection, Run
from tests.internals.sweeps import TableStage
from tests.internals.workers import IMPORT_MODELS as IMPORT_TABLES
from tests.internals.workers import drop_canceling
from tests.internals.workers import imports_sweep as stale_imports

#: What a trigger does for the bad row, in PL/pgSQL.
ERRORS: Final = {
    **{
        code: f"RAISE EXCEPTION 'not this one' USING ERRCODE = '{code}'"
        for code in (
            "45000",  # raised by an application
            "HK001",  # a code of its own
            "27000",  # triggered data change
            "42501",  # no right
            "44000",  # a view's check option
            "54001",  # stack depth
            "55000",  # not in the prerequisite state
            "0A000",  # not supported
            "HV000",  # a foreign table
            "XX000",  # internal
            "40001",  # serialization failure
            "53400",  # a configured limit
            "08006",  # lost connection
            "25006",  # read-only
            "57P01",  # shutdown
        )
    },
    "21000": "PERFORM (SELECT n FROM generate_series(1, 2) AS n)",
    "22012": "PERFORM 1 / 0",
    "42P01": "INSERT INTO no_such_audit VALUES (1)",
}
ROWS: Final = 30


@dataclass(frozen=True)
class Subject:
    """A sweep over thirty rows, the third of which a trigger refuses.

    Attributes:
      prepare: Creates the table and its rows.
      run: Runs the sweep.
      trigger: The event before which the trigger fires.
      bad: Condition of the row for which it does.
      counts: The counts of the run that are not 0.
    """

    prepare: Callable[[Database, Tables], None]
    run: Callable[[], RunResult]
    trigger: str
    bad: str
    counts: dict[str, int]


def _orders(postgres: Database, tables: Tables) -> None:
    postgres.create_tables([Order])
    add(ROWS)


def _statuses(postgres: Database, tables: Tables) -> None:
    postgres.create_tables([UserStatus])
    tables.do(f"INSERT INTO user_statuses (user_id, clear_status_at) SELECT n, {DUE} FROM generate_series(1, 30) n")
    tables.do(
        "CREATE TABLE old_statuses (LIKE user_statuses, archived_at timestamptz, archived_by_run bigint, "
        "PRIMARY KEY (archived_by_run, archived_at, user_id))"
    )


def _archived(postgres: Database, tables: Tables) -> None:
    _statuses(postgres, tables)
    run_sweep(_ARCHIVING)


def _imports(postgres: Database, tables: Tables) -> None:
    postgres.create_tables(list(IMPORT_TABLES.values()))
    tables.add_imports(ROWS)


def _entities(postgres: Database, tables: Tables) -> None:
    postgres.create_tables(list(IMPORT_TABLES.values()))
    tables.add_entities(ROWS)
    tables.add_trackers(EACH, "1")


def _builds(postgres: Database, tables: Tables) -> None:
    postgres.create_tables([Build])
    tables.do(
        "INSERT INTO ci_builds (id, type, status, created_at, updated_at, project_id, commit_id, lock_version) "
        "SELECT n, 'Ci::Build', 'canceling', timestamp '2025-12-01', timestamp '2025-12-01', n, n, 0 "
        "FROM generate_series(1, 30) AS n"
    )


def _expire(function: Callable[[Any], object] | None = None) -> Sweep:
    sweep = orders_sweep(function or (lambda order: None))
    return sweep if function else changed(sweep, action=Transition(machine, "expire"))


_ARCHIVING: Final = changed(SMALL, action=Delete(archive_to="old_statuses"))
_REMOVING: Final = Sweep(
    "shop.removed",
    Rows(Order, stale=stuck, order="updated_at", action=Remove(("removed",), ("removed",))),
    limits=Limits(batch=5, batch_takes=None),
)
_IMPORTS: Final = changed(stale_imports, options={"page_size": 10, "log_records": False}, batch=10)
_PURGE: Final = PurgeRequest(table="user_statuses", where="user_id > 0", batch_size=10)
_DELETED: Final = {"deleted_rows": 29, "failed": 1}


def _restore() -> RunResult:
    run: int = Run.select(Run.id).where(Run.worker == _ARCHIVING.name).scalar()
    return restoration_of(_ARCHIVING, run).carry_out(pause=True)


SUBJECTS: Final = {
    "delete": Subject(_statuses, lambda: run_sweep(SMALL), "DELETE ON user_statuses", "OLD.user_id = 3", _DELETED),
    "transition": Subject(
        _orders,
        lambda: run_sweep(_expire(), clock=ManualClock()),
        "UPDATE ON orders",
        "OLD.id = 3",
        {"moved_rows": 29, "failed": 1},
    ),
    "call": Subject(
        _orders,
        lambda: run_sweep(_expire(Outside()), clock=ManualClock()),
        "UPDATE ON orders",
        "OLD.id = 3",
        {"moved_rows": 29, "failed": 1},
    ),
    "own action": Subject(
        _orders,
        lambda: run_sweep(_REMOVING, clock=ManualClock()),
        "DELETE ON orders",
        "OLD.id = 3",
        {"removed": 29, "failed": 1},
    ),
    "archive": Subject(
        _statuses,
        lambda: run_sweep(_ARCHIVING),
        "INSERT ON old_statuses",
        "NEW.user_id = 3",
        {**_DELETED, "archived_rows": 29},
    ),
    "restore": Subject(
        _archived, _restore, "INSERT ON user_statuses", "NEW.user_id = 3", {"restored": 29, "failed": 1}
    ),
    "purge": Subject(_statuses, lambda: purge(_PURGE), "DELETE ON user_statuses", "OLD.user_id = 3", _DELETED),
    "imports": Subject(
        _imports,
        lambda: run_sweep(_IMPORTS, clock=ManualClock()),
        "UPDATE ON bulk_imports",
        "OLD.id = 3",
        {"timed_out_imports": 29, "failed": 1},
    ),
    "entities": Subject(
        _entities,
        lambda: run_sweep(_IMPORTS, clock=ManualClock()),
        "UPDATE ON bulk_import_entities",
        "OLD.id = 3",
        {"timed_out_entities": 29, "timed_out_trackers": 29, "failed": 1},
    ),
    "trackers": Subject(
        _entities,
        lambda: run_sweep(_IMPORTS, clock=ManualClock()),
        "UPDATE ON bulk_import_trackers",
        "OLD.bulk_import_entity_id = 3",
        {"timed_out_entities": 29, "timed_out_trackers": 29, "failed": 1},
    ),
    "builds": Subject(
        _builds,
        lambda: run_sweep(changed(drop_canceling, batch=10, lease=None), clock=ManualClock()),
        "UPDATE ON ci_builds",
        "OLD.id = 3 AND NEW.failure_reason IS DISTINCT FROM 12",
        {"dropped": 29, "doomed": 1},
    ),
}
#: Pairs that every run of the tests has; the others are slow.
_OFTEN: Final = {("delete", code) for code in ERRORS} | {
    (name, code) for name in SUBJECTS for code in ("45000", "42P01")
}


@pytest.fixture
def declared_keys() -> Iterator[None]:
    yield
    restore_declared_key(Build)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param(name, code, marks=() if (name, code) in _OFTEN else pytest.mark.slow)
        for name in SUBJECTS
        for code in ERRORS
    ],
)
def test_row_with_any_error_fails_alone(
    postgres: Database, admin: Connection, plant: Plant, declared_keys: None, name: str, code: str
) -> None:
    subject = SUBJECTS[name]
    subject.prepare(postgres, Tables(admin))
    plant(subject.trigger, subject.bad, ERRORS[code])

    result = subject.run()

    changed = {key: value for key, value in result.counts.items() if type(value) is int and value and key != "batches"}
    assert (result.outcome, {key: changed.get(key) for key in subject.counts}) == ("done", subject.counts)


@pytest.mark.parametrize("bad", ["= 1", "= 16", "= 30", "IN (1, 6)"])
def test_probed_row_with_an_error_of_its_statement_fails_alone(
    add_statuses: AddStatuses, plant: Plant, bad: str
) -> None:
    # The first, middle and last row of a batch are probed.
    add_statuses(ROWS, DUE)
    plant("DELETE ON user_statuses", f"OLD.user_id {bad}", ERRORS["42P01"])

    result = run_sweep(SMALL)

    left = [row.user_id for row in UserStatus.select().where(SQL(f"NOT user_id {bad}"))]
    assert (result.outcome, left) == ("done", [])
    assert result.counts["failed"] == UserStatus.select().count() > 0


def test_batch_whose_probed_rows_all_failed_is_bisected_by_the_next_run(
    add_statuses: AddStatuses, plant: Plant
) -> None:
    # Once the statement has changed rows, it cannot be wrong by itself.
    add_statuses(ROWS, DUE)
    plant("DELETE ON user_statuses", "OLD.user_id IN (1, 6, 10)", ERRORS["42P01"])

    first, second = run_sweep(SMALL), run_sweep(SMALL)

    assert (first.outcome, first.counts.get("failed")) == ("failed", None)
    assert (second.outcome, second.counts["failed"]) == ("done", 3)
    assert [row.user_id for row in UserStatus.select().order_by(UserStatus.user_id)] == [1, 6, 10]


@pytest.mark.direct_only(reason="it gives a session another role")
def test_row_that_a_policy_refuses_fails_alone(postgres: Database, settings: Settings, admin: Connection) -> None:
    _orders(postgres, Tables(admin))
    Tables(admin).do(
        "ALTER TABLE orders ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY seen ON orders USING (true) WITH CHECK (id <> 3 OR status = 'pending')"
    )

    with connected_as_a_role(postgres, settings, admin, {"orders": ("SELECT", "UPDATE")}):
        result = run_sweep(_expire(), clock=ManualClock())

    assert (result.outcome, result.counts["moved_rows"], result.counts["failed"]) == ("done", 29, 1)


@pytest.mark.direct_only(reason="it gives a session another role")
def test_missing_right_fails_the_run_and_no_row(
    postgres: Database, settings: Settings, admin: Connection, add_statuses: AddStatuses, statements: list[str]
) -> None:
    add_statuses(1000, DUE)

    with connected_as_a_role(postgres, settings, admin, {"user_statuses": ("SELECT", "UPDATE")}):
        statements.clear()
        result = run_sweep(SMALL)
        error = Run.get_by_id(result.run_id).error

    assert (result.outcome, result.reason) == ("failed", "database: permission denied for table user_statuses")
    assert str(error).endswith("user_statuses; housekeeping doctor names missing rights, tables and columns")
    assert (result.counts.get("failed", 0), Rejection.select().count()) == (0, 0)
    assert len([sql for sql in statements if "DELETE" in sql or "EXECUTE" in sql]) < 20


@pytest.mark.direct_only(reason="it gives a session another role")
def test_right_that_is_revoked_during_a_run_fails_it_and_no_row(
    postgres: Database, settings: Settings, admin: Connection, add_statuses: AddStatuses
) -> None:
    add_statuses(ROWS, DUE)

    def revoke(counts: Any) -> None:
        Tables(admin).do(f"REVOKE DELETE ON user_statuses FROM {role}")

    with connected_as_a_role(postgres, settings, admin, {"user_statuses": ("SELECT", "UPDATE", "DELETE")}) as role:
        result = run_sweep(SMALL, on_batch=revoke)

    assert (result.outcome, result.reason) == ("failed", "database: permission denied for table user_statuses")
    assert result.counts.get("failed", 0) == Rejection.select().count() == 0
    assert 0 < UserStatus.select().count() < ROWS


@pytest.mark.parametrize(
    ("condition", "text"),
    [("1 / (user_id - user_id) = 1", "division by zero"), ("no_such_column = 1", 'column "no_such_column"')],
)
def test_condition_that_cannot_be_read_fails_the_run_and_no_row(
    add_statuses: AddStatuses, condition: str, text: str
) -> None:
    add_statuses(ROWS, DUE)

    unreadable: Any = SQL(condition)

    result = run_sweep(changed(SMALL, stale=lambda row: unreadable))

    assert result.outcome == "failed" and text in str(result.reason)
    assert result.counts.get("failed", 0) == 0


def test_table_with_a_rule_fails_the_run_and_no_row(add_statuses: AddStatuses, admin: Connection) -> None:
    add_statuses(ROWS, DUE)
    logged = "CREATE RULE logged AS ON DELETE TO user_statuses DO ALSO INSERT INTO log VALUES (1)"
    Tables(admin).do(f"CREATE TABLE log (id bigint); {logged}")

    result = run_sweep(SMALL)

    assert result.outcome == "failed" and "rules are not supported" in str(result.reason)
    assert result.counts.get("failed", 0) == Rejection.select().count() == 0


def test_stage_that_cannot_be_read_does_not_keep_the_next(add_statuses: AddStatuses) -> None:
    add_statuses(ROWS, DUE)
    conditions = {"unreadable": "1 / (user_id - user_id) = 1", "good": "user_id > 0"}
    stages = [
        TableStage(name=name, stale=partial(_condition, text), order=stage_of(SMALL).order, action=Delete())
        for name, text in conditions.items()
    ]
    sweep = Sweep(
        "shop.two_stages", lambda _: stages, limits=Limits(runtime=timedelta(minutes=1)), guard=Guard(first_run=False)
    )

    result = run_sweep(sweep)

    assert (result.outcome, result.reason) == ("failed", "database: division by zero")
    assert (result.counts["deleted_rows"], result.counts.get("failed", 0)) == (ROWS, 0)


def _condition(text: str, now: datetime) -> Any:
    return SQL(text) & UserStatus.scheduled_for_cleanup(now)


def test_trigger_that_is_wrong_for_every_row_fails_the_run_and_no_row(add_statuses: AddStatuses, plant: Plant) -> None:
    add_statuses(500, DUE)
    plant("DELETE ON user_statuses", "true", ERRORS["42P01"])

    result = run_sweep(SMALL)

    assert (result.outcome, result.reason) == ("failed", 'database: relation "no_such_audit" does not exist')
    assert result.counts.get("failed", 0) == 0


@pytest.mark.parametrize(("code", "outcome"), [("42P01", "failed"), ("45000", "done")])
def test_imports_that_all_fail_do_not_keep_entities(
    postgres: Database, admin: Connection, plant: Plant, code: str, outcome: str
) -> None:
    tables = Tables(admin)
    _imports(postgres, tables)
    tables.add_entities(ROWS)
    plant("UPDATE ON bulk_imports", "true", ERRORS[code])

    result = run_sweep(_IMPORTS, clock=ManualClock())

    assert (result.outcome, result.counts["timed_out_imports"]) == (outcome, 0)
    assert result.counts["timed_out_entities"] == ROWS


def test_bad_row_among_the_rows_of_later_runs_is_not_in_their_way(add_statuses: AddStatuses, plant: Plant) -> None:
    plant("DELETE ON user_statuses", "OLD.user_id = 1", ERRORS["42501"])
    add_statuses(ROWS, DUE)
    run_sweep(SMALL)
    add_statuses(ROWS, DUE, first_id=100)

    result = run_sweep(SMALL)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 30, 1)
