"""Claims, by which only one run deletes an upload: takeover, expiry and loss."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.object_storage import pending_uploads
from tests.faults import at_number, at_step, elsewhere, exchanges, lose_connection, once, redis_fault
from tests.integration.workers.object_storage.conftest import Configure, Pending, Prepare, StaleUploads
from tests.integration.workers.object_storage.places import Folder, Place
from tests.internals.core import RedisUnavailable, UploadBeingDeleted
from tests.internals.engine import run_sweep
from tests.internals.ledger import Run
from tests.internals.workers import Claims, Entry, deletion, pending_entry
from tests.internals.workers import uploads_sweep as sweep

pytestmark = pytest.mark.usefixtures("postgres", "pending")


@pytest.fixture
def entry(prepared: Prepare, pending: redis.Redis) -> Entry:
    prepared("may/1")
    value: Any = pending.hget(pending_entry.KEY, "artifacts:may/1")
    return Entry(b"artifacts:may/1", value)


@pytest.fixture
def claim(settings: Settings) -> str:
    return f"{settings.namespace}:upload_claim:artifacts:may/1"


@pytest.mark.parametrize(("dead", "active", "taken"), [(7, [6, 8], True), (7, [7, 8], False), (9, [8], True)])
def test_claim_of_an_inactive_run_is_taken_over_at_once(
    entry: Entry, dead: int, active: list[int], taken: bool
) -> None:
    asleep, awake = Claims(dead), Claims(8, lambda: active)
    assert asleep.take([entry]) == [entry]

    assert awake.take([entry]) == ([entry] if taken else [])
    assert asleep.finish([entry]).removed == ([] if taken else [entry])


def test_claim_of_a_run_that_was_recorded_later_is_left_alone(entry: Entry) -> None:
    # Ids are drawn before their rows can be seen: a run that began earlier may show later.
    active = {8}
    ours = Claims(8, lambda: active)
    active.add(7)
    Claims(7).take([entry])

    assert ours.take([entry]) == []


def test_claim_ends_a_month_after_the_last_attempt(entry: Entry, pending: redis.Redis, claim: str) -> None:
    Claims(7).take([entry])

    assert timedelta(days=29, hours=23).total_seconds() < pending.ttl(claim) <= timedelta(days=30).total_seconds()


@pytest.mark.parametrize(("age", "is_refused"), [(timedelta(hours=23), True), (timedelta(hours=25), False)])
def test_path_of_a_claimed_upload_is_free_after_a_day(
    entry: Entry, pending: redis.Redis, claim: str, age: timedelta, is_refused: bool
) -> None:
    pending.set(claim, 7, px=timedelta(days=30) - age)

    assert pending_uploads.complete("artifacts", "may/1") is False, "its object may have been deleted"
    if is_refused:
        with pytest.raises(UploadBeingDeleted, match="artifacts:may/1"):
            pending_uploads.prepare("artifacts", "may/1")
    else:
        pending_uploads.prepare("artifacts", "may/1")
    assert pending_uploads.complete("artifacts", "may/1") is not is_refused


def test_claims_of_many_uploads_are_one_round_trip_each_way(prepared: Prepare, pending: redis.Redis) -> None:
    prepared(*(f"may/{number}" for number in range(100)))
    found: Any = pending.hgetall(pending_entry.KEY)
    entries = [Entry(field, value) for field, value in found.items()]
    ours = Claims(7)
    ours.finish(ours.take(entries[:1]))  # loads the scripts

    with exchanges() as made:
        removed = ours.finish(ours.take(entries)).removed

    assert (len(removed), len(made.commands)) == (99, 2)


@pytest.mark.parametrize("meanwhile", [None, "claimed", "prepared again"])
def test_removal_with_a_lost_answer_is_counted(
    entry: Entry, pending: redis.Redis, claim: str, still_pending: Pending, meanwhile: str | None
) -> None:
    ours = Claims(7)
    ours.take([entry])

    def change() -> None:
        if meanwhile == "claimed":
            pending.set(claim, 8)
        elif meanwhile == "prepared again":
            pending.hset(pending_entry.KEY, "artifacts:may/1", "1")

    def change_and_lose_the_answer() -> None:
        elsewhere(change)()
        lose_connection()

    with redis_fault("EVALSHA", "after", once(change_and_lose_the_answer)):
        ends = ours.finish([entry])

    assert (ends.removed, ends.lost) == ([entry] if meanwhile is None else [], [])
    assert still_pending() == ({"may/1"} if meanwhile == "prepared again" else set())


def test_claim_lost_together_with_an_answer_is_written_again(entry: Entry, pending: redis.Redis, claim: str) -> None:
    # A restart of Redis, or a failover, that forgets the claim: the first attempt of the removal fails as well.
    ours = Claims(7)
    ours.take([entry])

    def forget() -> None:
        elsewhere(lambda: pending.delete(claim))()
        lose_connection()

    with redis_fault("EVALSHA", "before", once(forget)):
        ends = ours.finish([entry])

    assert [str(error) for _, error in ends.lost] == ["Redis lost its claim; its object was deleted"]
    assert pending_uploads.complete("artifacts", "may/1") is False, "its object is gone"


@pytest.mark.parametrize("is_prepared_again", [False, True])
def test_redis_emptied_during_a_deletion_is_reported(
    folder: Folder,
    stale_uploads: StaleUploads,
    pending: redis.Redis,
    claim: str,
    reported: list[dict[str, Any]],
    clock: ManualClock,
    is_prepared_again: bool,
) -> None:
    stale_uploads(folder, "may/1")

    def empty() -> None:
        pending.delete(pending_entry.KEY, claim)
        if is_prepared_again:
            pending_uploads.prepare("artifacts", "may/1", clock=clock)

    with at_step(deletion, "delete_file", "before", empty):
        result = run_sweep(sweep, clock=clock)

    assert (result.counts["total_deleted_stale_entries"], result.counts["failed"]) == (0, 1)
    assert [str(report["error"]) for report in reported] == ["Redis lost its claim; its object was deleted"]
    assert pending_uploads.complete("artifacts", "may/1") is False, "its object is gone"


def test_upload_prepared_after_redis_was_emptied_keeps_its_object(
    folder: Folder, stale_uploads: StaleUploads, pending: redis.Redis, clock: ManualClock
) -> None:
    stale_uploads(folder, "may/1")

    def empty() -> None:
        pending.delete(pending_entry.KEY)
        pending_uploads.prepare("artifacts", "may/1", clock=clock)

    with at_step(Claims, "take", "before", empty):
        run_sweep(sweep, clock=clock)

    assert folder.paths() == {"may/1"}
    assert pending_uploads.complete("artifacts", "may/1") is True


def test_lost_run_deletes_nothing_and_loses_its_claims(
    place: Place,
    stale_uploads: StaleUploads,
    still_pending: Pending,
    clock: ManualClock,
    admin: Connection,
) -> None:
    stale_uploads(place, "may/1")

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
