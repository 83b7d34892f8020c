"""A new sweep's first run that would process a large part of its table waits for a confirmation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from housekeeping.database.connection import database
from housekeeping.sweeps import Breaker, Delete, Sweep, TableStage, run_sweep
from housekeeping.sweeps.insight.alerts import Alert
from housekeeping.sweeps.insight.explain import why
from housekeeping.sweeps.insight.plan import plan
from housekeeping.sweeps.insight.status import worker_status
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.stages.stage import Backlog
from housekeeping.testing import ManualClock
from tests.integration.own_stages import with_stages
from tests.integration.sweeps.engine.sizing import past_runs
from tests.integration.sweeps.limits.visits import NAME, OLD, Visit, old
from tests.integration.sweeps.limits.visits import visits as visits

UTC = ZoneInfo("UTC")


def alerts(clock: ManualClock, sweep: Sweep = OLD) -> list[Alert]:
    return worker_status(sweep, clock.now(), UTC).alarms


@pytest.mark.parametrize(
    ("stale", "others", "outcome"),
    [
        (999, 0, "done"),
        (1000, 0, "skipped"),
        (1000, 4000, "done"),
        (1001, 4000, "skipped"),
        (1001, 4004, "done"),
        (0, 5000, "done"),
    ],
)
def test_first_run_over_a_fifth_of_the_table_is_skipped(
    visits: Callable[[int, int], None], clock: ManualClock, stale: int, others: int, outcome: str
) -> None:
    visits(stale, others)

    result = run_sweep(OLD, clock=clock)

    assert (result.outcome, result.exit_code) == (outcome, 0)
    assert Visit.select().count() == others + (stale if outcome == "skipped" else 0)


@pytest.mark.parametrize("action", ["alert", "limit", "stop"])
def test_first_run_is_skipped_with_any_breaker_action(
    visits: Callable[[int, int], None], clock: ManualClock, action: Any
) -> None:
    visits(2000, 0)

    result = run_sweep(dataclasses.replace(OLD, breaker=Breaker(action=action)), clock=clock, force=True)

    assert (result.outcome, result.reason, Visit.select().count()) == ("skipped", "unconfirmed", 2000)


def test_skipped_first_run_names_the_commands_to_type(visits: Callable[[int, int], None], clock: ManualClock) -> None:
    visits(2000, 10)
    text = (
        '2,000 of about 2,010 rows of "visit" are stale, over the first run\'s limit of 999, and no run of this worker '
        f"has completed yet: its runs are skipped until one is confirmed. Look: housekeeping plan {NAME}; "
        f"then: housekeeping run {NAME} --confirm"
    )

    planned = plan(OLD, clock=clock)
    run_sweep(OLD, clock=clock)
    row = Run.get()
    answer = why(OLD, None, clock.now(), UTC)

    assert str(planned.unconfirmed) == text
    assert (row.outcome, row.reason, row.error) == ("skipped", "unconfirmed", None)
    assert [(alarm.name, alarm.text) for alarm in alerts(clock)] == [("unconfirmed", text)]
    assert (answer.outcome, answer.meaning) == ("skipped", f"this worker has no schedule; its last run: {text}")


def test_scheduled_runs_follow_a_confirmed_run(visits: Callable[[int, int], None], clock: ManualClock) -> None:
    visits(2000, 0)
    run_sweep(OLD, clock=clock)

    first = run_sweep(OLD, clock=clock, confirmed=True)
    visits(3000, 0)
    next_one = run_sweep(OLD, clock=clock)

    assert (first.outcome, first.counts["deleted_rows"]) == ("done", 2000)
    assert (next_one.outcome, next_one.counts["deleted_rows"]) == ("done", 3000)
    assert alerts(clock) == []
    assert plan(OLD, clock=clock).unconfirmed is None


@pytest.mark.parametrize(
    ("outcome", "reason", "counts", "goes_on"),
    [
        ("done", None, {}, True),
        ("partial", "out_of_time", {}, True),
        ("partial", "shutdown", {}, False),
        ("failed", "breaker", {}, False),
        ("failed", "it broke", {"confirmed": True}, True),
        ("lost", "taken_over", {}, False),
        ("skipped", "paused", {}, False),
    ],
)
def test_only_a_run_that_ended_or_was_confirmed_is_history(
    visits: Callable[[int, int], None],
    clock: ManualClock,
    outcome: str,
    reason: str | None,
    counts: dict[str, Any],
    goes_on: bool,
) -> None:
    visits(2000, 0)
    past_runs(1, 0, outcome, reason, worker=NAME, **counts)
    past_runs(60, 0, "failed", "it broke", worker=NAME)

    assert (run_sweep(OLD, clock=clock).outcome == "done") is goes_on


def test_stages_through_one_table_are_counted_together(visits: Callable[[int, int], None], clock: ManualClock) -> None:
    visits(1000, 0)
    stages = [
        TableStage(
            name=name,
            stale=partial(old, bot),
            order=OLD.order,
            action=Delete(),
        )
        for name, bot in (("people", False), ("bots", True))
    ]
    sweep = Sweep(name=NAME, stages=lambda sweep: stages, counts=("deleted_rows",), progress_counts=("deleted_rows",))
    Visit.update(bot=True).where(Visit.id <= 500).execute()

    assert run_sweep(sweep, clock=clock).reason == "unconfirmed"


def test_large_table_is_estimated_and_not_read_through(visits: Callable[[int, int], None], clock: ManualClock) -> None:
    visits(21_000, 89_000)

    before = run_sweep(OLD, clock=clock, force=True).reason
    database.execute_sql("ANALYZE visit")
    after = run_sweep(OLD, clock=clock).outcome

    assert (before, after) == ("unconfirmed", "done")


@dataclass(frozen=True, kw_only=True)
class _SlowToCount(TableStage):
    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        database.execute_sql("SELECT pg_sleep(10)")
        return TableStage.backlog(self, now, limit, argument)


def test_first_run_that_cannot_count_in_time_is_skipped(visits: Callable[[int, int], None], clock: ManualClock) -> None:
    visits(3, 0)
    slow = dataclasses.replace(OLD, max_runtime=timedelta(milliseconds=200))

    result = run_sweep(with_stages(slow, _SlowToCount), clock=clock)

    assert (result.outcome, result.reason) == ("skipped", "unconfirmed")
    assert result.counts["unconfirmed"]["stale"] is None


@pytest.mark.parametrize(("stale", "reason"), [(50, None), (51, "breaker")])
def test_share_of_the_breaker_holds_for_the_first_run(
    visits: Callable[[int, int], None], clock: ManualClock, stale: int, reason: str | None
) -> None:
    visits(stale, 100 - stale)
    database.execute_sql("ANALYZE visit")
    sweep = dataclasses.replace(OLD, breaker=Breaker(share=0.5, action="stop"))

    result = run_sweep(sweep, clock=clock)

    assert result.reason == reason
    assert reason is None or "no run before it has ended, the breaker allows 50" in str(result.error)


def test_sweep_that_says_so_needs_no_confirmation(visits: Callable[[int, int], None], clock: ManualClock) -> None:
    visits(2000, 0)

    assert run_sweep(dataclasses.replace(OLD, confirm_first_run=False), clock=clock).outcome == "done"
