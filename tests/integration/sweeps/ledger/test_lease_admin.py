"""List and forced release of leases (L3)."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import redis

from housekeeping import ExclusiveLease, Settings
from tests.faults import at_step, once
from tests.integration.conftest import LoseLease
from tests.integration.leases.own_connection import own_connection
from tests.internals.core import HousekeepingError, LeaseLost, MessageContext, RedisUnavailable, current_message
from tests.internals.database import Database
from tests.internals.insight import as_json
from tests.internals.leases import LeaseRow, LeaseStore
from tests.internals.ledger import HeldLease, Run, UnknownLease, held_leases, release_lease, runs
from tests.session_settings import set_in_session

TTL = timedelta(minutes=10)
KEY = "報告/夜"
WORKER = "user_status_cleanup.batch"

List = Callable[[], list[HeldLease]]
Release = Callable[[], HeldLease]


@pytest.fixture
def run_at_work(postgres: Database, redis_client: redis.Redis) -> runs.RunStart:
    """A run that holds the lease, as a worker process has it."""
    message = current_message.set(MessageContext("message-1"))
    lease = ExclusiveLease(KEY, TTL, worker=WORKER)
    token = lease.try_obtain()
    current_message.reset(message)
    assert token is not None
    begun = runs.begin(WORKER, message_id="message-1", tick=None, trigger="enqueue", lease=(KEY, token))
    assert begun is not None
    return begun


@pytest.fixture
def listed(leases: LeaseStore) -> List:
    return lambda: held_leases(leases)


@pytest.fixture
def release(leases: LeaseStore) -> Release:
    return lambda: release_lease(leases, KEY)


def commits_nothing(postgres: Database, run: runs.RunStart) -> bool:
    """Whether the run's next batch is refused."""
    try:
        with postgres.atomic():
            runs.advance(run.run_id, {}, None, run.fence)
    except LeaseLost:
        return True
    return False


def test_held_lease_is_listed_with_its_holder_and_run(listed: List, run_at_work: runs.RunStart) -> None:
    (held,) = listed()

    assert (held.key, held.worker, held.message_id) == (KEY, WORKER, "message-1")
    assert held.process is not None and held.process.endswith(f":{os.getpid()}")
    assert (held.epoch, held.run_id) == (1, run_at_work.run_id)
    assert held.held_for_s is not None and held.remaining_s is not None and held.silent_for_s is not None
    assert 0 <= held.held_for_s < 60 and 540 < held.remaining_s <= 600 and 0 <= held.silent_for_s < 60


def test_leases_of_application_code_are_listed(listed: List, postgres: Database, leases: LeaseStore) -> None:
    fenced = ExclusiveLease("b", TTL, fenced=True)
    fenced.try_obtain()
    ExclusiveLease("a", TTL).try_obtain()
    leases.obtain("c", "a token of another release", TTL)

    assert [(held.key, held.worker, held.epoch, held.run_id) for held in listed()] == [
        ("a", None, None, None),
        ("b", None, 1, None),
        ("c", None, None, None),
    ]


def test_foreign_redis_keys_do_not_hide_leases(
    listed: List, run_at_work: runs.RunStart, redis_client: redis.Redis, settings: Settings
) -> None:
    prefix = f"{settings.namespace}:lease:".encode()
    redis_client.set(prefix + b"\xff", b"\xfe", ex=60)
    redis_client.set(prefix + b"\0", "x", ex=60)
    redis_client.hset((prefix + b"hash").decode(), "field", "value")
    redis_client.expire((prefix + b"hash").decode(), 60)

    held = listed()

    assert sorted(each.key for each in held) == ["\0", "\\xff", KEY]


def test_lease_lost_by_redis_is_listed_while_its_run_is_open(
    listed: List, run_at_work: runs.RunStart, lose_lease: LoseLease
) -> None:
    lose_lease(KEY)
    assert [(held.remaining_s, held.run_id) for held in listed()] == [(None, run_at_work.run_id)]

    runs.finish(run_at_work.run_id, "done", None, counts={}, cursor=None)
    assert listed() == []


def test_lost_lease_and_its_successor_are_both_listed(
    listed: List, run_at_work: runs.RunStart, lose_lease: LoseLease
) -> None:
    lose_lease(KEY)
    ExclusiveLease(KEY, TTL).try_obtain()

    assert {(held.run_id, held.remaining_s is None) for held in listed()} == {(run_at_work.run_id, True), (None, False)}


