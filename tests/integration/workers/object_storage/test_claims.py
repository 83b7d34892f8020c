"""Claims, by which only one run deletes an upload, and uploads that change while a run deletes them.

Document 100, 概要, 影響範囲: 正常なファイルには影響しません."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
from tests.internals.core import RedisUnavailable, UploadBeingDeleted, WorkerSettings
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.ledger import Run
from tests.internals.workers import Claims, Entry, StoreDeletion, deletion, pending_entry
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


#: Does something right before the worker claims what it found stale, or right before it deletes the objects.
Meanwhile = Callable[[Callable[[], Any]], object]


@pytest.fixture
def before_the_claim() -> Iterator[Meanwhile]:
    with ExitStack() as stack:
        yield lambda act: stack.enter_context(at_step(Claims, "take", "before", act))


@pytest.fixture
def before_the_deletion() -> Iterator[Meanwhile]:
    with ExitStack() as stack:
        yield lambda act: stack.enter_context(at_step(StoreDeletion, "delete", "before", act))


def complete(path: str) -> bool:
    return pending_uploads.complete("artifacts", path)


@pytest.mark.parametrize(
    ("meanwhile", "left"),
    [
        (lambda pending: complete("may/1"), set()),
        (lambda pending: pending_uploads.prepare("artifacts", "may/1", clock=ManualClock()), {"may/1"}),
        # That program knows no claims; its HDEL counts as completion up to the claim.
        (lambda pending: pending.hdel(pending_entry.KEY, "artifacts:may/1"), set()),
    ],
    ids=["completed", "prepared_again", "removed"],
)
def test_upload_completed_after_the_read_keeps_its_object(
    place: Place,
    stale_uploads: StaleUploads,
    pending: redis.Redis,
    still_pending: Pending,
    before_the_claim: Meanwhile,
    clock: ManualClock,
    meanwhile: Callable[[redis.Redis], object],
    left: set[str],
) -> None:
    stale_uploads(place, "may/1", "may/2")
    before_the_claim(lambda: meanwhile(pending))

    result = run_sweep(sweep, clock=clock)

    assert (result.counts["total_deleted_stale_entries"], result.counts["failed"]) == (1, 0)
    assert (still_pending(), place.paths()) == (left, {"may/1"})


def test_upload_being_deleted_cannot_be_completed(
    place: Place,
    stale_uploads: StaleUploads,
    still_pending: Pending,
    before_the_deletion: Meanwhile,
    clock: ManualClock,
) -> None:
    # The gap that a second look cannot close: after "completed", the object exists.
    stale_uploads(place, "may/1")
    completed: list[bool] = []

    def try_to() -> None:
        completed.append(complete("may/1"))
        with pytest.raises(UploadBeingDeleted, match="artifacts:may/1"):
            pending_uploads.prepare("artifacts", "may/1", clock=clock)
        assert pending_uploads.exists("artifacts", "may/1"), "nobody sees the entry change before it goes"

    before_the_deletion(try_to)

    result = run_sweep(sweep, clock=clock)

    assert completed == [False]
    assert result.counts["total_deleted_stale_entries"] == 1
    assert (still_pending(), place.paths()) == (set(), set())


def test_path_is_free_after_its_stale_upload_is_deleted(
    folder: Folder, stale_uploads: StaleUploads, pending: redis.Redis, clock: ManualClock
) -> None:
    stale_uploads(folder, "may/1")
    run_sweep(sweep, clock=clock)

    pending_uploads.prepare("artifacts", "may/1", clock=clock)
    folder.put("may/1")

    assert run_sweep(sweep, clock=clock).counts["total_deleted_stale_entries"] == 0
    assert complete("may/1") is True
    assert folder.paths() == {"may/1"}


def test_completed_upload_always_has_its_object(
    folder: Folder, configure: Configure, prepared: Prepare, still_pending: Pending, postgres: Database
) -> None:
    # The same without arranging anything: everything is completed while everything is swept.
    configure(artifacts=folder.settings())
    paths = [f"may/{number}" for number in range(1_000)]
    prepared(*paths, place=folder)
    completed: set[str] = set()
    start = threading.Barrier(2)

    def complete_all() -> None:
        start.wait(timeout=10)
        completed.update(path for path in reversed(paths) if complete(path))

    other = threading.Thread(target=complete_all)
    other.start()
    start.wait(timeout=10)
    result = run_sweep(sweep.configured(WorkerSettings(batch_size=50)), clock=ManualClock())
    other.join(timeout=60)

    assert folder.paths() == completed
    assert result.counts["failed"] == 0
    assert still_pending() == set()


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda pending: pending.hdel(pending_entry.KEY, "artifacts:may/1"), "completed by another program"),
        (lambda pending: pending.hset(pending_entry.KEY, "artifacts:may/1", "1767225600"), "prepared again by another"),
    ],
)
def test_upload_changed_during_its_deletion_is_reported(
    folder: Folder,
    stale_uploads: StaleUploads,
    pending: redis.Redis,
    before_the_deletion: Meanwhile,
    reported: list[dict[str, Any]],
    clock: ManualClock,
    act: Callable[[redis.Redis], Any],
    why: str,
) -> None:
    # The declared limit (docs/workers/object_storage.md): a program that does not use this API is not held off.
    stale_uploads(folder, "may/1", "may/2")
    before_the_deletion(lambda: act(pending))

    result = run_sweep(sweep, clock=clock)

    assert result.counts["total_deleted_stale_entries"] == 1 and result.counts["failed"] == 1
    (report,) = reported
    assert why in str(report["error"]) and report["path"] == "may/1"
    assert pending.hget(pending_entry.KEY, "artifacts:may/1") in (None, b"1767225600"), "what is new is not removed"


def test_uncertain_deletion_blocks_complete_until_the_next_run(
    folder: Folder, configure: Configure, prepared: Prepare, still_pending: Pending, clock: ManualClock
) -> None:
    configure(artifacts=folder.settings())
    poison = folder.refuse("may/poison")
    prepared(poison)
    run_sweep(sweep, clock=clock)
    assert complete(poison) is False
    (folder.root / folder.prefix / poison / "inside").unlink()
    (folder.root / folder.prefix / poison).rmdir()

    assert run_sweep(sweep, clock=clock).counts["total_deleted_stale_entries"] == 1
    assert still_pending() == set()
