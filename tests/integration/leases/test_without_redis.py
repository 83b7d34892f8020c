"""Leases of an installation without Redis: PostgreSQL decides who may begin, by its own clock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from peewee import OperationalError

from housekeeping import Delete, ExclusiveLease, Limits, Row, Rows, Settings, Sweep, run_sweep, shared_redis
from housekeeping import Lease as DeclaredLease
from tests.internals.core import MAIN, DatabaseUnavailable, LeaseLost, SchemaMissing, SettingsError
from tests.internals.database import Database, database
from tests.internals.leases import HeldLeaseRow, PostgresLeaseStore
from tests.internals.ledger import NOW, Run, held_leases, release_lease
from tests.session_settings import set_in_session

KEY, TTL = "expired", timedelta(minutes=10)


@pytest.fixture(autouse=True)
def database_only(postgres: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_DATABASE_URL", settings.require_database_url())
    monkeypatch.setenv("HOUSEKEEPING_SCHEMA", settings.schema_name)
    monkeypatch.setattr(shared_redis, "client", None)


@pytest.fixture
def sweep() -> Sweep:
    database.execute_sql("CREATE TABLE entries (id bigint PRIMARY KEY, due boolean NOT NULL)")
    database.execute_sql("INSERT INTO entries SELECT id, true FROM generate_series(1, 5) AS id")
    return Sweep(
        "tests.expired",
        Rows("entries", stale=is_due, order="id", action=Delete()),
        lease=DeclaredLease(KEY, TTL),
        limits=Limits(batch=2),
    )


def is_due(row: Row) -> object:
    return row.due


def test_run_takes_and_releases_its_lease(sweep: Sweep) -> None:
    # L1, L3
    held = list[str]()

    result = run_sweep(sweep, confirmed=True, on_batch=lambda _: held.extend(each.key for each in held_leases(None)))

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 5)
    assert set(held) == {KEY}
    assert list(PostgresLeaseStore().held()) == []


def test_lease_of_an_application_skips_a_run(sweep: Sweep) -> None:
    # L4: one namespace
    with ExclusiveLease(KEY, TTL):
        assert (run_sweep(sweep).outcome, Run.get().reason) == ("skipped", "lease_held")

    assert run_sweep(sweep, confirmed=True).outcome == "done"


def test_suspended_holder_cannot_commit_after_its_successor_began(postgres: Database) -> None:
    # L3
    first, second = (ExclusiveLease(KEY, TTL, fenced=True) for _ in range(2))
    first.try_obtain()
    with database.using(MAIN):
        HeldLeaseRow.update(expires_at=NOW).execute()
    second.try_obtain()

    with pytest.raises(LeaseLost), postgres.atomic():
        first.fence()
    with postgres.atomic():
        second.fence()


def test_renewal_does_not_wait_for_an_open_batch(postgres: Database) -> None:
    # L2: a batch locks the row of its epoch until it ends
    lease = ExclusiveLease(KEY, TTL, fenced=True)
    lease.try_obtain()

    with postgres.atomic(), ThreadPoolExecutor(1) as renewing:
        lease.fence()
        assert renewing.submit(lease.renew).result()


def test_release_by_hand_fences_the_holder_off(postgres: Database) -> None:
    lease = ExclusiveLease(KEY, TTL, fenced=True)
    lease.try_obtain()

    release_lease(PostgresLeaseStore(), KEY)

    assert not lease.exists()
    with pytest.raises(LeaseLost), postgres.atomic():
        lease.fence()


def test_unreachable_database_does_not_free_the_lease() -> None:
    # L5
    lease = ExclusiveLease(KEY, TTL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(database.obj), "execute_sql", refuse)
        with pytest.raises(DatabaseUnavailable):
            lease.try_obtain()


def test_lease_on_a_standby_is_unavailable(postgres: Database) -> None:
    # L5: as after a failover, until the connection is replaced
    lease = ExclusiveLease(KEY, TTL)
    set_in_session(postgres, "default_transaction_read_only = on")

    with pytest.raises(DatabaseUnavailable, match="read-only transaction"):
        lease.try_obtain()


def test_lease_without_the_schema_names_the_init_command(postgres: Database, settings: Settings) -> None:
    postgres.execute_sql(f"DROP SCHEMA {settings.schema_name} CASCADE")

    with pytest.raises(SchemaMissing, match="run: housekeeping init"):
        ExclusiveLease(KEY, TTL).try_obtain()


def refuse(*_: object, **__: object) -> object:
    raise OperationalError("connection refused")


def test_redis_is_required_where_a_broker_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOUSEKEEPING_BROKER_URL", "amqp://localhost")

    with pytest.raises(SettingsError, match="HOUSEKEEPING_REDIS_URL is not set"):
        ExclusiveLease(KEY, TTL)
