"""Workers that change rows of one table: statuses, imports, entities, builds; and statuses by backlog and processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection

from benchmarks.comparison import FLOOR, LINES, OURS, WARM, Comparison, Contestant, Place
from benchmarks.contestants import Floor, composed, ours, run
from benchmarks.pooler import through_pgbouncer
from housekeeping import RowLog, run_sweep
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity, BulkImportTracker
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.user_status_cleanup.models import UserStatus

STATUSES: Final = "user_status_cleanup.batch"
_IMPORTS: Final = "bulk_imports.stale_import"
_BUILDS: Final = "ci.stuck_builds.drop_canceling"
#: Lateral joins: whether row n of ``among`` is one of the stale ones, which are spread evenly.
_SPREAD: Final = """
LATERAL (SELECT n * %(rows)s / %(among)s > (n - 1) * %(rows)s / %(among)s) AS one (stale),
LATERAL (SELECT now() - interval '20 hours' * random()
                - CASE WHEN stale THEN interval '26 hours' ELSE interval '0' END) AS moved (at)
"""


def _filling(statement: str) -> Callable[[Connection, int, int], None]:
    def fill(connection: Connection, rows: int, among: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement.replace("SPREAD", _SPREAD), {"rows": rows, "among": among})

    return fill


fill_statuses: Final = _filling("""
INSERT INTO user_statuses (user_id, emoji, message, clear_status_at)
SELECT n, 'palm_tree', 'On holiday until the ' || n %% 28,
       CASE
         WHEN n * %(rows)s / %(among)s > (n - 1) * %(rows)s / %(among)s THEN now() - interval '2 days' * random()
         WHEN n %% 2 = 0 THEN now() + interval '1 day' + interval '30 days' * random()
       END
FROM generate_series(1::bigint, %(among)s) AS n
""")
_FILL_IMPORTS: Final = """
INSERT INTO bulk_imports (user_id, source_type, status, created_at, updated_at)
SELECT n %% 5000, 0, CASE WHEN stale THEN n %% 2 ELSE (ARRAY[0, 1, 2, 2, 2, 3, -1, -2])[1 + n %% 8] END, at, at
FROM generate_series(1::bigint, %(among)s) AS n, SPREAD
"""
_FILL_ENTITIES: Final = """
INSERT INTO bulk_imports (user_id, source_type, status) SELECT n, 0, 2 FROM generate_series(1, 100) AS n;
INSERT INTO bulk_import_entities (bulk_import_id, namespace_id, source_type, source_full_path, destination_name,
    destination_namespace, status, created_at, updated_at)
SELECT 1 + n %% 100, n, 0, 'acme/team-' || n, 'team-' || n, 'moved', CASE WHEN stale THEN n %% 2 ELSE 2 END, at, at
FROM generate_series(1::bigint, %(among)s) AS n, SPREAD;
INSERT INTO bulk_import_trackers (bulk_import_entity_id, relation, stage, status, created_at, updated_at)
SELECT id, 'relation-' || n, n, CASE WHEN status = 2 THEN 2 ELSE (ARRAY[0, 1, 3])[1 + n %% 3] END,
       created_at, updated_at
FROM bulk_import_entities, generate_series(1, 10) AS n
"""
_FILL_BUILDS: Final = """
INSERT INTO ci_builds (type, status, created_at, updated_at, finished_at, project_id, runner_id, name, stage,
    commit_id, lock_version)
SELECT 'Ci::Build', CASE WHEN stale THEN 'canceling' ELSE (ARRAY['success', 'failed', 'canceled'])[1 + n %% 3] END,
       at, at, CASE WHEN NOT stale THEN at END, 1 + n %% 400, 1 + n %% 12, 'rspec unit', 'test', n / 5, n %% 4
FROM generate_series(1::bigint, %(among)s) AS n,
LATERAL (SELECT n * %(rows)s / %(among)s > (n - 1) * %(rows)s / %(among)s,
                (now() AT TIME ZONE 'UTC') - interval '3 hours' - interval '3 days' * random()) AS one (stale, at)
