"""Promises of leases (L1, L5, L6), with the in-memory stub, PostgreSQL and Redis alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import redis

from housekeeping import ExclusiveLease, Settings
from housekeeping.testing.stubs import ManualClock, MemoryLeaseStore
from tests.faults import exit_code_of_fork, lose_connection, lose_database, once, redis_fault
from tests.internals.core import MAIN, DeclarationError, HousekeepingError, LeaseHeld, LeaseLost, RedisUnavailable
from tests.internals.core import redis_client as make_redis_client
from tests.internals.database import Database, database
from tests.internals.leases import HeldLeaseRow, LeaseStore, PostgresLeaseStore, RedisLeaseStore
from tests.internals.ledger import NOW
from tests.sentinel_servers import applications_client

TTL = timedelta(seconds=30)
KEY = "報告/夜"

#: Lets a key's ttl pass.
Expire = Callable[[str], None]


@pytest.fixture(params=["memory", "postgres", "redis", "redis, answers as text"])
def store_and_expire(request: pytest.FixtureRequest) -> Any:
    if request.param == "memory":
        clock = ManualClock()
        yield MemoryLeaseStore(clock), lambda key: clock.advance(TTL)
        return
    if request.param == "postgres":
        request.getfixturevalue("postgres")

        def end(key: str) -> None:
            with database.using(MAIN):
                HeldLeaseRow.update(expires_at=NOW).where(HeldLeaseRow.key == key).execute()

        yield PostgresLeaseStore(), end
        return
    request.getfixturevalue("redis_client")
    settings: Settings = request.getfixturevalue("settings")
    client: Any = applications_client(settings.require_redis_url(), decode_responses="text" in request.param)

    def expire(key: str) -> None:
        name = f"{settings.namespace}:lease:{key}"
        assert client.pexpire(name, 1)
        while client.exists(name):
            time.sleep(0.001)

    yield RedisLeaseStore(client, settings.namespace), expire
    client.close()


@pytest.fixture
def store(store_and_expire: tuple[LeaseStore, Expire]) -> LeaseStore:
    return store_and_expire[0]


@pytest.fixture
def expire(store_and_expire: tuple[LeaseStore, Expire]) -> Expire:
    return store_and_expire[1]


def test_store_lets_only_the_holder_renew_and_release(store: LeaseStore) -> None:
    # L1
    assert store.obtain(KEY, "a", TTL) == "a"
    assert store.obtain(KEY, "a", TTL) == "a", "asked again after a lost answer"
    assert store.obtain(KEY, "b", TTL) == "a"
    assert store.obtain("another", "b", TTL) == "b"

    assert not store.renew(KEY, "b", TTL) and not store.release(KEY, "b")
    assert store.owner(KEY) == "a"
    assert store.renew(KEY, "a", 2 * TTL)
    assert TTL < (store.remaining(KEY) or TTL) <= 2 * TTL
    assert store.release(KEY, "a") and not store.release(KEY, "a")
    assert (store.owner(KEY), store.remaining(KEY)) == (None, None)


def test_an_expired_token_has_no_rights(store: LeaseStore, expire: Expire) -> None:
    # L1
    store.obtain(KEY, "a", TTL)
    expire(KEY)

    assert store.owner(KEY) is None
    assert not store.renew(KEY, "a", TTL), "what has expired is not revived"
    assert store.obtain(KEY, "b", TTL) == "b"
    assert not store.release(KEY, "a")
    assert store.owner(KEY) == "b"


def test_concurrent_tries_obtain_a_lease_once(store: LeaseStore) -> None:
    # L1
    with ThreadPoolExecutor(8) as threads:
        tokens = list(threads.map(lambda _: ExclusiveLease(KEY, TTL, store).try_obtain(), range(32)))

    assert sum(token is not None for token in tokens) == 1


def test_lease_shows_its_holder_and_its_age(store: LeaseStore) -> None:
    # L4
    lease, other = ExclusiveLease(KEY, TTL, store), ExclusiveLease(KEY, TTL, store)
    assert (lease.exists(), lease.owner(), lease.remaining(), lease.held_for()) == (False, None, None, None)

    token = lease.try_obtain()

    assert token is not None and other.owner() == token and other.exists()
    assert timedelta() < (other.remaining() or timedelta()) <= TTL
    assert timedelta() <= (other.held_for() or timedelta()) < timedelta(minutes=1)


def test_lease_is_not_reentrant_and_only_its_holder_releases_it(store: LeaseStore) -> None:
    # L1
    lease, other = ExclusiveLease(KEY, TTL, store), ExclusiveLease(KEY, TTL, store)
    assert lease.try_obtain() is not None

    assert lease.try_obtain() is None
    assert other.try_obtain() is None
    assert not other.cancel() and not other.renew()
    assert lease.renew() and lease.cancel() and not lease.cancel()
    assert other.try_obtain() is not None


def test_with_block_holds_its_lease_until_its_end(store: LeaseStore) -> None:
    other = ExclusiveLease(KEY, TTL, store)

    with ExclusiveLease(KEY, TTL, store) as lease:
        lease.check()
        with pytest.raises(LeaseHeld, match=KEY), other:
            pass
        lease.check()

    assert not lease.exists()


def test_with_block_sleeps_between_its_tries(store: LeaseStore) -> None:
    holder, waits = ExclusiveLease(KEY, TTL, store), list[int]()
    holder.try_obtain()

    def wait(number: int) -> float:
        waits.append(number)
        if number == 2:
            holder.cancel()
        return 0.0

    with ExclusiveLease(KEY, TTL, store, retries=5, sleep=wait):
        pass

    assert waits == [1, 2]


def test_with_block_raises_at_its_end_if_its_lease_was_lost(store: LeaseStore, expire: Expire) -> None:
    successor = ExclusiveLease(KEY, TTL, store)

    with pytest.raises(LeaseLost), ExclusiveLease(KEY, TTL, store):
        expire(KEY)
        successor.try_obtain()

    assert successor.renew(), "it gives nobody else's lease back"


def test_lost_lease_does_not_hide_an_error_of_the_block(store: LeaseStore, expire: Expire) -> None:
    with pytest.raises(ZeroDivisionError), ExclusiveLease(KEY, TTL, store):
        expire(KEY)
        raise ZeroDivisionError


def test_forked_child_neither_renews_nor_releases_its_parents_lease(
    store: LeaseStore,
) -> None:
    # L1
    lease = ExclusiveLease(KEY, TTL, store)
    lease.try_obtain()

    assert exit_code_of_fork(lambda: lease.renew() + 2 * lease.cancel()) == 0
    assert lease.exists()


@pytest.mark.parametrize("ttl", [timedelta(), timedelta(seconds=2.999), 30])
def test_ttl_below_three_seconds_is_rejected(store: LeaseStore, ttl: Any) -> None:
    with pytest.raises(DeclarationError, match="at least 3 seconds"):
        ExclusiveLease(KEY, ttl, store)
    ExclusiveLease(KEY, timedelta(seconds=3), store)


def test_an_unreachable_store_is_an_error_not_a_free_lease() -> None:
    # L5
    broken = MemoryLeaseStore()
    broken.broken = True

    for store in (broken, make_redis_client("redis://127.0.0.1:1")):
        with pytest.raises(RedisUnavailable):
            ExclusiveLease(KEY, TTL, store).try_obtain()


@contextmanager
def lost_in_redis() -> Iterator[None]:
    with redis_fault(":lease:", "after", once(lose_connection)):
        yield


@contextmanager
def lost_in_postgres() -> Iterator[None]:
    execute = Database.execute_sql

    def answered(self: Database, sql: str, params: Any = None) -> Any:
        cursor = execute(self, sql, params)
        if "INTO" in sql and "held_leases" in sql:
            patch.undo()
            self.connection().close()
            lose_database()
        return cursor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "execute_sql", answered)
        yield


@pytest.mark.parametrize("lost", [lost_in_redis, lost_in_postgres], ids=["redis", "postgres"])
def test_lease_acquired_without_an_answer_has_a_holder(
    lost: Callable[[], AbstractContextManager[None]], postgres: Database, redis_client: redis.Redis, settings: Settings
) -> None:
    # L5: the command took effect, then the connection broke
    is_redis = lost is lost_in_redis
    lease = ExclusiveLease(
        KEY, TTL, RedisLeaseStore(redis_client, settings.namespace) if is_redis else PostgresLeaseStore()
    )

    with lost():
        assert lease.try_obtain() is not None

    assert lease.cancel()


def test_lease_in_an_open_transaction_raises(postgres: Database, redis_client: redis.Redis) -> None:
    # L6: in any transaction
    lease = ExclusiveLease(KEY, TTL)

    with postgres.atomic(), pytest.raises(HousekeepingError, match="inside an open database transaction"):
        lease.try_obtain()
    postgres.execute_sql("BEGIN")
    with pytest.raises(HousekeepingError, match="inside an open database transaction"):
        lease.try_obtain()
    postgres.execute_sql("ROLLBACK")

    assert not lease.exists()
    assert lease.try_obtain() is not None


def test_a_lease_shares_the_installed_applications_redis_and_name_space(
    redis_client: redis.Redis, settings: Settings
) -> None:
    ExclusiveLease(f"k{uuid4().hex}", TTL, redis_client).try_obtain()
    ExclusiveLease(KEY, TTL).try_obtain()

    assert RedisLeaseStore(redis_client, settings.namespace).owner(KEY) is not None
    assert len(list(redis_client.scan_iter(match=f"{settings.namespace}:lease:*", count=1000))) == 2
