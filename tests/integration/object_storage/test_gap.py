"""An upload that is touched in exactly the gap between the worker's look and its deletion.

Document 100, 概要, 影響範囲: 正常なファイルには影響しません.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping.foundation.db import Database
from housekeeping.foundation.errors import UploadBeingDeleted
from housekeeping.foundation.settings import Settings, WorkerSettings
from housekeeping.sweeps.own_tables import Run
from housekeeping.sweeps.run import perform
from housekeeping.testing import ManualClock
from housekeeping.workers.object_storage import claims, entries, pending_uploads
from housekeeping.workers.object_storage.claims import Claims
from housekeeping.workers.object_storage.deletion import Deleted, Deletion
from housekeeping.workers.object_storage.entries import Entry
from housekeeping.workers.object_storage.worker import sweep
from tests.integration.object_storage.conftest import THREE_HOURS, Configure, Pending, Prepare
from tests.integration.object_storage.places import Folder, Place

#: Does something right before the worker claims what it found stale, or right before it deletes the objects.
Meanwhile = Callable[[Callable[[], Any]], None]

pytestmark = pytest.mark.usefixtures("postgres", "pending")


@pytest.fixture
def before_the_claim(monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    def arrange(act: Callable[[], Any]) -> None:
        take = Claims.take

        def act_and_take(self: Claims, chosen: Sequence[Entry]) -> list[Entry]:
            act()
            return take(self, chosen)

        monkeypatch.setattr(Claims, "take", act_and_take)

    return arrange


@pytest.fixture
def before_the_deletion(monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    def arrange(act: Callable[[], Any]) -> None:
        delete = Deletion.delete

        def act_and_delete(self: Deletion, *arguments: Any) -> Deleted:
            act()
            return delete(self, *arguments)

        monkeypatch.setattr(Deletion, "delete", act_and_delete)

    return arrange


def complete(path: str) -> bool:
    return pending_uploads.complete("artifacts", path)


def test_an_upload_completed_after_the_page_was_read_keeps_its_object(
    place: Place,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    before_the_claim: Meanwhile,
    clock: ManualClock,
) -> None:
    configure(artifacts=place.settings())
    prepared("may/1", "may/2", place=place)
    completed: list[bool] = []
    before_the_claim(lambda: completed.append(complete("may/1")))

    result = perform(sweep, clock=clock)

    assert completed == [True]
    assert result.counts["total_deleted_stale_entries"] == 1 and result.counts["failed"] == 0
    assert (still_pending(), place.paths()) == (set(), {"may/1"})


def test_an_upload_prepared_anew_after_the_page_was_read_keeps_its_object(
    place: Place,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    before_the_claim: Meanwhile,
    clock: ManualClock,
) -> None:
    configure(artifacts=place.settings())
    prepared("may/1", "may/2", place=place)
    before_the_claim(lambda: pending_uploads.prepare("artifacts", "may/1", clock=clock))

    perform(sweep, clock=clock)

    assert (still_pending(), place.paths()) == ({"may/1"}, {"may/1"})


def test_an_upload_removed_by_another_program_after_the_page_was_read_keeps_its_object(
    place: Place, configure: Configure, prepared: Prepare, pending: redis.Redis, before_the_claim: Meanwhile
) -> None:
    # That program knows no claims; its HDEL counts as completion up to the claim.
    configure(artifacts=place.settings())
    prepared("may/1", place=place)
    before_the_claim(lambda: pending.hdel(entries.KEY, "artifacts:may/1"))

    perform(sweep, clock=ManualClock())

    assert place.paths() == {"may/1"}


def test_an_upload_that_is_being_deleted_cannot_be_completed_or_prepared(
    place: Place,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    before_the_deletion: Meanwhile,
    clock: ManualClock,
) -> None:
    # The gap that a second look cannot close: whoever is told "completed" has an object.
    configure(artifacts=place.settings())
    prepared("may/1", place=place)
    completed: list[bool] = []

    def try_to() -> None:
        completed.append(complete("may/1"))
        with pytest.raises(UploadBeingDeleted, match="artifacts:may/1"):
            pending_uploads.prepare("artifacts", "may/1", clock=clock)
        assert pending_uploads.exists("artifacts", "may/1"), "nobody sees the entry change before it goes"

    before_the_deletion(try_to)

    result = perform(sweep, clock=clock)

    assert completed == [False]
    assert result.counts["total_deleted_stale_entries"] == 1
    assert (still_pending(), place.paths()) == (set(), set())


def test_a_path_is_free_again_once_its_stale_upload_is_gone(
    folder: Folder, configure: Configure, prepared: Prepare, pending: redis.Redis, clock: ManualClock
) -> None:
    configure(artifacts=folder.settings())
    prepared("may/1", place=folder)
    perform(sweep, clock=clock)

    pending_uploads.prepare("artifacts", "may/1", clock=clock)
    folder.put("may/1")

    assert perform(sweep, clock=clock).counts["total_deleted_stale_entries"] == 0
    assert complete("may/1") is True
    assert folder.paths() == {"may/1"}


def test_whoever_is_told_completed_has_an_object_and_nobody_else(
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
    result = perform(sweep.configured(WorkerSettings(batch_size=50)), clock=ManualClock())
    other.join(timeout=60)

    assert folder.paths() == completed
    assert result.counts["failed"] == 0
    assert still_pending() == set()


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda pending: pending.hdel(entries.KEY, "artifacts:may/1"), "completed by another program"),
        (lambda pending: pending.hset(entries.KEY, "artifacts:may/1", "1767225600"), "prepared anew by another"),
    ],
)
def test_an_upload_another_program_touches_while_it_is_deleted_is_lost_and_that_is_said(
    folder: Folder,
    configure: Configure,
    prepared: Prepare,
    pending: redis.Redis,
    before_the_deletion: Meanwhile,
    reported: list[dict[str, Any]],
    clock: ManualClock,
    act: Callable[[redis.Redis], Any],
    why: str,
) -> None:
    # The declared limit (docs/workers/object_storage.md): a program that does not use this API is not held off.
    configure(artifacts=folder.settings())
    prepared("may/1", "may/2", place=folder)
    before_the_deletion(lambda: act(pending))

    result = perform(sweep, clock=clock)

    assert result.counts["total_deleted_stale_entries"] == 1 and result.counts["failed"] == 1
    (report,) = reported
    assert why in str(report["error"]) and report["path"] == "may/1"
    assert pending.hget(entries.KEY, "artifacts:may/1") in (None, b"1767225600"), "what is new is not removed"


def test_an_object_that_may_be_gone_cannot_be_completed_and_the_next_run_takes_it_up_at_once(
    folder: Folder, configure: Configure, prepared: Prepare, still_pending: Pending, clock: ManualClock
) -> None:
    configure(artifacts=folder.settings())
    poison = folder.refuse("may/poison")
    prepared(poison)
    perform(sweep, clock=clock)
    assert complete(poison) is False
    (folder.root / folder.prefix / poison / "inside").unlink()
    (folder.root / folder.prefix / poison).rmdir()

    assert perform(sweep, clock=clock).counts["total_deleted_stale_entries"] == 1
    assert still_pending() == set()


@pytest.mark.parametrize(("older_by", "taken"), [(-1, 0), (1, 1)])
def test_the_claim_of_a_dead_run_is_taken_over_when_it_must_have_ended(
    prepared: Prepare, pending: redis.Redis, settings: Settings, older_by: int, taken: int
) -> None:
    lasts = timedelta(minutes=6)
    prepared("may/1")
    value: Any = pending.hget(entries.KEY, "artifacts:may/1")
    entry = Entry(b"artifacts:may/1", value)
    dead, living = Claims(lasts), Claims(lasts)
    assert dead.take([entry]) == [entry]
    assert living.take([entry]) == []
    left = claims._KEPT - lasts - timedelta(seconds=older_by)
    pending.pexpire(f"{settings.namespace}:upload_claim:artifacts:may/1", left)

    assert len(living.take([entry])) == taken


@pytest.mark.parametrize(
    ("dead", "living", "at_work", "taken"),
    [(7, 8, [6, 8], 1), (7, 8, [7, 8], 0), (9, 8, [8], 0), (None, 8, [8], 0), (7, None, [], 0)],
)
def test_the_claim_of_an_earlier_run_that_is_not_at_work_is_taken_over_at_once(
    prepared: Prepare, pending: redis.Redis, dead: int | None, living: int | None, at_work: list[int], taken: int
) -> None:
    prepared("may/1")
    value: Any = pending.hget(entries.KEY, "artifacts:may/1")
    entry = Entry(b"artifacts:may/1", value)
    asleep, awake = Claims(THREE_HOURS, dead), Claims(THREE_HOURS, living, at_work)
    assert asleep.take([entry]) == [entry]

    assert len(awake.take([entry])) == taken
    assert asleep.settle([entry], []).removed == ([] if taken else [entry])


def test_a_run_that_was_taken_for_dead_begins_no_deletion_and_the_next_one_takes_over_its_claims(
    place: Place,
    configure: Configure,
    prepared: Prepare,
    still_pending: Pending,
    clock: ManualClock,
    admin: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configure(artifacts=place.settings())
    prepared("may/1", place=place)
    take, asleep = Claims.take, [True]

    def take_and_sleep(self: Claims, chosen: Sequence[Entry]) -> list[Entry]:
        claimed = take(self, chosen)
        if asleep:
            asleep.clear()
            # A minute passes: for its heartbeat, and for how long ago it thinks that was.
            with admin.cursor() as cursor:
                cursor.execute(f"UPDATE {Run._meta.schema}.runs SET heartbeat_at = heartbeat_at - interval '61 s'")
            monotonic = time.monotonic
            monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 61)
            assert perform(sweep, clock=clock).counts["total_deleted_stale_entries"] == 1, "it takes them over"
            place.put("may/1")  # by whoever uses the path again
        return claimed

    monkeypatch.setattr(Claims, "take", take_and_sleep)
    result = perform(sweep, clock=clock)

    assert (result.outcome, result.reason) == ("lost_lease", "taken_over")
    assert (place.paths(), still_pending()) == ({"may/1"}, set())


def test_a_run_that_lost_its_claim_removes_nothing_and_reports_nothing(
    prepared: Prepare, pending: redis.Redis, still_pending: Pending, settings: Settings
) -> None:
    prepared("may/1")
    value: Any = pending.hget(entries.KEY, "artifacts:may/1")
    entry = Entry(b"artifacts:may/1", value)
    asleep = Claims(THREE_HOURS)
    asleep.take([entry])
    pending.set(f"{settings.namespace}:upload_claim:artifacts:may/1", "another's")

    ends = asleep.settle([entry], [])

    assert (ends.removed, ends.lost) == ([], [])
    assert still_pending() == {"may/1"}


def test_claims_end_by_themselves(prepared: Prepare, pending: redis.Redis, settings: Settings) -> None:
    prepared("may/1", "may/2")
    found: Any = pending.hgetall(entries.KEY)
    both = [Entry(field, value) for field, value in found.items()]
    ours = Claims(timedelta(minutes=6))
    ours.take(both)
    ours.settle(both[:1], both[1:])

    keys: Any = list(pending.scan_iter(match=f"{settings.namespace}:upload_claim:*"))

    assert len(keys) == 1, "the one whose object may still be there"
    assert 0 < int(pending.ttl(keys[0])) <= claims._KEPT.total_seconds()
