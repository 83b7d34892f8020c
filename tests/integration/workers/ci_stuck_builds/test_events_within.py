"""Handlers of the builds' events within the batch's transaction, and their outbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from housekeeping import events
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.declarations import changed
from tests.integration.workers.ci_stuck_builds.tables import STALE, AddBuilds
from tests.internals.engine import run_sweep
from tests.internals.workers import drop_canceling

SMALL = changed(drop_canceling, batch=4)


class Pipelines:
    """A handler that cannot cancel the pipeline of one build."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.told: list[int] = []

    def __call__(self, connection: Any, rows: list[dict[str, Any]], /, *, worker: str, run_id: int | None) -> None:
        if self.refused in {row["build_id"] for row in rows}:
            raise LookupError("the pipeline is gone")
        self.told += [row["build_id"] for row in rows]


@pytest.fixture
def dropped() -> Iterator[Pipelines]:
    handler = Pipelines(3)
    events.on(events.build_dropped, handler, within_transaction=True)
    yield handler
    events.off(events.build_dropped, handler)


@pytest.fixture
def doomed() -> Iterator[Pipelines]:
    handler = Pipelines(0)
    events.on(events.build_doomed, handler, within_transaction=True)
    yield handler
    events.off(events.build_doomed, handler)


def test_build_whose_handler_fails_is_doomed(
    builds: type[Build], add_builds: AddBuilds, dropped: Pipelines, doomed: Pipelines, reported: list[dict[str, Any]]
) -> None:
    add_builds(10, "canceling", STALE, STALE)

    result = run_sweep(SMALL, clock=ManualClock())

    assert (result.outcome, result.counts["dropped"], result.counts["doomed"], result.counts["failed"]) == (
        "done",
        9,
        1,
        0,
    )
    assert doomed.told == [3] and Build.get_by_id(3).failure_reason == 12
    assert set(dropped.told) == {1, 2, *range(4, 11)}
    assert [about["build_id"] for about in reported] == [3]


def test_build_whose_doom_has_a_failing_handler_stays(
    builds: type[Build], add_builds: AddBuilds, dropped: Pipelines, doomed: Pipelines
) -> None:
    add_builds(10, "canceling", STALE, STALE)
    doomed.refused = 3

    result = run_sweep(SMALL, clock=ManualClock())

    assert (result.counts["dropped"], result.counts["doomed"], result.counts["failed"]) == (9, 0, 1)
    assert Build.get_by_id(3).status == "canceling"
