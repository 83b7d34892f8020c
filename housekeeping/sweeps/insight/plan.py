"""Preview of a run: the run's own query, in one read-only snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, tzinfo
from typing import Any, Final

from peewee import PeeweeException, ProgrammingError

from housekeeping.core.clock import SYSTEM_CLOCK, Clock
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.sanitize import error_line
from housekeeping.database.clock_skew import ClockSkew, read_database_clock
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.sweeps.checks.references import Reference, sampled_references
from housekeeping.sweeps.checks.unique_keys import stages_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.counts import initial_counts
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.insight.backlog import first_of, last_ended, pace, total_held
from housekeeping.sweeps.insight.forecast import Forecast, forecast
from housekeeping.sweeps.insight.plan_warnings import warnings_of
from housekeeping.sweeps.limits.first_run import Unconfirmed
from housekeeping.sweeps.partitions.hint import hint_of
from housekeeping.sweeps.stages.stage import Backlog, StagePlan, as_cursor

#: Rows counted at most, so that a plan never takes minutes; above it the plan says "at least".
COUNT_LIMIT: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of a run that would begin at `now`.

    Attributes:
      stages: The plan of each stage, with its number of batches.
      warnings: What is unusual about the stale rows.
      references: Foreign keys that reference the rows it would delete.
      clock_skew: The difference between this machine's clock and the database's; None if not measured.
      forecast: What the checks before the first batch would do to the run.
      pace: Rows per second in the worker's last runs; None without such runs.
      max_rows_per_s: The worker's limit; None for no limit.
    """

    worker: str
    now: datetime
    stages: list[tuple[StagePlan, int]]
    pace: float | None = None
    clock_skew: ClockSkew | None = None
    references: Sequence[Reference] = ()
    warnings: Sequence[str] = ()
    forecast: Forecast = Forecast()
    max_rows_per_s: float | None = None

    @property
    def unconfirmed(self) -> Unconfirmed | None:
        """Why a run needs a confirmation; None if it needs none."""
        return self.forecast.unconfirmed

    @property
    def stale(self) -> Backlog:
        """The stale rows of all stages."""
        total = Backlog(0)
        for each, _ in self.stages:
            total += each.stale
        return total

    @property
    def held(self) -> Backlog | None:
        """The stale rows of all stages that stay because they are on hold; None if no stage has a hold."""
        return total_held(each.held for each, _ in self.stages)

    @property
    def batches(self) -> int:
        """The number of batches, if time were no limit."""
        return sum(batches for _, batches in self.stages)

    def expected_s(self, stale: Backlog) -> float | None:
        """Return the expected seconds of work for these rows, over one or more runs; None when unknown."""
        if stale.rows == 0:
            return 0.0
        if self.pace is None:
            return None
        return stale.rows / (self.pace if self.max_rows_per_s is None else min(self.pace, self.max_rows_per_s))

    @property
    def oldest(self) -> Any:
        """The oldest stale row's first order column, usually its time; None without stale rows."""
        return first_of(each.oldest for each, _ in self.stages)

    @property
    def newest(self) -> Any:
        """The newest stale row's first order column; None without stale rows."""
        return first_of((each.newest for each, _ in self.stages), max)

    def as_json(self) -> dict[str, Any]:
        """Return the object of ``housekeeping plan --json``."""
        return {
            "worker": self.worker,
            "now": self.now.isoformat(),
            "stale_rows": self.stale.rows,
            "exact": self.stale.exact,
            "held": None if self.held is None else self.held.rows,
            "batches": self.batches,
            "expected_s": _rounded(self.expected_s(self.stale)),
            "records_per_s": _rounded(self.pace),
            "oldest": _plain(self.oldest),
            "newest": _plain(self.newest),
            "clock_skew_s": None if self.clock_skew is None else self.clock_skew.seconds,
            "unconfirmed": None if self.unconfirmed is None else str(self.unconfirmed),
            "passes": [
                {
                    "pass": each.name,
                    "stale_rows": each.stale.rows,
                    "exact": each.stale.exact,
                    "held": None if each.held is None else each.held.rows,
                    "batches": batches,
                    "expected_s": _rounded(self.expected_s(each.stale)),
                    "oldest": _plain(each.oldest),
                    "newest": _plain(each.newest),
                    "samples": [{name: _plain(value) for name, value in row.items()} for row in each.samples],
                }
                for each, batches in self.stages
            ],
            "outcome": self.forecast.outcome,
            "reason": self.forecast.reason,
            "checks": [each.as_json() for each in self.forecast.checks],
            "next_tick": None if self.forecast.next_tick is None else self.forecast.next_tick.isoformat(),
            "warnings": list(self.warnings),
            "references": [each.as_json() for each in self.references],
        }


