"""What operators type and read: names of workers, arguments and times; states, counts, ages and progress as text."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Final, Literal

from peewee import ProgrammingError

from housekeeping.core.cron import Cron
from housekeeping.core.errors import DeclarationError, SchemaMissing, UnknownWorker, WrongArgument
from housekeeping.core.logs import error_line, format_duration, in_one_line
from housekeeping.core.settings import PREFIX
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.errors import sqlstate
from housekeeping.ledger.operators import Override
from housekeeping.ledger.operators import describe_override as describe_override
from housekeeping.ledger.runs import PURGE, RESTORE, SILENCE
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stage import DETAILS
from housekeeping.sweeps.values import SetupProblem
from housekeeping.workers import is_built_in

if TYPE_CHECKING:
    from housekeeping.brokers.dead_letters import LetterResult
    from housekeeping.ledger.history import RunRecord
    from housekeeping.ledger.leases import HeldLease


_DETAIL_WIDTH: Final = 200  # characters
_TICKS: Final = 3  # next ticks of a schedule
#: Seconds by which two clocks differ; a time so far ahead is not shown as future.
_CLOCK_NOISE: Final = 1


def format_counts(counts: dict[str, Any]) -> str:
    """Return a run's counts in one line, without those that are zero."""
    return ", ".join(_count(name, value) for name, value in _shown(counts).items()) or "nothing to do"


def format_run_counts(outcome: str | None, counts: dict[str, Any]) -> str:
    """Return a run's counts in one line; ``-`` if they are zero and the run did not end as done or partial."""
    return format_counts(counts) if outcome in ("done", "partial") or _shown(counts) else "-"


def format_value(value: Any) -> str:
    """Return one count of a run: ``21,200``, ``yes`` or ``no``, details as JSON."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _shown(counts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in counts.items() if value and name not in (PURGE, RESTORE, DETAILS)}


def _count(name: str, value: Any) -> str:
    if isinstance(value, bool | dict):  # the engine's own counts carry details, which the alerts show
        return name
    # A user's own stage may store something other than a number as a count.
    return f"{name} {value:,}" if isinstance(value, int | float) else f"{name} {value}"


def outcome_in_words(run: RunRecord) -> str:
    """Return a run's outcome; of an open run whether it is running, stopping, silent or lost."""
    if run.lost:
        return f"lost? no heartbeat for {format_duration(run.silent_s)}"
    if run.is_silent:
        return f"silent for {format_duration(round(run.silent_s or 0))}"
    return run.outcome or ("running" if run.stopped_by is None else "stopping")


def lost_holder(lease: HeldLease) -> str | None:
    """Return a text if the run that holds the lease has missed its heartbeats; None otherwise."""
    if lease.silent_for_s is None or lease.silent_for_s <= SILENCE.total_seconds():
        return None
    return f"no heartbeat for {format_duration(lease.silent_for_s)}: the next run takes over"


