"""A run that its breaker would stop, and that a person has confirmed by a plan's id."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.plan import plan
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.limits.breaker import Breaker
from housekeeping.sweeps.limits.confirmation import Confirmation, confirmed, plan_id
from housekeeping.sweeps.stages.stage import Backlog
from housekeeping.testing import ManualClock
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.conftest import History
from tests.integration.sweeps.engine.sizing import DUE, SMALL

STOPPING = dataclasses.replace(SMALL, breaker=Breaker(action="stop"))


def planned(clock: ManualClock) -> Confirmation:
    """What a person has read off `housekeeping plan` and given back."""
    found = plan(SMALL, clock=clock)
    return confirmed(plan_id(SMALL.name, None, found.stale, found.now), SMALL.name, None, clock.now())


def test_a_confirmed_run_goes_on_and_says_so_in_its_row(
    add_statuses: AddStatuses,
    history: History,
    low_floor: None,
    clock: ManualClock,
    last_run: Callable[[], Run],
    caplog: pytest.LogCaptureFixture,
) -> None:
    history(10, 0)
    add_statuses(100, DUE)
    word = planned(clock)

    with caplog.at_level("INFO"):
        result = run_sweep(STOPPING, clock=clock, confirmation=word)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 100)
    assert last_run().counts["confirmed"] is True
    assert word.plan_id in [record.__dict__.get("plan_id") for record in caplog.records]


@pytest.mark.parametrize(("more", "outcome"), [(10, "done"), (11, "failed")])
def test_a_confirmed_run_may_meet_a_tenth_more_than_was_planned(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock, more: int, outcome: str
) -> None:
    history(10, 0)
    add_statuses(100, DUE)
    word = planned(clock)
    add_statuses(more, DUE, first_id=1000)

    result = run_sweep(STOPPING, clock=clock, confirmation=word)

    assert result.outcome == outcome
    assert outcome == "done" or "more than 110 rows are stale;" in str(result.error)


def test_a_plan_that_did_not_count_to_the_end_confirms_as_many_as_there_are(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock
) -> None:
    history(10, 0)
    add_statuses(100, DUE)
    at_least = plan_id(SMALL.name, None, Backlog(20, exact=False), clock.now())

    result = run_sweep(STOPPING, clock=clock, confirmation=confirmed(at_least, SMALL.name, None, clock.now()))

    assert result.outcome == "done"
