"""The workers on tables of real installations, and in sessions of any time zone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings, Sweep
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.integration.statements import watch_statements
from tests.integration.workers.ci_stuck_builds.tables import NOW, STALE, AddBuilds, Refuse
from tests.internals.database import Database, connect_to, database
from tests.internals.engine import run_sweep
from tests.internals.sweeps import Batch, TableStage
from tests.internals.workers import drop_canceling, drop_pending, drop_running, drop_scheduled

PARTITIONS = (101, 102)


@pytest.fixture
def twins(gitlab_builds: type[Build], add_builds: AddBuilds) -> type[Build]:
    """Each id in two partitions: stuck in one, recently updated in the other."""
    add_builds(30, "canceling", STALE, STALE, partition_id="101 + n % 2")
    add_builds(30, "canceling", STALE, NOW, partition_id="102 - n % 2")
    return gitlab_builds


def by_pair() -> dict[tuple[int, int], str]:
    return {(build.id, build.partition_id): build.status for build in Build.select()}


def test_drop_leaves_the_same_id_in_another_partition(twins: type[Build], clock: ManualClock) -> None:
    result = run_sweep(drop_canceling, clock=clock)

    assert result.counts["dropped"] == 30
    assert by_pair() == {
        (number, partition): "failed" if partition == 101 + number % 2 else "canceling"
        for number in range(1, 31)
        for partition in PARTITIONS
    }


def test_doom_leaves_the_same_id_in_another_partition(
    twins: type[Build],
    refuse: Refuse,
    reported: list[dict[str, Any]],
    heard: Callable[[], dict[str, list[dict[str, Any]]]],
    admin: Connection,
) -> None:
    # All are stuck now; one of two twins refuses the drop, one of two others everything.
    with admin.cursor() as cursor:
        cursor.execute(f"UPDATE p_ci_builds SET updated_at = {STALE}")
    refuse(
        "(OLD.id = 7 AND OLD.partition_id = 101 AND NEW.failure_reason IS DISTINCT FROM 12)"
        " OR (OLD.id = 8 AND OLD.partition_id = 102)"
    )

    result = run_sweep(drop_canceling, clock=ManualClock())

    assert result.counts == {"dropped": 58, "doomed": 1, "failed": 1, "out_of_time": False}
    assert {pair for pair, status in by_pair().items() if status == "canceling"} == {(8, 102)}
    assert {(about["build_id"], about["partition_id"]) for about in reported} == {(7, 101), (8, 102)}
    assert heard()["build_doomed"] == [
        {"build_id": 7, "project_id": 7, "pipeline_id": 5007, "partition_id": 101, "failure_reason": 12}
    ]
    assert len({(row["build_id"], row["partition_id"]) for row in heard()["build_dropped"]}) == 58


def test_single_partition_can_be_cleaned(gitlab_builds: type[Build], add_builds: AddBuilds, clock: ManualClock) -> None:
    # An installation may have its builds in `ci_builds`, which is the first partition of `p_ci_builds`.
    add_builds(5, "canceling", STALE, STALE, partition_id="100")
    add_builds(5, "canceling", STALE, STALE, partition_id="102")
    Build._meta.set_table_name("ci_builds")

    run_sweep(drop_canceling, clock=clock)

    Build._meta.set_table_name("p_ci_builds")
    assert {partition for (_, partition), status in by_pair().items() if status == "failed"} == {100}


@pytest.fixture
def elsewhere(settings: Settings, postgres: Database) -> Iterator[None]:
    """The library's sessions in another time zone, by the URL's options."""
    handle = connect_to(f"{settings.database_url}%20-ctimezone%3DAsia%2FTokyo")
    database.initialize(handle)
    yield
    handle.close()
    database.initialize(postgres)


@pytest.mark.parametrize(
    ("sweep", "status"),
    [
        (drop_canceling, "canceling"),
        pytest.param(drop_running, "running", marks=pytest.mark.slow),
        pytest.param(drop_scheduled, "scheduled", marks=pytest.mark.slow),
        pytest.param(drop_pending, "pending", marks=pytest.mark.slow),
    ],
)
def test_no_statement_of_a_run_scans_the_table(
    either: type[Build],
    elsewhere: None,
    add_builds: AddBuilds,
    admin: Connection,
    sweep: Sweep,
    status: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 備考: the order lets the planner use the index (status, created_at, project_id).
    add_builds(50_000, "success", f"{NOW} - interval '1 minute' * n", STALE)
    old = f"{NOW} - interval '2 days' - interval '1 minute' * n"
    add_builds(300, status, old, old, first_id=60_001, scheduled_at="timestamptz '2025-12-01 00:00:00+00'")
    with admin.cursor() as cursor:
        cursor.execute(f"ANALYZE {either._meta.table_name}")
    statements: list[str] = []
    (table,) = [each for each in sweep.stages_for_run() if isinstance(each, TableStage)]
    with monkeypatch.context() as noting, database.atomic() as transaction:
        watch_statements(noting, lambda sql: statements.append(sql), with_values=True)
        now = datetime(2026, 1, 1, tzinfo=UTC)
        first = table.apply(Batch(sweep.name, None, now))
        second = table.apply(Batch(sweep.name, None, now, first.position))
        positions = table.positions(Batch(sweep.name, None, now, second.position))
        table.fallback(Batch(sweep.name, None, now, only=positions[:1]), ValueError("no"))
        table.describe(positions[0])
        table.backlog(now, 1000)
        table.oldest(now)
        transaction.rollback()

    walks = [sql for sql in statements if either._meta.table_name in sql]
    plans = ["\n".join(row[0] for row in database.execute_sql(f"EXPLAIN {sql}")) for sql in walks]
    assert (first.counts, second.counts) == ({"dropped": 100}, {"dropped": 100})
    assert len(plans) >= 7
    assert [plan for plan in plans if "Seq Scan" in plan] == []
    assert "status_" in plans[0] and "status_" in plans[1], "the index of the document"
