"""Object stores that deny, fail half-way, answer late or not at all (F9): all others are processed, no entry goes whose
object is still there, and no object that is in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from housekeeping.testing.stubs import ManualClock
from tests.integration.workers.object_storage.conftest import Configure, Lines, Pending, Prepare
from tests.integration.workers.object_storage.faulty_s3 import (
    Answer,
    Behaviour,
    FaultyS3,
    deletes_only,
    faulty_s3,
    healthy,
    without_delete_objects,
)
from tests.integration.workers.object_storage.places import Bucket
from tests.integration.workers.object_storage.s3_server import S3Server
from tests.internals.engine import run_sweep
from tests.internals.workers import stores
from tests.internals.workers import uploads_sweep as sweep

pytestmark = pytest.mark.usefixtures("postgres", "pending")

STALE = {f"may/{number}" for number in range(40)}
POISON = {"may/7", "may/8", "may/23"}
#: Completed long ago, or being uploaded now: in use.
COMPLETED, FRESH = {"may/completed"}, {"may/fresh"}


@pytest.fixture
def store(configure: Configure, prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A store with 40 stale uploads, one fresh, and one object that was completed; its client hardly waits to retry."""
    soon = timedelta(milliseconds=1)
    monkeypatch.setitem(stores.RETRY, "backoff", {"init_backoff": soon, "max_backoff": soon, "base": 2})
    with faulty_s3() as store:
        configure(artifacts=store.settings())
        store.objects = STALE | COMPLETED | FRESH
        prepared(*sorted(STALE))
        prepared(*FRESH, ago=sweep.limits.runtime)
        yield store


