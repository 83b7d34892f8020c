"""Functions for applications: prepare, complete, exists, pending_only, count, each."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.object_storage import pending_uploads
from tests.integration.conftest import SetAhead
from tests.integration.workers.object_storage.conftest import NOW
from tests.internals.core import RedisUnavailable, UploadRefused, shared_redis
from tests.internals.core import redis_client as make_redis_client
from tests.internals.workers import PendingUpload, pending_entry

pytestmark = pytest.mark.usefixtures("pending")


def test_the_hash_has_the_name_that_other_programs_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    assert pending_entry.KEY == "pending_direct_uploads"


def test_an_entry_is_location_and_path_and_whole_epoch_seconds(pending: redis.Redis) -> None:
    clock = ManualClock(NOW + timedelta(milliseconds=999))

    pending_uploads.prepare("artifacts", "ab/cd:ef/g h", clock=clock)

    assert pending.hgetall(pending_entry.KEY) == {b"artifacts:ab/cd:ef/g h": b"1767225600"}


def test_upload_is_prepared_by_the_clock_of_redis_not_of_the_application(
    pending: redis.Redis, set_ahead: SetAhead
) -> None:
    set_ahead(-timedelta(days=2))
    before: Any = pending.time()

    pending_uploads.prepare("artifacts", "a")

    after: Any = pending.time()
    stored: Any = pending.hget(pending_entry.KEY, "artifacts:a")
    assert before[0] <= int(stored) <= after[0]


def test_preparing_again_starts_over(pending: redis.Redis) -> None:
    pending_uploads.prepare("artifacts", "a", clock=ManualClock(NOW))
    pending_uploads.prepare("artifacts", "a", clock=ManualClock(NOW + timedelta(hours=1)))

    assert pending.hgetall(pending_entry.KEY) == {b"artifacts:a": b"1767229200"}


def test_complete_says_whether_the_upload_was_pending() -> None:
    pending_uploads.prepare("artifacts", "a")

    assert [pending_uploads.complete("artifacts", "a") for _ in range(2)] == [True, False]
    assert not pending_uploads.exists("artifacts", "a")


def test_entries_of_other_programs_can_be_completed(pending: redis.Redis) -> None:
    pending.hset(pending_entry.KEY, "uploads:x:y", "1")

    assert pending_uploads.exists("uploads", "x:y")
    assert pending_uploads.complete("uploads", "x:y") is True


def test_pending_only_keeps_the_order_and_the_location_apart() -> None:
    paths = [str(number) for number in range(2_500)]
    for path in paths[::500]:
        pending_uploads.prepare("artifacts", path)
    pending_uploads.prepare("uploads", "1")

    assert pending_uploads.pending_only("artifacts", reversed(paths)) == ["2000", "1500", "1000", "500", "0"]
    assert pending_uploads.pending_only("artifacts", []) == []


def test_count_and_each_cover_all_locations(pending: redis.Redis) -> None:
    pending_uploads.prepare("artifacts", "a:b", clock=ManualClock(NOW))
    pending.hset(pending_entry.KEY, mapping={"no-colon": "yesterday", b"\xff:p": "0"})

    assert pending_uploads.count() == 3
    assert {upload.location: upload for upload in pending_uploads.each()} == {
        "artifacts": PendingUpload("artifacts", "a:b", NOW),
        "no-colon": PendingUpload("no-colon", "", None),
        "\\xff": PendingUpload("\\xff", "p", datetime(1970, 1, 1, tzinfo=UTC)),
    }


def test_each_goes_through_a_large_hash_page_by_page(pending: redis.Redis) -> None:
    pending.hset(pending_entry.KEY, mapping={f"artifacts:{number}": 1 for number in range(5_000)})

    assert {upload.path for upload in pending_uploads.each()} == {str(number) for number in range(5_000)}


@pytest.mark.parametrize("path", ["", "/a", "..", "a/../b", "a/..", "a//b", "a/", "./a", "a\nb", "a\x7f", "a\udc80"])
def test_invalid_path_is_rejected(pending: redis.Redis, path: str) -> None:
    with pytest.raises(UploadRefused, match="path"):
        pending_uploads.prepare("artifacts", path)

    assert pending_uploads.count() == 0


@pytest.mark.parametrize("location", ["", "a:b"])
def test_invalid_location_is_rejected(location: str) -> None:
    with pytest.raises(UploadRefused, match="location"):
        pending_uploads.prepare(location, "a")


def test_redis_outage_raises_redis_unavailable(settings: Settings) -> None:
    ours: Any = shared_redis.client
    shared_redis.use(make_redis_client("redis://127.0.0.1:1"), settings.namespace)
    calls = (
        lambda: pending_uploads.prepare("a", "b"),
        lambda: pending_uploads.complete("a", "b"),
        lambda: pending_uploads.exists("a", "b"),
        lambda: pending_uploads.pending_only("a", ["b"]),
        lambda: pending_uploads.count(),
        lambda: list(pending_uploads.each()),
    )

    for call in calls:
        with pytest.raises(RedisUnavailable):
            call()
    shared_redis.use(ours, settings.namespace)
