"""Uploads that are changed between the worker's read and its deletion.

Document 100, 概要, 影響範囲: 正常なファイルには影響しません.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.object_storage import pending_uploads
from tests.faults import at_step
from tests.integration.workers.object_storage.conftest import Configure, Pending, Prepare, StaleUploads
from tests.integration.workers.object_storage.places import Folder, Place
from tests.internals.core import UploadBeingDeleted, WorkerSettings
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.workers import Claims, Deletion, pending_entry
from tests.internals.workers import uploads_sweep as sweep

#: Does something right before the worker claims what it found stale, or right before it deletes the objects.
Meanwhile = Callable[[Callable[[], Any]], object]

pytestmark = pytest.mark.usefixtures("postgres", "pending")


@pytest.fixture
def before_the_claim() -> Iterator[Meanwhile]:
    with ExitStack() as stack:
        yield lambda act: stack.enter_context(at_step(Claims, "take", "before", act))


@pytest.fixture
def before_the_deletion() -> Iterator[Meanwhile]:
    with ExitStack() as stack:
        yield lambda act: stack.enter_context(at_step(Deletion, "delete", "before", act))


def complete(path: str) -> bool:
    return pending_uploads.complete("artifacts", path)


def test_upload_completed_after_the_read_keeps_its_object(
    place: Place,
    stale_uploads: StaleUploads,
    still_pending: Pending,
    before_the_claim: Meanwhile,
    clock: ManualClock,
) -> None:
    stale_uploads(place, "may/1", "may/2")
    completed: list[bool] = []
    before_the_claim(lambda: completed.append(complete("may/1")))

    result = run_sweep(sweep, clock=clock)

    assert completed == [True]
    assert result.counts["total_deleted_stale_entries"] == 1 and result.counts["failed"] == 0
    assert (still_pending(), place.paths()) == (set(), {"may/1"})


def test_upload_prepared_after_the_read_keeps_its_object(
    place: Place,
    stale_uploads: StaleUploads,
    still_pending: Pending,
    before_the_claim: Meanwhile,
    clock: ManualClock,
) -> None:
    stale_uploads(place, "may/1", "may/2")
    before_the_claim(lambda: pending_uploads.prepare("artifacts", "may/1", clock=clock))

    run_sweep(sweep, clock=clock)

    assert (still_pending(), place.paths()) == ({"may/1"}, {"may/1"})


def test_upload_removed_after_the_read_keeps_its_object(
    place: Place, stale_uploads: StaleUploads, pending: redis.Redis, before_the_claim: Meanwhile
) -> None:
    # That program knows no claims; its HDEL counts as completion up to the claim.
    stale_uploads(place, "may/1")
    before_the_claim(lambda: pending.hdel(pending_entry.KEY, "artifacts:may/1"))

    run_sweep(sweep, clock=ManualClock())

    assert place.paths() == {"may/1"}


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
