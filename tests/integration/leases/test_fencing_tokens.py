"""Fencing tokens never decrease, even after an upgrade or lost rows (L3), on a real PostgreSQL."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.integration.leases.own_connection import own_connection
from tests.internals.core import LeaseLost
from tests.internals.database import Database, database
from tests.internals.leases import Fence, LeaseRow, acquire_epoch, check_epoch
from tests.internals.ledger import NOW

PATIENCE_S = 60
LONG_AGO = NOW - timedelta(days=29)


def forget(key: str) -> None:
    assert LeaseRow.delete().where(LeaseRow.key == key).execute() == 1


def acquired(holder: str) -> Fence:
    return Fence("k", acquire_epoch("k", holder), holder)


def fence(holder: Fence) -> None:
    with database.atomic():
        check_epoch(holder)


def is_recent(key: str) -> bool:
    return bool(
        LeaseRow.select().where((LeaseRow.key == key) & (LeaseRow.used_at > NOW - timedelta(minutes=5))).exists()
    )


def test_epoch_is_higher_than_before_its_row_was_deleted(postgres: Database) -> None:
    # L3
    before = [acquire_epoch("k", "first"), acquire_epoch("k", "second")]
    forget("k")

    after = [acquire_epoch("k", "third"), acquire_epoch("k", "fourth")]

    assert sorted({*before, *after}) == [*before, *after]


def test_holder_whose_epoch_row_was_deleted_cannot_commit(postgres: Database) -> None:
    # L3
    sleeper = acquired("sleeper")
    fence(sleeper)
    forget("k")

    with pytest.raises(LeaseLost):
        fence(sleeper)
    acquired("successor")
    with pytest.raises(LeaseLost):
        fence(sleeper)


def test_holder_whose_epoch_was_issued_again_cannot_commit(postgres: Database) -> None:
    # L3: a failover to a replica that has not received the last acquisition
    sleeper = acquired("sleeper")
    LeaseRow.update(holder="successor on the new primary").execute()

    with pytest.raises(LeaseLost):
        fence(sleeper)


def test_epoch_is_drawn_after_its_row_is_locked(postgres: Database, admin: Connection, settings: Settings) -> None:
    # L3: one drawn while it waited might be lower than that of another who waited less
    first = acquired("first")
    with ThreadPoolExecutor(1) as another:
        with postgres.atomic():
            check_epoch(first)
            beginning = another.submit(acquire_epoch, "k", "second")
            wait_for_a_lock(admin, settings)
            with own_connection(settings) as own, own.cursor() as cursor:
                cursor.execute(
                    f"INSERT INTO {settings.schema_name}.leases (key, holder) VALUES ('other', '') RETURNING epoch"
                )
                (meanwhile,) = cursor.fetchone() or (0,)
            own.close()
        second = beginning.result(PATIENCE_S)

    assert first.epoch < meanwhile < second


def wait_for_a_lock(admin: Connection, settings: Settings) -> None:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
    never = threading.Event()
    with admin.cursor() as cursor:
        for _ in range(PATIENCE_S * 100):
            cursor.execute(waiting, (f'%"{settings.schema_name}"."leases"%',))
            if cursor.fetchone() != (0,):
                return
            never.wait(0.01)
    raise AssertionError("nobody waits")


def test_fence_keeps_the_epoch_row_of_a_long_held_lease(postgres: Database) -> None:
    # L3
    holder = acquired("holder for months")
    LeaseRow.update(used_at=LONG_AGO).execute()

    fence(holder)

    assert is_recent("k")


def test_transactions_of_one_holder_do_not_wait_for_each_others_fences(postgres: Database, settings: Settings) -> None:
    # L3: both would note that the lease is in use
    holder = acquired("holder for months")
    LeaseRow.update(used_at=LONG_AGO).execute()
    own = own_connection(settings)
    try:
        with postgres.atomic():
            postgres.execute_sql("SET LOCAL lock_timeout = '1s'")
            with own.cursor() as cursor:
                cursor.execute(f"SELECT 1 FROM {settings.schema_name}.leases WHERE key = 'k' FOR SHARE")
            check_epoch(holder)
        check_epoch(holder, own)
        own.commit()
    finally:
        own.close()

    assert is_recent("k")


def test_fence_of_a_new_lease_writes_nothing(postgres: Database, settings: Settings) -> None:
    holder = acquired("holder")
    table = f"{settings.schema_name}.leases"
    before = postgres.execute_sql(f"SELECT ctid FROM {table}").fetchall()

    fence(holder)

    assert postgres.execute_sql(f"SELECT ctid FROM {table}").fetchall() == before
