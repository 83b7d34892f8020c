"""Many look at once: what one slow look costs the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from housekeeping.core.settings import Settings
from housekeeping.web import snapshot
from housekeeping.web.snapshot import Snapshot, SnapshotCache

PATIENCE_S = 30.0


class Looking(SnapshotCache):
    """Sees the moments in turn; from the second one on it is as slow as the test likes."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, {})
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.looks = 0

    def _look(self) -> Snapshot:
        self.looks += 1
        seen = Snapshot(datetime(2026, 11, 20, tzinfo=UTC) + timedelta(hours=self.looks), {}, {}, {}, [], False, [])
        if self.looks > 1:
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S)
        return seen


@pytest.fixture
def observatory(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Looking:
    """One that has looked once, and of which the next look is asked for by the next question."""
    monkeypatch.setattr(snapshot, "_FRESH_S", 0.0)
    monkeypatch.setattr(snapshot, "_PATIENCE_S", 0.01, raising=False)
    observatory = Looking(settings)
    observatory.look()
    return observatory


@pytest.fixture
def slow(observatory: Looking) -> Future[Snapshot]:
    """A look that has begun in another thread."""
    pool = ThreadPoolExecutor()
    looking = pool.submit(observatory.look)
    pool.shutdown(wait=False)
    assert observatory.begun.wait(PATIENCE_S)
    return looking


def answered(observatory: Looking, question: Callable[[], object]) -> object:
    """What is answered while the slow look goes on, which it does at the latest when the test gives up."""
    pool = ThreadPoolExecutor()
    asked = pool.submit(question)
    pool.shutdown(wait=False)
    try:
        return asked.result(5)
    except TimeoutError:
        return "nothing"
    finally:
        observatory.go_on.set()


def test_who_comes_while_one_looks_gets_what_was_seen_last(observatory: Looking, slow: Future[Snapshot]) -> None:
    seen = answered(observatory, observatory.look)

    assert isinstance(seen, Snapshot) and seen.at.hour == 1
    assert slow.result(PATIENCE_S).at.hour == 2


def test_a_change_waits_for_no_look(observatory: Looking, slow: Future[Snapshot]) -> None:
    assert answered(observatory, observatory.forget) is None


def test_what_was_seen_before_a_change_is_not_taken_for_fresh(
    observatory: Looking, slow: Future[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_FRESH_S", 3600.0)
    answered(observatory, observatory.forget)
    slow.result(PATIENCE_S)

    assert observatory.look().at.hour == 3
    assert observatory.look().at.hour == 3, "and from then on it is"
