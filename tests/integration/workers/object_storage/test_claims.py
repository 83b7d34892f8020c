"""Claims, by which only one run deletes an upload: takeover and expiry."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping.core.errors import RedisUnavailable
from housekeeping.core.settings import Settings
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.models import Run
from housekeeping.testing import ManualClock
from housekeeping.workers.object_storage import claims, pending_entry, pending_uploads
from housekeeping.workers.object_storage.claims import Claims
from housekeeping.workers.object_storage.pending_entry import Entry
from housekeeping.workers.object_storage.worker import sweep
from tests.faults import at_number, at_step, elsewhere, lose_connection, once, redis_fault
from tests.integration.workers.object_storage.conftest import THREE_HOURS, Configure, Pending, Prepare
from tests.integration.workers.object_storage.places import Folder, Place

pytestmark = pytest.mark.usefixtures("postgres", "pending")


@pytest.mark.parametrize(("older_by", "taken"), [(-1, 0), (1, 1)])
def test_abandoned_claim_is_taken_over_by_age(
    prepared: Prepare, pending: redis.Redis, settings: Settings, older_by: int, taken: int
) -> None:
    lasts = timedelta(minutes=6)
    prepared("may/1")
    value: Any = pending.hget(pending_entry.KEY, "artifacts:may/1")
    entry = Entry(b"artifacts:may/1", value)
    dead, living = Claims(lasts), Claims(lasts)
    assert dead.take([entry]) == [entry]
    assert living.take([entry]) == []
    kept: Any = pending.hget(f"{settings.namespace}:upload_claims", entry.field)
    expires, _, token = kept.partition(b":")
    aged = int(expires) - (lasts + timedelta(seconds=older_by)) // timedelta(milliseconds=1)
    pending.hset(f"{settings.namespace}:upload_claims", entry.field, b"%d:%s" % (aged, token))

    assert len(living.take([entry])) == taken


@pytest.mark.parametrize(
    ("dead", "living", "at_work", "taken"),
    [(7, 8, [6, 8], 1), (7, 8, [7, 8], 0), (9, 8, [8], 0), (None, 8, [8], 0), (7, None, [], 0)],
)
def test_claim_of_an_inactive_run_is_taken_over_at_once(
    prepared: Prepare, pending: redis.Redis, dead: int | None, living: int | None, at_work: list[int], taken: int
) -> None:
    prepared("may/1")
    value: Any = pending.hget(pending_entry.KEY, "artifacts:may/1")
    entry = Entry(b"artifacts:may/1", value)
    asleep, awake = Claims(THREE_HOURS, dead), Claims(THREE_HOURS, living, lambda: at_work)
    assert asleep.take([entry]) == [entry]

    assert len(awake.take([entry])) == taken
    assert asleep.finish([entry], []).removed == ([] if taken else [entry])


def test_lost_run_deletes_nothing_and_loses_its_claims(
    place: Place,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    clock: ManualClock,
    admin: Connection,
) -> None:
    configure(artifacts=place.settings())
    prepared("may/1", place=place)

    def sleep() -> None:
        # A minute passes, but not by the machine's own clock, which stands still while it is paused.
        with admin.cursor() as cursor:
            cursor.execute(f"UPDATE {Run._meta.schema}.runs SET heartbeat_at = heartbeat_at - interval '61 s'")
        assert run_sweep(sweep, clock=clock).counts["total_deleted_stale_entries"] == 1, "it takes them over"
        place.put("may/1")  # by a program that uses the path again

    with at_step(Claims, "take", "after", once(sleep)):
        result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.reason) == ("lost_lease", "taken_over")
    assert (place.paths(), still_pending()) == ({"may/1"}, set())


def test_run_without_its_claim_removes_nothing(
    prepared: Prepare, pending: redis.Redis, still_pending: Pending, settings: Settings
) -> None:
    prepared("may/1")
    value: Any = pending.hget(pending_entry.KEY, "artifacts:may/1")
    entry = Entry(b"artifacts:may/1", value)
    asleep = Claims(THREE_HOURS)
    asleep.take([entry])
    pending.hset(f"{settings.namespace}:upload_claims", entry.field, "9999999999999:another's")

    ends = asleep.finish([entry], [])

    assert (ends.removed, ends.lost) == ([], [])
    assert still_pending() == {"may/1"}


def test_claim_of_a_kept_object_expires_after_a_day(
    prepared: Prepare, pending: redis.Redis, settings: Settings
) -> None:
    prepared("may/1", "may/2")
    found: Any = pending.hgetall(pending_entry.KEY)
    both = [Entry(field, value) for field, value in found.items()]
    ours, kept = Claims(timedelta(minutes=6)), f"{settings.namespace}:upload_claims"
    ours.take(both)
    ours.finish(both[:1], both[1:])

    left: Any = pending.hgetall(kept)

    assert list(left) == [both[1].field], "the one whose object may still be there"
    expires = int(left[both[1].field].removesuffix(b":")) / 1000
    assert time.time() + 3600 < expires < time.time() + claims.KEPT.total_seconds() + 60
    assert 3600 < int(pending.ttl(kept)) <= claims.KEPT.total_seconds()


@pytest.mark.parametrize(("expires_in_s", "is_refused"), [(60, True), (-1, False)])
def test_expired_claim_refuses_nothing_and_is_dropped(
    prepared: Prepare, pending: redis.Redis, settings: Settings, expires_in_s: int, is_refused: bool
) -> None:
    prepared("may/1")
    kept = f"{settings.namespace}:upload_claims"
    pending.hset(kept, "artifacts:may/1", f"{(time.time() + expires_in_s) * 1000:.0f}:7:dead")

    assert pending_uploads.complete("artifacts", "may/1") is not is_refused
    claims.drop_expired()

    assert bool(pending.exists(kept)) is is_refused


@pytest.mark.plain_redis_only(reason="it counts the commands of the server, also those of replicas and Sentinels")
def test_claims_of_a_page_are_one_command_each_way(prepared: Prepare, pending: redis.Redis) -> None:
    prepared(*(f"may/{number}" for number in range(1000)))
    found: Any = pending.hgetall(pending_entry.KEY)
    entries = [Entry(field, value) for field, value in found.items()]
    ours = Claims(THREE_HOURS)
    ours.take(entries[:1])  # loads the scripts
    ours.finish([], entries[:1])
    server: Any = pending
    before = server.info("stats")["total_commands_processed"]

    claimed = ours.take(entries)
    taken = server.info("stats")["total_commands_processed"]
    removed = ours.finish(claimed[:900], claimed[900:]).removed
    finished = server.info("stats")["total_commands_processed"]

    assert (len(claimed), len(removed)) == (1000, 900)
    # EVALSHA, TIME, two HMGET, HSET and PEXPIRE; then also two HDEL. INFO itself.
    assert (taken - before - 1, finished - taken - 1) == (6, 8)


def test_run_committed_after_its_claim_was_seen_keeps_it(prepared: Prepare, pending: redis.Redis) -> None:
    # Ids are drawn before their rows can be seen: a run that began earlier may show later.
    prepared("may/1")
    value: Any = pending.hget(pending_entry.KEY, "artifacts:may/1")
    entry = Entry(b"artifacts:may/1", value)
    at_work = {8}
    living = Claims(THREE_HOURS, 8, lambda: at_work)
    at_work.add(7)
    assert Claims(THREE_HOURS, 7).take([entry]) == [entry]

    assert living.take([entry]) == []


def test_run_without_conflicts_does_not_query_active_runs(prepared: Prepare, pending: redis.Redis) -> None:
    prepared("may/1")
    value: Any = pending.hget(pending_entry.KEY, "artifacts:may/1")
    entry = Entry(b"artifacts:may/1", value)

    assert Claims(THREE_HOURS, 8, lambda: pytest.fail("it asked")).take([entry]) == [entry]


@pytest.mark.parametrize("meanwhile", [None, "claimed", "prepared again"])
def test_removal_with_a_lost_answer_is_counted(
    prepared: Prepare, pending: redis.Redis, settings: Settings, still_pending: Pending, meanwhile: str | None
) -> None:
    prepared("may/1", "may/2")
    found: Any = pending.hgetall(pending_entry.KEY)
    gone, kept = sorted((Entry(field, value) for field, value in found.items()), key=lambda entry: entry.field)
    ours = Claims(THREE_HOURS, 7)
    ours.take([gone, kept])

    def change() -> None:
        if meanwhile == "claimed":
            pending.hset(f"{settings.namespace}:upload_claims", gone.field, "9999999999999:8:another's")
        elif meanwhile == "prepared again":
            pending.hset(pending_entry.KEY, "artifacts:may/1", "1")

    def change_and_lose_the_answer() -> None:
        elsewhere(change)()
        lose_connection()

    with redis_fault("EVALSHA", "after", once(change_and_lose_the_answer)):
        ends = ours.finish([gone], [kept])

    assert (ends.removed, ends.lost) == ([gone] if meanwhile is None else [], [])
    assert still_pending() == ({"may/1", "may/2"} if meanwhile == "prepared again" else {"may/2"})


def test_removals_before_a_redis_outage_are_counted(
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    clock: ManualClock,
    tmp_path: Path,
) -> None:
    places = {location: Folder(tmp_path / location) for location in ("artifacts", "uploads")}
    configure(**{location: place.settings() for location, place in places.items()})
    for location, place in places.items():
        prepared("may/1", "may/2", location=location, place=place)

    def fail() -> None:
        raise RedisUnavailable("gone")

    with at_step(Claims, "take", "before", at_number(2, fail)):
        result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["total_deleted_stale_entries"]) == ("done", 4)
    assert still_pending() == set()
