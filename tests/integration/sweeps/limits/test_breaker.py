"""The breaker that is set to stop runs: one that finds far more than usual ends before the first change."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from typing import Any

import pytest

from housekeeping import Guard, Sweep
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.conftest import History
from tests.integration.sweeps.engine.sizing import DUE, LONG_DUE, SMALL
from tests.internals.core import BreakerSettings, BreakerTripped, WorkerSettings
from tests.internals.database import Database, database
from tests.internals.engine import RowGuard, run_sweep
from tests.internals.insight import worker_status
from tests.internals.ledger import NOW, Counts, Run, RunRow
from tests.internals.sweeps import Backlog


def with_breaker(**limits: Any) -> Sweep:
    return changed(SMALL, **limits, guard_action="stop")


STOPPING = with_breaker()
WIDE = changed(STOPPING, batch=5000)


def test_breaker_trips_above_ten_thousand_rows_before_any_change(
    add_statuses: AddStatuses, history: History, last_run: Callable[[], Run]
) -> None:
    history(10, 3)
    add_statuses(10_001, DUE)

    tripped = run_sweep(WIDE)
    row = last_run()
    UserStatus.delete().where(UserStatus.user_id == 1).execute()
    done = run_sweep(WIDE)

    assert (tripped.outcome, tripped.reason, tripped.counts["deleted_rows"]) == ("failed", "breaker", 0)
    assert isinstance(tripped.error, BreakerTripped)
    assert str(tripped.error) == (
        "more than 10,000 rows are stale; the last 10 runs processed 3 at most, the breaker allows 10,000; nothing was "
        f"changed. Look at: housekeeping plan {SMALL.name}; to continue: housekeeping run {SMALL.name} --confirm"
    )
    assert (row.outcome, row.reason, row.error) == ("failed", "breaker", str(tripped.error))
    assert (done.outcome, done.counts["deleted_rows"]) == ("done", 10_000)


@pytest.mark.parametrize(("stale", "reason"), [(29, None), (30, None), (31, "breaker")])
def test_multiple_of_the_largest_past_run_is_allowed(
    add_statuses: AddStatuses, history: History, low_floor: None, stale: int, reason: str | None
) -> None:
    history(5, 2)
    history(5, 15)
    add_statuses(stale, DUE)

    assert run_sweep(with_breaker(times_history=2)).reason == reason


@pytest.mark.parametrize(("runs", "reason"), [(9, None), (10, "breaker")])
def test_fewer_than_ten_runs_are_no_history(
    add_statuses: AddStatuses, history: History, low_floor: None, runs: int, reason: str | None
) -> None:
    history(runs, 0)
    history(20, 0, "skipped", "paused")
    history(20, 0, "missed", "no_scheduler")
    add_statuses(11, DUE)

    assert run_sweep(STOPPING).reason == reason


@pytest.mark.parametrize(("since", "reason"), [(49, None), (50, "breaker")])
def test_last_fifty_runs_are_the_history(
    add_statuses: AddStatuses, history: History, low_floor: None, since: int, reason: str | None
) -> None:
    history(1, 1000)
    history(since, 1)
    add_statuses(101, DUE)

    assert run_sweep(STOPPING).reason == reason


def test_breaker_that_trips_for_hours_keeps_the_usual_number(
    add_statuses: AddStatuses, history: History, low_floor: None
) -> None:
    history(10, 5)
    history(60, 0, "failed", "breaker")
    add_statuses(500, DUE)

    assert run_sweep(STOPPING).outcome == "done"


@pytest.mark.parametrize(("due", "reason"), [(50, None), (51, "breaker")])
def test_share_is_of_the_rows_that_the_table_has_now(add_statuses: AddStatuses, due: int, reason: str | None) -> None:
    add_statuses(5000, "now() + interval '1 day'", first_id=10_000)
    database.execute_sql("ANALYZE user_statuses")
    UserStatus.delete().where(UserStatus.user_id >= 10_000).execute()  # PostgreSQL's statistics still have them
    add_statuses(due, DUE)
    add_statuses(100 - due, "now() + interval '1 day'", first_id=1000)

    assert run_sweep(with_breaker(share=0.5)).reason == reason


def test_disabled_breaker_never_trips(add_statuses: AddStatuses, history: History, low_floor: None) -> None:
    history(10, 0)
    add_statuses(11, DUE)

    assert run_sweep(with_breaker(times_history=None)).outcome == "done"


def test_force_is_no_confirmation(add_statuses: AddStatuses, history: History, low_floor: None) -> None:
    history(10, 0)
    add_statuses(11, DUE)

    assert run_sweep(STOPPING, force=True).reason == "breaker"


@pytest.mark.parametrize("action", ["stop", "limit"])
def test_confirmed_run_processes_more_than_its_breaker_allows(
    add_statuses: AddStatuses,
    history: History,
    low_floor: None,
    clock: ManualClock,
    last_run: Callable[[], Run],
    caplog: pytest.LogCaptureFixture,
    action: str,
) -> None:
    history(10, 0)
    add_statuses(100, DUE)

    with caplog.at_level("INFO"):
        result = run_sweep(changed(SMALL, guard_action=action), clock=clock, confirmed=True)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 100)
    assert last_run().counts["confirmed"] is True
    assert "Run is confirmed" in [record.getMessage() for record in caplog.records]


def test_tripped_breaker_is_not_retried_and_alerts_until_confirmed(
    add_statuses: AddStatuses, history: History, low_floor: None, clock: ManualClock
) -> None:
    history(10, 0)
    add_statuses(11, DUE)

    result = run_sweep(STOPPING)
    result.raise_for_failure()  # which is what makes an actor's message fail
    seen = worker_status(STOPPING, clock.now(), UTC)

    (alarm,) = (alarm for alarm in seen.alarms if alarm.name == "last_run")
    assert "more than 10 rows are stale" in alarm.text and "--confirm" in alarm.text
    assert result.exit_code == 1


def test_tripped_breaker_keeps_the_cursor_of_an_interrupted_run(
    add_statuses: AddStatuses, history: History, low_floor: None
) -> None:
    add_statuses(30, DUE)

    def fail(counts: Counts) -> None:
        raise OSError("the disk is full")

    run_sweep(SMALL, on_batch=fail)  # ten are gone
    first = with_breaker(times_history=1)
    history_of_ten(SMALL.name)
    tripped = run_sweep(first)
    add_statuses(1, LONG_DUE, first_id=1000)
    gone_on = run_sweep(changed(first, times_history=None, guard_action="stop"))

    assert (tripped.reason, gone_on.counts["deleted_rows"]) == ("breaker", 21)


def history_of_ten(worker: str) -> None:
    """Runs before those there are: by their ids, so that the newest stays the newest."""
    newest = Run.select().order_by(Run.id.desc()).first()
    for _ in range(10):
        Run.create(
            worker=worker, trigger="cli", started_at=NOW, heartbeat_at=NOW, finished_at=NOW, outcome="done", counts={}
        )
    values = {"outcome": newest.outcome, "reason": newest.reason, "cursor": newest.cursor, "counts": newest.counts}
    Run.update(**values).where(Run.id == Run.select(Run.id).order_by(Run.id.desc()).limit(1)).execute()


def test_worker_whose_own_limit_is_lower_has_no_breaker(postgres: Database, clock: ManualClock) -> None:
    countless: Any = type("Countless", (), {"backlog": lambda *_: Backlog(10_000, exact=False)})()

    limited, over = (changed(SMALL, name="limited", options={"max_deletes": 10_000 + n}) for n in (0, 1))

    history = [RunRow("done", None, None, {"deleted_rows": 1})] * 10

    bounded, found = (RowGuard(sweep, [countless], clock.now(), 7) for sweep in (limited, over))

    assert bounded.breaker(history) is None
    assert found.breaker(history) is not None and found.exceeded and found.worker == "limited 7"


def test_breaker_is_configured_by_a_setting() -> None:
    settings = WorkerSettings(breaker=BreakerSettings(share=0.25))

    assert SMALL.configured(settings).guard == Guard(times_history=100, share=0.25, first_run=False)
    assert SMALL.configured(WorkerSettings(breaker=BreakerSettings(action="limit"))).guard.action == "limit"
    assert SMALL.configured(WorkerSettings(breaker=BreakerSettings(times_history=None))).guard == Guard(
        None, None, first_run=False
    )
