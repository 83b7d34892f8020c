"""The next run of a sweep whose predicate or table has changed waits for a confirmation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest

from housekeeping import Sweep
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.sweeps.engine.sizing import past_runs
from tests.integration.sweeps.limits.visits import NAME, OLD, Visit, old
from tests.integration.sweeps.limits.visits import visits as visits
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.insight import plan
from tests.internals.ledger import NOW, Run, history
from tests.internals.workers import old_runs_sweep as old_runs


def changed_to(stale: Callable[[Any, datetime], Any], **given: Any) -> Sweep:
    return changed(OLD, stale=stale, **given)


BOTS = changed_to(lambda row, now: (row.at < now) & (row.bot == False))  # noqa: E712


@pytest.mark.parametrize(
    "changed",
    [
        BOTS,
        changed_to(lambda row, now: row.at < now + timedelta(days=1), age=timedelta(days=1)),
        changed_to(lambda row, now: (row.at < now) | (row.bot == True)),  # noqa: E712
    ],
    ids=["condition", "age", "wider"],
)
def test_changed_predicate_needs_a_confirmation_again(
    visits: Callable[[int, int], None], clock: ManualClock, changed: Sweep
) -> None:
    visits(10, 0)
    assert run_sweep(OLD, clock=clock).outcome == "done"
    visits(2000, 0)

    planned = plan(changed, clock=clock)
    refused = run_sweep(changed, clock=clock)
    unchanged = plan(OLD, clock=clock)
    confirmed = run_sweep(changed, clock=clock, confirmed=True)
    visits(2000, 0)
    following = run_sweep(changed, clock=clock)

    assert "its predicate, its age or its table has changed since the last completed run" in str(planned.unconfirmed)
    assert (refused.outcome, refused.reason, unchanged.unconfirmed) == ("skipped", "unconfirmed", None)
    assert [confirmed.counts["deleted_rows"], following.counts["deleted_rows"]] == [2000, 2000]


def test_changed_value_of_a_predicate_needs_a_confirmation_again(
    visits: Callable[[int, int], None], clock: ManualClock
) -> None:
    visits(10, 0)
    run_sweep(BOTS, clock=clock)
    visits(2000, 0)
    Visit.update(bot=True).execute()

    assert run_sweep(changed_to(partial(old, True)), clock=clock).reason == "unconfirmed"


@pytest.mark.parametrize("lists", [([1], [7, 8, 9]), ([], [7]), ([7], set())], ids=["longer", "first", "none left"])
def test_values_of_the_time_and_of_lists_may_change(
    visits: Callable[[int, int], None], clock: ManualClock, lists: Any
) -> None:
    sweeps = [
        changed_to(lambda row, now, ids=ids: (row.at < now) & ~row.id.in_(ids))  # type: ignore[misc]
        for ids in lists
    ]
    visits(10, 0)
    run_sweep(sweeps[0], clock=clock)
    visits(2000, 0)
    clock.advance(timedelta(days=1))

    assert run_sweep(sweeps[1], clock=clock).outcome == "done"


def test_table_that_is_new_to_the_sweep_needs_a_confirmation(
    visits: Callable[[int, int], None], clock: ManualClock
) -> None:
    visits(10, 0)
    run_sweep(OLD, clock=clock)
    database.execute_sql("CREATE TABLE other_visit (LIKE visit INCLUDING ALL)")
    database.execute_sql("INSERT INTO other_visit SELECT n, '2025-01-01', false FROM generate_series(1, 2000) AS n")
    Visit._meta.set_table_name("other_visit")
    try:
        result = run_sweep(OLD, clock=clock)
    finally:
        Visit._meta.set_table_name("visit")

    assert result.reason == "unconfirmed"


@pytest.mark.parametrize(("outcome", "reason"), [("failed", "it broke"), ("partial", "shutdown"), ("lost", None)])
def test_run_that_did_not_complete_leaves_the_question_open(
    visits: Callable[[int, int], None], clock: ManualClock, outcome: str, reason: str | None
) -> None:
    visits(10, 0)
    run_sweep(OLD, clock=clock)
    past_runs(1, 0, outcome, reason, worker=NAME)
    visits(2000, 0)

    assert run_sweep(BOTS, clock=clock).reason == "unconfirmed"


def test_fingerprint_is_written_once_a_day_and_shown_nowhere(
    visits: Callable[[int, int], None], clock: ManualClock
) -> None:
    visits(10, 0)
    results = [run_sweep(OLD, clock=clock) for _ in range(2)]
    Run.update(started_at=NOW - timedelta(days=2)).execute()
    results.append(run_sweep(OLD, clock=clock))

    assert ["predicate" in run.counts for run in Run.select().order_by(Run.id)] == [True, False, True]
    assert all("predicate" not in each.counts for each in results)
    assert all("predicate" not in each.counts for each in history.recent(NAME, 9))


def test_sweep_that_runs_once_a_month_is_not_new_again(visits: Callable[[int, int], None], clock: ManualClock) -> None:
    visits(2000, 0)
    run_sweep(OLD, clock=clock, confirmed=True)
    long_ago = NOW - timedelta(days=31)
    Run.update(started_at=long_ago, heartbeat_at=long_ago, finished_at=long_ago).execute()
    run_sweep(old_runs)
    visits(2000, 0)

    assert run_sweep(OLD, clock=clock).outcome == "done"
