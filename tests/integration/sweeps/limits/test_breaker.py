"""The breaker that is set to stop runs: one that finds far more than usual ends before the first change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from housekeeping.core.errors import BreakerTripped
from housekeeping.core.settings import BreakerSettings, WorkerSettings
from housekeeping.database.connection import Database, database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.explain import why
from housekeeping.sweeps.insight.status import worker_status
from housekeeping.sweeps.ledger.models import NOW, Run
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.sweeps.limits import breaker
from housekeeping.sweeps.limits.breaker import Breaker
from housekeeping.sweeps.registration import register
from housekeeping.sweeps.stages.stage import Backlog
from housekeeping.testing import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.conftest import History
from tests.integration.sweeps.engine.sizing import DUE, LONG_DUE, SMALL


def with_breaker(**limits: Any) -> Sweep:
    return dataclasses.replace(SMALL, breaker=Breaker(**limits, action="stop"))


STOPPING = with_breaker()
WIDE = dataclasses.replace(STOPPING, batch_size=5000)


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
def test_more_than_the_share_of_the_table_trips_the_breaker(
    add_statuses: AddStatuses, history: History, due: int, reason: str | None
) -> None:
    history(10, 1)
    add_statuses(due, DUE)
    add_statuses(100 - due, "now() + interval '1 day'", first_id=1000)
    database.execute_sql("ANALYZE user_statuses")

    result = run_sweep(with_breaker(share=0.5))

    assert result.reason == reason
    assert reason is None or "more than 50 rows are stale;" in str(result.error)
    assert reason is None or "the breaker allows 50;" in str(result.error)


def test_share_does_not_apply_to_a_table_without_statistics(add_statuses: AddStatuses, history: History) -> None:
    history(10, 1)
    add_statuses(100, DUE)

    assert run_sweep(with_breaker(share=0.5)).outcome == "done"


def test_disabled_breaker_never_trips(add_statuses: AddStatuses, history: History, low_floor: None) -> None:
    history(10, 0)
    add_statuses(11, DUE)

    assert run_sweep(with_breaker(times_history=None)).outcome == "done"


def test_force_is_no_confirmation(add_statuses: AddStatuses, history: History, low_floor: None) -> None:
    history(10, 0)
    add_statuses(11, DUE)

    assert run_sweep(STOPPING, force=True).reason == "breaker"


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


def test_message_of_a_run_stopped_by_its_breaker_ends_without_error(
    add_statuses: AddStatuses, history: History, low_floor: None, last_run: Callable[[], Run]
) -> None:
    history(10, 0)
    add_statuses(11, DUE)
    broker = StubBroker()
    broker.add_middleware(_Options())

    register(broker, dataclasses.replace(STOPPING, schedule=None)).fn()

    assert last_run().reason == "breaker"


class _Options(dramatiq.Middleware):
    """Knows the options of the library's actors, and does nothing."""

    @property
    def actor_options(self) -> set[str]:
        known = {"idempotent", "feature_category", "data_consistency", "sweep", "deduplicate", "deduplication"}
        return known | {"rediscovered"}


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
    gone_on = run_sweep(dataclasses.replace(first, breaker=Breaker(None, action="stop")))

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


def test_breaker_costs_one_bounded_count_and_only_with_a_history(
    add_statuses: AddStatuses, history: History, statements: list[str]
) -> None:
    add_statuses(25, DUE)

    def sent() -> list[str]:
        before = len(statements)
        run_sweep(STOPPING)
        return statements[before:]

    sent()  # the first run of all
    without = sent()
    history(10, 1)
    with_history = sent()

    counting = [sql for sql in with_history if sql.startswith("SELECT COUNT") and '"user_statuses"' in sql]
    assert len(with_history) == len(without) + 2, "the count and its own timeout"
    assert len(counting) == 2 and all(" LIMIT " in sql for sql in counting), "before the run, and at its end"


def test_worker_whose_own_limit_is_lower_has_no_breaker(postgres: Database, clock: ManualClock) -> None:
    countless: Any = type("Countless", (), {"backlog": lambda *_: Backlog(10_000, exact=False)})()

    limited, over = (dataclasses.replace(SMALL, name="limited", options={"max_deletes": 10_000 + n}) for n in (0, 1))

    bounded = breaker.check(limited, [1] * 10, [countless], clock.now(), 7)
    found = breaker.check(over, [1] * 10, [countless], clock.now(), 7)

    assert bounded is None
    assert found is not None and found.exceeded
    assert "housekeeping plan limited 7; to continue: housekeeping run limited 7 --confirm" in found.refusal


def test_breaker_is_configured_by_a_setting() -> None:
    settings = WorkerSettings(breaker=BreakerSettings(share=0.25))

    assert SMALL.configured(settings).breaker == Breaker(times_history=100, share=0.25)
    assert SMALL.configured(WorkerSettings(breaker=BreakerSettings(action="limit"))).breaker.action == "limit"
    assert SMALL.configured(WorkerSettings(breaker=BreakerSettings(times_history=None))).breaker == Breaker(None, None)


def test_why_names_the_commands_to_continue(add_statuses: AddStatuses, history: History, low_floor: None) -> None:
    history(10, 0)
    add_statuses(11, DUE)
    run_sweep(STOPPING)

    answer = why(dataclasses.replace(STOPPING, schedule=None), None, datetime.now(UTC), UTC)

    assert "more than 10 rows are stale" in answer.meaning and "--confirm" in answer.meaning
