"""Sweeps on distributed tables of Citus: batches lock no rows, and runs hold a lease instead."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

import psycopg2
import pytest
from peewee import BigIntegerField, BooleanField, CompositeKey, IntegerField, TextField, fn

from housekeeping import (
    BaseModel,
    Call,
    Delete,
    DropPartitions,
    Guard,
    Lease,
    Limits,
    Rows,
    Settings,
    StateMachine,
    Sweep,
    Transition,
    UtcDateTimeField,
)
from housekeeping.testing.points import run_in_process
from housekeeping.testing.stubs import ManualClock
from tests.citus_like import Cluster
from tests.integration.conftest import Do
from tests.integration.sweeps.documents import NOW
from tests.internals.core import shared_redis
from tests.internals.database import Database, database
from tests.internals.engine import RunResult, restoration_of, run_sweep
from tests.internals.leases import RedisLeaseStore
from tests.internals.ledger import NOW as DATABASE_NOW
from tests.internals.ledger import Counts, Run, runs

pytestmark = pytest.mark.on_citus

PATIENCE_S: Final = 20
OLD: Final = "'2025-12-01'::timestamptz + n * interval '1 minute'"


class Status(StrEnum):
    OPEN = "open"
    EXPIRED = "expired"


class Ticket(BaseModel):
    tenant = IntegerField()
    id = BigIntegerField()
    status = TextField(default=Status.OPEN)
    on_hold = BooleanField(null=True)
    expires_at = UtcDateTimeField()

    class Meta:
        table_name = "tickets"
        primary_key = CompositeKey("tenant", "id")


class HeldTenant(BaseModel):
    tenant = IntegerField(primary_key=True)

    class Meta:
        table_name = "held_tenants"


MACHINE: Final = StateMachine(Ticket.status, Status, {"expire": ([Status.OPEN], Status.EXPIRED)})


def sweep(action: Any = None, **given: Any) -> Sweep:
    hold = given.pop("hold", None)
    rows = Rows(
        Ticket, stale=lambda row, now: row.expires_at <= now, order="expires_at", action=action or Delete(), hold=hold
    )
    given.setdefault("guard", Guard(first_run=False))
    return Sweep("shop.tickets", rows, limits=Limits(batch=given.pop("batch", 8), batch_takes=None), **given)


def run(of: Sweep) -> RunResult:
    return run_sweep(of, clock=ManualClock(NOW))


@pytest.fixture
def left(postgres: Database, cluster: Cluster, do: Do) -> Callable[[], list[int]]:
    """Twenty stale tickets of five tenants, a fresh one, and tenant 3 in a reference table; returns the ids left."""
    postgres.create_tables([Ticket])
    do("CREATE TABLE held_tenants (tenant integer PRIMARY KEY); INSERT INTO held_tenants VALUES (3)")
    cluster.refer("held_tenants")
    do(f"INSERT INTO tickets SELECT n % 5, n, 'open', n = 7, {OLD} FROM generate_series(1, 20) AS n")
    do("INSERT INTO tickets VALUES (1, 21, 'open', NULL, '2026-02-01')")
    return lambda: [number for (number,) in do("SELECT id FROM tickets WHERE status = 'open' ORDER BY id")]


@pytest.mark.parametrize(
    ("of", "stay"),
    [
        pytest.param(sweep(), [21], id="delete"),
        pytest.param(sweep(Transition(MACHINE, "expire")), [21], id="update"),
        pytest.param(
            sweep(Transition(MACHINE, "expire", changes=lambda now: {Ticket.expires_at: now + timedelta(days=1)})),
            [21],
            id="update of a time",
        ),
        pytest.param(sweep(Call(lambda row: None, then=Delete())), [21], id="call"),
        pytest.param(sweep(hold=lambda row: row.on_hold), [7, 21], id="hold by a column"),
        pytest.param(sweep(hold=lambda row: row.expires_at > fn.NOW()), [21], id="hold by the server's time"),
        pytest.param(
            sweep(hold=lambda row: HeldTenant.tenant == row.tenant), [3, 8, 13, 18, 21], id="hold by a reference table"
        ),
    ],
)
def test_batches_change_the_stale_rows_without_locking_any(
    of: Sweep, stay: list[int], left: Callable[[], list[int]], statements: list[str]
) -> None:
    result = run(of)

    assert (result.outcome, result.counts[of.progress_counts[0]]) == ("done", 21 - len(stay))
    assert left() == stay
    refused = ("FOR UPDATE", "FOR NO KEY UPDATE", '"advanced" AS')  # the last in a batch of one statement
    assert not [each for each in statements if '"tickets"' in each and any(text in each for text in refused)]


@pytest.mark.parametrize("distributed", [True, False])
def test_rows_are_moved_to_an_archive(
    distributed: bool, left: Callable[[], list[int]], cluster: Cluster, do: Do
) -> None:
    do(
        "CREATE TABLE old_tickets (LIKE tickets, archived_at timestamptz, archived_by_run bigint, "
        "PRIMARY KEY (archived_by_run, archived_at, tenant, id))"
    )
    if distributed:
        cluster.distribute("old_tickets", "tenant")

    result = run(sweep(Delete(archive_to="old_tickets")))

    assert (result.outcome, result.counts["deleted_rows"], result.counts["archived_rows"]) == ("done", 20, 20)
    assert left() == [21]
    assert do("SELECT count(*), count(archived_by_run) FROM old_tickets") == [(20, 20)]
    assert result.run_id is not None
    restored = restoration_of(sweep(Delete(archive_to="old_tickets")), result.run_id).carry_out(pause=True)
    assert (restored.outcome, restored.reason, restored.counts.get("restored")) == ("done", None, 20)


@pytest.mark.parametrize("change", ["expires_at = '2026-02-01'", "on_hold = true"])
def test_row_that_changes_between_pick_and_change_stays_and_counts_as_no_failure(
    change: str, left: Callable[[], list[int]], cluster: Cluster, do: Do, application_url: str
) -> None:
    of = sweep(hold=lambda row: row.on_hold)
    changing = psycopg2.connect(application_url)
    changing.cursor().execute(f"UPDATE tickets SET {change} WHERE tenant = 2 AND id = 2")

    with ThreadPoolExecutor(1) as another:
        running = another.submit(_run_and_disconnect, of)
        _wait_until_found(lambda: do(cluster.waits_for_locks), running)
        changing.commit()
        result = running.result(PATIENCE_S)
    changing.close()

    assert (result.outcome, result.counts["deleted_rows"], result.counts.get("failed", 0)) == ("done", 18, 0)
    assert left() == [2, 7, 21]


def _run_and_disconnect(of: Sweep) -> RunResult:
    try:
        return run(of)
    finally:
        database.close()


def _wait_until_found(look: Callable[[], object], running: Future[RunResult]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline and not running.done()


@pytest.mark.parametrize(
    ("of", "key"),
    [(sweep(), "shop.tickets"), (sweep(lease=Lease("tickets", timedelta(hours=1))), "tickets")],
    ids=["lease of its own", "declared lease"],
)
def test_second_run_at_the_same_time_is_skipped(
    of: Sweep, key: str, left: Callable[[], list[int]], do: Do, settings: Settings
) -> None:
    others: list[RunResult] = []

    def run_another(counts: Counts) -> None:
        if not others:
            with ThreadPoolExecutor(1) as another:
                others.append(another.submit(_run_and_disconnect, of).result(PATIENCE_S))

    result = run_sweep(of, clock=ManualClock(NOW), on_batch=run_another)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 20)
    assert [(each.outcome, each.reason) for each in others] == [("skipped", "lease_held")]
    assert do(f"SELECT key FROM {settings.schema_name}.leases") == [(key,)]


def test_run_that_is_killed_anywhere_counts_each_change_once(left: Callable[[], list[int]], do: Do) -> None:
    of, alive = sweep(), random.getrandbits(62)
    commits = [
        number
        for number, point in enumerate(run_in_process(lambda: run(of).outcome, None, alive).points)
        if point.startswith(("COMMIT", 'UPDATE "', "WITH"))
    ]
    for number in commits:
        do("TRUNCATE tickets")
        do(f"INSERT INTO tickets SELECT n % 5, n, 'open', NULL, {OLD} FROM generate_series(1, 20) AS n")
        since = Run.select().order_by(Run.id.desc()).get().id
        run_in_process(lambda: run(of).outcome, number, alive)
        do(f"SELECT pg_advisory_lock({alive}), pg_advisory_unlock({alive})")
        Run.update(heartbeat_at=DATABASE_NOW - 2 * runs.SILENCE).where(Run.outcome.is_null()).execute()
        store = RedisLeaseStore(shared_redis.get(), shared_redis.namespace)
        if (owner := store.owner(of.name)) is not None:  # it may have died before its row was there
            store.release(of.name, owner)

        assert run(of).outcome == "done"

        counted = [row.counts.get("deleted_rows", 0) for row in Run.select().where(Run.id > since)]
        assert (left(), sum(counted)) == ([], 20), number
    assert len(commits) > 4


@pytest.mark.parametrize(("others", "outcome"), [(0, "skipped"), (4004, "done")])
def test_first_run_counts_the_rows_of_all_shards(
    others: int, outcome: str, left: Callable[[], list[int]], do: Do
) -> None:
    do("INSERT INTO tickets SELECT n % 5, n, 'open', NULL, '2025-12-01' FROM generate_series(100, 1080) AS n")
    do(f"INSERT INTO tickets SELECT n % 5, -n, 'open', NULL, '2026-02-01' FROM generate_series(2, {others}) AS n")

    result = run(sweep(guard=Guard(), batch=1000))

    assert (result.outcome, result.counts["deleted_rows"]) == (outcome, 1001 if outcome == "done" else 0)


def test_limit_of_rows_ends_the_run(left: Callable[[], list[int]]) -> None:
    result = run_sweep(sweep(), clock=ManualClock(NOW), max_rows=10)

    assert (result.outcome, result.reason, result.counts["deleted_rows"]) == ("partial", "limit", 10)


def test_partition_is_detached_in_the_transaction_that_drops_it(
    postgres: Database, cluster: Cluster, do: Do, statements: list[str]
) -> None:
    do("CREATE TABLE visits (tenant integer, at timestamptz, PRIMARY KEY (tenant, at)) PARTITION BY RANGE (at)")
    do("CREATE TABLE visits_1 PARTITION OF visits FOR VALUES FROM ('2025-01-01') TO ('2025-02-01')")
    do("CREATE TABLE visits_2 PARTITION OF visits FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')")
    do("INSERT INTO visits SELECT n, '2025-01-02' FROM generate_series(1, 100) AS n")
    cluster.distribute("visits", "tenant")
    old = DropPartitions("visits", "at", older_than=timedelta(days=90))
    of = Sweep("shop.visits", old, guard=Guard(first_run=False))

    result = run(of)

    assert (result.outcome, result.reason, result.counts["dropped_partitions"]) == ("done", None, 1)
    assert result.counts["freed_bytes"] > 0
    assert not [each for each in statements if "CONCURRENTLY" in each]
    assert do("SELECT to_regclass('visits_1'), to_regclass('visits_2') IS NOT NULL") == [(None, True)]
