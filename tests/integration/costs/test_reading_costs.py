"""Costs of an evaluation of the alerts, a status and a page: as many statements for sixty workers as for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Delete, Rows, Settings, Sweep
from tests.integration.costs.measuring import Costs, Meter, deviations
from tests.internals.database import Database
from tests.internals.insight import InstallationWatch
from tests.internals.ledger import NOW, AlertRow, Run
from tests.internals.web import SnapshotReader

MANY: Final = 60


@pytest.fixture
def shop(counted: Database, admin: Connection) -> dict[str, Sweep]:
    """Sixty workers, each with its own table, some stale rows, and one run."""
    with admin.cursor() as cursor:
        for number in range(MANY):
            cursor.execute(f"CREATE TABLE t{number} (id bigserial PRIMARY KEY, expires_at timestamptz NOT NULL)")
            cursor.execute(
                f"INSERT INTO t{number} (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 9)"
            )
    names = [f"shop.t{number}" for number in range(MANY)]
    ended = {"started_at": NOW, "heartbeat_at": NOW, "finished_at": NOW, "outcome": "done", "trigger": "schedule"}
    Run.insert_many([{"worker": name, **ended} for name in names]).execute()
    return {
        name: Sweep(
            name,
            Rows(f"t{number}", stale=lambda row, now: row.expires_at <= now, order="expires_at", action=Delete()),
            schedule="* * * * *",
        )
        for number, name in enumerate(names)
    }


def read_by(kind: str, settings: Settings, sweeps: dict[str, Sweep], database: Database) -> Callable[[], object]:
    if kind != "evaluation":
        return SnapshotReader(settings, sweeps, with_progress=kind == "page").read
    watch = InstallationWatch(settings, sweeps)

    def look() -> None:
        database.execute_sql(f'DELETE FROM "{AlertRow._meta.schema}".evaluations')
        watch.look()

    return look


@pytest.mark.parametrize("kind", ["evaluation", "status", "page"])
def test_sixty_workers_are_read_with_as_many_statements_as_one(
    shop: dict[str, Sweep],
    settings: Settings,
    counted: Database,
    admin: Connection,
    meter_client: redis.Redis,
    kind: str,
) -> None:
    def costs(sweeps: dict[str, Sweep]) -> Costs:
        read = read_by(kind, settings, sweeps, counted)
        read()  # reads the catalog, and stores the alerts
        meter = Meter(admin, meter_client)
        read()
        return meter.costs()

    many = costs(shop)
    one = costs(dict([*shop.items()][:1]))

    assert many.statements == one.statements
    assert deviations(f"{kind} of {MANY} workers", many) == {}
