"""Snapshot cache: a slow read does not delay other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from housekeeping import Settings
from tests.internals.web import Snapshot, SnapshotCache

PATIENCE_S = 30.0


class SlowCache(SnapshotCache):
    """Cache that returns numbered snapshots; every read after the first waits for the test."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, {})
        self.started, self.finish = threading.Event(), threading.Event()
        self.reads = 0

    def age(self, *, seconds: float) -> None:
        """Make the last snapshot older."""
        assert self._last is not None
        snapshot, began, ended = self._last
        self._last = snapshot, began - seconds, ended - seconds
        self._changed_at = began - seconds - 1

    def _read(self, before: Snapshot | None) -> Snapshot:
        self.reads += 1
        result = Snapshot(datetime(2026, 11, 20, tzinfo=UTC) + timedelta(hours=self.reads))
        if self.reads > 1:
            self.started.set()
            assert self.finish.wait(PATIENCE_S)
        return result


@pytest.fixture
def snapshots(settings: Settings) -> SlowCache:
    """Cache with one snapshot, which is stale."""
    snapshots = SlowCache(settings)
    snapshots.current()
    snapshots.invalidate()
    return snapshots


@pytest.fixture
def slow(snapshots: SlowCache) -> Future[Snapshot]:
    """Read in progress in another thread."""
    pool = ThreadPoolExecutor()
    reading = pool.submit(snapshots.current)
    pool.shutdown(wait=False)
    assert snapshots.started.wait(PATIENCE_S)
    return reading


def call_meanwhile(snapshots: SlowCache, function: Callable[[], object]) -> object:
    """Return what the function returns while the slow read continues, then let the read finish."""
    pool = ThreadPoolExecutor()
    future = pool.submit(function)
    pool.shutdown(wait=False)
    try:
        return future.result(5)
    except TimeoutError:
        return "nothing"
    finally:
        snapshots.finish.set()


def test_reader_during_a_slow_read_gets_the_last_snapshot(snapshots: SlowCache, slow: Future[Snapshot]) -> None:
    snapshot_seen = call_meanwhile(snapshots, snapshots.current)

    assert isinstance(snapshot_seen, Snapshot) and snapshot_seen.at.hour == 1
    assert snapshots.current().at.hour == 2


def test_invalidate_does_not_wait_for_a_slow_read(snapshots: SlowCache, slow: Future[Snapshot]) -> None:
    assert call_meanwhile(snapshots, snapshots.invalidate) is None


def test_snapshot_read_before_a_change_is_not_fresh(snapshots: SlowCache, slow: Future[Snapshot]) -> None:
    call_meanwhile(snapshots, snapshots.invalidate)
    slow.result(PATIENCE_S)

    assert snapshots.current().at.hour == 3
    assert snapshots.current().at.hour == 3


def test_page_does_not_wait_for_the_next_snapshot(settings: Settings) -> None:
    snapshots = SlowCache(settings)
    snapshots.current()
    snapshots.age(seconds=5)
    try:
        assert snapshots.current().at.hour == 1 and snapshots.started.wait(PATIENCE_S)
    finally:
        snapshots.finish.set()


def test_old_snapshot_is_shown_with_its_age(settings: Settings) -> None:
    snapshots = SlowCache(settings)
    snapshots.current()
    snapshots.age(seconds=60)
    try:
        seen = snapshots.current()
    finally:
        snapshots.finish.set()

    assert seen.at.hour == 1 and seen.late_s >= 60
