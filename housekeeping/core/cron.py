"""Schedules in cron form: which moments they name, and when periodiq is to send.

`Cron` stands in for periodiq's own ``CronSpec`` as an actor's ``periodic`` option, so that
``periodiq housekeeping.app`` works as it stands for every cron form.

A schedule has five fields (minute, hour, day of the month, month, day of the week) of ``*``,
numbers, names (``jan``, ``mon``), ranges, steps (``*/15``, ``10-50/10``) and lists of these; or
is one of ``@hourly``, ``@daily``, ``@midnight``, ``@weekly``, ``@monthly``, ``@yearly``,
``@annually``. Sunday is ``0``, ``7`` or ``sun``. ``L`` and ``LW`` are the month's last day and
last weekday, ``friL`` or ``5L`` its last Friday, ``mon#2`` its second Monday.

Where day of the month and day of the week are both restricted, either is enough. A field that
begins with a star, ``*/2`` too, is not restricted: then both must hold (as in Debian's cron).

In a zone that puts its clocks forward and back (again as Debian's cron):

- A schedule with a star in front of neither minute nor hour names times of day. One that is
  skipped comes at the end of the gap; one that is repeated comes once, the first time round.
  ``30 2 * * *`` fires once a day, all year.
- Any other names explain_queries of the clock, and fires whenever the clock shows one. ``*/15 * * * *``
  and ``0 * * * *`` keep their distance all year; ``*/30 2 * * *`` rests on the day that has no
  such hour, and fires twice as often on the day that has two.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from itertools import islice, takewhile
from typing import Final, NamedTuple

import pendulum
from cronsim import CronSim, CronSimError

from housekeeping.core.errors import DeclarationError

_MINUTE: Final = timedelta(minutes=1)
_NEAR: Final = timedelta(hours=25)  # longer than any change of a clock has been: Samoa left out a day in 2011
_ORIGIN: Final = datetime.combine(date(2000, 1, 1), time())  # what fifty years from here do not have, never comes
_REMEMBERED: Final = 1440  # ticks: a day of them where every minute is one

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


@dataclass(unsafe_hash=True)
class Cron:
    """The moments that a schedule names, and periodiq's question whether to send now.

    Parameters:
      spec: The schedule, as described at the top of this module.
      zone: Whose clock it is read on: UTC, or a `zoneinfo.ZoneInfo`.

    Attributes:
      due: Who answers `validate`; may be replaced. Called once a minute in the scheduler's
        process, with this object and the time in UTC; what it raises ends that process.

    Raises:
      DeclarationError: When the schedule cannot be read or can never fire.
    """

    spec: str
    zone: tzinfo = UTC

    def __post_init__(self) -> None:
        self.due: Callable[[Cron, datetime], bool] = EachTickOnce()
        minute, hour, *days = _fields(self.spec)
        self._days = " ".join(["0 0", *days])
        self._by_the_clock = minute.startswith("*") or hour.startswith("*")
        try:
            clock = CronSim(f"{minute} {hour} * * *", _ORIGIN)
            next(CronSim(self._days, _ORIGIN))
        except (CronSimError, StopIteration):
            example = f"{minute} {hour} L {days[1]} *"
            raise _refusal(self.spec, "it can never fire, no month it names has such a day", example) from None
        self._times = tuple(time(h, m) for h in sorted(clock.hours) for m in sorted(clock.minutes))

    def latest(self, at: datetime) -> datetime:
        """The last tick at or before a moment, in UTC."""
        minute = _minute(at)
        least, most = self._offsets(minute)
        found: list[datetime] = []
        for wall in self._walls_down_from(_naive(minute) + most):
            found.extend(instant for instant in self._instants(wall) if instant <= minute)
            # Earlier explain_queries may still be later moments while the clock is being changed.
            if found and wall - least <= _naive(max(found)):
                break
        return max(found)

    def next(self, after: datetime) -> datetime:
        """The first tick later than a moment, in UTC."""
        return next(self._ticks_after(_minute(after)))

    def ticks(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """The ticks later than `after` and not later than `until`, in order, as they are asked for."""
        return takewhile(lambda tick: tick <= until, self._ticks_after(_minute(after)))

    def count(self, after: datetime, until: datetime, limit: int) -> int:
        """How many ticks are later than `after` and not later than `until`; counting stops at `limit`."""
        return sum(1 for _ in islice(self.ticks(after, until), limit))

    def period(self, at: datetime) -> timedelta:
        """How far apart the ticks before and after a moment are."""
        return self.next(at) - self.latest(at)

    def validate(self, now: datetime) -> bool:
        """Whether to send at this wake-up: periodiq's name for asking `due`, which takes a yes as sent."""
        return self.due(self, _utc(now))

    def next_valid_date(self, now: datetime) -> pendulum.DateTime:
        """When periodiq is to wake up next: at the next whole minute, tick or not."""
        # A wake-up a minute costs nothing, and no step of the clock can make periodiq oversleep by more.
        return pendulum.instance(_minute(now) + _MINUTE)

    def __str__(self) -> str:
        return self.spec

    def _ticks_after(self, minute: datetime) -> Iterator[datetime]:
        last = minute
        least, _ = self._offsets(minute)
        second_time_round: list[datetime] = []
        for instants in filter(None, map(self._instants, self._walls_up_from(_naive(minute) + least))):
            ready = [instant for instant in second_time_round if instant < instants[0]]
            second_time_round = [*second_time_round[len(ready) :], *instants[1:]]
            for instant in (*ready, instants[0]):
                if instant > last:  # times that a gap swallowed come together at its end
                    yield instant
                    last = instant

    def _instants(self, wall: datetime) -> tuple[datetime, ...]:
        """When the zone's clock shows a time the schedule names: usually once, sometimes never or twice."""
        if self.zone is UTC:
            return (wall.replace(tzinfo=UTC),)
        first = wall.replace(tzinfo=self.zone).astimezone(UTC)
        second = wall.replace(tzinfo=self.zone, fold=1).astimezone(UTC)
        if first == second or (first < second and not self._by_the_clock):
            return (first,)
        if self._by_the_clock:
            return (first, second) if first < second else ()
        around = (second + _MINUTE * n for n in range(1, (first - second) // _MINUTE + 1))
        return (next(instant for instant in around if _naive(instant.astimezone(self.zone)) > wall),)

    def _offsets(self, minute: datetime) -> tuple[timedelta, timedelta]:
        """The zone's least and greatest distance from UTC around a moment."""
        around = [(minute + step).astimezone(self.zone).utcoffset() for step in (-_NEAR, timedelta(), _NEAR)]
        offsets = [offset or timedelta() for offset in around]
        return min(offsets), max(offsets)

    # cronsim is asked for days only. With times and a zone it misplaces them where the clock changes by
    # half an hour or at midnight, goes back in time when started in a repeated hour, and takes ten times
    # as long. It leaves out the moment it is given: hence the minute off midnight.

    def _walls_up_from(self, wall: datetime) -> Iterator[datetime]:
        midnight = datetime.combine(wall, time())
        past = bisect_right(self._times, wall.time())
        for day in CronSim(self._days, midnight - _MINUTE):
            for reading in self._times[past if day == midnight else 0 :]:
                yield datetime.combine(day, reading)

    def _walls_down_from(self, wall: datetime) -> Iterator[datetime]:
        midnight = datetime.combine(wall, time())
        reached = bisect_right(self._times, wall.time())
        for day in CronSim(self._days, midnight + _MINUTE, reverse=True):
            for reading in reversed(self._times[: reached if day == midnight else None]):
                yield datetime.combine(day, reading)


class EachTickOnce:
    """Says yes to each tick at most once, with nothing but this process's memory.

    A tick is due in its own minute. When the scheduler overslept, or the clock was put forward,
    the last of the ticks passed by since the question before is due as well.

    Note: It remembers 1440 ticks; a restart or another scheduler knows of none.
    """

    def __init__(self) -> None:
        self._asked_at: datetime | None = None
        self._said_yes_to: deque[datetime] = deque(maxlen=_REMEMBERED)

    def __call__(self, cron: Cron, now: datetime) -> bool:
        minute = _minute(now)
        asked_at, self._asked_at = self._asked_at, minute
        since = asked_at if asked_at is not None and asked_at < minute else minute - _MINUTE
        tick = cron.latest(minute)
        if tick <= since or tick in self._said_yes_to:
            return False
        self._said_yes_to.append(tick)
        return True


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


def _fields(spec: str) -> list[str]:
    """The five fields with names as numbers, every entry checked."""
    words = str(spec).lower().split()
    if len(words) == 1 and words[0].startswith("@"):
        if words[0] not in _ALIASES:
            raise _refusal(spec, f"{words[0]} is not one of {', '.join(_ALIASES)}", "@daily")
        words = _ALIASES[words[0]].split()
    if len(words) != len(_FIELDS):
        names = ", ".join(field.name for field in _FIELDS)
        raise _refusal(spec, f"the number of fields is {len(words)}, not 5 ({names})", _FIELDS[0].example)
    read = []
    for field, word in zip(_FIELDS, words, strict=True):
        try:
            read.append(",".join(_entry(field, entry) for entry in word.split(",")))
        except ValueError as error:
            raise _refusal(spec, str(error), field.example) from None
    return read


def _entry(field: _Field, text: str) -> str:
    if field.special and (special := field.special.fullmatch(text)):
        return f"{_number(field, special['day'])}{special['which']}" if special.groups() else text
    term = _TERM.fullmatch(text)
    if term is None:
        raise ValueError(f'{field.name} "{text}" is not understood')
    values = field.high - field.low + 1
    step = "" if term["step"] is None else f"/{_within(f'{field.name} step', term['step'], 1, values)}"
    if term["first"] is None:
        return f"*{step}"
    first = _number(field, term["first"])
    if term["last"] is None:
        if step:
            # Minute 5 to some crons, 5, 20, 35 and 50 to others, an error to the rest.
            raise ValueError(f"{field.name} {text} has a step but no range, as {first}-{field.high}{step} has")
        return str(first)
    last = _number(field, term["last"])
    if last == 0 < first and field.high == 7:
        last = 7  # fri-sun ends with the Sunday that comes after
    if last < first:
        raise ValueError(f"{field.name} {text} runs backwards; {first}-{field.high},{field.low}-{last} does not")
    return f"{first}-{last}{step}"


def _number(field: _Field, text: str) -> int:
    if text in (names := field.names.split()):
        return field.low + names.index(text)
    return _within(field.name, text, field.low, field.high)


def _within(name: str, text: str, low: int, high: int) -> int:
    if not text.isdigit():
        raise ValueError(f'{name} "{text}" is not understood')
    if not low <= int(text) <= high:
        raise ValueError(f"{name} {text} is not within {low}-{high}")
    return int(text)


def _refusal(spec: str, problem: str, example: str) -> DeclarationError:
    shown = " ".join(str(spec).split())
    return DeclarationError(f'schedule "{shown}": {problem}; write for example "{example}"')


def _utc(at: datetime) -> datetime:
    if at.tzinfo is None:
        raise ValueError(f"{at} has no time zone")
    moment = at.astimezone(UTC)  # of pendulum's own type, from periodiq
    return datetime.combine(date(moment.year, moment.month, moment.day), moment.timetz())


def _minute(at: datetime) -> datetime:
    return _utc(at).replace(second=0, microsecond=0)


def _naive(at: datetime) -> datetime:
    return at.replace(tzinfo=None)
