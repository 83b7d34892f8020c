"""Fencing tokens and the fence (L3), on a real PostgreSQL and Redis."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis
from peewee import OperationalError
from psycopg2.extensions import connection as Connection

import housekeeping
from housekeeping import ExclusiveLease, Settings
from tests.faults import at_step
from tests.integration.conftest import LoseLease
from tests.integration.leases.own_connection import own_connection
from tests.integration.middleware.applications import eventually
from tests.internals.core import DatabaseUnavailable, HousekeepingError, LeaseLost
from tests.internals.database import Database, connect_to, database
from tests.internals.leases import LeaseRow, renewal
from tests.internals.leases import lease as lease_module
from tests.internals.ledger import runs
from tests.session_settings import set_in_session

TTL = timedelta(minutes=10)
KEY = "報告/夜"
PATIENCE_S = 60


@pytest.fixture
def written(postgres: Database, admin: Connection) -> Iterator[Any]:
    """A table to write into, and what others see in it."""
    postgres.execute_sql("CREATE TABLE written (epoch bigint)")

    def seen() -> list[int]:
        with admin.cursor() as cursor:
            cursor.execute("SELECT epoch FROM written ORDER BY epoch")
            return [epoch for (epoch,) in cursor.fetchall()]

    yield seen


def write(lease: ExclusiveLease, epoch: int) -> None:
    with database.atomic():
        database.execute_sql("INSERT INTO written VALUES (%s)", (epoch,))
        lease.fence()


def obtained(ttl: timedelta = TTL) -> ExclusiveLease:
    lease = ExclusiveLease(KEY, ttl, fenced=True)
    assert lease.try_obtain() is not None
    return lease


def test_suspended_holder_commits_nothing_after_a_new_run_began(written: Any, lose_lease: LoseLease) -> None:
    # L3
    zombie = obtained()
    write(zombie, 1)
    lose_lease(KEY)
    write(zombie, 1)  # the store may fail: no run has begun, so no row is in danger

    successor = obtained()
    with pytest.raises(LeaseLost, match="newer holder"):
        write(zombie, 1)
    write(successor, 2)

    assert written() == [1, 1, 2]


def let_another_begin_during_a_transaction_of(
    zombie: ExclusiveLease, postgres: Database, lose_lease: LoseLease, settings: Settings, admin: Connection
) -> None:
    """Fence the zombie, check that its successor waits for the end of the transaction, and let both write."""
    with ThreadPoolExecutor(1) as another:
        with postgres.atomic():
            zombie.fence()
            lose_lease(KEY)
            beginning = another.submit(obtained)
            waiting = (
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                f"AND query LIKE '%{settings.schema_name}%leases%'"
            )
            with admin.cursor() as cursor:
                count = 0
                while count == 0 and not beginning.done():
                    cursor.execute(waiting)
                    (count,) = cursor.fetchone() or (0,)
            assert not beginning.done()
            postgres.execute_sql("INSERT INTO written VALUES (1)")
        successor = beginning.result(PATIENCE_S)

    write(successor, 2)


def test_next_epoch_waits_for_a_fenced_transaction_to_end(
    written: Any, postgres: Database, settings: Settings, admin: Connection, lose_lease: LoseLease
) -> None:
    # L3: else a commit could come after another has begun, though it asked before
    zombie = obtained()
    write(zombie, 0)

    let_another_begin_during_a_transaction_of(zombie, postgres, lose_lease, settings, admin)

    assert written() == [0, 1, 2]


def test_an_applications_own_connection_is_fenced_too(written: Any, settings: Settings, lose_lease: LoseLease) -> None:
    # L3
    lease = obtained()
    assert settings.database_url is not None
    own = own_connection(settings)
    try:
        with own, own.cursor() as cursor:
            cursor.execute(f"INSERT INTO {settings.namespace}.written VALUES (1)")
            lease.fence(own)
        lose_lease(KEY)
        obtained()
        with pytest.raises(LeaseLost), own, own.cursor() as cursor:
            cursor.execute(f"INSERT INTO {settings.namespace}.written VALUES (1)")
            lease.fence(own)
        own.autocommit = True
        with pytest.raises(HousekeepingError, match="outside of a transaction"):
            obtained_again(lease).fence(own)
    finally:
        own.close()

    assert written() == [1]


def obtained_again(lease: ExclusiveLease) -> ExclusiveLease:
    """Another key's, so that nothing but the missing transaction is in the way."""
    another = ExclusiveLease(f"{lease.key}/2", TTL, fenced=True)
    assert another.try_obtain() is not None
    return another


def test_fence_outside_of_a_transaction_raises(written: Any, redis_client: redis.Redis) -> None:
    # L3: it would guard nothing, and look as if it did
    with pytest.raises(HousekeepingError, match="was called outside of a transaction"):
        obtained().fence()


