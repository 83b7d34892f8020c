"""Forecasts of runs: what the checks would do to a run is what they then do to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis

from housekeeping import Lease, Settings, Sweep, Throttle
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.engine.sizing import DUE, SMALL, past_runs
from tests.internals.database import Database, database
from tests.internals.engine import run_sweep
from tests.internals.insight import Check, Plan, as_json, dry_run, plan
from tests.internals.ledger import Counts, Override, Run, operators, schema

FREE = changed(SMALL, throttle=Throttle(None, None))


def forecast_of(sweep: Sweep, **options: Any) -> Plan:
    return plan(sweep, **options)


def check(found: Plan, name: str) -> Check:
    return next(each for each in found.checks if each.name == name)


def pause(sweep: Sweep) -> Sweep:
    operators.switch(Override(sweep.name, "paused", "a migration"))
    return sweep


def flood(action: Any) -> Callable[[Sweep], Sweep]:
    def prepare(sweep: Sweep) -> Sweep:
        past_runs(10, 1)
        return changed(sweep, guard_action=action)

    return prepare


def disable(sweep: Sweep) -> Sweep:
    return changed(sweep, enabled=False)


def first_time(sweep: Sweep) -> Sweep:
    return changed(sweep, name="shop.statuses", first_run=True)


@pytest.mark.parametrize(
    ("prepare", "outcome", "reason"),
    [
        (lambda sweep: sweep, "done", None),
        (pause, "skipped", "paused"),
        (disable, "skipped", "disabled"),
        (first_time, "skipped", "unconfirmed"),
        (flood("alert"), "done", None),
        (flood("limit"), "partial", "breaker"),
        (flood("stop"), "failed", "breaker"),
    ],
    ids=["free", "paused", "disabled", "first_run", "alert", "limit", "stop"],
)
def test_forecast_and_dry_run_have_the_outcome_of_the_run(
    add_statuses: AddStatuses,
    low_floor: None,
    prepare: Callable[[Sweep], Sweep],
    outcome: str,
    reason: str | None,
) -> None:
    add_statuses(1200, DUE)
    worker = changed(prepare(FREE), batch=1000)

    found, dry = forecast_of(worker), dry_run(worker)
    run = run_sweep(worker)

    assert [(each.outcome, each.reason) for each in (found, dry, run)] == [(outcome, reason)] * 3
    assert (dry.exit_code, dry.counts["deleted_rows"]) == (run.exit_code, 1200)


@pytest.mark.parametrize("prepare", [pause, disable])
def test_forced_run_is_forecast_as_forced(add_statuses: AddStatuses, prepare: Callable[[Sweep], Sweep]) -> None:
    worker = prepare(FREE)

    assert (forecast_of(worker, force=True).outcome, dry_run(worker, force=True).outcome) == ("done", "done")
    assert "--force runs it" in check(forecast_of(worker, force=True), "override").text


def test_breaker_names_its_numbers_and_the_command(add_statuses: AddStatuses, low_floor: None) -> None:
    add_statuses(1200, DUE)

    stops, limits = (check(forecast_of(flood(action)(FREE)), "breaker").text for action in ("stop", "limit"))

    assert stops.startswith("more than 100 rows are stale; the last 10 runs processed 1 at most")
    assert stops.endswith(f"to continue: housekeeping run {FREE.name} --confirm")
    assert limits.endswith("the breaker allows 100: the run ends after 100 rows, and the next one resumes")


def test_breaker_without_a_history_says_so(statuses: None) -> None:
    past_runs(1, 1)

    assert check(forecast_of(FREE), "breaker").text == "has no limit before 10 past runs; there is 1"


def test_narrowed_worker_is_forecast_as_slower(statuses: None) -> None:
    operators.switch(Override(FREE.name, "narrow", batch_size=3))

    found = check(forecast_of(FREE), "override")

    assert (found.effect, "narrowed to 3 records a batch" in found.text) == ("slows", True)


def test_throttle_names_the_limit_that_is_exceeded(statuses: None) -> None:
    def busy() -> str:
        return "the queue of mails is long"

    worker = changed(FREE, throttle=Throttle(None, None, wait_s=3, custom=busy))

    found = check(forecast_of(worker), "throttle")

    assert found.effect == "slows"
    assert found.text.startswith("custom: the queue of mails is long: the run waits up to 3 s, ")


def test_throttle_that_cannot_be_read_is_unknown(statuses: None) -> None:
    def broken() -> str:
        raise OSError("no route to host")

    worker = changed(FREE, throttle=Throttle(None, None, custom=broken))

    assert check(forecast_of(worker), "throttle").effect == "unknown"


def test_lease_of_a_running_run_is_named(add_statuses: AddStatuses, redis_client: redis.Redis) -> None:
    add_statuses(20, DUE)
    worker = dataclasses.replace(FREE, lease=Lease("statuses", timedelta(minutes=10)))
    during: list[Plan] = []

    def look(counts: Counts) -> None:
        during.append(forecast_of(worker))

    run = run_sweep(worker, on_batch=look)
    after = forecast_of(worker)

    assert (during[0].outcome, during[0].reason) == ("skipped", "lease_held")
    text = check(during[0], "lease").text
    assert text.startswith(f"run {run.run_id}, {worker.name} on ") and " holds the lease statuses for " in text
    assert (after.outcome, check(after, "lease").effect) == ("done", "none")


def test_schedule_names_the_next_tick_that_is_not_skipped(
    statuses: None, clock: ManualClock, settings: Settings, redis_client: redis.Redis
) -> None:
    hourly = dataclasses.replace(FREE, schedule="30 * * * *")
    free = as_json(plan(hourly, clock=clock, settings=settings))
    operators.switch(Override(FREE.name, "paused", until=clock.now() + timedelta(days=9000)))
    paused = as_json(plan(hourly, clock=clock, settings=settings))

    assert free["next_tick"] == "2026-01-01T00:30:00+00:00"
    assert free["checks"][-1]["text"].startswith("the next tick is 2026-01-01 00:30 UTC, in 30 min")
    assert paused["next_tick"][:4] == "2050"


def test_forecast_without_the_ledger_keeps_the_rest(add_statuses: AddStatuses, postgres: Database) -> None:
    add_statuses(3, DUE)
    database.execute_sql(f"DROP SCHEMA {Run._meta.schema} CASCADE")

    planned = plan(FREE)
    schema.init()

    assert (planned.stale.rows, [each.name for each in planned.checks]) == (
        3,
        ["ledger", "locks", "first run", "throttle"],
    )
    assert planned.in_words == "it is unknown whether a run now would start (ledger)"
    assert "housekeeping init" in check(planned, "ledger").text
