"""Object stores that deny, fail half-way, answer late or not at all (F9): all others are processed, no entry goes whose
object is still there, and no object that is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.testing import ManualClock
from housekeeping.workers.object_storage.worker import sweep
from tests.integration.workers.object_storage.conftest import Configure, Pending, Prepare
from tests.integration.workers.object_storage.faulty_s3 import Answer, FaultyS3, faulty_s3, healthy

pytestmark = pytest.mark.usefixtures("postgres", "pending")

STALE = {f"may/{number}" for number in range(40)}
POISON = {"may/7", "may/8", "may/23"}
#: Completed long ago, or being uploaded now: in use.
COMPLETED, FRESH = {"may/completed"}, {"may/fresh"}


@pytest.fixture
def store(configure: Configure, prepared: Prepare) -> Iterator[FaultyS3]:
    """A store with 40 stale uploads, one fresh, and one object that was completed."""
    with faulty_s3() as store:
        configure(artifacts=store.settings())
        store.objects = STALE | COMPLETED | FRESH
        prepared(*sorted(STALE))
        prepared(*FRESH, ago=sweep.max_runtime)
        yield store


def denies_some(server: FaultyS3, keys: Sequence[str], many: bool) -> Answer:
    return 200, server.remove(keys, sorted(POISON))


def fails_half_way(server: FaultyS3, keys: Sequence[str], many: bool) -> Answer:
    """Half of a bulk request is executed."""
    if not many and set(keys) & POISON:
        return 500, "<Error><Code>InternalError</Code></Error>"
    answer = server.remove([key for key in keys[: len(keys) // 2 + 1] if key not in POISON])
    return (500, "<Error><Code>InternalError</Code></Error>") if many else (200, answer)


def says_nothing_once(server: FaultyS3, keys: Sequence[str], many: bool) -> Answer:
    """Delete, then drop the connection without an answer."""
    answer = healthy(server, keys, many)
    return None if server.requests == 1 else answer


def says_nothing_to_many(server: FaultyS3, keys: Sequence[str], many: bool) -> Answer:
    answer = healthy(server, keys, many)
    return None if many else answer


def is_late_once(server: FaultyS3, keys: Sequence[str], many: bool) -> Answer:
    """Delete, then answer after the client's timeout."""
    answer = healthy(server, keys, many)
    if server.requests == 1:
        server.over.wait(20)
    return answer


@pytest.mark.parametrize(
    ("behave", "left"),
    [
        (denies_some, POISON),
        (fails_half_way, POISON),
        (says_nothing_once, set()),
        (says_nothing_to_many, set()),
        (is_late_once, set()),
    ],
)
def test_partial_answer_leaves_the_rest_to_the_next_run(
    store: FaultyS3,
    still_pending: Pending,
    clock: ManualClock,
    behave: Callable[[FaultyS3, Sequence[str], bool], Answer],
    left: set[str],
) -> None:
    store.behave = behave
    first = run_sweep(sweep, clock=clock)
    objects, entries = set(store.objects), still_pending()
    store.behave = healthy
    second = run_sweep(sweep, clock=clock)

    assert entries == left | FRESH, "all others are processed"
    assert objects - COMPLETED == entries, "nothing is done with whose object is still there"
    assert (store.objects, still_pending()) == (COMPLETED | FRESH, FRESH)
    deleted = [result.counts["total_deleted_stale_entries"] for result in (first, second)]
    assert deleted == [len(STALE - left), len(left)]
    assert first.counts["failed"] == len(left)


def test_unconfirmed_deletions_are_finished_by_the_next_run(
    store: FaultyS3, still_pending: Pending, clock: ManualClock
) -> None:
    def breaks_down(server: FaultyS3, keys: Sequence[str], many: bool) -> Answer:
        if server.requests == 1:
            server.remove(keys[:20])
        return 503, "<Error><Code>SlowDown</Code></Error>"

    store.behave = breaks_down
    first = run_sweep(sweep, clock=clock)
    objects, entries = set(store.objects), still_pending()
    store.behave = healthy
    second = run_sweep(sweep, clock=clock)

    assert (len(objects - COMPLETED - FRESH), entries) == (20, STALE | FRESH)
    assert first.counts["total_deleted_stale_entries"] == 0
    assert (second.outcome, second.counts["total_deleted_stale_entries"]) == ("done", len(STALE))
    assert (store.objects, still_pending()) == (COMPLETED | FRESH, FRESH)


def slows_down(server: FaultyS3, keys: Sequence[str], many: bool) -> Answer:
    return 503, "<Error><Code>SlowDown</Code></Error>"


def test_store_that_asks_to_slow_down_is_left_alone(
    store: FaultyS3, still_pending: Pending, clock: ManualClock
) -> None:
    store.behave = slows_down

    result = run_sweep(sweep, clock=clock)

    assert result.outcome == "failed" and result.reason is not None and "SlowDown" in result.reason
    assert (result.counts["failed"], still_pending()) == (0, STALE | FRESH)
    assert store.requests == 4 * (1 + 4), "one for all and four single ones, each with three retries"


def test_object_that_is_always_unavailable_fails_alone(
    store: FaultyS3, still_pending: Pending, clock: ManualClock
) -> None:
    store.behave = lambda server, keys, many: (slows_down if POISON & set(keys) else healthy)(server, keys, many)

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["failed"], still_pending()) == ("done", len(POISON), POISON | FRESH)