def plan(
    sweep: Sweep,
    argument: Any = None,
    *,
    clock: Clock | None = None,
    limit: int = COUNT_LIMIT,
    zone: tzinfo | None = None,
    force: bool = False,
    confirmed: bool = False,
) -> Plan:
    """Return what a run would do, in one read-only transaction without a lease or a row in the ledger.

    Parameters:
      clock: Time by which rows are stale, for tests; default: the database's clock.
      zone: Time zone of the schedule; None if the plan should not name the next tick.
      force, confirmed: As for `run_sweep`.

    Raises:
      DatabaseUnavailable: PostgreSQL does not answer.
      DeclarationError: A stage identifies its rows by columns that are not unique.
    """
    with database.using(sweep.database):
        planned = _counted(sweep, argument, clock, limit)
        skew = None if clock else planned.clock_skew
        # Not in the snapshot: it must work before the library's own tables exist, and a timed-out count would end it.
        with translate_postgres_errors():
            found = forecast(
                sweep,
                stages_of(sweep),
                planned.now,
                argument,
                skew=skew,
                zone=zone,
                force=force,
                confirmed=confirmed,
            )
        return replace(planned, forecast=found)


def _counted(sweep: Sweep, argument: Any, clock: Clock | None, limit: int) -> Plan:
    with translate_postgres_errors(), _snapshot():
        skew = read_database_clock()
        now = clock.now() if clock else skew.server_at
        stages = stages_of(sweep)
        found = [(each.plan(now, limit, argument), each.batch_size) for each in stages]
        referenced = sampled_references(stages, now)
        warnings = [
            line for each, (made, _) in zip(stages, found, strict=True) for line in warnings_of(each, made, now)
        ]
        warnings += [hint for each in stages if (hint := hint_of(each, now)) is not None]
    passes = [(planned, -(-planned.stale.rows // size)) for planned, size in found]
    if sweep.before_lease is not None:
        passes.insert(0, (sweep.before_lease.plan(), 0))
    rows_per_s = None
    with suppress(ProgrammingError), translate_postgres_errors():  # before `housekeeping init`
        rows_per_s = pace(last_ended(sweep))
    return Plan(sweep.name, now, passes, rows_per_s, skew, referenced, warnings, max_rows_per_s=sweep.max_rows_per_s)


@dataclass(frozen=True, slots=True)
class DryRun(RunResult):
    """Result that a run would have, as far as it is known beforehand.

    The counts are those of a run that nothing stops or limits, time included.

    Attributes:
      forecast: What the checks before the first batch would do to the run.
    """

    forecast: Forecast = field(default=Forecast(), compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the object of ``housekeeping run --dry-run --json``."""
        return {**RunResult.as_json(self), "checks": [each.as_json() for each in self.forecast.checks]}


def dry_run(
    sweep: Sweep,
    argument: Any = None,
    *,
    clock: Clock | None = None,
    zone: tzinfo | None = None,
    force: bool = False,
    confirmed: bool = False,
) -> DryRun:
    """Return the plan as a run's result; never raises. For the parameters see `plan`."""
    run_clock = clock or SYSTEM_CLOCK
    started, now, counts = run_clock.monotonic(), run_clock.now(), initial_counts(sweep)
    try:
        planned = plan(sweep, argument, clock=clock, zone=zone, force=force, confirmed=confirmed)
    except (HousekeepingError, PeeweeException) as error:
        spent = run_clock.monotonic() - started
        return DryRun(sweep.name, "failed", error_line(error), None, now, spent, counts, dry_run=True, error=error)
    for each, batches in planned.stages:
        for name, number in each.counts.items():
            counts[name] = counts.get(name, 0) + number
        if "batches" in counts:
            counts["batches"] += batches
    expected, deciding = planned.forecast, planned.forecast.deciding
    return DryRun(
        sweep.name,
        expected.outcome,
        expected.reason or (None if planned.stale.exact else "counted_up_to_limit"),
        None,
        planned.now,
        run_clock.monotonic() - started,
        counts,
        dry_run=True,
        error=HousekeepingError(deciding.text) if deciding is not None and expected.outcome == "failed" else None,
        forecast=expected,
    )


@contextmanager
def _snapshot() -> Iterator[None]:
    with database.atomic():
        database.execute_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _plain(value: Any) -> Any:
    return None if value is None else (as_cursor((value,)) or [None])[0]
