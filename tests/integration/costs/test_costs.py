"""Costs of each worker's runs, compared with the recorded ones, to notice increases.

``written.json`` holds the recorded costs. A run that exceeds them needs a decision. Lower a recorded cost that has
become too large, because it would hide the next increase. The tests record what they measure with
``HOUSEKEEPING_TEST_WRITE_COSTS=1``. Durations are measured by the benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, Final

import psycopg2
import pytest
import redis
from psycopg2.extensions import connection as Connection

from benchmarks.catalogue import COMPARISONS
from benchmarks.comparison import Place
from housekeeping import Delete, Rows, Settings, Sweep, install
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.batched_git_ref_updates.models import Deletion
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.costs.measuring import Costs, Meter, deviations
from tests.integration.middleware.step_worker import close
from tests.integration.statements import read_rows, watch_statements
from tests.internals.brokers import message_broker
from tests.internals.core import shared_redis
from tests.internals.database import Database
from tests.internals.engine import RunResult, register, run_sweep, send
from tests.internals.ledger import Run as RunRow
from tests.internals.workers import backends, configured_sweeps, stores

#: Runs a worker on this many stale rows of a comparison; returns its result and its cost.
Run = Callable[..., tuple[RunResult, Costs]]


class _NoGit:
    """Repositories whose refs cost nothing."""

    def locate(self, project_id: int) -> PurePath:
        return PurePath("/nowhere")

    def delete(self, repository: PurePath, refs: Any) -> None: ...


@pytest.fixture
def sweeps(counted: Database, settings: Settings, meter_client: redis.Redis, tmp_path: Path) -> Iterator[Any]:
    """Return all workers by name and settings, with this test's own targets."""
    brokers = []

    def composed(worker: str, **setting: Any) -> Sweep:
        (tmp_path / "store").mkdir(exist_ok=True)
        measured_settings = Settings.load(
            **settings.model_dump(include={"database_url", "redis_url", "namespace", "schema_name"}),
            workers={worker: setting},
            repositories_root=tmp_path,
            object_stores={"uploads": f"file://{tmp_path}/store"},
        )
        broker = message_broker(measured_settings)
        brokers.append(broker)
        install(broker, measured_settings.model_copy(update={"database_url": None}), workers=False)
        found = configured_sweeps(measured_settings)
        for sweep in found.values():
            register(broker, sweep)
        for client in (broker.client, shared_redis.get()):  # type: ignore[attr-defined]
            client.ping()
        return found[worker]

    yield composed
    for broker in brokers:
        close(broker)
    send.forget_all()
    backends.replace()
    backends.use_root(None)
    stores.configured.clear()


@pytest.fixture
def run(sweeps: Any, admin: Connection, settings: Settings, meter_client: redis.Redis, tmp_path: Path) -> Run:
    def perform_and_count(worker: str, argument: Any = None, **setting: Any) -> tuple[RunResult, Costs]:
        sweep = sweeps(worker, **setting)
        meter = Meter(admin, meter_client)
        # A stopped clock: work that is done at intervals is done once.
        result = run_sweep(sweep, argument, clock=ManualClock(datetime.now(UTC)))
        return result, meter.costs()

    return perform_and_count


@pytest.fixture
def fill(counted: Database, admin: Connection, settings: Settings, tmp_path: Path) -> Callable[[str, int, int], None]:
    """Create only the tables and stale rows of a comparison."""

    def made(name: str, rows: int, among: int) -> None:
        comparison = COMPARISONS[name]
        counted.create_tables(list(comparison.models))
        comparison.fill(admin, rows, among)
        comparison.prepare(Place("", settings.require_redis_url(), rows, tmp_path))

    return made