def test_fence_of_a_released_lease_raises(postgres: Database, redis_client: redis.Redis) -> None:
    lease = obtained()
    lease.cancel()

    with postgres.atomic(), pytest.raises(HousekeepingError, match="it is not held"):
        lease.fence()


def test_holder_that_renews_too_late_is_fenced_off_before_another_begins(written: Any, lose_lease: LoseLease) -> None:
    # L2, L3
    with pytest.raises(LeaseLost), ExclusiveLease(KEY, timedelta(seconds=3), fenced=True) as lease:
        lose_lease(KEY)
        eventually(lambda: lease.lost)
        write(lease, 1)

    assert written() == []


def test_sweeps_and_code_take_their_epochs_from_one_row(postgres: Database, redis_client: redis.Redis) -> None:
    # L3: one name space
    obtained().cancel()
    first = LeaseRow.get(key=KEY).epoch
    begun = runs.begin("any", message_id=None, tick=None, trigger="cli", lease=(KEY, "token"))
    second = LeaseRow.get(key=KEY).epoch
    obtained()

    assert begun is not None and begun.fence == (KEY, second, "token")
    assert first < second < LeaseRow.get().epoch
    assert [lease.key for lease in LeaseRow.select()] == [KEY]


def test_fenced_lease_without_a_database_names_the_missing_setting(redis_client: redis.Redis) -> None:
    lease = ExclusiveLease(KEY, TTL, fenced=True)

    with pytest.raises(HousekeepingError, match=r"has no epoch: no database is configured"):
        lease.try_obtain()
    assert not lease.exists()


def test_fenced_lease_is_not_acquired_while_the_database_is_unavailable(
    postgres: Database, redis_client: redis.Redis
) -> None:
    # L3, L5
    there, lease = database.obj, ExclusiveLease(KEY, TTL, fenced=True)
    database.initialize(connect_to("postgresql://postgres@/postgres?host=/nowhere"))
    try:
        with pytest.raises(DatabaseUnavailable, match="PostgreSQL did not answer"):
            lease.try_obtain()
    finally:
        database.initialize(there)

    assert not lease.exists()


def test_fenced_lease_without_the_schema_names_the_init_command(
    postgres: Database, redis_client: redis.Redis, admin: Connection, settings: Settings
) -> None:
    with admin.cursor() as cursor:
        cursor.execute(f"DROP SCHEMA {settings.schema_name} CASCADE")

    with pytest.raises(HousekeepingError, match="run: housekeeping init"):
        obtained()


def test_fence_without_fenced_shows_the_option(postgres: Database, redis_client: redis.Redis) -> None:
    # L3
    lease = ExclusiveLease(KEY, TTL)
    lease.try_obtain()

    with (
        postgres.atomic(),
        pytest.raises(HousekeepingError, match='fence\\(\\) needs fenced=True in .* "fenced": True'),
    ):
        lease.fence()


def test_lease_is_released_if_its_epoch_cannot_be_issued(
    written: Any, postgres: Database, redis_client: redis.Redis, settings: Settings, admin: Connection
) -> None:
    # L3: the last holder's transaction does not end, so no other run may begin
    last = obtained()
    write(last, 1)
    last.cancel()
    zombie_may_end = threading.Event()

    def zombie() -> None:
        with own_connection(settings) as own, own.cursor() as cursor:
            cursor.execute(f"SELECT 1 FROM {settings.schema_name}.leases FOR SHARE")
            began.set()
            zombie_may_end.wait(PATIENCE_S)
        own.close()

    began = threading.Event()
    with ThreadPoolExecutor(1) as another:
        sleeping = another.submit(zombie)
        assert began.wait(PATIENCE_S)
        set_in_session(postgres, "lock_timeout = '50ms'")
        lease = ExclusiveLease(KEY, TTL, fenced=True)
        with pytest.raises(OperationalError, match="lock timeout"):
            lease.try_obtain()
        zombie_may_end.set()
        sleeping.result(PATIENCE_S)

    assert not lease.exists()


def test_lease_that_expires_while_its_epoch_is_issued_is_lost(
    postgres: Database, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # L3: others may have begun meanwhile, and a late epoch would fence them off
    lease, now = ExclusiveLease(KEY, TTL, fenced=True), [1000.0]

    def sleep() -> None:
        now[0] += TTL.total_seconds()

    monkeypatch.setattr(renewal, "read_clock", lambda: now[0])
    slowly = at_step(lease_module, "acquire_epoch", "before", sleep)

    with slowly, pytest.raises(LeaseLost, match="while its epoch was issued"):
        lease.try_obtain()
    assert not lease.exists()


def test_a_thread_without_a_connection_is_left_without_one(postgres: Database, redis_client: redis.Redis) -> None:
    postgres.close()
    obtained().cancel()
    assert postgres.is_closed()

    postgres.connect()
    obtained().cancel()
    assert not postgres.is_closed()


def test_fence_outside_of_a_message_raises() -> None:
    with pytest.raises(HousekeepingError, match="of an actor with an exclusive_lease"):
        housekeeping.fence()