def format_time(value: datetime | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time in UTC, to the second by default, or ``-`` for `None`."""
    return "-" if value is None else value.strftime(form)


def describe_requeue(result: LetterResult) -> str:
    """Return what happened to a dead letter that was to be requeued or deleted."""
    match result.outcome:
        case "requeued" | "deleted":
            return result.outcome
        case "duplicate":
            return f"kept: duplicate of {in_one_line(result.detail or 'a live message', _DETAIL_WIDTH)}"
        case "refused":
            return f"kept: it cannot be sent: {in_one_line(result.detail or '', _DETAIL_WIDTH)}"
        case _:
            return "already requeued or deleted"


def format_age(value: datetime, now: datetime) -> str:
    """Return how long ago a time was, or how far ahead it is: ``3 h ago``, ``just now``, ``in 20 h``."""
    seconds = (now - value).total_seconds()
    if abs(seconds) <= _CLOCK_NOISE:
        return "just now"
    return f"in {format_duration(-seconds)}" if seconds < 0 else f"{format_duration(seconds)} ago"


WorkerState = Literal["on", "paused", "narrow", "disabled", "not_set_up"]


def state_of(sweep: Sweep, switch: Override | None, problem: SetupProblem | None = None) -> WorkerState:
    """Return whether the worker is active, paused, narrowed, disabled or not set up."""
    if problem is not None:
        return "not_set_up"
    if not sweep.enabled:
        return "disabled"
    return "on" if switch is None or switch.state == "stopped" else switch.state


def next_tick(sweep: Sweep, now: datetime, zone: Any, switch: Override | None = None) -> datetime | None:
    """Return the next tick that is not skipped, in UTC; None without one: no schedule, disabled, or paused."""
    if not (sweep.schedule and sweep.enabled):
        return None
    if switch is not None and switch.state == "paused":
        return Cron(sweep.schedule, zone).next(switch.until) if switch.until else None
    return Cron(sweep.schedule, zone).next(now)


def next_ticks(sweep: Sweep, now: datetime, zone: Any, switch: Override | None = None) -> list[datetime]:
    """Return the next three ticks that are not skipped, see `next_tick`."""
    found: list[datetime] = []
    after = next_tick(sweep, now, zone, switch)
    while after is not None and len(found) < _TICKS:
        found.append(after)
        after = Cron(str(sweep.schedule), zone).next(after)
    return found


def format_ticks(ticks: Sequence[datetime]) -> str:
    """Return ticks in UTC, the date only where it changes: ``2026-11-20 23:30, 23:50, 2026-11-21 00:10``."""
    texts = [
        format_time(tick, "%Y-%m-%d %H:%M" if not place or tick.date() != ticks[place - 1].date() else "%H:%M")
        for place, tick in enumerate(ticks)
    ]
    return ", ".join(texts) or "-"


_UNITS: Final = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
#: Schedules cannot be evaluated in the first and last years that datetime supports.
_LONGEST: Final = timedelta(days=3650)
_MINUTE: Final = timedelta(minutes=1)


def parse_past_time(text: str, now: datetime) -> datetime:
    """Return a time such as ``2026-11-20T03:00``, or the latest ``03:00``; UTC unless the text names a zone.

    Raises:
      WrongArgument: The text is not a time, or the time is more than ten years away.
    """
    return parse_local_time(text, now, UTC)[0]


def parse_local_time(text: str, now: datetime, zone: tzinfo) -> tuple[datetime, str | None]:
    """Return a time of the zone, in UTC, and a sentence about it if clocks there skipped or repeated it.

    Raises:
      WrongArgument: As `parse_past_time`.
    """
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text):
            hour, minute = (int(part) for part in text.split(":"))
            today = now.astimezone(zone).replace(hour=hour, minute=minute, second=0, microsecond=0, tzinfo=None)
            found = _at_local(today, zone)
            return found if found[0] <= now else _at_local(today - timedelta(days=1), zone)
        typed = datetime.fromisoformat(text)
        time, sentence = (_aware(text), None) if typed.tzinfo else _at_local(typed, zone)
        if abs(time - now) > _LONGEST:
            raise ValueError
        return time, sentence
    except (ValueError, OverflowError):
        raise WrongArgument(f"{text!r} is not a time; it should be such as 2026-11-20T03:00 or 03:00") from None


def _at_local(local: datetime, zone: tzinfo) -> tuple[datetime, str | None]:
    """Return when the zone's clocks show a time. A skipped time is the end of the gap, as for `Cron`."""
    first, second = (local.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if first == second:
        return first, None
    on = f"{local:%H:%M} on {local:%Y-%m-%d}"
    if first < second:
        other = second.astimezone(zone).isoformat(timespec="minutes")
        return first, f"{zone} had {on} twice; this is the first one, the second is {other}"
    after = first.astimezone(zone).utcoffset()
    while (first - _MINUTE).astimezone(zone).utcoffset() == after:
        first -= _MINUTE
    return (
        first,
        f"{zone} skipped {on}: its clocks were set forward to {first.astimezone(zone):%H:%M}, which is meant here",
    )


def format_in_zone(time: datetime, zone: tzinfo) -> str:
    """Return a time to the minute in a zone, with the zone's name, and in UTC."""
    shown = f"{time.astimezone(zone):%Y-%m-%d %H:%M} {zone}"
    return shown if str(zone) == "UTC" else f"{shown} ({time:%H:%M} UTC)"


def parse_since(text: str, now: datetime) -> datetime:
    """Return the time a duration such as ``2h`` ago, or what `parse_past_time` returns.

    Raises:
      WrongArgument: The text is neither.
    """
    try:
        duration = _duration(text)
    except OverflowError:
        duration = _LONGEST
    try:
        return parse_past_time(text, now) if duration is None else now - min(duration, _LONGEST)
    except WrongArgument:
        raise WrongArgument(f"{text!r} is not a time; it should be such as 2h, 3d, 03:00 or 2026-11-20T03:00") from None


def parse_future_time(text: str, now: datetime) -> datetime:
    """Return a time such as ``2026-11-20T03:00``, the next ``03:00``, or a duration such as ``2h`` from now.

    Raises:
      WrongArgument: The text is not a time, or the time is past.
    """
    try:
        if (duration := _duration(text)) is not None:
            time = now + min(duration, _LONGEST)
        elif re.fullmatch(r"\d{1,2}:\d{2}", text):
            time = parse_past_time(text, now) + timedelta(days=1)
        else:
            time = _aware(text)
    except (ValueError, OverflowError):
        raise WrongArgument(
            f"{text!r} is not a time; it should be such as 2h, 30min, 03:00 or 2026-11-20T03:00"
        ) from None
    if time <= now:
        raise WrongArgument(f"{text!r} is past; it should be a future time, such as 2h or 03:00")
    return time


def _duration(text: str) -> timedelta | None:
    found = re.fullmatch(r"(\d+)\s*([a-z]+)", text.strip().lower())
    return None if found is None or found[2] not in _UNITS else timedelta(**{_UNITS[found[2]]: int(found[1])})


def _aware(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


_UNDEFINED_TABLE: Final = "42P01"  # SQLSTATE


def find_worker(sweeps: dict[str, Sweep], name: str) -> Sweep:
    """Return the worker with this name.

    Raises:
      UnknownWorker: No worker has the name. The message suggests a similar one.
    """
    if name in sweeps:
        return sweeps[name]
    near = difflib.get_close_matches(name, sweeps, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the workers are {', '.join(sweeps)}"
    raise UnknownWorker(f"there is no worker {name!r}; {hint}")


def parse_argument(sweep: Sweep, text: str | None) -> Any:
    """Return the argument of a run, converted to the worker's type.

    Raises:
      WrongArgument: The argument is missing, cannot be converted, or the worker takes none.
    """
    if sweep.argument is None:
        if text is not None:
            raise WrongArgument(f"{sweep.name} takes no argument, but got {text!r}")
        return None
    if text is None:
        raise WrongArgument(f"{sweep.name} takes an argument: {sweep.argument.label}")
    try:
        return sweep.argument.type(text)
    except ValueError:
        raise WrongArgument(f"{sweep.name} takes {sweep.argument.label}, but got {text!r}") from None


@contextmanager
def translate_table_errors(sweep: Sweep) -> Iterator[None]:
    """Translate the errors of queries on the worker's tables into errors that name the remedy.

    Raises:
      DatabaseUnavailable: PostgreSQL does not answer.
      SchemaMissing: A table does not exist, or the family of a built-in worker is not set up.
    """
    try:
        with database.using(sweep.database), translate_postgres_errors():
            yield
    except (ProgrammingError, DeclarationError) as error:
        with database.using(sweep.database), translate_postgres_errors():
            problem = sweep.lacks()
        if problem is not None:
            raise SchemaMissing(f"{sweep.name}: not set up: {problem.text}; {_remedy(sweep)}") from error
        missing = missing_table_error(sweep, error)
        if missing is None:
            raise
        raise missing from error


def missing_table_error(sweep: Sweep, error: BaseException | None) -> SchemaMissing | None:
    """Return an error that names the remedy if the given one is a missing table, else `None`."""
    if not isinstance(error, ProgrammingError) or sqlstate(error) != _UNDEFINED_TABLE:
        return None
    return SchemaMissing(f"{sweep.name}: {error_line(error)}; {_remedy(sweep)}")


def _remedy(sweep: Sweep) -> str:
    setting = f'{PREFIX}WORKERS["{sweep.name}"]'
    if not is_built_in(sweep.name):
        return f'create the table, or name yours in {setting}["tables"]'
    return f'name your table in {setting}["tables"], or for a trial: housekeeping init --with-tables'


def as_json(value: Any) -> Any:
    """Return a value as JSON has it: a record by its fields, a time as ISO 8601, a duration in seconds.

    A record whose JSON differs from its fields has a method ``as_json``, which returns its values by their names.
    Fields that ``repr`` leaves out are secret. The field `database` is left out if there is only one database.
    """
    if hasattr(value, "as_json"):
        return as_json(value.as_json())
    if is_dataclass(value):
        shown = [each.name for each in fields(value) if each.repr and (each.name != "database" or database.several())]
        return {name: _rounded(name, as_json(getattr(value, name))) for name in shown}
    if isinstance(value, Mapping):
        return {name: _rounded(name, as_json(each)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, date):
        return value.isoformat()
    return value.total_seconds() if isinstance(value, timedelta) else value


def _rounded(name: str, value: Any) -> Any:
    """Return seconds to the millisecond."""
    return round(value, 3) if str(name).endswith("_s") and isinstance(value, float) else value
