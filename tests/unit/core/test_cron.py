"""Cron schedules and their ticks, also as periodiq asks for them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pendulum
import pytest

from tests.internals.core import Cron, DeclarationError, in_words

MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)
BERLIN = ZoneInfo("Europe/Berlin")
START = datetime(2023, 11, 15, 12, 34, tzinfo=UTC)
END = datetime(2028, 3, 2, tzinfo=UTC)

EVERY_MINUTE = set(range(60))
EVERY_HOUR = set(range(24))


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def any_day(day: datetime) -> bool:
    return True


def last_of_its_month(day: datetime) -> bool:
    return (day + DAY).day == 1


# Schedules, and what they mean: minutes, hours, and whether a day is one of theirs.
MEANINGS: list[tuple[list[str], set[int], set[int], Callable[[datetime], bool]]] = [
    (["* * * * *"], EVERY_MINUTE, EVERY_HOUR, any_day),
    (["*/6 * * * *"], set(range(0, 60, 6)), EVERY_HOUR, any_day),
    (["*/7 * * * *"], {0, 7, 14, 21, 28, 35, 42, 49, 56}, EVERY_HOUR, any_day),
    (["10-50/20,5 * * * *"], {5, 10, 30, 50}, EVERY_HOUR, any_day),
    (["5-59/15 * * * *"], {5, 20, 35, 50}, EVERY_HOUR, any_day),
    (["0 * * * *", "@hourly"], {0}, EVERY_HOUR, any_day),
    (["45 */6 * * *"], {45}, {0, 6, 12, 18}, any_day),
    (["59 23 * * *", " 59  023 * * 0-7"], {59}, {23}, any_day),
    (["1,2,3 22-23,0-1 * * *"], {1, 2, 3}, {22, 23, 0, 1}, any_day),
    (["0 0 * * 0-6", "0 0 * * sun-sat", "@daily", "@midnight"], {0}, {0}, any_day),
    (["0 0 * * 0", "0 0 * * 7", "0 0 * * 0,7", "0 0 * * SUN"], {0}, {0}, lambda d: d.isoweekday() == 7),
    (["0 0 * * sun", "0 0 * * */7", "@weekly"], {0}, {0}, lambda d: d.isoweekday() == 7),
    (["0 0 * * fri-sun", "0 0 * * 5-7", "0 0 * * 5-0"], {0}, {0}, lambda d: d.isoweekday() >= 5),
    (["0 0 * * Sat,Sun,Mon"], {0}, {0}, lambda d: d.isoweekday() in {6, 7, 1}),
    (["0 0 * * 1-5/2"], {0}, {0}, lambda d: d.isoweekday() in {1, 3, 5}),
    (["*/15 8-18 * * 1-5"], {0, 15, 30, 45}, set(range(8, 19)), lambda d: d.isoweekday() <= 5),
    (["0 9 * 3,9 1-5", "0 9 * mar,SEP mon-fri"], {0}, {9}, lambda d: d.month in {3, 9} and d.isoweekday() <= 5),
    (["0 0 1 jan-mar/2 *"], {0}, {0}, lambda d: d.day == 1 and d.month in {1, 3}),
    (["0 0 1,15 * *"], {0}, {0}, lambda d: d.day in {1, 15}),
    (["0 0 1 * *", "@monthly"], {0}, {0}, lambda d: d.day == 1),
    (["@yearly", "@Annually"], {0}, {0}, lambda d: (d.month, d.day) == (1, 1)),
    (["0 0 31 * *"], {0}, {0}, lambda d: d.day == 31),
    (["0 0 30 2,3 *"], {0}, {0}, lambda d: (d.month, d.day) == (3, 30)),
    (["0 0 29 2 *"], {0}, {0}, lambda d: (d.month, d.day) == (2, 29)),
    (["0 0 L * *"], {0}, {0}, last_of_its_month),
    (["0 0 15,l * *"], {0}, {0}, lambda d: d.day == 15 or last_of_its_month(d)),
    (["0 0 13 * fri"], {0}, {0}, lambda d: d.day == 13 or d.isoweekday() == 5),
    (["0 0 1-7 * 1"], {0}, {0}, lambda d: d.day <= 7 or d.isoweekday() == 1),
    (["0 0 */2 * 1"], {0}, {0}, lambda d: d.day % 2 == 1 and d.isoweekday() == 1),
    (["0 0 30 2 sun"], {0}, {0}, lambda d: d.month == 2 and d.isoweekday() == 7),
    (["0 0 * * 5L", "0 0 * * friL"], {0}, {0}, lambda d: d.isoweekday() == 5 and (d + 7 * DAY).month != d.month),
    (["0 0 * * mon#2"], {0}, {0}, lambda d: d.isoweekday() == 1 and 8 <= d.day <= 14),
]
CASES = [pytest.param(spec, m, h, d, id=spec) for specs, m, h, d in MEANINGS for spec in specs]


def by_hand(minutes: set[int], hours: set[int], is_a_day: Callable[[datetime], bool]) -> Iterator[datetime]:
    day = START.replace(hour=0, minute=0)
    while day < END:
        of_the_day = (day.replace(hour=h, minute=m) for h in sorted(hours) for m in sorted(minutes) if is_a_day(day))
        yield from (moment for moment in of_the_day if moment > START)
        day += DAY


@pytest.mark.parametrize(("spec", "minutes", "hours", "is_a_day"), CASES)
def test_a_schedule_fires_at_the_minutes_that_cron_gives_it_for_years(
    spec: str, minutes: set[int], hours: set[int], is_a_day: Callable[[datetime], bool]
) -> None:
    schedule = Cron(spec)
    expected = list(islice(by_hand(minutes, hours, is_a_day), 3000))

    assert list(schedule.ticks(START, expected[-1])) == expected
    for before, after in list(pairwise(expected))[:: max(1, len(expected) // 30)]:
        between = before + (after - before) / 3
        assert schedule.latest(before) == schedule.latest(between) == before
        assert schedule.next(before) == schedule.next(between) == after
        assert schedule.period(between) == after - before


def test_a_weekly_schedule_fires_on_sunday() -> None:
    assert Cron("0 0 * * 0").next(at("2026-11-20T12:00Z")) == at("2026-11-22T00:00Z")


def test_a_leap_day_is_found_over_the_years_that_have_none() -> None:
    leap_day = Cron("0 0 29 2 *")

    assert leap_day.next(at("2096-02-29T00:00Z")) == at("2104-02-29T00:00Z")
    assert leap_day.latest(at("2104-02-28T23:59Z")) == at("2096-02-29T00:00Z")
    assert Cron("0 0 * 2 mon#5").next(at("2026-01-01T00:00Z")) == at("2044-02-29T00:00Z")


def test_the_last_weekday_of_a_month_is_never_a_weekend() -> None:
    ticks = list(Cron("0 0 LW * *").ticks(at("2026-01-01T00:00Z"), at("2026-06-01T00:00Z")))

    assert [tick.day for tick in ticks] == [30, 27, 31, 30, 29]


def test_ticks_exclude_the_first_moment_and_include_the_second() -> None:
    every_minute = Cron("* * * * *")

    assert list(every_minute.ticks(START, START + 2 * MINUTE)) == [START + MINUTE, START + 2 * MINUTE]
    assert list(every_minute.ticks(START + 0.9 * MINUTE, START + 1.9 * MINUTE)) == [START + MINUTE]
    assert list(every_minute.ticks(START, START)) == []


def test_latest_of_a_tick_is_the_tick_itself() -> None:
    hourly = Cron("@hourly")

    assert hourly.latest(at("2026-01-01T05:00:00Z")) == at("2026-01-01T05:00Z")
    assert hourly.latest(at("2026-01-01T04:59:59.999999Z")) == at("2026-01-01T04:00Z")


def test_counting_stops_at_the_limit() -> None:
    every_minute = Cron("* * * * *")
    three_days_later = START + timedelta(days=3)

    assert every_minute.count(START, three_days_later, limit=10_000) == 4320
    assert every_minute.count(START, three_days_later, limit=4320) == 4320
    assert every_minute.count(START, three_days_later, limit=4319) == 4319
    assert every_minute.count(START, START, limit=10) == 0


def test_moments_of_any_zone_are_understood_and_answered_in_utc() -> None:
    tokyo_morning = datetime(2026, 1, 2, 8, 30, tzinfo=timezone(timedelta(hours=9)))

    assert Cron("0 0 * * *").latest(tokyo_morning) == at("2026-01-01T00:00Z")
    assert Cron("0 0 * * *").latest(tokyo_morning).tzinfo is UTC
    assert Cron("0 8 * * *", BERLIN).next(tokyo_morning) == at("2026-01-02T08:00+01:00")
    assert Cron("0 8 * * *", BERLIN).next(tokyo_morning).tzinfo is UTC


def test_naive_moment_is_rejected() -> None:
    with pytest.raises(ValueError, match="has no time zone"):
        Cron("* * * * *").latest(START.replace(tzinfo=None))


@pytest.mark.parametrize(
    ("spec", "problem", "example"),
    [
        ("61 * * * *", "minute 61 is not within 0-59", "*/6 * * * *"),
        ("0 24 * * *", "hour 24 is not within 0-23", "0 3 * * *"),
        ("*/90 * * * *", "minute step 90 is not within 1-60", "*/6 * * * *"),
        ("5/15 * * * *", "minute 5/15 has a step but no range, as 5-59/15 has", "*/6 * * * *"),
        ("0 22-3 * * *", "hour 22-3 runs backwards; 22-23,0-3 does not", "0 3 * * *"),
        ("0 0 * jen *", 'month "jen" is not valid', "0 0 1 jan,jul *"),
        ("0 0 30 2 *", "it can never fire, because none of its months has such a day", "0 0 L 2 *"),
        (
            "* * * * * *",
            "the number of fields is 6, not 5 (minute, hour, day of the month, month, day of the week)",
            "*/6 * * * *",
        ),
    ],
)
def test_invalid_schedule_is_rejected_with_a_valid_example(spec: str, problem: str, example: str) -> None:
    with pytest.raises(DeclarationError) as refusal:
        Cron(spec)

    assert str(refusal.value) == f'schedule "{spec}": {problem}; write for example "{example}"'


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "*",
        "* * * *",
        "* * * *\n* *",
        "@",
        "@reboot",
        "@every 5m",
        "-1 * * * *",
        "1- * * * *",
        "-5 * * * *",
        "1,,2 * * * *",
        "*/0 * * * *",
    ]
    + ["*/61 * * * *", "*/ * * * *", "*-5 * * * *", "1.5 * * * *", "٣ * * * *", "5-1 * * * *", "mon * * * *"]
    + ["60 * * * *", "* 24 * * *", "* L * * *", "0 0 0 * *", "0 0 32 * *", "0 0 15W * *", "0 0 L/2 * *", "0 0 ? * *"]
    + ["0 0 * 0 *", "0 0 * 13 *", "0 0 * sun *", "0 0 * january *", "0 0 * * 8", "0 0 * * L", "0 0 * * mon#0"]
    + ["0 0 * * mon#6", "0 0 * * monday", "0 0 * * sat-mon", "0 0 * * 1/2", "0 0 * * 1-3#2", "0 0 * * 8L"]
    + ["0 0 31 4,6,9,11 *", "0 0 30,31 2 *", "0 0 */31 2 mon#5", "9" * 5000 + " * * * *"],
)
def test_malformed_schedule_is_rejected(spec: str) -> None:
    with pytest.raises(DeclarationError, match=r'^schedule ".*": .*; write for example ".*"$'):
        Cron(spec)


def test_a_schedule_is_shown_as_it_was_written() -> None:
    assert str(Cron("* * * * *")) == "* * * * *"
    assert str(Cron("@Weekly")) == "@Weekly"
    assert repr(Cron("@Weekly", BERLIN)) == f"Cron(spec='@Weekly', zone={BERLIN!r})"


def test_schedules_are_equal_by_their_words_and_their_zone() -> None:
    assert Cron("0 3 * * *") == Cron("0 3 * * *")
    assert len({Cron("0 3 * * *"), Cron("0 3 * * *"), Cron("0 3 * * *", BERLIN), Cron("0  3 * * *")}) == 3


@pytest.mark.parametrize(
    ("spec", "day", "expected"),
    [
        ("30 2 * * *", "2026-03-28", ["2026-03-28T02:30+01:00"]),
        ("30 2 * * *", "2026-03-29", ["2026-03-29T03:00+02:00"]),
        ("30 2 * * *", "2026-10-25", ["2026-10-25T02:30+02:00"]),
        ("0,30 2,3 * * *", "2026-03-29", ["2026-03-29T03:00+02:00", "2026-03-29T03:30+02:00"]),
        ("0 3 * * *", "2026-10-25", ["2026-10-25T03:00+01:00"]),
        ("30 */2 * * *", "2026-03-29", [f"2026-03-29T{hour:02}:30+02:00" for hour in range(4, 24, 2)]),
        ("*/30 2 * * *", "2026-03-29", []),
        (
            "*/30 2 * * *",
            "2026-10-25",
            [f"2026-10-25T02:{minute}+0{offset}:00" for offset in (2, 1) for minute in ("00", "30")],
        ),
    ],
)
def test_times_of_day_fire_once_and_readings_as_often_as_shown(spec: str, day: str, expected: list[str]) -> None:
    midnight = datetime.fromisoformat(day).replace(tzinfo=BERLIN)
    early = midnight + timedelta(hours=1)
    next_midnight = midnight + DAY

    assert list(Cron(spec, BERLIN).ticks(early, next_midnight - MINUTE)) == [at(moment) for moment in expected]


@pytest.mark.parametrize(("spec", "distance"), [("*/15 * * * *", 15), ("0 * * * *", 60), ("@hourly", 60)])
def test_interval_schedules_keep_their_distance_when_clocks_change(spec: str, distance: int) -> None:
    schedule = Cron(spec, BERLIN)
    ticks = list(schedule.ticks(at("2026-03-28T00:00Z"), at("2026-03-30T00:00Z")))
    ticks += schedule.ticks(ticks[-1], at("2026-10-26T00:00Z"))

    assert {later - earlier for earlier, later in pairwise(ticks)} == {timedelta(minutes=distance)}


CHANGES = [
    (BERLIN, at("2026-03-29T01:00Z")),
    (BERLIN, at("2026-10-25T01:00Z")),
    (ZoneInfo("Australia/Lord_Howe"), at("2026-10-03T15:30Z")),  # half an hour forward
    (ZoneInfo("Australia/Lord_Howe"), at("2026-04-04T15:00Z")),  # half an hour back
    (ZoneInfo("Africa/Cairo"), at("2026-04-23T22:00Z")),  # leaves out midnight
    (ZoneInfo("America/Havana"), at("2026-11-01T05:00Z")),  # repeats midnight
]


@pytest.mark.parametrize(("zone", "change"), CHANGES)
@pytest.mark.parametrize(
    ("spec", "shows"),
    [
        ("* * * * *", lambda d: True),
        ("*/10 0,2,3 * * *", lambda d: d.minute % 10 == 0 and d.hour in {0, 2, 3}),
        ("17 */2 * * *", lambda d: d.minute == 17 and d.hour % 2 == 0),
        ("*/20 0 * * thu,fri,sun", lambda d: d.minute % 20 == 0 and d.hour == 0 and d.isoweekday() in {4, 5, 7}),
    ],
)
def test_readings_match_a_check_in_every_minute(
    zone: ZoneInfo, change: datetime, spec: str, shows: Callable[[datetime], bool]
) -> None:
    minutes = [change + MINUTE * n for n in range(-4 * 24 * 60 + 1, 4 * 24 * 60)]
    expected = [minute for minute in minutes if shows(minute.astimezone(zone))]

    assert list(Cron(spec, zone).ticks(change - 4 * DAY, minutes[-1])) == expected


@pytest.mark.parametrize(("zone", "change"), CHANGES)
@pytest.mark.parametrize("spec", ["* * * * *", "*/10 0,2,3 * * *", "0 0 * * *", "30 2 * * *", "15,45 0,1,2,23 * * *"])
def test_ticks_latest_and_next_agree_at_every_moment(zone: ZoneInfo, change: datetime, spec: str) -> None:
    schedule = Cron(spec, zone)
    ticks = list(schedule.ticks(change - 4 * DAY, change + 4 * DAY))

    assert ticks == sorted(set(ticks))
    for moment in (change + timedelta(minutes=7 * n) for n in range(-40, 40)):
        place = bisect_right(ticks, moment)
        assert schedule.latest(moment) == ticks[place - 1]
        assert schedule.next(moment) == ticks[place]


def test_tick_of_a_skipped_day_fires_when_the_next_day_begins() -> None:
    samoa = ZoneInfo("Pacific/Apia")  # had no 30 December 2011

    ticks = list(Cron("0 10 * * *", samoa).ticks(at("2011-12-29T00:00-10:00"), at("2012-01-01T00:00+14:00")))

    assert ticks == [at("2011-12-29T10:00-10:00"), at("2011-12-31T00:00+14:00"), at("2011-12-31T10:00+14:00")]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("* * * * *", "every minute"),
        ("*/5 * * * *", "every 5 minutes"),
        ("*/7 * * * *", "every 7th minute"),
        ("0 * * * *", "every hour"),
        ("7 * * * *", "every hour at minute 7"),
        ("5,35 * * * *", "every hour at minute 5 and 35"),
        ("10-50/20 * * * *", "every 20th minute from 10 to 50"),
        ("15 */6 * * *", "every 6 hours at minute 15"),
        ("30 3 * * *", "every day at 03:30"),
        ("0 3,15 * * *", "every day at 03:00 and 15:00"),
        ("*/10 8-17 * * mon-fri", "every 10 minutes in hour 8 to 17 on Monday to Friday"),
        ("30 3 * * sun", "at 03:30 on Sunday"),
        ("0 0 1,15 * *", "at 00:00 on day 1 and day 15 of the month"),
        ("0 0 L * *", "at 00:00 on the last day of the month"),
        ("0 0 LW jan,jul *", "at 00:00 on the last weekday of the month in January and July"),
        ("0 0 * * friL", "at 00:00 on the last Friday of the month"),
        ("0 0 * * mon#2", "at 00:00 on the second Monday of the month"),
        ("0 0 1 * mon", "at 00:00 on day 1 of the month or on Monday"),
        ("0 0 */2 * mon", "at 00:00 on every 2nd day of the month and on Monday"),
        ("@weekly", "at 00:00 on Sunday"),
    ],
)
def test_schedule_is_said_in_words(spec: str, words: str) -> None:
    assert in_words(spec) == words


@pytest.mark.parametrize("meaning", MEANINGS)
def test_every_valid_schedule_has_words(meaning: tuple[list[str], object, object, object]) -> None:
    assert all(in_words(spec) for spec in meaning[0])


SATURDAY = datetime(2026, 11, 21, 9, 30, 20, tzinfo=UTC)


@pytest.mark.parametrize("answer", [True, False])
def test_due_decides_for_validate(answer: bool) -> None:
    asked: list[datetime] = []
    schedule = Cron("0 0 1 1 *")

    def ask(now: datetime) -> bool:
        asked.append(now)
        return answer

    schedule.due = ask

    assert schedule.validate(pendulum.instance(SATURDAY).in_timezone("Asia/Tokyo")) is answer
    assert asked == [SATURDAY]
    assert type(asked[0]) is datetime
    assert asked[0].tzinfo is UTC


@pytest.mark.parametrize("second", [0, 1, 59])
def test_scheduler_wakes_at_each_whole_minute_for_any_schedule(second: int) -> None:
    now = pendulum.datetime(2026, 3, 29, 1, 59, second, 500_000, tz="Europe/Berlin")

    wake_up = Cron("0 0 29 2 *").next_valid_date(now)

    assert wake_up == datetime(2026, 3, 29, 1, 0, tzinfo=UTC)
    assert isinstance(wake_up, pendulum.DateTime)
