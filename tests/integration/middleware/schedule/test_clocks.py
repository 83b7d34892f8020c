"""Clock steps, daylight saving time, parallel schedulers and days without a scheduler (F7, S1, S4, S5)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, Literal
from zoneinfo import ZoneInfo

import pytest
import redis

from housekeeping import Settings
from tests.integration.middleware.applications import at, close_all, rows, wake_up
from tests.integration.middleware.schedule.ticking import Account, utc
from tests.internals.database import Database
from tests.set_clock import Machine

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


@pytest.fixture
def own(settings: Settings, postgres: Database, redis_client: redis.Redis) -> Iterator[Settings]:
    yield settings
    close_all()


def _run(machine: Machine, account: Account, until: datetime) -> None:
    """Run a scheduler in periodiq's own loop, and then a worker."""
    machine.run_scheduler(*account.process().actors.values(), until=until)
    account.drain()


def test_schedulers_restarted_every_minute_fire_each_tick_once(own: Settings) -> None:
    account = Account(own, "* * * * *")

    for second in range(0, 180, 20):
        wake_up(account.process(), at(10) + timedelta(seconds=second))
    account.drain()

    assert account.ran == account.recorded == account.nominal(at(9, 59), at(10, 2))
    assert account.missed == 0


#: A schedule of minutes takes seconds in a test of hours.
SCHEDULES: Final = [
    pytest.param("* * * * *", marks=pytest.mark.slow),
    pytest.param("*/7 * * * *", marks=pytest.mark.slow),
    "0 * * * *",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("by", [HOUR, -HOUR], ids=["forwards", "backwards"])
def test_clock_step_of_an_hour_leaves_each_tick_one_outcome(
    own: Settings, monkeypatch: pytest.MonkeyPatch, schedule: str, by: timedelta
) -> None:
    account, machine = Account(own, schedule), Machine(monkeypatch, at(9, 59, 30))
    machine.step_clock(at(11, 20, 10), by)

    _run(machine, account, until=at(12, 40, 30))

    assert account.ran == account.recorded
    assert account.ran <= account.nominal(at(9, 58), at(12, 40))
    assert len(account.ran) + account.missed == len(account.nominal(at(9, 58), at(12, 40)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("restarted", [False, True])
def test_clock_step_forward_and_back_leaves_each_tick_one_outcome(
    own: Settings, monkeypatch: pytest.MonkeyPatch, schedule: str, restarted: bool
) -> None:
    # A tick that was missed while the clock was ahead fires at its time, and is no longer missed.
    account, machine = Account(own, schedule), Machine(monkeypatch, at(9, 59, 30))
    machine.step_clock(at(10, 20, 10), HOUR)
    machine.step_clock(at(11, 25, 10), -HOUR)

    if restarted:
        _run(machine, account, until=at(11, 24, 30))
    _run(machine, account, until=at(12, 40, 30))

    assert account.ran == account.recorded
    assert len(account.ran) + account.missed == len(account.nominal(at(9, 58), at(12, 40)))
    assert account.missed < 60 / 7


def test_clock_that_was_a_year_ahead_does_not_silence_the_year(own: Settings) -> None:
    account, year = Account(own, "*/10 * * * *"), timedelta(days=365)
    ahead = [at(10, 10) + year, at(10, 20) + year]

    for moment in (at(10), *ahead, at(10, 10), at(10, 20), at(10, 30)):
        wake_up(account.process(), moment)
    account.drain()

    assert account.ran == account.recorded == {at(10), *ahead, at(10, 10), at(10, 20), at(10, 30)}
    assert account.missed == len(account.nominal(at(10, 30), at(10) + year))


SPRING, AUTUMN = "2026-03-29", "2026-10-25"


@pytest.mark.parametrize(
    ("schedule", "day", "fired"),
    [
        # 2 o'clock is 3 o'clock: ticks in the gap fire at its end.
        ("30 2 * * *", SPRING, ["03:00+02:00"]),
        pytest.param("15,45 2 * * *", SPRING, ["03:00+02:00"], marks=pytest.mark.slow),
        # 3 o'clock is 2 o'clock: the tick fires the first time.
        ("30 2 * * *", AUTUMN, ["02:30+02:00"]),
        ("0 1-3 * * *", AUTUMN, ["01:00+02:00", "02:00+02:00", "03:00+01:00"]),
    ],
)
def test_daily_tick_fires_once_on_daylight_saving_days(
    own: Settings, monkeypatch: pytest.MonkeyPatch, schedule: str, day: str, fired: list[str]
) -> None:
    account = _night(own, monkeypatch, schedule, day)

    assert account.ran == account.recorded == {utc(f"{day}T{time}") for time in fired}
    assert account.missed == 0


@pytest.mark.parametrize(
    ("schedule", "day", "fired"),
    [
        ("0 * * * *", SPRING, ["00:00+01:00", "01:00+01:00", "03:00+02:00", "04:00+02:00"]),
        pytest.param("*/30 2 * * *", SPRING, [], marks=pytest.mark.slow),
        (
            "0 * * * *",
            AUTUMN,
            ["00:00+02:00", "01:00+02:00", "02:00+02:00", "02:00+01:00", "03:00+01:00", "04:00+01:00"],
        ),
        ("*/30 2 * * *", AUTUMN, ["02:00+02:00", "02:30+02:00", "02:00+01:00", "02:30+01:00"]),
    ],
)
def test_hourly_ticks_fire_once_each_on_daylight_saving_days(
    own: Settings, monkeypatch: pytest.MonkeyPatch, schedule: str, day: str, fired: list[str]
) -> None:
    account = _night(own, monkeypatch, schedule, day)

    assert account.ran == account.recorded == {utc(f"{day}T{time}") for time in fired}
    assert account.missed == 0


def _night(own: Settings, monkeypatch: pytest.MonkeyPatch, schedule: str, day: str) -> Account:
    """Run a scheduler in Berlin from half a minute before midnight until ten past four."""
    berlin = own.model_copy(update={"timezone": ZoneInfo("Europe/Berlin")})
    midnight = datetime.fromisoformat(day).replace(tzinfo=berlin.timezone)
    account = Account(berlin, schedule)
    machine = Machine(monkeypatch, midnight.astimezone(UTC) - MINUTE / 2, zone="Europe/Berlin")
    _run(machine, account, until=midnight.replace(hour=4, minute=10).astimezone(UTC))
    return account


@pytest.mark.parametrize("catch_up", ["latest", "none"])
@pytest.mark.parametrize(
    ("schedule", "start", "made_up"),
    [
        ("*/6 * * * *", "2026-03-05T10:02:20", "2026-03-05T10:00"),
        ("30 2 * * *", "2026-03-05T10:02:20", "2026-03-05T02:30"),
        ("0 0 1 * *", "2026-04-03T10:02:20", "2026-04-01T00:00"),
        # The minute of the start is itself a tick, and it is the latest in either case.
        ("0 10 * * *", "2026-03-05T10:00:20", "2026-03-05T10:00"),
        ("* * * * *", "2026-03-05T10:02:20", "2026-03-05T10:02"),
    ],
)
def test_after_three_days_the_latest_tick_fires_and_all_are_recorded(
    own: Settings,
    monkeypatch: pytest.MonkeyPatch,
    catch_up: Literal["latest", "none"],
    schedule: str,
    start: str,
    made_up: str,
) -> None:
    account = Account(own.model_copy(update={"catch_up": catch_up}), schedule)
    wake_up(account.process(), at(10))
    before = set(account.nominal(at(9, 59), at(10)))

    _run(Machine(monkeypatch, utc(start)), account, until=utc(start) + 3 * MINUTE)

    latest = utc(made_up)
    in_its_minute = utc(start) - latest < MINUTE
    expected = {latest} if catch_up == "latest" or in_its_minute else set()
    assert {tick for tick in account.ran if tick <= utc(start)} == expected | before
    assert account.ran == account.recorded
    last_missed = latest - MINUTE if latest in expected else latest
    assert account.missed == len(account.nominal(at(10), last_missed))
    gaps = [row for row in rows("swept") if row[0] == "missed"]
    assert len(gaps) <= 1, "a row for each gap"


def test_consecutive_outages_have_a_row_each(own: Settings) -> None:
    account = Account(own, "0 * * * *")
    for hour in (6, 9, 10, 14):
        wake_up(account.process(), at(hour))
    account.drain()

    gaps = [row[2:] for row in rows("swept") if row[0] == "missed"]
    assert gaps == [(at(8), {"missed": 2}), (at(13), {"missed": 3})]
    assert account.ran == account.recorded == {at(6), at(9), at(10), at(14)}