def test_holder_of_a_released_lease_commits_nothing(
    release: Release, run_at_work: runs.RunStart, postgres: Database
) -> None:
    # L3: whether it still lives or only sleeps
    assert release().run_id == run_at_work.run_id

    assert commits_nothing(postgres, run_at_work)
    assert ExclusiveLease(KEY, TTL, fenced=True).try_obtain() is not None
    assert run_at_work.fence is not None and LeaseRow.get().epoch > run_at_work.fence.epoch + 1
    # It closes its own row, or the next run does, so that the next run resumes from its cursor.
    assert Run.get().outcome is None


def test_holder_is_fenced_off_before_its_lease_is_released(
    release: Release, run_at_work: runs.RunStart, postgres: Database, leases: LeaseStore
) -> None:
    # L3: else it could commit beside its successor
    harmless: list[bool] = []

    def away() -> None:
        harmless.append(commits_nothing(postgres, run_at_work))
        raise RedisUnavailable("connection refused")

    with (
        at_step(type(leases), "release", "before", away),
        pytest.raises(RedisUnavailable, match="its holder can no longer commit, but it is held until its ttl"),
    ):
        release()

    assert harmless == [True]


def test_release_leaves_a_successor_that_began_meanwhile(
    release: Release, run_at_work: runs.RunStart, lose_lease: LoseLease, leases: LeaseStore
) -> None:
    # L1, L3
    successors: list[ExclusiveLease] = []

    def begin_a_successor() -> None:
        lose_lease(KEY)
        successors.append(ExclusiveLease(KEY, TTL, fenced=True))
        successors[0].try_obtain()

    # The release has read the database, and reads the store now.
    with (
        at_step(type(leases), "held", "before", once(begin_a_successor)),
        pytest.raises(HousekeepingError, match="another holder has begun meanwhile; nothing was released"),
    ):
        release()

    assert successors[0].renew()
    assert LeaseRow.get().holder == successors[0].owner()


def test_two_holders_in_one_process_are_distinguished(listed: List, leases: LeaseStore) -> None:
    lease, successor = ExclusiveLease(KEY, TTL), ExclusiveLease(KEY, TTL)
    lease.try_obtain()
    [meant] = listed()
    lease.cancel()
    successor.try_obtain()

    with pytest.raises(HousekeepingError, match="another holder has begun meanwhile"):
        release_lease(leases, KEY, expected=meant.token)

    assert successor.exists()
    assert meant.token and meant.token not in str(meant) and "token" not in as_json(meant)


def test_lease_known_only_from_its_open_run_can_be_released(
    release: Release, run_at_work: runs.RunStart, postgres: Database, lose_lease: LoseLease
) -> None:
    lose_lease(KEY)

    assert release().remaining_s is None

    assert commits_nothing(postgres, run_at_work)


def test_lease_without_a_database_is_released_in_redis(release: Release, redis_client: redis.Redis) -> None:
    lease = ExclusiveLease(KEY, TTL)
    lease.try_obtain()

    assert release().epoch is None

    assert not lease.exists()


def test_release_of_a_free_lease_is_rejected(release: Release, postgres: Database, redis_client: redis.Redis) -> None:
    held, given_back = ExclusiveLease("another", TTL), ExclusiveLease(KEY, TTL)
    held.try_obtain(), given_back.try_obtain()
    given_back.cancel()

    with pytest.raises(UnknownLease, match=f"no lease '{KEY}' is held"):
        release()

    assert held.exists()
    assert not LeaseRow.select().exists(), "no holder was fenced off"


def test_release_fences_off_a_plain_holder(release: Release, postgres: Database, redis_client: redis.Redis) -> None:
    # L3: Redis may fail just then
    held = ExclusiveLease(KEY, TTL, fenced=True)
    token = held.try_obtain()

    release()
    held._store.obtain(KEY, str(token), TTL)

    with postgres.atomic(), pytest.raises(LeaseLost):
        held.fence()


def test_open_transaction_of_the_holder_prevents_the_release(
    release: Release, run_at_work: runs.RunStart, settings: Settings, postgres: Database
) -> None:
    # L3: it has asked for its epoch, and may commit at any moment
    own = own_connection(settings)
    with own.cursor() as cursor:
        cursor.execute(f"SELECT 1 FROM {settings.schema_name}.leases FOR SHARE")
    set_in_session(postgres, "lock_timeout = '50ms'")

    with pytest.raises(HousekeepingError, match="a transaction of its holder is open, so nothing was released"):
        release()
    own.rollback()
    own.close()

    assert ExclusiveLease(KEY, TTL).exists()
