"""Rows with a limit for each group, such as a retention per tenant, are found group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from peewee import BigAutoField, BigIntegerField, BooleanField, CompositeKey, IntegerField, Value, fn
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Delete, Guard, Limits, Rows, Settings, Sweep, UtcDateTimeField
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.conftest import Locked
from tests.integration.statements import watch_statements
from tests.integration.sweeps.engine.sizing import Impatient
from tests.internals.database import Database, database, forget_table
from tests.internals.doctor import examine_stages as examine
from tests.internals.engine import run_sweep
from tests.internals.insight import backlog, oldest, plan, worker_status
from tests.internals.sweeps import Backlog, TableStage, stages_of

#: 2026-01-01 00:00 UTC, the time of the manual clock.
NOW: Final = "'2026-01-01+00'::timestamptz"


class Tenant(BaseModel):
    id = BigAutoField()
    keep_days = IntegerField(null=True)


class TenantEvent(BaseModel):
    id = BigAutoField()
    tenant_id = BigIntegerField()
    created_at = UtcDateTimeField()
    pinned = BooleanField(default=False)


def outlived(row: Any, now: datetime) -> Any:
    too_old = row.created_at < Value(now) - fn.make_interval(0, 0, 0, Tenant.keep_days)
    return fn.EXISTS(Tenant.select(Tenant.id).where((Tenant.id == row.tenant_id) & too_old))


BY_TENANT: Final = Sweep(
    "shop.outlived_events",
    Rows(
        TenantEvent,
        stale=outlived,
        order=("tenant_id", "created_at"),
        hold=lambda row: row.pinned,
        action=Delete(),
    ),
    guard=Guard(first_run=False),
)

#: Adds this many tenants, each with rows of so many days, which all keep for thirty days.
AddTenants = Callable[[int, int], None]


@pytest.fixture
def add_tenants(postgres: Database) -> AddTenants:
    postgres.create_tables([Tenant, TenantEvent])
    database.execute_sql("CREATE INDEX by_tenant ON tenant_event (tenant_id, created_at, id)")

    def add(tenants: int, days: int) -> None:
        database.execute_sql("INSERT INTO tenant (keep_days) SELECT 30 FROM generate_series(1, %s)", (tenants,))
        database.execute_sql(
            "INSERT INTO tenant_event (tenant_id, created_at, pinned) "
            f"SELECT tenant.id, {NOW} - day * interval '1 day', false FROM tenant, generate_series(1, %s) AS day",
            (days,),
        )
        database.execute_sql("ANALYZE tenant, tenant_event")

    return add


def left() -> list[tuple[int, int]]:
    """The tenant and the age in days of each row that is left."""
    rows = database.execute_sql(
        f"SELECT tenant_id, extract(epoch FROM {NOW} - created_at)::int / 86400 FROM tenant_event ORDER BY 1, 2"
    )
    return [*rows.fetchall()]


def test_run_deletes_what_each_tenant_does_not_keep(add_tenants: AddTenants, clock: ManualClock) -> None:
    add_tenants(4, 40)
    Tenant.update(keep_days=35).where(Tenant.id == 2).execute()
    Tenant.update(keep_days=None).where(Tenant.id == 3).execute()
    sweep = changed(BY_TENANT, batch=4, batch_takes=None)

    result = run_sweep(sweep, clock=clock)

    kept = {1: 30, 2: 35, 3: 40, 4: 30}
    assert left() == [(tenant, day) for tenant, days in kept.items() for day in range(1, days + 1)]
    assert (result.outcome, result.counts["deleted_rows"], result.counts["batches"]) == ("done", 25, 7)


def test_interrupted_run_resumes_within_a_tenant(add_tenants: AddTenants, clock: ManualClock) -> None:
    add_tenants(3, 36)
    sweep = changed(BY_TENANT, batch=4)

    first = run_sweep(sweep, clock=clock, stopping=Impatient(clock), max_rows=8)
    second = run_sweep(sweep, clock=clock, resumes=first.run_id)

    assert (first.counts["deleted_rows"], second.counts["deleted_rows"], len(left())) == (8, 10, 90)


def test_locked_rows_are_skipped_and_those_behind_them_are_not(
    add_tenants: AddTenants, clock: ManualClock, locked: Locked
) -> None:
    add_tenants(2, 40)

    with locked(f"SELECT FROM tenant_event WHERE tenant_id = 1 AND created_at < {NOW} - interval '31 days' FOR UPDATE"):
        result = run_sweep(changed(BY_TENANT, batch=4), clock=clock)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 11)
    assert [day for tenant, day in left() if tenant == 1 and day > 30] == [32, 33, 34, 35, 36, 37, 38, 39, 40]


def test_locked_tenant_does_not_hide_its_rows(add_tenants: AddTenants, clock: ManualClock, locked: Locked) -> None:
    add_tenants(1, 33)

    with locked("SELECT FROM tenant FOR UPDATE"):
        assert run_sweep(BY_TENANT, clock=clock).counts["deleted_rows"] == 3


def test_rows_on_hold_stay_and_are_counted(add_tenants: AddTenants, clock: ManualClock) -> None:
    add_tenants(3, 32)
    TenantEvent.update(pinned=True).where(TenantEvent.tenant_id == 2).execute()

    status = worker_status(BY_TENANT, clock.now(), UTC)
    result = run_sweep(BY_TENANT, clock=clock)

    assert (status.waiting, status.held) == (Backlog(4), Backlog(2))
    assert (result.counts["deleted_rows"], len(left())) == (4, 92)


def test_plan_shows_the_times_of_the_oldest_and_newest_row(add_tenants: AddTenants, clock: ManualClock) -> None:
    add_tenants(3, 33)
    Tenant.update(keep_days=31).where(Tenant.id == 1).execute()

    planned = plan(BY_TENANT, clock=clock)

    assert (planned.stale, planned.held) == (Backlog(8), Backlog(0))
    assert planned.oldest == oldest(BY_TENANT, clock.now()) == clock.now() - timedelta(days=33)
    assert planned.newest == clock.now() - timedelta(days=31)
    assert [row["tenant_id"] for row in planned.stages[0][0].samples] == [1, 1, 2, 2, 2]
    assert planned.warnings == []


def test_bounded_counts_stop_at_their_limit(add_tenants: AddTenants, clock: ManualClock) -> None:
    add_tenants(3, 33)

    assert [backlog(BY_TENANT, clock.now(), limit) for limit in (8, 9, 10)] == [
        Backlog(8, exact=False),
        Backlog(9),
        Backlog(9),
    ]


def test_key_of_several_columns_finds_the_same_rows(postgres: Database, clock: ManualClock) -> None:
    class Note(BaseModel):
        tenant_id = BigIntegerField()
        number = IntegerField()
        part = IntegerField()
        at = UtcDateTimeField()

        class Meta:
            primary_key = CompositeKey("number", "part")

    def stale(row: Any, now: datetime) -> Any:
        too_old = row.at < Value(now) - fn.make_interval(0, 0, 0, Tenant.keep_days)
        return fn.EXISTS(Tenant.select().where(too_old & (row.tenant_id == Tenant.id)))

    postgres.create_tables([Tenant, Note])
    database.execute_sql("INSERT INTO tenant (keep_days) VALUES (1), (3), (NULL)")
    database.execute_sql(
        f"INSERT INTO note SELECT tenant, day, tenant, {NOW} - day * interval '1 day' "
        "FROM generate_series(1, 3) AS tenant, generate_series(1, 5) AS day"
    )
    sweep = Sweep(
        "shop.notes",
        Rows(Note, stale=stale, order=("tenant_id", "at", "number", "part"), action=Delete()),
        limits=Limits(batch=2, batch_takes=None),
    )

    result = run_sweep(sweep, clock=clock)

    assert result.counts["deleted_rows"] == 4 + 2
    assert stages_of(sweep)[0].groups(stale(Note, clock.now())) is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("alias", [False, True])
def test_group_is_found_by_a_unique_column_only(add_tenants: AddTenants, clock: ManualClock, alias: bool) -> None:
    add_tenants(2, 32)
    database.execute_sql("CREATE TABLE policy (tenant_id bigint NOT NULL, keep_days int NOT NULL)")
    database.execute_sql("INSERT INTO policy VALUES (1, 30), (1, 31), (2, 31)")

    class Policy(BaseModel):
        tenant_id = BigIntegerField()
        keep_days = IntegerField()

        class Meta:
            primary_key = False

    policies: Any = Policy.alias() if alias else Policy

    def stale(row: Any, now: datetime) -> Any:
        too_old = row.created_at < Value(now) - fn.make_interval(0, 0, 0, policies.keep_days)
        return fn.EXISTS(policies.select(policies.tenant_id).where((policies.tenant_id == row.tenant_id) & too_old))

    sweep = changed(BY_TENANT, stale=stale)
    (stage,) = stages_of(sweep)
    assert isinstance(stage, TableStage)

    several = stage.groups(stale(TenantEvent, clock.now()))
    deleted = run_sweep(sweep, clock=clock).counts["deleted_rows"]
    database.execute_sql("DELETE FROM policy WHERE keep_days = 30")
    database.execute_sql("CREATE UNIQUE INDEX ON policy (tenant_id)")
    forget_table(Policy)
    one = stage.groups(stale(TenantEvent, clock.now()))

    assert (several, deleted) == (None, 3)
    assert one is not None and one.table_name == "policy"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("tenant_id, created_at, id", None),
        ("created_at, id", "the rows of each tenant_id are searched in an index that does not begin with it"),
        ("pinned", "the whole table is read"),
    ],
)
def test_doctor_asks_for_an_index_of_the_groups(
    add_tenants: AddTenants, settings: Settings, columns: str, said: str | None
) -> None:
    add_tenants(50, 40)
    database.execute_sql(f"DROP INDEX by_tenant; CREATE INDEX ON tenant_event ({columns})")

    (found,) = [each for each in examine(settings, {BY_TENANT.name: BY_TENANT}) if each.subject == "indexes"]

    if said is None:
        assert (found.level, found.text) == ("fine", "the query of stage rows uses an index")
    else:
        assert found.text == f"the query of stage rows: {said}"
        assert found.way_out == 'CREATE INDEX CONCURRENTLY ON "tenant_event" (tenant_id, created_at, id)'


@pytest.fixture
def reads(
    monkeypatch: pytest.MonkeyPatch, admin: Connection, settings: Settings
) -> Iterator[list[tuple[str, int, int]]]:
    """Statements on the table of events that are sent from now on, with the rows and the blocks that each reads."""
    found: list[tuple[str, int, int]] = []
    cursor = admin.cursor()
    cursor.execute(f"SET search_path TO {settings.namespace}, {settings.schema_name}")

    def explain(sql: str) -> None:
        if '"tenant_event"' not in sql or not sql.startswith(("SELECT", "WITH", "(SELECT")):
            return
        cursor.execute("BEGIN")
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}")
        row: Any = cursor.fetchone()
        cursor.execute("ROLLBACK")
        whole = row[0][0]["Plan"]
        found.append((sql, rows_read(whole), whole["Shared Hit Blocks"] + whole["Shared Read Blocks"]))

    watch_statements(monkeypatch, explain, with_values=True)
    yield found
    cursor.close()


def rows_read(node: dict[str, Any]) -> int:
    """Return how many rows of the events a plan has read."""
    removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    own = (node["Actual Rows"] + removed) * node["Actual Loops"] if node.get("Relation Name") == "tenant_event" else 0
    return round(own) + sum(rows_read(child) for child in node.get("Plans", ()))


def read_all(sweep: Sweep, clock: ManualClock) -> None:
    """Do everything that reads stale rows: plan, backlog, age, and a run with breaker and progress."""
    plan(sweep, clock=clock)
    backlog(sweep, clock.now(), 1_000_000)
    worker_status(sweep, clock.now(), UTC)
    oldest(sweep, clock.now())
    run_sweep(sweep, clock=clock)


def test_statements_read_the_tenants_and_the_stale_rows_only(
    add_tenants: AddTenants, clock: ManualClock, reads: list[tuple[str, int, int]]
) -> None:
    add_tenants(200, 30)
    TenantEvent.insert_many(
        [{"tenant_id": tenant, "created_at": clock.now() - timedelta(days=100)} for tenant in range(1, 200, 10)]
    ).execute()
    sweep = changed(BY_TENANT, times_history=None)

    read_all(sweep, clock)

    assert len(reads) > 8
    assert [(sql, rows) for sql, rows, _ in reads if rows > 5 * 20] == []
