"""Cron schedules: their syntax, their ticks in a time zone, and when periodiq should send.

A schedule has five fields (minute, hour, day of the month, month, day of the week) of ``*``, numbers, names (``jan``,
``mon``), ranges, steps (``*/15``, ``10-50/10``) and lists of these. Or it is one of ``@hourly``, ``@daily``,
``@midnight``, ``@weekly``, ``@monthly``, ``@yearly``, ``@annually``. Sunday is ``0``, ``7`` or ``sun``. ``L`` and
``LW`` are the month's last day and last weekday, ``friL`` or ``5L`` its last Friday, ``mon#2`` its second Monday.
`Cron` replaces periodiq's own ``CronSpec`` as an actor's ``periodic`` option, so that ``periodiq housekeeping.app``
supports all of that.

If day of the month and day of the week are both restricted, a day needs to match only one of them. A field that begins
with a star, ``*/2`` included, does not count as restricted, and then both must match (as in Debian's cron).

Where a zone changes its clocks, the rules are Debian's as well:

- If neither minute nor hour begins with a star, a schedule names times of day. A skipped time fires at the end of the
  gap. A repeated time fires once, at its first occurrence. ``30 2 * * *`` fires once a day, all year.
- Any other schedule names readings of the clock, and fires whenever the clock shows one. ``*/15 * * * *`` and
  ``0 * * * *`` keep their distance all year. ``*/30 2 * * *`` does not fire on the day without such an hour, and fires
  twice as often on the day with two.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from cronsim import CronSim, CronSimError

from housekeeping.core.errors import DeclarationError

if TYPE_CHECKING:
    import pendulum


_ALIASES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

_TERM: Final = re.compile(r"(?:\*|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d+))?", re.ASCII)
_DAY_OF_MONTH: Final = re.compile(r"lw?")
_DAY_OF_WEEK: Final = re.compile(r"(?P<day>\w+?)(?P<which>l|#[1-5])", re.ASCII)


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    example: str
    names: str = ""
    special: re.Pattern[str] | None = None


_FIELDS: Final = (
    _Field("minute", 0, 59, "*/6 * * * *"),
    _Field("hour", 0, 23, "0 3 * * *"),
    _Field("day of the month", 1, 31, "0 0 1,15 * *", "", _DAY_OF_MONTH),
    _Field("month", 1, 12, "0 0 1 jan,jul *", "jan feb mar apr may jun jul aug sep oct nov dec"),
    _Field("day of the week", 0, 7, "0 0 * * mon-fri", "sun mon tue wed thu fri sat", _DAY_OF_WEEK),
)


def read_fields(spec: str) -> list[str]:
    """Check every entry and return the five fields, with numbers in place of names.

    Raises:
      DeclarationError: If an entry is not valid.
    """
    words = str(spec).lower().split()
    if len(words) == 1 and words[0].startswith("@"):
        if words[0] not in _ALIASES:
            raise invalid_schedule(spec, f"{words[0]} is not one of {', '.join(_ALIASES)}", "@daily")
        words = _ALIASES[words[0]].split()
    if len(words) != len(_FIELDS):
        names = ", ".join(field.name for field in _FIELDS)
        raise invalid_schedule(spec, f"the number of fields is {len(words)}, not 5 ({names})", _FIELDS[0].example)
    fields = []
    for field, word in zip(_FIELDS, words, strict=True):
        try:
            fields.append(",".join(_entry(field, entry) for entry in word.split(",")))
        except ValueError as error:
            raise invalid_schedule(spec, str(error), field.example) from None
    return fields


def _entry(field: _Field, text: str) -> str:
    if field.special and (special := field.special.fullmatch(text)):
        return f"{_number(field, special['day'])}{special['which']}" if special.groups() else text
    term = _TERM.fullmatch(text)
    if term is None:
        raise ValueError(f'{field.name} "{text}" is not valid')
    values = field.high - field.low + 1
    step = "" if term["step"] is None else f"/{_within(f'{field.name} step', term['step'], 1, values)}"
    if term["first"] is None:
        return f"*{step}"
    first = _number(field, term["first"])
    if term["last"] is None:
        if step:
            # "5/15" is minute 5 in some crons, minutes 5, 20, 35 and 50 in others, and an error in the rest.
            raise ValueError(f"{field.name} {text} has a step but no range, as {first}-{field.high}{step} has")
        return str(first)
    last = _number(field, term["last"])
    if last == 0 < first and field.high == 7:
        last = 7  # the Sunday after the week, as in fri-sun
    if last < first:
        raise ValueError(f"{field.name} {text} runs backwards; {first}-{field.high},{field.low}-{last} does not")
    return f"{first}-{last}{step}"


def _number(field: _Field, text: str) -> int:
    if text in (names := field.names.split()):
        return field.low + names.index(text)
    return _within(field.name, text, field.low, field.high)


def _within(name: str, text: str, low: int, high: int) -> int:
    if not text.isdigit():
        raise ValueError(f'{name} "{text}" is not valid')
    if not low <= int(text) <= high:
        raise ValueError(f"{name} {text} is not within {low}-{high}")
    return int(text)


def invalid_schedule(spec: str, problem: str, example: str) -> DeclarationError:
    """Return the error that shows the schedule, its problem, and a valid example."""
    shown = " ".join(str(spec).split())
    return DeclarationError(f'schedule "{shown}": {problem}; write for example "{example}"')


_MINUTE: Final = timedelta(minutes=1)
_LONGEST_CHANGE: Final = timedelta(hours=25)  # longer than any change of a clock: Samoa skipped a day in 2011
_ORIGIN: Final = datetime.combine(date(2000, 1, 1), time())  # a date not found within 50 years of it does not exist


@dataclass(unsafe_hash=True)
class Cron:
    """Schedule with its ticks, and the answer to periodiq whether to send now.

    Parameters:
      spec: The schedule, in the form that this module describes.
      zone: Time zone of the schedule: UTC, or a `zoneinfo.ZoneInfo`.

    Attributes:
      due: Decides for `validate` whether to send; set by the middleware of the scheduler. It is called once a minute,
        with the time in UTC. An exception ends the scheduler's process.
      over: Called by `next_valid_date`, after periodiq has sent what was due. The same holds for it.

    Raises:
      DeclarationError: If the schedule is not valid or can never fire.
    """

    spec: str
    zone: tzinfo = UTC
    due: Callable[[datetime], bool] = dataclasses.field(init=False, repr=False, compare=False)
    over: Callable[[], None] = dataclasses.field(
        default_factory=lambda: _nothing, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        minute, hour, *days = read_fields(self.spec)
        self._days = " ".join(["0 0", *days])
        self._names_readings = minute.startswith("*") or hour.startswith("*")
        try:
            self._times = _times_of_day(minute, hour)
            next(CronSim(self._days, _ORIGIN))
        except (CronSimError, StopIteration):
            example = f"{minute} {hour} L {days[1]} *"
            raise invalid_schedule(
                self.spec, "it can never fire, because none of its months has such a day", example
            ) from None

    def latest(self, at: datetime) -> datetime:
        """Return the last tick at or before a moment, in UTC."""
        minute = _minute(at)
        least, most = self._offsets(minute)
        found: list[datetime] = []
        for reading in self._readings_before(_naive(minute) + most):
            found.extend(instant for instant in self._instants(reading) if instant <= minute)
            # While the clock changes, an earlier reading can be a later moment.
            if found and reading - least <= _naive(max(found)):
                break
        return max(found)

    def next(self, after: datetime) -> datetime:
        """Return the first tick after a moment, in UTC."""
        return next(self._ticks_after(_minute(after)))

    def ticks(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """Yield the ticks after `after` and up to `until`, in order."""
        return takewhile(lambda tick: tick <= until, self._ticks_after(_minute(after)))

    def count(self, after: datetime, until: datetime, limit: int) -> int:
        """Return the number of ticks after `after` and up to `until`, at most `limit`."""
        return sum(1 for _ in islice(self.ticks(after, until), limit))

    def period(self, at: datetime) -> timedelta:
        """Return the time between the ticks before and after a moment."""
        return self.next(at) - self.latest(at)

    def validate(self, now: datetime) -> bool:
        """Return whether to send at this wake-up; periodiq calls it, and sends if True."""
        return self.due(_utc(now))

    def next_valid_date(self, now: datetime) -> pendulum.DateTime:
        """Return when periodiq should wake up next: at the next whole minute, whether it is a tick or not."""
        import pendulum

        self.over()
        # One wake-up a minute costs nothing, and a clock that is set back delays periodiq by a minute at most.
        return pendulum.instance(_minute(now) + _MINUTE)

    def __str__(self) -> str:
        return self.spec

    def _ticks_after(self, minute: datetime) -> Iterator[datetime]:
        last = minute
        least, _ = self._offsets(minute)
        repeats: list[datetime] = []
        for instants in filter(None, map(self._instants, self._readings_after(_naive(minute) + least))):
            ready = [instant for instant in repeats if instant < instants[0]]
            repeats = [*repeats[len(ready) :], *instants[1:]]
            for instant in (*ready, instants[0]):
                if instant > last:  # several times in a gap coincide at its end
                    yield instant
                    last = instant

    def _instants(self, reading: datetime) -> tuple[datetime, ...]:
        """Return the moments at which the zone's clock shows this time: usually one, sometimes none or two."""
        if self.zone is UTC:
            return (reading.replace(tzinfo=UTC),)
        first = reading.replace(tzinfo=self.zone).astimezone(UTC)
        second = reading.replace(tzinfo=self.zone, fold=1).astimezone(UTC)
        if first == second or (first < second and not self._names_readings):
            return (first,)
        if self._names_readings:
            return (first, second) if first < second else ()
        around = (second + _MINUTE * n for n in range(1, (first - second) // _MINUTE + 1))
        return (next(instant for instant in around if _naive(instant.astimezone(self.zone)) > reading),)

    def _offsets(self, minute: datetime) -> tuple[timedelta, timedelta]:
        """Return the zone's least and greatest offset from UTC around a moment."""
        around = [
            (minute + step).astimezone(self.zone).utcoffset()
            for step in (-_LONGEST_CHANGE, timedelta(), _LONGEST_CHANGE)
        ]
        offsets = [offset or timedelta() for offset in around]
        return min(offsets), max(offsets)

    # cronsim computes only the days. With times and a zone it is wrong where the clock changes by half an hour or at
    # midnight, goes back in time if it starts in a repeated hour, and takes ten times as long. It excludes the moment
    # that it starts from: hence the minute before or after midnight.

    def _readings_after(self, reading: datetime) -> Iterator[datetime]:
        midnight = datetime.combine(reading, time())
        past = bisect_right(self._times, reading.time())
        for day in CronSim(self._days, midnight - _MINUTE):
            for time_of_day in self._times[past if day == midnight else 0 :]:
                yield datetime.combine(day, time_of_day)

    def _readings_before(self, reading: datetime) -> Iterator[datetime]:
        midnight = datetime.combine(reading, time())
        reached = bisect_right(self._times, reading.time())
        for day in CronSim(self._days, midnight + _MINUTE, reverse=True):
            for time_of_day in reversed(self._times[: reached if day == midnight else None]):
                yield datetime.combine(day, time_of_day)


def _nothing() -> None: ...


@lru_cache(maxsize=64)  # schedules of many workers have the same times, up to 1,440 of them
def _times_of_day(minute: str, hour: str) -> tuple[time, ...]:
    clock = CronSim(f"{minute} {hour} * * *", _ORIGIN)
    return tuple(time(h, m) for h in sorted(clock.hours) for m in sorted(clock.minutes))


def _utc(at: datetime) -> datetime:
    if at.tzinfo is None:
        raise ValueError(f"{at} has no time zone")
    moment = at.astimezone(UTC)  # periodiq passes pendulum's own type
    return datetime.combine(date(moment.year, moment.month, moment.day), moment.timetz())


def _minute(at: datetime) -> datetime:
    return _utc(at).replace(second=0, microsecond=0)


def _naive(at: datetime) -> datetime:
    return at.replace(tzinfo=None)


_DAYS: Final = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS: Final = (
    "",
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_ORDINALS: Final = ("", "first", "second", "third", "fourth", "fifth")
_MOST_TIMES: Final = 4  # times of day that are listed
_ENDINGS: Final = {"1": "st", "2": "nd", "3": "rd", "21": "st", "22": "nd", "23": "rd"}


def in_words(spec: str) -> str:
    """Return a schedule in words: ``every 5 minutes``, ``at 03:30 on Monday to Friday``.

    Raises:
      DeclarationError: If the schedule is not valid.
    """
    minute, hour, day, month, weekday = read_fields(spec)
    days = [
        *([] if day == "*" else [f"on {_listed(day, 'day', _day)} of the month"]),
        *([] if weekday == "*" else [f"on {_listed(weekday, 'weekday', _weekday)}"]),
    ]
    both = " and " if day.startswith("*") or weekday.startswith("*") else " or "
    months = "" if month == "*" else f"in {_listed(month, 'month', lambda number: _MONTHS[int(number)])}"
    times = _times_in_words(minute, hour)
    if times.startswith("at ") and not days and not months:
        times = f"every day {times}"
    return " ".join(filter(None, (times, both.join(days), months)))


def _times_in_words(minute: str, hour: str) -> str:
    minutes, hours = minute.split(","), hour.split(",")
    if all(each.isdigit() for each in (*minutes, *hours)) and len(minutes) * len(hours) <= _MOST_TIMES:
        return f"at {_joined([f'{int(h):02}:{int(m):02}' for h in hours for m in minutes])}"
    at, of = _listed(minute, "minute", str), _listed(hour, "hour", str)
    often = _every(minute, 60, "minute") or (at if "every" in at else "")
    at = f"at minute {at}"
    if hour == "*":
        return often or ("every hour" if minute == "0" else f"every hour {at}")
    if (every := _every(hour, 24, "hour")) and not often:
        return every if minute == "0" else f"{every} {at}"
    return f"{often or at} in {of if 'every' in of else f'hour {of}'}"


def _every(field: str, values: int, unit: str) -> str:
    """Return ``every 5 minutes`` for a field that fires at equal distances; else an empty text."""
    step = 1 if field == "*" else int(field[2:]) if field.startswith("*/") else 0
    if not step or values % step:
        return ""
    return f"every {unit}" if step == 1 else f"every {step} {unit}s"


def _listed(field: str, unit: str, name: Callable[[str], str]) -> str:
    return _joined([_entry_in_words(each, unit, name) for each in field.split(",")])


def _entry_in_words(entry: str, unit: str, name: Callable[[str], str]) -> str:
    values, _, step = entry.partition("/")
    first, to, last = values.partition("-")
    shown = f"{name(first)} to {name(last)}" if to else "" if values == "*" else name(first)
    if not step:
        return shown or f"any {unit}"
    return f"every {int(step)}{_ENDINGS.get(step, 'th')} {unit}{f' from {shown}' if shown else ''}"


def _day(text: str) -> str:
    return {"l": "the last day", "lw": "the last weekday"}.get(text, f"day {text}")


def _weekday(text: str) -> str:
    number, which, of = text.partition("#")
    if which:
        return f"the {_ORDINALS[int(of)]} {_DAYS[int(number)]} of the month"
    return f"the last {_DAYS[int(text[0])]} of the month" if text.endswith("l") else _DAYS[int(text)]


def _joined(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
