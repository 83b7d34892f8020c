"""Handlers of the builds' events within the batch's transaction, and their outbox."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from housekeeping.core import events
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.models import OutboxRow
from housekeeping.testing import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from housekeeping.workers.ci_stuck_builds.worker import drop_canceling
from tests.integration.workers.ci_stuck_builds.tables import STALE, AddBuilds

SMALL = dataclasses.replace(drop_canceling, batch_size=4)


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


def test_doomed_build_is_in_the_outbox(builds: type[Build], add_builds: AddBuilds, dropped: Pipelines) -> None:
    add_builds(10, "canceling", STALE, STALE)

    def refuse(rows: list[dict[str, Any]], **about: Any) -> None:
        raise OSError("the queue is away")

    for event in (events.build_dropped, events.build_doomed):
        events.on(event, refuse, outbox="pipelines")
    try:
        run_sweep(SMALL, clock=ManualClock())
    finally:
        for event in (events.build_dropped, events.build_doomed):
            events.off(event, refuse)

    rows = [(row.event, row.contents["build_id"], row.contents["failure_reason"]) for row in OutboxRow.select()]
    assert {build for event, build, _ in rows if event == "build_dropped"} == {1, 2, *range(4, 11)}
    assert [row for row in rows if row[0] == "build_doomed"] == [("build_doomed", 3, 12)]
