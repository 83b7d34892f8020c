"""A new sweep's first run that would process a large part of its table waits for a confirmation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any, Final
from zoneinfo import ZoneInfo

import pytest
from peewee import BigAutoField
from psycopg2.extensions import connection as Connection

from housekeeping import Alerts, BaseModel, Delete, Settings, Sweep, UtcDateTimeField
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed, stage_of
from tests.integration.own_stages import with_stages
from tests.integration.sweeps.engine.sizing import past_runs
from tests.integration.sweeps.limits.visits import NAME, OLD, Visit, old
from tests.integration.sweeps.limits.visits import visits as visits
from tests.internals.database import Database, database
from tests.internals.engine import AT_LEAST, FLOOR, ONE_IN, RowGuard, run_sweep, stale_if_outgrown
from tests.internals.engine import guard as bounded_counts
from tests.internals.insight import Alert, Observation, plan, why, worker_alerts, worker_status
from tests.internals.ledger import Run, RunRow
from tests.internals.sweeps import Backlog, TableStage, stages_of

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

    result = run_sweep(changed(OLD, guard_action=action), clock=clock, force=True)

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

    assert planned.unconfirmed == text.replace(f"Look: housekeeping plan {NAME}; then", "If these rows should go")
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
            stale=partial(old, bot, Visit),
            order=stage_of(OLD).order,
            action=Delete(),
        )
        for name, bot in (("people", False), ("bots", True))
    ]
    sweep = Sweep(NAME, lambda sweep: stages)
    Visit.update(bot=True).where(Visit.id <= 500).execute()

    assert run_sweep(sweep, clock=clock).reason == "unconfirmed"


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize(("stale", "outcome"), [(24_000, "done"), (24_001, "skipped")])
def test_table_of_over_100000_rows_is_compared_with_its_own_rows(
    visits: Callable[[int, int], None], clock: ManualClock, stale: int, outcome: str, analyzed: bool
) -> None:
    visits(stale, 120_000 - stale)
    if analyzed:
        database.execute_sql("ANALYZE visit")

    assert run_sweep(OLD, clock=clock).outcome == outcome


@pytest.mark.parametrize(("rows", "statistics"), [(2000, 2_000_000), (120_000, 2_000_000), (120_000, 10)])
def test_wrong_statistics_do_not_decide(
    visits: Callable[[int, int], None],
    clock: ManualClock,
    settings: Settings,
    admin: Connection,
    rows: int,
    statistics: int,
) -> None:
    visits(rows, 0)
    with admin.cursor() as cursor:
        cursor.execute(
            "UPDATE pg_class SET reltuples = %s, relpages = pg_relation_size(oid) / 8192 WHERE oid = %s::regclass",
            (statistics, f"{settings.namespace}.visit"),
        )

    assert run_sweep(OLD, clock=clock).reason == "unconfirmed"


class OtherVisit(BaseModel):
    id = BigAutoField()
    at = UtcDateTimeField()


#: Numbers up to which rows are counted, or at which a limit begins.
LIMITS: Final = (1000, 10_000, 100_000, 500_000, 1_000_000)


class Sizes(TableStage):
    """Stage whose table has these numbers of stale and other rows, as far as a count goes."""

    stale_rows = 0

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        return Backlog(min(self.stale_rows, limit), self.stale_rows <= limit)


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch, visits: Callable[[int, int], None]) -> Callable[[int, int, int], None]:
    """Sets what counts find: the stale rows, all rows, and PostgreSQL's estimate of these."""

    def set_sizes(stale: int, rows: int, estimate: int) -> None:
        monkeypatch.setattr(Sizes, "stale_rows", stale)
        monkeypatch.setattr(bounded_counts, "count_rows", lambda tables, limit, max_runtime: min(rows, limit))
        monkeypatch.setattr(bounded_counts, "estimated_rows", lambda tables, max_runtime: estimate)

    return set_sizes