#: Name -> (comparison with the rows, stale rows, all rows, worker, its settings).
CASES: Final[dict[str, tuple[str, int, int, str, dict[str, Any]]]] = {
    "statuses by 100": ("statuses", 10_000, 10_000, "user_status_cleanup.batch", {}),
    "statuses by 1,000": ("statuses", 10_000, 10_000, "user_status_cleanup.batch", {"batch_size": 1000}),
    "imports": ("imports", 5_000, 5_000, "bulk_imports.stale_import", {}),
    "entities": ("entities", 1_000, 1_000, "bulk_imports.stale_import", {}),
    "builds": ("builds", 5_000, 5_000, "ci.stuck_builds.drop_canceling", {}),
    "uploads": ("uploads", 1_000, 10_000, "object_storage.delete_stale_direct_uploads", {}),
    "projects": ("projects", 1_000, 2_000, "batched_git_ref_updates.cleanup_scheduler", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_run_has_the_recorded_costs(fill: Callable[[str, int, int], None], run: Run, case: str) -> None:
    comparison, rows, among, worker, setting = CASES[case]
    fill(comparison, rows, among)

    result, costs = run(worker, **setting)

    assert result.outcome == "done"
    assert deviations(case, costs) == {}


@pytest.mark.parametrize("case", ["statuses by 100", "builds"])
def test_statement_of_a_batch_is_planned_once_and_reads_only_its_rows(
    counted: Database,
    admin: Connection,
    fill: Callable[[str, int, int], None],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    comparison, _, _, worker, setting = CASES[case]
    fill(comparison, 2_000, 20_000)
    with admin.cursor() as cursor:
        cursor.execute("ANALYZE")
    executed: list[str] = []
    read: list[int] = []

    def explain(sql: str) -> None:
        if "EXECUTE" not in sql or "EXPLAIN" in sql:
            return
        executed.append(sql)
        if len(executed) == 10:  # PostgreSQL plans for the values five times before it compares the costs
            *before, execution = sql.split("; ")
            with counted.atomic() as transaction:
                found = counted.execute_sql("; ".join((*before, f"EXPLAIN (ANALYZE, FORMAT JSON) {execution}")))
                read.extend(rows for _, rows in read_rows(found.fetchone()[0][0]["Plan"]))
                transaction.rollback()

    watch_statements(monkeypatch, explain)

    run(worker, **setting)

    assert max(read) <= 200
    if counted.server_version >= 140000:
        assert counted.execute_sql("SELECT custom_plans FROM pg_prepared_statements").fetchall() == [(5,)]


def test_project_cleanup_has_the_recorded_costs(counted: Database, admin: Connection, run: Run) -> None:
    counted.create_tables([Deletion])
    with admin.cursor() as cursor:
        cursor.execute(
            "INSERT INTO batched_git_ref_updates_deletions (project_id, ref) "
            "SELECT 1, 'refs/heads/fix-' || n FROM generate_series(1, 5000) AS n"
        )
    backends.replace(repositories=_NoGit(), deletion=_NoGit())

    result, costs = run("batched_git_ref_updates.project_cleanup", 1)

    assert result.counts["total_deletes"] == 5_000
    assert deviations("project cleanup", costs) == {}


def test_run_without_work_has_the_recorded_costs(counted: Database, run: Run) -> None:
    counted.create_tables([Build])

    result, costs = run("ci.stuck_builds.drop_canceling")

    assert result.outcome == "done"
    assert deviations("nothing stale", costs) == {}


@pytest.fixture
def expired(counted: Database, sweeps: Any) -> Sweep:
    """Return a sweep as an application declares it, with the guard that it has by default."""
    sweeps("user_status_cleanup.batch")
    rows = Rows(UserStatus, stale=lambda row, now: row.clear_status_at <= now, order="clear_status_at", action=Delete())
    return Sweep("shop.expired", rows)


@pytest.mark.parametrize("runs_before", [1, 12])
@pytest.mark.parametrize(
    ("worker", "batches"),
    [
        ("ci.stuck_builds.drop_canceling", 1),
        ("user_status_cleanup.batch", 1),
        ("bulk_imports.stale_import", 2),
        ("shop.expired", 1),
    ],
)
def test_idle_run_of_a_warm_worker_takes_few_statements(
    counted: Database,
    sweeps: Any,
    expired: Sweep,
    admin: Connection,
    meter_client: redis.Redis,
    worker: str,
    batches: int,
    runs_before: int,
) -> None:
    counted.create_tables([Build, UserStatus, *COMPARISONS["entities"].models])
    sweep = expired if worker == expired.name else sweeps(worker)
    for _ in range(runs_before):
        run_sweep(sweep)

    meter = Meter(admin, meter_client)
    result = run_sweep(sweep)

    # The override; begin with lease, row and the runs before; the database's health; a batch for each stage. From ten
    # runs on, the breaker counts the stale rows. Each of them is one round trip.
    counts = runs_before >= 10
    assert (result.outcome, meter.costs().statements) == ("done", 3 + counts + batches)
    assert (RunRow.get_by_id(result.run_id).backlog, RunRow.get_by_id(result.run_id).backlog_exact) == (0, True)


def test_rows_that_an_earlier_stage_leaves_are_in_the_backlog(
    fill: Callable[[str, int, int], None], run: Run, settings: Settings
) -> None:
    fill("imports", 3, 10)
    with closing(psycopg2.connect(settings.require_database_url())) as other, other.cursor() as cursor:
        cursor.execute("SELECT FROM bulk_imports WHERE status IN (0, 1) ORDER BY updated_at LIMIT 1 FOR UPDATE")

        result, _ = run("bulk_imports.stale_import")

    row = RunRow.get_by_id(result.run_id)
    assert (result.outcome, result.counts["timed_out_imports"], row.backlog, row.backlog_exact) == ("done", 2, 1, True)