def denies_some(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
    return 200, server.remove(keys, sorted(POISON))


def fails_for_some(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
    if set(keys) & POISON:
        return 500, "<Error><Code>InternalError</Code></Error>"
    return healthy(server, keys, method)


def says_nothing_once(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
    """Delete, then drop the connection without an answer."""
    answer = healthy(server, keys, method)
    return None if len(server.methods) == 1 else answer


def confirms_half_of_the_keys(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
    """Delete and name the first half, and leave the others out."""
    return (200, server.remove(keys[: len(keys) // 2])) if method == "POST" else (501, "")


def confirms_nothing(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
    """Say 200 to everything, without a deletion."""
    return (200, server.remove([])) if method == "POST" else (405, "")


def confirms_nothing_about_some(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
    if method == "DELETE":
        return 403, "<Error><Code>AccessDenied</Code></Error>"
    return 200, server.remove([key for key in keys if key not in POISON])


def answers_404_to_everything(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
    return 404, "<Error><Code>NoSuchKey</Code></Error>"


@pytest.mark.parametrize(
    ("behave", "left"),
    [
        (denies_some, POISON),
        (fails_for_some, POISON),
        (confirms_nothing_about_some, POISON),
        (says_nothing_once, set()),
        (deletes_only(404), set()),
        (deletes_only(405), set()),
        (deletes_only(501), set()),
        (deletes_only(400), set()),
        pytest.param(confirms_half_of_the_keys, STALE, marks=pytest.mark.slow),
        pytest.param(confirms_nothing, STALE, marks=pytest.mark.slow),
        (answers_404_to_everything, STALE),
    ],
)
def test_partial_answer_leaves_the_rest_to_the_next_run(
    store: FaultyS3, still_pending: Pending, clock: ManualClock, behave: Behaviour, left: set[str]
) -> None:
    store.behave = behave
    first = run_sweep(sweep, clock=clock)
    objects, entries = set(store.objects), still_pending()
    store.behave = healthy
    second = run_sweep(sweep, clock=clock)

    assert entries == left | FRESH
    assert objects - COMPLETED == entries, "no entry is removed whose object still exists"
    assert (store.objects, still_pending()) == (COMPLETED | FRESH, FRESH)
    deleted = [result.counts["total_deleted_stale_entries"] for result in (first, second)]
    assert deleted == [len(STALE - left), len(left)]
    assert first.counts["failed"] == len(left)


def test_unconfirmed_deletions_are_finished_by_the_next_run(
    store: FaultyS3, still_pending: Pending, clock: ManualClock
) -> None:
    def breaks_down(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
        return healthy(server, keys, method) if len(server.methods) <= 20 else slows_down(server, keys, method)

    store.behave = breaks_down
    first = run_sweep(sweep, clock=clock)
    objects, entries = set(store.objects), still_pending()
    store.behave = healthy
    second = run_sweep(sweep, clock=clock)

    assert objects - COMPLETED == entries
    assert (first.outcome, first.counts["total_deleted_stale_entries"]) == ("failed", 20)
    assert (second.outcome, second.counts["total_deleted_stale_entries"]) == ("done", len(STALE) - 20)
    assert (store.objects, still_pending()) == (COMPLETED | FRESH, FRESH)


def test_unconfirmed_deletion_is_logged_and_reported(
    store: FaultyS3, lines: Lines, reported: list[dict[str, Any]], clock: ManualClock
) -> None:
    store.behave = answers_404_to_everything

    run_sweep(sweep, clock=clock)

    assert lines("Record rejected")[0]["error"] == "the store answers 404 to its deletion, but the object exists"
    (report,) = reported
    assert report["rows"] == len(STALE)


@pytest.mark.slow
def test_late_answer_leaves_the_entry_to_the_next_run(
    store: FaultyS3, still_pending: Pending, clock: ManualClock
) -> None:
    def is_late_for_one(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
        answer = healthy(server, keys, method)
        if "may/7" in keys:
            server.over.wait(20)
        return answer

    store.behave = is_late_for_one
    first = run_sweep(sweep, clock=clock)
    entries = still_pending()
    store.behave = healthy
    second = run_sweep(sweep, clock=clock)

    assert (first.counts["failed"], entries) == (1, {"may/7"} | FRESH)
    assert (second.counts["total_deleted_stale_entries"], still_pending()) == (1, FRESH)


@pytest.mark.parametrize(("behave", "posts"), [(healthy, len(STALE)), (deletes_only(404), 4)])
def test_each_object_is_one_request(store: FaultyS3, clock: ManualClock, behave: Behaviour, posts: int) -> None:
    store.behave = behave

    run_sweep(sweep, clock=clock)

    assert store.methods.count("POST") == posts, "a store without DeleteObjects is asked for it by the first group only"
    assert store.methods.count("DELETE") == (0 if posts == len(STALE) else len(STALE))


def test_real_store_without_delete_objects_deletes_one_by_one(
    s3: S3Server, configure: Configure, prepared: Prepare, still_pending: Pending, clock: ManualClock
) -> None:
    bucket = Bucket(s3)
    odd = {"may/a b+c=d&e", "may/é/%20/ü", "may/~!$'()*,;:@"}
    prepared(*(f"may/{number}" for number in range(40)), *odd, place=bucket)
    refused = bucket.refuse("may/refused")
    prepared(refused, "may/never-uploaded")
    settings = bucket.settings()
    with without_delete_objects(s3.endpoint) as gateway:
        configure(artifacts={**settings, "options": {**settings["options"], "endpoint": gateway}})
        result = run_sweep(sweep, clock=clock)

    assert (result.counts["total_deleted_stale_entries"], result.counts["failed"]) == (44, 1)
    assert (bucket.paths(), still_pending()) == ({refused}, {refused})


def test_signature_of_a_request_is_in_no_log_line(store: FaultyS3, lines: Lines, clock: ManualClock) -> None:
    store.behave = lambda server, keys, method: (405, "")

    run_sweep(sweep, clock=clock)

    error = lines("Record rejected")[0]["error"]
    assert "405" in error and "X-Amz" not in error


def slows_down(server: FaultyS3, keys: Sequence[str], method: str) -> Answer:
    return 503, "<Error><Code>SlowDown</Code></Error>"


def test_store_that_asks_to_slow_down_is_left_alone(
    store: FaultyS3, still_pending: Pending, clock: ManualClock
) -> None:
    store.behave = slows_down

    result = run_sweep(sweep, clock=clock)

    assert result.outcome == "failed" and result.reason is not None and "SlowDown" in result.reason
    assert (result.counts["failed"], still_pending()) == (0, STALE | FRESH)
    assert len(store.methods) == 4 * 4, "four objects, each with three retries"


def test_object_that_is_always_unavailable_fails_alone(
    store: FaultyS3, still_pending: Pending, clock: ManualClock
) -> None:
    store.behave = lambda server, keys, method: (slows_down if POISON & set(keys) else healthy)(server, keys, method)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["failed"], still_pending()) == ("done", len(POISON), POISON | FRESH)