@pytest.mark.parametrize("limit", LIMITS)
def test_first_run_over_a_fifth_is_unconfirmed_at_any_size(
    simulate: Callable[[int, int, int], None], clock: ManualClock, limit: int
) -> None:
    sweep = with_stages(OLD, Sizes)

    for stale in (limit - 1, limit, limit + 1):
        for rows in (stale, 5 * stale - 1, 5 * stale, 5 * stale + 1, 60 * stale):
            for estimate in (0, rows // 10, rows, 10 * rows):
                simulate(stale, rows, estimate)

                found = RowGuard(sweep, stages_of(sweep), clock.now()).first_run()

                over_a_fifth = stale >= AT_LEAST and stale > rows // ONE_IN
                beyond_estimate = stale > max(100_000, ceil(estimate / ONE_IN))  # a confirmation too many does no harm
                assert (found is not None) is (over_a_fifth or beyond_estimate), (rows, estimate)


@pytest.mark.parametrize("limit", (2, *LIMITS))
def test_breaker_by_share_is_exceeded_above_it_at_any_size(
    simulate: Callable[[int, int, int], None], clock: ManualClock, limit: int
) -> None:
    for stale in (limit - 1, limit, limit + 1):
        for share in (0.01, 0.3, 1):
            sweep = changed(with_stages(OLD, Sizes), times_history=None, share=share)
            enough = ceil(stale / Fraction(str(share)))
            for rows in (stale, enough - 1, enough, enough + 1):
                for estimate in (rows, 10 * rows):
                    simulate(stale, rows, estimate)

                    guard = RowGuard(sweep, stages_of(sweep), clock.now())

                    assert guard.breaker([]) is not None and guard.exceeded is (stale > Fraction(str(share)) * rows)


@pytest.mark.parametrize("limit", LIMITS)
def test_breaker_by_history_is_exceeded_above_it_at_any_size(
    simulate: Callable[[int, int, int], None], clock: ManualClock, limit: int
) -> None:
    sweep = changed(with_stages(OLD, Sizes), times_history=1)

    for stale in (limit - 1, limit, limit + 1):
        simulate(stale, 2 * stale, 0)

        for most in (stale - 1, stale, stale + 1):
            guard = RowGuard(sweep, stages_of(sweep), clock.now())
            history = [RunRow("done", None, None, {sweep.progress_counts[0]: most})] * 10

            assert guard.breaker(history) is not None and guard.exceeded is (stale > max(FLOOR, most))


@pytest.mark.parametrize("limit", LIMITS)
def test_backlog_alert_rings_above_its_threshold_at_any_size(
    simulate: Callable[[int, int, int], None], clock: ManualClock, limit: int
) -> None:
    for stale in (limit - 1, limit, limit + 1):
        for most in (stale - 1, stale, stale + 1):
            sweep = dataclasses.replace(with_stages(OLD, Sizes), alerts=Alerts(backlog=most))
            simulate(stale, stale, stale)

            assert [each.name for each in alerts(clock, sweep)] == (["backlog"] if stale > most else [])


def test_count_that_ends_below_the_threshold_is_no_backlog_alert() -> None:
    sweep = dataclasses.replace(OLD, alerts=Alerts(backlog=50_000))

    def found(rows: int) -> list[str]:
        seen = Observation(now=datetime.now(UTC), waiting=Backlog(rows, exact=False))
        return [alert.name for alert in worker_alerts(sweep, seen)]

    assert (found(10_000), found(50_000)) == ([], ["backlog"])


@pytest.mark.parametrize("limit", LIMITS)
def test_plan_is_outgrown_above_twice_its_rows_at_any_size(
    simulate: Callable[[int, int, int], None], limit: int
) -> None:
    sweep = with_stages(OLD, Sizes)

    for stale in (limit - 1, limit, limit + 1):
        simulate(stale, stale, stale)

        for seen in (stale // 2 - 1, stale // 2, ceil(stale / 2), stale):
            found = stale_if_outgrown(sweep, None, Backlog(seen))

            assert (found is not None) is (stale > max(2 * seen, seen + 1000))


def test_tables_of_several_stages_are_compared_each_by_itself(
    visits: Callable[[int, int], None], postgres: Database, clock: ManualClock
) -> None:
    visits(1000, 9000)
    postgres.create_tables([OtherVisit])
    database.execute_sql("INSERT INTO other_visit (at) SELECT '2025-01-01+00' FROM generate_series(1, 1000)")
    stages = [
        TableStage(
            name=model.__name__, stale=lambda now, m=model: m.at < now, order=(model.at, model.id), action=Delete()
        )
        for model in (Visit, OtherVisit)
    ]
    sweep = Sweep(NAME, lambda sweep: stages)

    result = run_sweep(sweep, clock=clock)

    assert (result.reason, result.counts["unconfirmed"]["table"]) == ("unconfirmed", '"other_visit"')


def test_table_named_with_and_without_its_schema_is_counted_once(
    visits: Callable[[int, int], None], settings: Settings, clock: ManualClock
) -> None:
    visits(1000, 2000)
    Visit.update(bot=True).where(Visit.id <= 500).execute()
    visit: Any = Visit
    with_schema: Any = type("Visit", (Visit,), {"Meta": type("Meta", (), {"schema": settings.namespace})})
    stages = [
        TableStage(
            name=name,
            stale=lambda now, m=model, bot=bot: (m.at < now) & (m.bot == bot),
            order=(model.at, model.id),
            action=Delete(),
        )
        for name, model, bot in (("people", visit, False), ("bots", with_schema, True))
    ]
    sweep = Sweep(NAME, lambda sweep: stages)

    assert run_sweep(sweep, clock=clock).reason == "unconfirmed"


@dataclass(frozen=True, kw_only=True)
class _SlowToCount(TableStage):
    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        database.execute_sql("SELECT pg_sleep(10)")
        return TableStage.backlog(self, now, limit, argument)


def test_first_run_that_cannot_count_in_time_is_skipped(visits: Callable[[int, int], None], clock: ManualClock) -> None:
    visits(3, 0)
    slow = changed(OLD, runtime=timedelta(milliseconds=200))

    result = run_sweep(with_stages(slow, _SlowToCount), clock=clock)

    assert (result.outcome, result.reason) == ("skipped", "unconfirmed")
    assert result.counts["unconfirmed"]["stale"] is None


@pytest.mark.parametrize(("stale", "reason"), [(50, None), (51, "breaker")])
def test_share_of_the_breaker_holds_for_the_first_run(
    visits: Callable[[int, int], None], clock: ManualClock, stale: int, reason: str | None
) -> None:
    visits(stale, 100 - stale)
    database.execute_sql("ANALYZE visit")
    sweep = changed(OLD, share=0.5, guard_action="stop")

    result = run_sweep(sweep, clock=clock)

    assert result.reason == reason
    assert reason is None or "no run before it has ended, the breaker allows 50" in str(result.error)


def test_sweep_that_says_so_needs_no_confirmation(visits: Callable[[int, int], None], clock: ManualClock) -> None:
    visits(2000, 0)

    assert run_sweep(changed(OLD, first_run=False), clock=clock).outcome == "done"
