"""Forecast of a run: what each check before its first batch would do to a run that began now.

`forecast` calls the functions that the run itself calls, in the run's order, and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Any, Final, Literal

from peewee import ProgrammingError

from housekeeping.core.clock import SYSTEM_CLOCK, RunBudget
from housekeeping.core.wording import counted, format_duration
from housekeeping.database.clock_skew import ClockSkew
from housekeeping.sweeps.checks.archives import problems_of as archive_problems
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.failures.error_mapping import classify_error
from housekeeping.sweeps.insight.state import next_tick
from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.lease_admin import held_leases
from housekeeping.sweeps.ledger.overrides import Override, describe_override, override_of
from housekeeping.sweeps.ledger.run_start import past_runs
from housekeeping.sweeps.ledger.runs import Outcome
from housekeeping.sweeps.limits import breaker
from housekeeping.sweeps.limits.first_run import UNCONFIRMED, Unconfirmed, check_first_run
from housekeeping.sweeps.limits.throttle import ExceededLimit, Throttle
from housekeeping.sweeps.limits.throttled_tables import throttled_tables
from housekeeping.sweeps.stages.stage import Stage

#: ``none``: the run continues. ``alerts``: it continues and raises an alert. ``slows``: it processes less at a time, or
#: waits. ``ends_early``: it ends as partial. ``unknown``: the check could not be made.
Effect = Literal["none", "alerts", "slows", "ends_early", "skips", "fails", "unknown"]

_OUTCOMES: Final[dict[str, Outcome]] = {"ends_early": "partial", "skips": "skipped", "fails": "failed"}


@dataclass(frozen=True, slots=True)
class Check:
    """What one check would do to a run.

    Attributes:
      name: ``override``, ``lease``, ``clock``, ``archive``, ``first run``, ``breaker``, ``throttle`` or ``schedule``;
        ``ledger`` if the library's own tables cannot be read.
      text: What it found, with the command that helps.
      reason: Reason of the run's outcome, if the check decides it.
    """

    name: str
    effect: Effect
    text: str
    reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``checks`` in ``housekeeping plan --json``."""
        return {"check": self.name, "effect": self.effect, "text": self.text}


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the checks would do to a run that began now.

    Attributes:
      checks: In the order of the run.
      unconfirmed: Why the run needs a confirmation; None if it needs none.
      next_tick: When the schedule starts the next run, in UTC; None if never, or unknown.
    """

    checks: Sequence[Check] = ()
    unconfirmed: Unconfirmed | None = None
    next_tick: datetime | None = None

    @property
    def deciding(self) -> Check | None:
        """The first check that decides the outcome; None if the run continues."""
        return next((each for each in self.checks if each.effect in _OUTCOMES), None)

    @property
    def notable(self) -> list[Check]:
        """The checks that affect the run or could not be made."""
        return [each for each in self.checks if each.effect != "none"]

    @property
    def outcome(self) -> Outcome:
        """The outcome, as far as the checks decide it; ``done`` if the run continues."""
        return "done" if self.deciding is None else _OUTCOMES[self.deciding.effect]

    @property
    def reason(self) -> str | None:
        """The reason of that outcome; None if the run continues."""
        return None if self.deciding is None else self.deciding.reason

    @property
    def in_words(self) -> str:
        """Outcome of a run that began now, as text."""
        match self.outcome:
            case "skipped":
                return f"a run now would be skipped ({self.reason})"
            case "failed":
                return f"a run now would fail before its first change ({self.reason})"
            case "partial":
                return f"a run now would start and end early ({self.reason})"
            case _:
                return "a run now would start"


def forecast(
    sweep: Sweep,
    stages: Sequence[Stage],
    now: datetime,
    argument: Any = None,
    *,
    skew: ClockSkew | None = None,
    zone: tzinfo | None = None,
    force: bool = False,
    confirmed: bool = False,
) -> Forecast:
    """Return what the checks would do to a run that began now.

    Parameters:
      skew: How far this machine's clock is from the database's; None if not measured.
      zone: Time zone of the schedule; None leaves out the schedule.
      force, confirmed: As for `run_sweep`.

    Raises:
      peewee.PeeweeException, DatabaseUnavailable: The database does not answer, or rejects the worker's predicate.
    """
    checks: list[Check] = []
    try:
        override = override_of(sweep.name)
        checks += [_override(sweep, override, force), *_lease(sweep, argument), *_clock(skew, force)]
        checks += [Check("archive", "fails", str(each), "archive") for each in archive_problems(stages)]
        first_run = check_first_run(sweep, stages, now, argument, confirmed=confirmed).unconfirmed
        checks += [_first_run(first_run), _breaker(sweep, stages, now, argument, confirmed)]
    except ProgrammingError as error:
        # The library's own tables are missing. An error of the worker's predicate is raised by its own count.
        unknown = Check("ledger", "unknown", str(classify_error(error)))
        return Forecast([*checks, unknown, _throttle(sweep, stages, now)])
    checks.append(_throttle(sweep, stages, now))
    tick = None if zone is None else next_tick(sweep, now, zone, override)
    if zone is not None:
        checks.append(Check("schedule", "none", _tick_in_words(sweep, tick, now)))
    return Forecast(checks, first_run, tick)


def _override(sweep: Sweep, override: Override | None, force: bool) -> Check:
    if not sweep.enabled:
        text = "the worker is disabled in HOUSEKEEPING_WORKERS"
        return Check("override", "none", f"{text}; --force runs it") if force else _skip("override", text, "disabled")
    if override is None:
        return Check("override", "none", "neither paused nor narrowed")
    text = describe_override(override)
    if override.state == "narrow":
        return Check("override", "slows", text)
    if force:
        return Check("override", "none", f"{text}; --force runs it")
    return _skip("override", f"{text}. To end that: housekeeping resume {sweep.name}", "paused")


def _lease(sweep: Sweep, argument: Any) -> Iterator[Check]:
    """Yield the check of the lease, as the ledger knows its holder; Redis is not asked."""
    if sweep.lease is None:
        return
    key = sweep.lease.key_for(argument)
    for each in held_leases(None, ""):
        if each.key == key and (each.silent_for_s or 0) < runs.SILENCE.total_seconds():
            yield _skip("lease", f"run {each.run_label} holds the lease {key}", "lease_held")
            return
    yield Check("lease", "none", f"no run holds the lease {key}")


def _clock(skew: ClockSkew | None, force: bool) -> Iterator[Check]:
    if skew is None or not skew.exceeded:
        return
    if skew.refused and not force:
        yield Check("clock", "fails", str(skew), "clock")
    else:
        yield Check("clock", "alerts", str(skew))


def _first_run(unconfirmed: Unconfirmed | None) -> Check:
    if unconfirmed is None:
        return Check("first run", "none", "no confirmation is needed")
    return _skip("first run", str(unconfirmed), UNCONFIRMED)


def _breaker(sweep: Sweep, stages: Sequence[Stage], now: datetime, argument: Any, confirmed: bool) -> Check:
    if confirmed:
        return Check("breaker", "none", "confirmed: the run may process any number of rows")
    history = breaker.usual_rows(past_runs(sweep.name), sweep.progress_counts)
    verdict = breaker.check(sweep, history, stages, now, argument)
    if verdict is None:
        return Check("breaker", "none", _inactive_breaker(sweep, len(history)))
    found = breaker.in_numbers(verdict.as_count())
    if not verdict.exceeded:
        return Check("breaker", "none", found)
    if verdict.action == "stop":
        return Check("breaker", "fails", verdict.refusal, "breaker")
    if verdict.action == "limit":
        rows = counted(verdict.row_limit.rows or 0, "row")
        text = f"{found}: the run ends after {rows}, and the next one resumes"
        return Check("breaker", "ends_early", text, "breaker")
    return Check("breaker", "alerts", f"{found}: the run continues and raises an alert")


def _inactive_breaker(sweep: Sweep, history: int) -> str:
    if sweep.breaker.times_history is not None and history < breaker.ENOUGH:
        return f"has no limit before {breaker.ENOUGH} past runs; there {'is' if history == 1 else 'are'} {history}"
    return "has no limit"


def _throttle(sweep: Sweep, stages: Sequence[Stage], now: datetime) -> Check:
    limits = sweep.throttle
    budget = RunBudget(sweep.max_runtime, SYSTEM_CLOCK)
    throttle = Throttle(limits, throttled_tables(stages, now), budget, time.sleep)
    exceeded, unknown = throttle.look()
    if exceeded:
        waits = f"waits up to {format_duration(limits.wait_s)}, continues slowly, and ends as partial if that lasts"
        return Check("throttle", "slows", f"{', '.join(map(_over_limit, exceeded))}: the run {waits}")
    if unknown:
        return Check("throttle", "unknown", f"{', '.join(unknown)}: could not be read; the run continues without it")
    return Check("throttle", "none", "no limit is exceeded")


def _over_limit(exceeded: ExceededLimit) -> str:
    if exceeded.limit is None:
        return f"{exceeded.gate}: {exceeded.value}"
    return f"{exceeded.gate} {exceeded.value} is over {exceeded.limit}"


def _tick_in_words(sweep: Sweep, tick: datetime | None, now: datetime) -> str:
    if sweep.schedule is None:
        return "none: the worker runs when it is enqueued or started by hand"
    if tick is None:
        return f"no tick of {sweep.schedule!r} until the worker is on again"
    return f"the next tick is {tick:%Y-%m-%d %H:%M} UTC, in {format_duration((tick - now).total_seconds())}"


def _skip(name: str, text: str, reason: str) -> Check:
    return Check(name, "skips", text, reason)
