"""A purge deletes the rows that its condition selects, in batches that its row in the ledger counts."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from tests.integration.conftest import Plant
from tests.integration.purge.conftest import EXPIRED, Left, purge
from tests.internals.core import RunTakenOver, WrongArgument
from tests.internals.database import Database
from tests.internals.engine import PurgeRequest, request_of, sweep_of
from tests.internals.insight import SORTED_ROWS, Batching, Plan, PurgePlan, plan_purge
from tests.internals.ledger import NOW, Override, Run, operators, runs
from tests.internals.sweeps import Backlog, StagePlan


def test_purge_deletes_the_selected_rows_in_batches(sessions: Left) -> None:
    result = purge(PurgeRequest(table="sessions", where=EXPIRED, batch_size=4))

    assert sessions() == [11, 12]
    assert (result.outcome, result.counts["deleted_rows"], result.counts["batches"]) == ("done", 10, 3)
    [run] = Run.select()
    assert (run.worker, run.outcome, run.counts["purge"]["where"]) == ("purge:sessions", "done", EXPIRED)


def test_batches_of_a_purge_grow(sessions: Left, clock: ManualClock) -> None:
    request = PurgeRequest(table="sessions", where=EXPIRED, batch_size=1)

    result = purge(request, sweep=sweep_of(request), clock=clock)

    # Of 1, 2, 5 and 2 rows.
    assert (result.counts["deleted_rows"], result.counts["batches"]) == (10, 4)


def test_second_purge_finds_nothing(sessions: Left) -> None:
    request = PurgeRequest(table="sessions", where=EXPIRED)
    purge(request)

    assert (purge(request).counts["deleted_rows"], sessions()) == (0, [11, 12])


@pytest.mark.parametrize(
    ("where", "left"),
    [
        ("note LIKE '%1%' OR id = 5", [2, 3, 4, 6, 7, 8, 9]),
        ("sessions.id <= 10 AND NOT EXISTS (SELECT 1 FROM orders WHERE orders.session_id = sessions.id)", [3, 11, 12]),
        ("id < (SELECT max(id) FROM sessions other WHERE other.id % 2 = sessions.id % 2)", [11, 12]),
        ("note = '(a) %s'", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
    ],
)
def test_condition_means_what_it_means_in_sql(sessions: Left, postgres: Database, where: str, left: list[int]) -> None:
    postgres.execute_sql("CREATE TABLE orders (session_id integer); INSERT INTO orders VALUES (3)")

    purge(PurgeRequest(table="sessions", where=where, batch_size=3))

    assert sessions() == left


def test_max_rows_limits_the_run(sessions: Left) -> None:
    result = purge(PurgeRequest(table="sessions", where=EXPIRED, batch_size=4, max_rows=6))

    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("partial", "limit", 6)
    assert sessions() == [7, 8, 9, 10, 11, 12]


def test_rows_are_deleted_in_the_given_order(sessions: Left) -> None:
    # A repeated column changes nothing.
    purge(PurgeRequest(table="sessions", where="true", order_by=("note", "note"), batch_size=2, max_rows=4))

    assert sessions() == [2, 3, 4, 5, 6, 7, 8, 9]  # as texts: 1, 10, 11, 12


def test_table_with_any_name_and_key_is_purged(postgres: Database, settings: Settings) -> None:
    postgres.execute_sql(
        'CREATE TABLE "Old Rows" ("Day" date, "the N" integer, PRIMARY KEY ("Day", "the N"));'
        "INSERT INTO \"Old Rows\" SELECT date '2026-01-01', n FROM generate_series(1, 5) AS n"
    )

    result = purge(
        PurgeRequest(table=f'{settings.namespace}."Old Rows"', where='"Old Rows"."the N" % 2 = 1', batch_size=2)
    )

    assert result.counts["deleted_rows"] == 3


def test_paused_purge_is_skipped(sessions: Left) -> None:
    operators.switch(Override("purge:sessions", "paused"))

    result = purge(PurgeRequest(table="sessions", where=EXPIRED))

    assert (result.outcome, result.reason, len(sessions())) == ("skipped", "paused", 12)


def test_interrupted_purge_is_resumed_from_its_cursor(sessions: Left, postgres: Database) -> None:
    first = purge(PurgeRequest(table="sessions", where=EXPIRED, batch_size=2, max_rows=8), on_batch=_pause_after(2))
    operators.resume("purge:sessions")
    assert (first.outcome, first.reason, first.run_id is not None) == ("partial", "paused", True)

    request = request_of(first.run_id or 0)
    second = purge(request)

    assert (request.where, request.batch_size, request.max_rows) == (EXPIRED, 2, 8 - first.counts["deleted_rows"])
    assert first.counts["deleted_rows"] + second.counts["deleted_rows"] == 8
    assert sessions() == [9, 10, 11, 12]
    with pytest.raises(WrongArgument, match="was resumed by run"):
        request_of(first.run_id or 0)


def test_resumed_purge_begins_behind_the_last_committed_batch(sessions: Left, postgres: Database) -> None:
    first = purge(PurgeRequest(table="sessions", where=EXPIRED, batch_size=2), on_batch=_pause_after(2))
    operators.resume("purge:sessions")
    postgres.execute_sql("INSERT INTO sessions VALUES (0, 'older', now() - interval '1 day')")
    assert sessions()[:2] == [0, 7]

    purge(replace(request_of(first.run_id or 0), max_rows=2))

    assert sessions()[:2] == [0, 9]


def test_time_limit_ends_a_purge_which_is_then_resumed(sessions: Left) -> None:
    first = purge(PurgeRequest(table="sessions", where=EXPIRED, batch_size=2, max_runtime_s=0.000001))
    assert (first.outcome, first.reason) == ("partial", "out_of_time")

    resumed = purge(replace(request_of(first.run_id or 0), max_runtime_s=None))

    assert (first.counts["deleted_rows"] + resumed.counts["deleted_rows"], sessions()) == (10, [11, 12])


def test_of_two_processes_that_resume_a_purge_one_begins(sessions: Left) -> None:
    first = purge(PurgeRequest(table="sessions", where=EXPIRED, batch_size=2, max_rows=8), on_batch=_pause_after(2))
    operators.resume("purge:sessions")
    request = request_of(first.run_id or 0)  # both have found it open

    one, other = purge(request), purge(request)

    assert (one.outcome, other.outcome, other.reason) == ("partial", "skipped", "already_done")
    assert sessions() == [9, 10, 11, 12]


def test_dead_purge_cannot_commit_once_it_is_resumed(sessions: Left) -> None:
    dead = purge(PurgeRequest(table="sessions", where=EXPIRED, batch_size=2, max_rows=8), on_batch=_pause_after(1))
    assert dead.run_id is not None
    Run.update(outcome=None, finished_at=None, heartbeat_at=NOW - 2 * runs.SILENCE).where(
        Run.id == dead.run_id
    ).execute()

    request = request_of(dead.run_id)

    with pytest.raises(RunTakenOver):
        runs.check(dead.run_id)
    assert request.max_rows == 8 - dead.counts["deleted_rows"]


def test_run_that_is_done_alive_or_no_purge_is_not_resumed(sessions: Left, postgres: Database) -> None:
    done = purge(PurgeRequest(table="sessions", where="id = 1")).run_id or 0
    full = purge(PurgeRequest(table="sessions", where=EXPIRED, max_rows=2)).run_id or 0
    alive = purge(PurgeRequest(table="sessions", where="id = 5")).run_id or 0
    Run.update(outcome=None, finished_at=None).where(Run.id == alive).execute()
    other = purge(PurgeRequest(table="sessions", where="id = 6")).run_id or 0
    Run.update(counts={}).where(Run.id == other).execute()

    for run_id, problem in (
        (done, "is done"),
        (full, "--max-rows"),
        (alive, "at work"),
        (other, "no purge"),
        (0, "no run"),
    ):
        with pytest.raises(WrongArgument, match=problem):
            request_of(run_id)


def test_plan_shows_rows_edges_index_and_statement(sessions: Left) -> None:
    request = PurgeRequest(table="sessions", where=EXPIRED, batch_size=4)

    planned = plan_purge(request, sweep_of(request))

    assert (planned.rows.rows, planned.plan.oldest, planned.plan.newest, planned.plan.batches) == (10, 1, 10, 3)
    assert planned.indexes == ("sessions_pkey",)
    assert not planned.is_sorted
    assert "DELETE FROM" in planned.statement
    assert EXPIRED in planned.statement
    assert len(sessions()) == 12
    assert not Run.select().exists()


def test_plan_speaks_of_the_where_and_of_no_declaration(sessions: Left, postgres: Database) -> None:
    postgres.execute_sql(
        "CREATE TABLE visits (session_id int REFERENCES sessions); CREATE INDEX ON visits (session_id)"
    )
    postgres.execute_sql("INSERT INTO visits VALUES (1)")
    request = PurgeRequest(table="sessions", where="true", order_by=("expires_at",))

    planned = plan_purge(request, sweep_of(request)).plan

    (visits,) = planned.dependents
    assert planned.warnings == [
        "2 matching rows are in the future (expires_at); check the direction of the comparison in --where"
    ]
    assert visits.text.endswith(": 1 of the first 12 matching rows is referenced and cannot be deleted")
    assert str(visits.way_out).startswith("leave referenced rows out of --where, or add --cascade")


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (
            PurgeRequest(table="keyless", where="true"),
            "needs to continue after any row; add one",
        ),
        (PurgeRequest(table="viewed", where="true"), "a view"),
        (PurgeRequest(table="nowhere", where="true"), "there is no table"),
        (PurgeRequest(table="noWhere", where="true"), "capitals in quotes: '\"noWhere\"'"),
        (PurgeRequest(table="a..b", where="true"), "'a..b'"),  # from PostgreSQL 16 on, a table that does not exist
        (PurgeRequest(table="percent", where="true"), "a percent sign"),
        (PurgeRequest(table="pg_catalog.pg_class", where="true"), "PostgreSQL itself"),
        (PurgeRequest(table="sessions", where="expires_at <"), "syntax error"),
        (PurgeRequest(table="sessions", where="nothing = 1"), 'column "nothing" does not exist'),
        (PurgeRequest(table="sessions", where="id"), "must be type boolean"),
        (PurgeRequest(table="sessions", where="id < 5 LIMIT 3"), "syntax error"),
        (PurgeRequest(table="sessions", where="id = $1"), "no parameter"),
        (PurgeRequest(table="sessions", where="id = 'a'"), "invalid input syntax"),
        (PurgeRequest(table="sessions", where="true", order_by=("at",)), "has no column 'at'"),
    ],
)
def test_wrong_request_is_rejected_in_one_line(
    sessions: Left, postgres: Database, request_: PurgeRequest, problem: str
) -> None:
    postgres.execute_sql(
        "CREATE TABLE keyless (id integer); CREATE VIEW viewed AS SELECT * FROM sessions;"
        'CREATE TABLE percent ("n%%" integer PRIMARY KEY)'
    )

    with pytest.raises(WrongArgument) as rejected:
        plan_purge(request_, sweep_of(request_))

    assert problem in str(rejected.value)
    assert "\n" not in str(rejected.value)


def test_library_s_own_table_is_rejected(postgres: Database, settings: Settings) -> None:
    with pytest.raises(WrongArgument, match="library's own"):
        sweep_of(PurgeRequest(table=f"{settings.schema_name}.runs", where="true"))


def test_order_of_a_large_table_needs_an_index(sessions: Left, postgres: Database) -> None:
    postgres.execute_sql('ALTER TABLE sessions RENAME note TO "Note"')
    request = PurgeRequest(table="sessions", where=EXPIRED, order_by=("Note",))
    assert plan_purge(request, sweep_of(request)).is_sorted  # a small table may be sorted
    postgres.execute_sql(
        f"INSERT INTO sessions SELECT n, '', now() FROM generate_series(100, {SORTED_ROWS + 100}) AS n;ANALYZE sessions"
    )

    with pytest.raises(WrongArgument, match="no index for --order-by Note,.*--force") as refused:
        plan_purge(request, sweep_of(request))

    assert plan_purge(request, sweep_of(request), force=True).is_sorted
    index = str(refused.value).partition("; ")[2].partition(", leave")[0]
    postgres.execute_sql(index.replace(" CONCURRENTLY", ""))
    assert not plan_purge(request, sweep_of(request)).is_sorted


def _pause_after(batches: int) -> Any:
    def pause(counts: dict[str, Any]) -> None:
        if counts["batches"] == batches:
            operators.switch(Override("purge:sessions", "paused"))

    return pause


@pytest.mark.parametrize(
    ("max_rows", "shown"),
    [(None, Backlog(5, exact=False)), (4, Backlog(4)), (5, Backlog(5)), (6, Backlog(5, exact=False))],
)
def test_plan_that_counted_too_few_rows_does_not_name_them_as_all(max_rows: int | None, shown: Backlog) -> None:
    request = PurgeRequest(table="sessions", where=EXPIRED, max_rows=max_rows)
    rows = StagePlan("rows", Backlog(5, exact=False), {})
    counted = Plan(request.worker, datetime.now(UTC), [(rows, Batching(5, 5, 1, 1))])

    assert PurgePlan(request, counted, (), False, (), "").rows == shown


def test_purge_tries_each_row_although_all_fail(postgres: Database, sessions: Left, plant: Plant) -> None:
    postgres.execute_sql(
        "INSERT INTO sessions SELECT n, NULL, now() - interval '1 day' FROM generate_series(100, 199) AS n"
    )
    plant("DELETE ON sessions", "OLD.id < 199", "RAISE EXCEPTION 'not this one'")

    result = purge(PurgeRequest(table="sessions", where="id >= 100"))

    assert (result.outcome, result.counts["deleted_rows"], result.counts["failed"]) == ("done", 1, 99)
