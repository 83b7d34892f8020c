from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pendulum
import pytest

from housekeeping.core.cron import Cron
from tests.set_clock import Machine

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
SATURDAY = datetime(2026, 11, 21, 9, 30, 20, tzinfo=UTC)


class Actor:
    """Actor with the attributes that periodiq's scheduler uses; records what was sent, and when."""

    def __init__(
        self, spec: str, zone: ZoneInfo | None = None, while_sending: Callable[[], None] | None = None
    ) -> None:
        self.options = {"periodic": Cron(spec, zone or UTC)}
        self.sent: list[datetime] = []
        self._while_sending = while_sending

    def send_with_options(self, *, scheduled_at: str) -> None:
        self.sent.append(datetime.fromisoformat(scheduled_at).astimezone(UTC))
        if self._while_sending is not None:
            self._while_sending()

    def sent_in_minutes(self) -> list[datetime]:
        return [moment.replace(second=0, microsecond=0) for moment in self.sent]


def ticks(start: datetime, end: datetime, is_tick: Callable[[datetime], bool]) -> list[datetime]:
    first = start.replace(second=0)
    minutes = (first + MINUTE * n for n in range((end - first) // MINUTE))
    return [minute for minute in minutes if is_tick(minute)]


def every_seventh(minute: datetime) -> bool:
    return minute.minute % 7 == 0


def test_periodiq_sends_each_tick_of_a_week_once_with_a_sunday_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weekly, often, end = Actor("0 0 * * 0"), Actor("*/7 * * * *"), SATURDAY + timedelta(days=7)

    Machine(monkeypatch, SATURDAY).run_scheduler(weekly, often, until=end)

    assert weekly.sent_in_minutes() == [datetime(2026, 11, 22, tzinfo=UTC)]
    assert often.sent_in_minutes() == ticks(SATURDAY, end, every_seventh)


@pytest.mark.parametrize("day", [datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC)])
def test_periodiq_sends_once_when_the_clocks_change(monkeypatch: pytest.MonkeyPatch, day: datetime) -> None:
    berlin = ZoneInfo("Europe/Berlin")
    nightly, often = Actor("30 2 * * *", berlin), Actor("*/7 * * * *", berlin)
    machine = Machine(monkeypatch, day - 2 * HOUR, zone="Europe/Berlin")

    machine.run_scheduler(nightly, often, until=day + 4 * HOUR)

    assert len(nightly.sent) == 1
    assert often.sent_in_minutes() == ticks(day - 2 * HOUR, day + 4 * HOUR, every_seventh)


def test_ticks_of_an_hour_set_back_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    often, end = Actor("*/7 * * * *"), SATURDAY + 4 * HOUR
    machine = Machine(monkeypatch, SATURDAY)
    machine.step_clock(SATURDAY + 2 * HOUR, by=-HOUR)

    machine.run_scheduler(often, until=end)

    assert often.sent_in_minutes() == ticks(SATURDAY, end, every_seventh)


def test_last_tick_of_an_hour_set_forward_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    hourly, end = Actor("5 * * * *"), SATURDAY + 6 * HOUR
    machine = Machine(monkeypatch, SATURDAY)
    machine.step_clock(datetime(2026, 11, 21, 11, 4, 30, tzinfo=UTC), by=2 * HOUR)

    machine.run_scheduler(hourly, until=end)

    assert [(moment.hour, moment.minute) for moment in hourly.sent] == [(10, 5), (13, 5), (14, 5), (15, 5)]


def test_clock_set_forward_and_back_sends_no_tick_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    often, end = Actor("*/7 * * * *"), SATURDAY + 4 * HOUR
    machine = Machine(monkeypatch, SATURDAY)
    machine.step_clock(SATURDAY + HOUR, by=HOUR)
    machine.step_clock(SATURDAY + 2 * HOUR + 3 * MINUTE, by=-HOUR)

    machine.run_scheduler(often, until=end)

    sent_for = [often.options["periodic"].latest(moment) for moment in often.sent]
    assert sorted(sent_for) == ticks(SATURDAY, end, every_seventh)


def test_tick_passed_while_others_were_sent_is_sent_late(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, SATURDAY)
    slow = Actor("0 10 * * *", while_sending=lambda: machine.pass_time(150))
    other = Actor("1 10 * * *")

    machine.run_scheduler(slow, other, until=SATURDAY + HOUR)

    assert [(moment.hour, moment.minute) for moment in other.sent] == [(10, 2)]
    assert len(slow.sent) == 1


def test_a_tick_is_due_in_the_minute_of_a_start_and_not_after() -> None:
    tick = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)

    assert not Cron("0 10 * * *").validate(tick - timedelta(seconds=1))
    assert Cron("0 10 * * *").validate(tick)
    assert Cron("0 10 * * *").validate(tick + timedelta(seconds=59))
    assert not Cron("0 10 * * *").validate(tick + timedelta(seconds=60))


def test_tick_is_due_once_for_repeated_calls_in_its_minute() -> None:
    every_minute = Cron("* * * * *")

    answers = [every_minute.validate(SATURDAY + timedelta(seconds=n)) for n in (0, 10, 39, 40)]

    assert answers == [True, False, False, True]


def test_clock_that_was_a_year_ahead_does_not_silence_the_year() -> None:
    every_minute = Cron("* * * * *")
    every_minute.validate(SATURDAY)
    every_minute.validate(SATURDAY + timedelta(days=365))

    assert every_minute.validate(SATURDAY + MINUTE)
    assert every_minute.validate(SATURDAY + 2 * MINUTE)


def test_equal_schedules_decide_independently() -> None:
    assert Cron("* * * * *").validate(SATURDAY)
    assert Cron("* * * * *").validate(SATURDAY)


@pytest.mark.parametrize("answer", [True, False])
def test_replaced_due_decides_for_validate(answer: bool) -> None:
    asked: list[tuple[Cron, datetime]] = []
    schedule = Cron("0 0 1 1 *")

    def ask(cron: Cron, now: datetime) -> bool:
        asked.append((cron, now))
        return answer

    schedule.due = ask

    assert schedule.validate(pendulum.instance(SATURDAY).in_timezone("Asia/Tokyo")) is answer
    assert asked == [(schedule, SATURDAY)]
    assert type(asked[0][1]) is datetime
    assert asked[0][1].tzinfo is UTC


@pytest.mark.parametrize("second", [0, 1, 59])
def test_scheduler_wakes_at_each_whole_minute_for_any_schedule(second: int) -> None:
    now = pendulum.datetime(2026, 3, 29, 1, 59, second, 500_000, tz="Europe/Berlin")

    wake_up = Cron("0 0 29 2 *").next_valid_date(now)

    assert wake_up == datetime(2026, 3, 29, 1, 0, tzinfo=UTC)
    assert isinstance(wake_up, pendulum.DateTime)