"""
_UNDONE_STATUSES: Final = "SELECT count(*) FROM user_statuses WHERE clear_status_at <= now()"
_UNDONE_ENTITIES: Final = (
    "SELECT count(*) FROM bulk_import_entities e WHERE updated_at < now() - interval '25 hours' "
    "AND (status IN (0, 1) OR EXISTS (SELECT FROM bulk_import_trackers WHERE bulk_import_entity_id = e.id "
    "AND status IN (0, 1, 3)))"
)

STATUSES_FLOOR: Final = Floor(
    table="user_statuses",
    stale="clear_status_at <= %(now)s",
    order=("clear_status_at", "user_id"),
    changes=("DELETE FROM user_statuses WHERE {chosen}",),
    batch=100,
)
_STALE: Final = "updated_at < %(now)s::timestamptz - interval '24 hours' AND status IN (0, 1)"
_IMPORTS_FLOOR: Final = Floor(
    table="bulk_imports",
    stale=_STALE,
    order=("updated_at", "id"),
    changes=("UPDATE bulk_imports SET status = 3, updated_at = %(now)s WHERE {chosen}",),
    batch=1_000,
)
#: Entities and trackers change together. Unlike the worker, it does not look for locked trackers.
_ENTITIES_FLOOR: Final = Floor(
    table="bulk_import_entities",
    stale=_STALE,
    order=("updated_at", "id"),
    changes=(
        "UPDATE bulk_import_entities SET status = 3, updated_at = %(now)s WHERE {chosen}",
        "UPDATE bulk_import_trackers SET status = 4, updated_at = %(now)s "
        "WHERE bulk_import_entity_id = ANY({keys}) AND status IN (0, 1, 3)",
    ),
    batch=100,
)
_BUILDS_FLOOR: Final = Floor(
    table="ci_builds",
    stale=(
        "type = 'Ci::Build' AND status = 'canceling' AND created_at < %(now)s::timestamp - interval '1 hour' "
        "AND updated_at < %(now)s::timestamp - interval '1 hour'"
    ),
    order=("created_at", "project_id", "id"),
    changes=(
        "UPDATE ci_builds SET status = 'failed', failure_reason = 3, finished_at = %(now)s, updated_at = %(now)s, "
        "lock_version = lock_version + 1 WHERE {chosen} AND status = 'canceling'",
    ),
    batch=100,
    # Not a row comparison: PostgreSQL underestimates its matches and then sorts all remaining rows.
    after=(
        "created_at >= %(p0)s AND (created_at > %(p0)s "
        "OR created_at = %(p0)s AND (project_id > %(p1)s OR project_id = %(p1)s AND id > %(p2)s))"
    ),
    naive=True,
)


def _beside_an_old_transaction(place: Place) -> Callable[[], object]:
    """Keep an old transaction open. Rows that are deleted meanwhile stay in the table, and must not be read again."""
    old = psycopg2.connect(place.database_url)
    old.set_session(isolation_level="REPEATABLE READ", readonly=True)
    old.cursor().execute("SELECT count(*) FROM user_statuses WHERE user_id = 1")
    sweep = composed(place, STATUSES, batch_size=1_000)

    def work() -> None:
        run(sweep)
        old.close()

    return work


def growth(size: int) -> Comparison:
    """Return the comparison of a worker on so many stale rows with itself beside an old open transaction."""
    return Comparison(
        name=f"growth-{size}",
        template="statuses",
        models=(UserStatus,),
        fill=fill_statuses,
        undone=_UNDONE_STATUSES,
        rows=size,
        # No other rows: among others, each of a few rows would write its own WAL page.
        among=size,
        rounds_at_most=2,
        contestants={
            OURS: ours(STATUSES, batch_size=1_000),
            "ours, beside an old transaction": _beside_an_old_transaction,
        },
        targets={"ours, beside an old transaction": 0.7},
    )


def _beside(number: int) -> Contestant:
    def ready(place: Place) -> Callable[[], object]:
        spawning = multiprocessing.get_context("spawn")
        start: Any = spawning.Barrier(number)
        others = [spawning.Process(target=_process, args=(place, start)) for _ in range(number - 1)]
        for other in others:
            other.start()
        sweep = composed(place, STATUSES, batch_size=1_000)
        start.wait(600)  # all are ready

        def work() -> None:
            start.wait(600)
            run_sweep(sweep)
            for other in others:
                other.join(600)
                if other.exitcode != 0:
                    raise RuntimeError(f"a process ended with {other.exitcode}")

        return work

    return ready


def _process(place: Place, start: Any) -> None:
    sweep = composed(place, STATUSES, batch_size=1_000)
    start.wait(600)
    start.wait(600)
    run_sweep(sweep)


COMPARISONS: Final = (
    Comparison(
        name="statuses",
        template="statuses",
        models=(UserStatus,),
        fill=fill_statuses,
        undone=_UNDONE_STATUSES,
        contestants={
            **STATUSES_FLOOR.contestants(),
            OURS: ours(STATUSES),
            LINES: ours(STATUSES, lines=True, row_log=RowLog("Status deleted", {"user_id": "user_id"})),
        },
        targets={OURS: 1.1},
    ),
    Comparison(
        name="imports",
        unit="imports",
        template="imports",
        models=(BulkImport, BulkImportEntity, BulkImportTracker),
        fill=_filling(_FILL_IMPORTS),
        undone="SELECT count(*) FROM bulk_imports WHERE status IN (0, 1) AND updated_at < now() - interval '25 hours'",
        contestants={
            **_IMPORTS_FLOOR.contestants(),
            OURS: ours(_IMPORTS, log_records=False),
            LINES: ours(_IMPORTS, lines=True),
        },
        targets={OURS: 1.05, LINES: 0.65},
    ),
    Comparison(
        name="entities",
        rounds_at_most=3,
        unit="entities",
        template="entities",
        models=(BulkImport, BulkImportEntity, BulkImportTracker),
        fill=_filling(_FILL_ENTITIES),
        undone=_UNDONE_ENTITIES,
        rows=20_000,
        among=100_000,
        contestants={
            **_ENTITIES_FLOOR.contestants(),
            OURS: ours(_IMPORTS, log_records=False),
            LINES: ours(_IMPORTS, lines=True),
        },
        targets={OURS: 0.9, LINES: 0.65},
    ),
    Comparison(
        name="builds",
        unit="builds",
        template="builds",
        models=(Build,),
        fill=_filling(_FILL_BUILDS),
        undone="SELECT count(*) FROM ci_builds WHERE type = 'Ci::Build' AND status = 'canceling'",
        contestants={
            **_BUILDS_FLOOR.contestants(),
            OURS: ours(_BUILDS, log_records=False),
            LINES: ours(_BUILDS, lines=True),
        },
        targets={OURS: 1.0, LINES: 0.65},
    ),
)


def _warm(worker: str) -> Contestant:
    """Run the worker once before the measured run, at a time when nothing was stale."""

    def ready(place: Place) -> Callable[[], object]:
        sweep = composed(place, worker, log_records=False)
        run(sweep, clock=ManualClock(datetime.now(UTC) - timedelta(days=3650)))
        return lambda: run(sweep)

    return ready


def _small(usual: Comparison, rows: int, worker: str, target: float | None = None) -> Comparison:
    """Return a comparison whose run has a few rows, so that what it costs beside its batches counts."""
    return replace(
        usual,
        name=f"{usual.name}-{rows}",
        rows=rows,
        among=max(10_000, 10 * rows),
        contestants={
            FLOOR: usual.contestants[FLOOR],
            OURS: ours(worker, log_records=False),
            WARM: _warm(worker),
        },
        targets={} if target is None else {OURS: target},
    )


_OF_WORKER: Final = {each.name: each for each in COMPARISONS}
#: Not run unless named: the rate must not depend on the backlog, and processes must not disturb each other. A run with
#: one row shows what an idle run costs; without any there would be no ratio.
FURTHER: Final = (
    *(_small(_OF_WORKER["imports"], rows, _IMPORTS) for rows in (1, 100, 1_000)),
    _small(_OF_WORKER["imports"], 10_000, _IMPORTS, 0.9),
    _small(_OF_WORKER["builds"], 10_000, _BUILDS, 0.9),
    _small(_OF_WORKER["entities"], 1_000, _IMPORTS, 0.75),
    *(growth(size) for size in (10_000, 100_000, 1_000_000, 10_000_000)),
    Comparison(
        name="pgbouncer",
        template="statuses",
        models=(UserStatus,),
        fill=fill_statuses,
        undone=_UNDONE_STATUSES,
        contestants={
            FLOOR: through_pgbouncer(STATUSES_FLOOR.contestants()[FLOOR]),
            OURS: through_pgbouncer(ours(STATUSES)),
        },
        targets={OURS: 0.9},
    ),
    Comparison(
        name="processes",
        template="statuses",
        models=(UserStatus,),
        fill=fill_statuses,
        undone=_UNDONE_STATUSES,
        contestants={"1 process": _beside(1), "2 processes": _beside(2), "4 processes": _beside(4)},
        targets={},
    ),
)
