"""When a backlog will be done: by the schedule, the limits and what operators have set."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

import pytest
import redis

from housekeeping import Settings, Sweep
from tests.declarations import changed
from tests.integration.conftest import AddStatuses, Beat
from tests.internals.core import MAIN
from tests.internals.database import Database, database
from tests.internals.insight import as_json, last_ended, plan, trends, with_alerts, worker_status
from tests.internals.ledger import NOW, BusyThread, Heartbeat, Override, Run, TickRow, history
from tests.internals.sweeps import Backlog
from tests.internals.web import SnapshotReader
from tests.internals.workers import status_sweep

AT: Final = datetime(2026, 1, 1, 3, 50, tzinfo=UTC)
#: Runs of at most 60 s, every ten minutes.
SWEEP: Final = changed(status_sweep, schedule="*/10 * * * *", runtime=timedelta(seconds=60))


def ran(minutes_ago: float, processed: int, *, left: int = 0, exact: bool = True, seconds: float = 60) -> None:
    """A run that ended this long ago."""
    ended = AT - timedelta(minutes=minutes_ago)
    Run.create(
        worker=SWEEP.name,
        trigger="schedule",
        started_at=ended - timedelta(seconds=seconds),
        heartbeat_at=ended,
        finished_at=ended,
        outcome="partial",
        reason="out_of_time",
        counts={"deleted_rows": processed},
        backlog=left,
        backlog_exact=exact,
    )


def steady(arrived_per_hour: int, processed: int = 6000) -> None:
    """Two hours of history: 100 rows a second in runs of a minute, and as many new rows."""
    ran(120, processed, left=50_000)
    ran(0, processed, left=50_000 + 2 * arrived_per_hour - processed)


def forecast(rows: int = 36_000, sweep: Sweep = SWEEP, **given: Any) -> Any:
    given = {"zone": UTC, "ended": last_ended(sweep), **given}
    return trends.forecast_backlog(sweep, Backlog(rows), AT, **given)


def paused(until: datetime | None = None) -> Override:
    return Override(SWEEP.name, "paused", until=until, since=AT)


def narrow(**limits: Any) -> Override:
    return Override(SWEEP.name, "narrow", since=AT, **limits)


def test_backlog_is_done_after_as_many_runs_as_it_takes(postgres: Database) -> None:
    steady(0)

    found = forecast()

    # Six runs of 6,000 rows at 04:00, 04:10, ... 04:50.
    assert (found.done_at, found.runs, found.catches_up) == (AT.replace(hour=4, minute=51), 6, True)
    assert found.text == "36,000 rows, done at about 04:51 UTC, after 6 runs"


@pytest.mark.parametrize(
    ("zone", "at"), [("Asia/Tokyo", "13:51 Asia/Tokyo"), ("America/Anchorage", "19:51 America/Anchorage")]
)
def test_time_of_a_forecast_is_in_the_zone_of_the_settings(postgres: Database, zone: str, at: str) -> None:
    steady(0)

    assert f"done at about {at}, after" in forecast(zone=ZoneInfo(zone)).text


def test_day_of_a_forecast_is_named_if_it_is_another_one_in_the_zone(postgres: Database) -> None:
    steady(0)

    # It is 23:50 there.
    assert "done at about 2026-01-01 00:51 Etc/GMT+4, after" in forecast(zone=ZoneInfo("Etc/GMT+4")).text


@pytest.mark.parametrize(
    ("sweep", "override", "runs", "done"),
    [
        (changed(SWEEP, rows_per_s=50.0), None, 12, "05:51"),
        (changed(SWEEP, runtime=timedelta(seconds=120)), None, 3, "04:22"),
        (changed(SWEEP, schedule="0 * * * *"), None, 6, "09:01"),
        (changed(SWEEP, schedule="* * * * *"), None, 6, "03:57"),
        (SWEEP, narrow(max_runtime_s=30), 12, "05:50"),
        (SWEEP, narrow(max_runtime_s=30, until=AT + timedelta(minutes=25)), 7, "05:01"),
        (SWEEP, narrow(batch_size=50), 12, "05:51"),
        (SWEEP, narrow(rows_per_s=50.0), 12, "05:51"),
        (SWEEP, paused(AT + timedelta(hours=1)), 6, "05:51"),
    ],
    ids=[
        "rows a second",
        "runtime",
        "schedule",
        "no gap",
        "narrowed",
        "narrowed for a time",
        "batches",
        "slower",
        "paused",
    ],
)
def test_limits_and_schedule_are_taken_into_account(
    postgres: Database, sweep: Sweep, override: Override | None, runs: int, done: str
) -> None:
    steady(0)

    found = forecast(sweep=changed(sweep, batch=100), override=override)

    assert (found.runs, f"{found.done_at:%H:%M}") == (runs, done)


def test_worker_paused_without_an_end_is_not_done_before_it_is_resumed(postgres: Database) -> None:
    steady(0)

    found = forecast(override=paused())

    assert (found.done_at, found.runs, found.catches_up) == (None, 6, False)
    assert found.text == (
        f"36,000 rows, and it will not catch up: {SWEEP.name} is paused until it is resumed (set by unknown, "
        f"2026-01-01 03:50 UTC): housekeeping resume {SWEEP.name}; after that, done after 6 runs"
    )


def test_run_at_work_is_the_first_of_them(postgres: Database) -> None:
    steady(0)
    began = {"started_at": AT - timedelta(seconds=30), "heartbeat_at": AT}
    Run.create(worker=SWEEP.name, trigger="schedule", **began)
    (at_work,) = history.recent(SWEEP.name, 1)

    assert forecast(3000, open_run=silent(at_work, 0)).text == "3,000 rows, done at about 03:50 UTC, after 1 run"
    assert f"{forecast(3000, open_run=silent(at_work, 41)).done_at:%H:%M}" == "04:00"


def silent(run: Any, seconds: float) -> Any:
    return type(run)(**{name: getattr(run, name) for name in run.__slots__} | {"silent_s": seconds, "lost": False})


def test_arrivals_delay_the_end(postgres: Database) -> None:
    steady(18_000)

    # Each run processes 6,000 rows, of which 3,000 are new.
    assert forecast().runs == 13


def test_more_arrivals_than_runs_can_process_are_never_caught_up(postgres: Database) -> None:
    steady(48_000)

    found = forecast()

    assert (found.done_at, found.runs, found.catches_up) == (None, None, False)
    assert found.text == (
        "36,000 rows, and it will never catch up: 48,000 rows an hour become stale, and its runs process at most "
        "36,000; raise max_runtime_s, or schedule it more often"
    )


@pytest.mark.parametrize(
    ("sweep", "override", "advice"),
    [
        (changed(SWEEP, rows_per_s=50.0), None, "raise max_rows_per_s"),
        (SWEEP, narrow(max_runtime_s=5), f"end its narrowing: housekeeping resume {SWEEP.name}"),
    ],
)
def test_advice_names_the_limit_that_is_in_the_way(
    postgres: Database, sweep: Sweep, override: Override | None, advice: str
) -> None:
    steady(48_000)

    assert forecast(sweep=sweep, override=override).text.endswith(advice)


def test_without_a_run_that_processed_rows_the_end_is_unknown(postgres: Database) -> None:
    found = forecast()

    assert (found.done_at, found.runs, found.catches_up) == (None, None, None)
    assert "is unknown, because no run has processed rows yet" in found.text


def test_backlog_beyond_the_counts_limit_is_estimated(add_statuses: AddStatuses) -> None:
    add_statuses(30_000, "'2026-01-01'::timestamptz - interval '1 second' * n")
    database.execute_sql("ANALYZE user_statuses")
    ran(0, 6000, exact=False)

    found = worker_status(SWEEP, AT, UTC).forecast

    assert found is not None and found.estimated and found.rows == pytest.approx(30_000, rel=0.1)
    assert re.fullmatch(r"about [23]\d,000 rows, done at about \d\d:\d\d UTC, after \d runs, .+", found.text)


def test_arrivals_of_a_backlog_beyond_the_limit_are_estimated(add_statuses: AddStatuses) -> None:
    # 14,400 rows an hour, the last of them now; ten runs of 1,000 rows an hour cannot keep up.
    add_statuses(60_000, f"timestamptz '{AT.isoformat()}' - interval '1 second' * n / 4")
    database.execute_sql("ANALYZE user_statuses")
    ran(0, 1000, exact=False)

    found = worker_status(SWEEP, AT, UTC).forecast

    assert found is not None and found.catches_up is False
    # The planner estimates from a sample.
    [arrived] = re.findall(r"never catch up: ([\d,]+) rows an hour", found.text)
    assert 13_000 <= int(arrived.replace(",", "")) <= 16_000


def test_status_and_plan_say_the_same(add_statuses: AddStatuses, settings: Settings) -> None:
    add_statuses(500, "now() - interval '1 hour'")
    ran(0, 50, seconds=60)
    (now,) = database.execute_sql("SELECT now()").fetchone()

    status = worker_status(status_sweep, now, UTC)
    planned = plan(status_sweep, settings=settings)

    assert status.forecast is not None and planned.backlog_forecast is not None
    assert status.forecast.runs == planned.backlog_forecast.runs and (status.forecast.runs or 0) > 1
    assert as_json(status)["forecast"]["estimated"] is False and as_json(planned)["forecast"]["rows"] == 500


def insert_run(began: timedelta, **given: Any) -> None:
    at = datetime.now(UTC) - began
    values = {"worker": SWEEP.name, "trigger": "schedule", "counts": {}, "started_at": at, "heartbeat_at": NOW}
    Run.insert({**values, **given}).execute()


def fail(times: int) -> None:
    for number in range(times):
        at = datetime.now(UTC) - timedelta(seconds=10 * (times - number))
        insert_run(timedelta(hours=1), outcome="failed", error="disk full", started_at=at, finished_at=at)


ALIVE: Final = Heartbeat(kind="scheduler", host="h", pid=1, version="1", up_s=9_000.0)
WORKER: Final = ALIVE.model_copy(update={"kind": "worker", "pid": 2, "queues": [SWEEP.queue], "threads": 1})
HANGING: Final = BusyThread(name="t", worker="shop.calls", message_id="m", busy_s=3_000.0, frame="shop.py:1 call")


@pytest.fixture
def two_wait(request: pytest.FixtureRequest, redis_client: redis.Redis, settings: Settings) -> Callable[[], None]:
    """Returns a function that lets two messages wait, or without Redis two ticks."""

    def wait() -> None:
        if request.config.getoption("topology") != "postgres-only":
            redis_client.hset(f"{settings.namespace}:broker:{SWEEP.queue}.msgs", mapping={"m": "{}", "n": "{}"})
            return
        with database.using(MAIN):
            for minutes in (1, 2):
                tick = datetime.now(UTC) - timedelta(minutes=minutes)
                TickRow.insert(worker=SWEEP.name, tick=tick, message_id=f"m{minutes}", due_at=NOW).execute()

    return wait


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("all right", None),
        ("no Redis", "Redis did not answer"),
        ("no scheduler", "no scheduler is alive since"),
        ("no worker", "no worker serves the queue"),
        ("threads busy", "all 1 thread of the queue"),
        ("stuck", "has not ended since"),
        ("failing", "3 runs in a row failed"),
    ],
)
def test_nothing_that_stops_the_runs_leaves_a_time(
    add_statuses: AddStatuses,
    settings: Settings,
    two_wait: Callable[[], None],
    beat: Beat,
    state: str,
    cause: str | None,
) -> None:
    add_statuses(500, "now() - interval '1 hour'")
    insert_run(
        timedelta(minutes=5), outcome="done", counts={"deleted_rows": 50}, finished_at=NOW - timedelta(minutes=4)
    )
    beat(
        "scheduler",
        ALIVE.model_copy(update={"stopped": state == "no scheduler"}),
        timedelta(hours=state == "no scheduler"),
    )
    busy = {"busy": 1, "busy_threads": [HANGING]} if state == "threads busy" else {}
    beat("worker", WORKER.model_copy(update={"stopped": state == "no worker", **busy}))
    if state == "threads busy":
        two_wait()
    if state == "stuck":
        insert_run(timedelta(hours=1), message_id="m")
    fail(3 if state == "failing" else 0)
    away = {"redis_url": "unix:///nowhere/redis.sock", "broker_url": None} if state == "no Redis" else {}
    told = settings.model_copy(update=away)

    sweep = changed(SWEEP, alerts=replace(SWEEP.alerts, failed_runs=3))

    snapshot = SnapshotReader(told, {sweep.name: sweep}).read()
    planned = with_alerts(plan(sweep, settings=told), sweep, snapshot.alerts)

    for found in (snapshot.statuses[sweep.name].forecast, planned.backlog_forecast):
        assert found is not None
        if cause is None:
            assert found.done_at is not None and "done at about" in found.text
        else:
            assert (found.done_at, found.catches_up) == (None, False)
            assert found.text.startswith("500 rows, and it will not catch up: ") and cause in found.text


def test_after_a_failed_run_the_end_is_unknown(add_statuses: AddStatuses, settings: Settings, beat: Beat) -> None:
    add_statuses(500, "now() - interval '1 hour'")
    insert_run(
        timedelta(minutes=5), outcome="done", counts={"deleted_rows": 50}, finished_at=NOW - timedelta(minutes=4)
    )
    fail(1)
    beat("scheduler", ALIVE)
    beat("worker", WORKER)

    found = SnapshotReader(settings, {SWEEP.name: SWEEP}).read().statuses[SWEEP.name].forecast

    assert found is not None and (found.done_at, found.catches_up) == (None, None)
    assert "when they will be done is unknown" in found.text and "disk full" in found.text
