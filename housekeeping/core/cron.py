"""Cron schedules: their ticks in a time zone, and when periodiq should send.

`Cron` replaces periodiq's own ``CronSpec`` as an actor's ``periodic`` option, so that ``periodiq housekeeping.app``
supports every form that `cron_fields` describes.

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

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final

from cronsim import CronSim, CronSimError

from housekeeping.core.cron_fields import invalid_schedule, read_fields

if TYPE_CHECKING:
    import pendulum

_MINUTE: Final = timedelta(minutes=1)
_LONGEST_CHANGE: Final = timedelta(hours=25)  # longer than any change of a clock: Samoa skipped a day in 2011
_ORIGIN: Final = datetime.combine(date(2000, 1, 1), time())  # a date not found within 50 years of it does not exist
_REMEMBERED: Final = 1440  # ticks: one day of a schedule that fires every minute


@dataclass(unsafe_hash=True)
class Cron:
    """Schedule with its ticks, and the answer to periodiq whether to send now.

    Parameters:
      spec: The schedule, as `cron_fields` describes it.
      zone: Time zone of the schedule: UTC, or a `zoneinfo.ZoneInfo`.

    Attributes:
      due: Decides for `validate` whether to send; may be replaced. It is called once a minute in the scheduler's
        process, with this object and the time in UTC. An exception ends that process.

    Raises:
      DeclarationError: If the schedule is not valid or can never fire.
    """

    spec: str
    zone: tzinfo = UTC

    def __post_init__(self) -> None:
        self.due: Callable[[Cron, datetime], bool] = EachTickOnce()
        minute, hour, *days = read_fields(self.spec)
        self._days = " ".join(["0 0", *days])
        self._names_readings = minute.startswith("*") or hour.startswith("*")
        try:
            clock = CronSim(f"{minute} {hour} * * *", _ORIGIN)
            next(CronSim(self._days, _ORIGIN))
        except (CronSimError, StopIteration):
            example = f"{minute} {hour} L {days[1]} *"
            raise invalid_schedule(
                self.spec, "it can never fire, because none of its months has such a day", example
            ) from None
        self._times = tuple(time(h, m) for h in sorted(clock.hours) for m in sorted(clock.minutes))

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
        return self.due(self, _utc(now))

    def next_valid_date(self, now: datetime) -> pendulum.DateTime:
        """Return when periodiq should wake up next: at the next whole minute, whether it is a tick or not."""
        import pendulum

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


class EachTickOnce:
    """Accepts each tick at most once, as far as this process remembers.

    A tick is due in its own minute. If the scheduler overslept or the clock was set forward, the last of the ticks
    since the previous call is due as well.

    Note: It remembers 1440 ticks. A restarted or a second scheduler knows none of them.
    """

    def __init__(self) -> None:
        self._called_at: datetime | None = None
        self._accepted: deque[datetime] = deque(maxlen=_REMEMBERED)

    def __call__(self, cron: Cron, now: datetime) -> bool:
        minute = _minute(now)
        called_at, self._called_at = self._called_at, minute
        since = called_at if called_at is not None and called_at < minute else minute - _MINUTE
        tick = cron.latest(minute)
        if tick <= since or tick in self._accepted:
            return False
        self._accepted.append(tick)
        return True


def _utc(at: datetime) -> datetime:
    if at.tzinfo is None:
        raise ValueError(f"{at} has no time zone")
    moment = at.astimezone(UTC)  # periodiq passes pendulum's own type
    return datetime.combine(date(moment.year, moment.month, moment.day), moment.timetz())


def _minute(at: datetime) -> datetime:
    return _utc(at).replace(second=0, microsecond=0)


def _naive(at: datetime) -> datetime:
    return at.replace(tzinfo=None)
