"""Preview of a run: the run's own query, in one read-only snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta, tzinfo
from typing import Any, Final, Literal, Self

from peewee import SQL, PeeweeException, ProgrammingError, Select, fn

from housekeeping.core.clock import SYSTEM_CLOCK, Clock, ClockSkew
from housekeeping.core.errors import (
    DatabaseUnavailable,
    DeclarationError,
    DependentsRefused,
    HousekeepingError,
    Refused,
    SchemaMissing,
    WrongArgument,
)
from housekeeping.core.logs import error_line, format_duration
from housekeeping.core.settings import LARGEST_BATCH, Settings
from housekeeping.database.connection import (
    LOCK_TIME,
    database,
    shorten_time_limits,
    time_limit,
    translate_postgres_errors,
)
from housekeeping.database.errors import Kind, is_lock_timeout, is_timeout, is_unavailable, kind_of
from housekeeping.database.queries import database_now, explain, read_database_clock, written_out
from housekeeping.engine import RunRequest, RunResult, initial_counts
from housekeeping.engine.alerts import first_of, last_ended, no_living_scheduler, total_held
from housekeeping.engine.gates import (
    OUTCOME_OF_EFFECT,
    Check,
    Gate,
    LeaseGate,
    LockGate,
    OverrideGate,
    QueueGate,
    ThrottleGate,
    WriteGate,
    before_batches,
)
from housekeeping.engine.guard import UNCONFIRMED, RowGuard, in_words
from housekeeping.engine.purge import PurgeRequest, PurgeSweep, refuse_large_table, with_options
from housekeeping.engine.run import classify_error
from housekeeping.engine.speed import batch_sizes
from housekeeping.insight.alerts import Active, what_stops
from housekeeping.insight.backlogs import hint_of, planned_rows
from housekeeping.insight.causes import failing_row
from housekeeping.insight.status import database_server
from housekeeping.insight.trends import BacklogForecast, forecast_backlog, pace
from housekeeping.insight.wording import next_tick
from housekeeping.ledger import history, runs
from housekeeping.ledger.alerts import Alert
from housekeeping.ledger.operators import Override, override_of
from housekeeping.ledger.processes import Processes
from housekeeping.ledger.runs import NOT_SENT, Outcome
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.keyset import is_not_true, may_be_null
from housekeeping.sweeps.stage import Backlog, OtherClock, Stage, StagePlan, as_cursor
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.tree import TreeBranch, counted_branches, read_known_tables, sampled_branches
from housekeeping.sweeps.validate_tables import FiringTrigger, problems_of, refused_by_citus, stages_of, triggers_of

#: Rows counted at most, so that a plan never takes minutes; above it the plan says "at least".
COUNT_LIMIT: Final = 1_000_000
_COUNTED: Final = 100_000  # rows counted at most for a warning
_SAMPLE: Final = 100  # stale rows that are compared with a later time
_LATER: Final = timedelta(days=3650)  # longer than any age that a sweep waits for
_COUNT_TIME: Final = timedelta(hours=1)  # keeps the connection's own statement_timeout, which is shorter
#: Checks whose result a run does not need to start.
_NOT_NEEDED: Final = ("throttle", "schedule")
#: Outcome of a run that is sent now, by the effect that decides it, and the effects that decide last.
_OUTCOMES: Final[dict[str, Outcome | Literal["waits", "unknown"]]] = {
    **OUTCOME_OF_EFFECT,
    "waits": "waits",
    "unknown": "unknown",
}
_RANKS: Final = {"waits": 1, "unknown": 2}
_IN_WORDS: Final = {
    "done": "a run now would start",
    "skipped": "a run now would be skipped",
    "failed": "a run now would fail before its first change",
    "partial": "a run now would start and end early",
    "waits": "a run now would wait",
    "unknown": "it is unknown whether a run now would start",
}
#: Reason of a run that fails when it reaches a row, after those before it.
PREDICATE_FAILS: Final = "the predicate fails"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What becomes of a run that is sent or started now.

    Attributes:
      checks: What the gates would do to the run, in its order.
      next_tick: When the schedule starts the next run, in UTC; None if never, or unknown.
    """

    checks: Sequence[Check] = ()
    next_tick: datetime | None = None

    @property
    def deciding(self) -> Check | None:
        """The first check that ends the run, else the first with ``waits``, else ``unknown``; None if it starts."""
        found = [each for each in self.checks if each.effect in _OUTCOMES and each.name not in _NOT_NEEDED]
        return min(found, key=lambda each: _RANKS.get(each.effect, 0), default=None)

    @property
    def outcome(self) -> Outcome | Literal["waits", "unknown"]:
        """The outcome, as far as the checks decide it; ``done`` if the run starts and continues."""
        return "done" if self.deciding is None else _OUTCOMES[self.deciding.effect]

    @property
    def reason(self) -> str | None:
        """The reason of that outcome; None if the run starts and continues."""
        return None if self.deciding is None else self.deciding.reason or self.deciding.name

    @property
    def in_words(self) -> str:
        """Outcome of a run that began now, as text."""
        if self.reason == PREDICATE_FAILS:
            return "a run now would fail when it reaches the row for which its predicate fails"
        return f"{_IN_WORDS[self.outcome]} ({self.reason})" if self.reason else _IN_WORDS[self.outcome]

    @property
    def unsendable(self) -> str | None:
        """Why no run can be sent to the workers now; None if one can, or this is unknown."""
        return next((each.text for each in self.checks if each.reason == NOT_SENT), None)

    def as_json(self) -> dict[str, Any]:
        """Return the object ``now`` of ``housekeeping why --json``."""
        decided = {"outcome": self.outcome, "reason": self.reason}
        return {**decided, "checks": self.checks, "next_tick": self.next_tick}


@dataclass(frozen=True, slots=True)
class Batching:
    """Batches that a stage's stale rows would take.

    Attributes:
      rows: Rows of the first batch.
      most_rows: Rows of the largest one. Quick batches grow up to it.
      fewest: Number of batches, if they grow at once.
      number: Number of batches, if none grows or shrinks.
    """

    rows: int
    most_rows: int
    fewest: int
    number: int

    @classmethod
    def of(cls, sweep: Sweep, stage: Stage, stale: int) -> Self:
        """Return the batches of a stage's stale rows."""
        paced = LARGEST_BATCH if sweep.limits.rows_per_s is None else max(1, int(sweep.limits.rows_per_s))
        first = min(stage.batch_size, paced)
        sizes = [min(each, paced) for each in batch_sizes(stage, sweep.limits) if each > stage.batch_size]
        fewest, left = 0, stale
        for size in (first, *sizes):
            if left > 0:
                fewest, left = fewest + 1, left - size
        most = max((first, *sizes))
        return cls(first, most, fewest + max(0, -(-left // most)), -(-stale // first))

    def __str__(self) -> str:
        return f"{self.number:,}" if self.fewest == self.number else f"{self.fewest:,} to {self.number:,}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields of a stage in ``housekeeping plan --json``."""
        return {"batch_size": self.rows, "largest_batch": self.most_rows, "fewest_batches": self.fewest}


@dataclass(frozen=True, slots=True)
class Plan(Forecast):
    """The work of a run that would begin at `now`.

    Attributes:
      stages: The plan of each stage, with its batches.
      warnings: What is unusual about the stale rows.
      dependents: Links to the rows it would delete, nearest first, with the dependents that they reach.
      triggers: Triggers and rules that it would fire.
      clock_skew: The difference between this machine's clock and the database's; None if not measured.
      pace: Rows per second in the worker's last runs; None without such runs.
      max_rows_per_s: The worker's limit; None for no limit.
      backlog_forecast: When its backlog will be processed; None if unknown.
      unit: What is counted, ``row`` or ``partition``.
    """

    worker: str
    now: datetime
    stages: list[tuple[StagePlan, Batching]]
    pace: float | None = None
    clock_skew: ClockSkew | None = None
    dependents: Sequence[TreeBranch] = ()
    triggers: Sequence[FiringTrigger] = ()
    warnings: Sequence[str] = ()
    max_rows_per_s: float | None = None
    backlog_forecast: BacklogForecast | None = None
    unit: str = "row"

    @property
    def unconfirmed(self) -> str | None:
        """Why a run needs a confirmation; None if it needs none."""
        return next((each.text for each in self.checks if each.reason == UNCONFIRMED), None)

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
        """The number of batches without a time limit, if none grows or shrinks."""
        return sum(batches.number for _, batches in self.stages)

    def expected_s(self, stale: Backlog) -> float | None:
        """Return the expected seconds of work for these rows, over one or more runs; None when unknown."""
        if stale == Backlog(0):
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
            "at": self.now,
            **self._numbers(self, self.batches),
            "rows_per_s": self.pace,
            "clock_skew_s": None if self.clock_skew is None else self.clock_skew.seconds,
            "unconfirmed": self.unconfirmed,
            "stages": [
                {
                    "stage": each.name,
                    **self._numbers(each, batches.number),
                    **batches.as_json(),
                    "samples": [{name: _plain(value) for name, value in row.items()} for row in each.samples],
                }
                for each, batches in self.stages
            ],
            **Forecast.as_json(self),
            "forecast": self.backlog_forecast,
            "warnings": self.warnings,
            "dependents": self.dependents,
            "triggers": self.triggers,
        }

    def _numbers(self, part: Plan | StagePlan, batches: int) -> dict[str, Any]:
        return {
            "backlog": part.stale.rows,
            "backlog_exact": part.stale.exact,
            "held": None if part.held is None else part.held.rows,
            "held_exact": None if part.held is None else part.held.exact,
            "batches": batches,
            "expected_s": self.expected_s(part.stale),
            "oldest": _plain(part.oldest),
            "newest": _plain(part.newest),
        }


def plan(
    sweep: Sweep,
    argument: Any = None,
    *,
    clock: Clock | None = None,
    limit: int = COUNT_LIMIT,
    settings: Settings | None = None,
    force: bool = False,
    confirmed: bool = False,
    declared: Iterable[Sweep] = (),
) -> Plan:
    """Return what a run would do, in one read-only transaction without a lease or a row in the ledger.

    Parameters:
      declared: All sweeps, to name those whose rows would be deleted along.
      clock: Time by which rows are stale, for tests; default: the database's clock.
      settings: The installation, to ask its queue and its processes as well and name the next tick; None for a run in
        the foreground.
      force, confirmed: As for `run_sweep`.

    Raises:
      DatabaseUnavailable: PostgreSQL does not answer.
      DeclarationError: A stage identifies its rows by columns that are not unique.
    """
    with database.using(sweep.database):
        try:
            planned = _counted(sweep, argument, clock, limit, declared)
        except (DatabaseUnavailable, PeeweeException) as error:
            cause = error.__cause__ if isinstance(error, DatabaseUnavailable) else error
            # The predicate of a purge was typed just now, and its error is the answer.
            of_row = isinstance(cause, PeeweeException) and kind_of(cause) is Kind.ROW
            if not isinstance(cause, PeeweeException) or not (
                is_lock_timeout(cause) or (of_row and not isinstance(sweep, PurgeSweep))
            ):
                raise
            planned = _uncounted(sweep, clock, cause)
        stages = stages_of(sweep)
        others = (each.clock_skew() for each in stages if isinstance(each, OtherClock))
        skews = [] if clock or planned.clock_skew is None else [planned.clock_skew, *others]
        request = RunRequest(sweep=sweep, argument=argument, force=force, confirmed=confirmed)
        # Not in the snapshot: it must work before the library's own tables exist, and a timed-out count would end it.
        found = forecast(request, stages, skews, planned.now, settings)
        course = None if settings is None else _backlog_forecast(sweep, planned, settings.timezone)
        warnings = [*planned.warnings, *_last_failure(sweep)]
    known = {check.name for check in planned.checks}
    checks = [
        replace(each, text=in_words(each.counts[UNCONFIRMED], in_plan=True)) if each.reason == UNCONFIRMED else each
        for each in (*planned.checks, *(check for check in found.checks if check.name not in known))
    ]
    return replace(planned, checks=checks, next_tick=found.next_tick, backlog_forecast=course, warnings=warnings)


def _last_failure(sweep: Sweep) -> Iterator[str]:
    """Yield a warning if the worker's last run failed, as the next one may fail, too."""
    # The library's own tables may not exist yet, and a worker with an argument fails by argument.
    with suppress(PeeweeException), database.atomic():
        last = last_ended(sweep)[-1:] if sweep.argument is None else []
        for run in last:
            if run.outcome == "failed" and run.reason:
                yield f"its last run failed: {run.reason}"


def _backlog_forecast(sweep: Sweep, planned: Plan, zone: tzinfo) -> BacklogForecast | None:
    try:
        with translate_postgres_errors(), time_limit(_COUNT_TIME, LOCK_TIME):
            last = next(iter(history.recent(sweep.name, 1)), None)
            known: Any = {"ended": last_ended(sweep), "override": override_of(sweep.name), "open_run": last}
        if not planned.stale.exact:
            found = planned_rows([sweep], planned.now).get(sweep.name)
            known["planned"] = None if isinstance(found, Exception) else found
        return forecast_backlog(sweep, planned.stale, planned.now, zone, **known)
    except Exception as error:  # before `housekeeping init`, or of a locked table
        if is_unavailable(error):
            raise
        return None


def with_alerts(planned: Plan, sweep: Sweep, alerts: Sequence[Alert]) -> Plan:
    """Return the plan with a forecast that respects the active alerts, such as a dead scheduler.

    Parameters:
      alerts: All active alerts, as `explained` returns them.
    """
    course = planned.backlog_forecast
    if course is None:
        return planned
    return replace(planned, backlog_forecast=course.stopped_by(what_stops(sweep, Active(alerts), database_server)))


def forecast_now(sweep: Sweep, clock: ClockSkew, settings: Settings) -> Forecast:
    """Return what would become of a run that is sent now, without its argument; the worker's database is current.

    Raises:
      DatabaseUnavailable: PostgreSQL does not answer.
    """
    try:
        with translate_postgres_errors():
            stages = () if sweep.lacks() is not None or sweep.argument is not None else stages_of(sweep)
    except (DeclarationError, ProgrammingError) as error:
        return Forecast(checks=[Check("rows", "fails", error_line(error), error_line(error))])
    return forecast(RunRequest(sweep=sweep), stages, [clock], clock.server_at, settings)


def forecast(
    request: RunRequest, stages: Sequence[Stage], skews: Sequence[ClockSkew], now: datetime, settings: Settings | None
) -> Forecast:
    """Ask all gates, and the schedule, what becomes of a run that begins now. A gate that fails is unknown.

    Raises:
      DatabaseUnavailable: PostgreSQL does not answer.
    """
    sweep, checks = request.sweep, dict[str, Check]()
    guard = RowGuard(sweep, stages, now, request.argument, confirmed=request.confirmed)
    entry, queue = OverrideGate(request), None
    gates: list[Gate] = [entry, WriteGate()]
    if settings is not None:
        gates.append(queue := QueueGate(sweep.queue, settings, now))
    if sweep.argument is None or request.argument is not None:
        gates.append(LeaseGate(sweep, request.argument))
    gates += [
        LockGate(stages, now),
        *before_batches(request, stages, skews, guard, lambda: runs.past_runs(sweep.name)),
        ThrottleGate(sweep, stages, now),
    ]
    for gate in gates:
        check = _said_once(_examined(gate), checks.values())
        if check.text:
            checks.setdefault(check.name, check)
    if queue is None or settings is None:
        return Forecast(checks=list(checks.values()))
    tick = None if "ledger" in checks else next_tick(sweep, now, settings.timezone, entry.override)
    checks["schedule"] = _schedule_check(sweep, tick, now, entry.override, queue.processes)
    return Forecast(checks=list(checks.values()), next_tick=tick)


def _said_once(check: Check, others: Iterable[Check]) -> Check:
    """Return the check without its error if another check shows the same error, such as of an unavailable server."""
    repeated = f": {check.error}"
    is_known = check.text.endswith(repeated) and any(str(check.error).rstrip(".") in each.text for each in others)
    return replace(check, text=check.text.removesuffix(repeated), reason=None) if is_known else check


def _examined(gate: Gate) -> Check:
    """Return a gate's check, which is unknown if the gate fails."""
    with translate_postgres_errors():
        try:
            # A table that is locked for longer has its own check. The throttle has limits of its own.
            with nullcontext() if isinstance(gate, ThrottleGate) else time_limit(_COUNT_TIME, LOCK_TIME):
                return gate.examine()
        except Exception as error:  # a predicate may raise anything
            if is_unavailable(error):
                raise
            found = error if is_timeout(error) else classify_error(error)
            of_ledger, said = isinstance(found, SchemaMissing) or isinstance(gate, OverrideGate), error_line(found)
            if isinstance(error, ProgrammingError) and not (of_ledger or isinstance(gate, LockGate | ThrottleGate)):
                return Check("rows", "fails", said, said)  # the run would fail with the same error
            return Check("ledger" if of_ledger else "rows", "unknown", said)


def _schedule_check(
    sweep: Sweep, tick: datetime | None, now: datetime, override: Override | None, processes: Processes
) -> Check:
    if sweep.schedule is None:
        return Check("schedule", "none", "none: the worker runs when it is enqueued or started by hand")
    if tick is None:
        return Check("schedule", "none", f"no tick of {sweep.schedule!r} until the worker is on again")
    text = f"the next tick is {tick:%Y-%m-%d %H:%M} UTC, in {format_duration((tick - now).total_seconds())}"
    if not processes.known:
        return Check("schedule", "unknown", f"{text}; whether a scheduler is alive is unknown")
    dead = no_living_scheduler(processes)
    return Check("schedule", "none", text) if dead is None else Check("schedule", "alerts", f"{text}, but {dead}")


def notable(checks: Iterable[Check]) -> list[Check]:
    """Return the checks that affect the run or could not be made."""
    return [each for each in checks if each.effect != "none"]


def _uncounted(sweep: Sweep, clock: Clock | None, error: PeeweeException) -> Plan:
    """Return the plan of a worker whose rows cannot be read. Its number of rows is unknown."""
    with translate_postgres_errors():
        now, stages = clock.now() if clock else database_now(), stages_of(sweep)
        unknown = [(StagePlan(each.name, Backlog(0, exact=False), {}), Batching.of(sweep, each, 0)) for each in stages]
        warnings = [f"the {sweep.unit}s could not be counted: {error_line(error)}"]
        planned = Plan(sweep.name, now, unknown, warnings=warnings, unit=sweep.unit)
        if is_lock_timeout(error):
            return planned
        rows = [text for each in stages if isinstance(each, TableStage) and (text := failing_row(each, now))]
    text = f"the predicate {sweep.predicate_name} fails {' and '.join(rows) or 'for a row'}: {error_line(error)}"
    return replace(planned, checks=[Check("rows", "fails", text, PREDICATE_FAILS)])


def _counted(sweep: Sweep, argument: Any, clock: Clock | None, limit: int, declared: Iterable[Sweep]) -> Plan:
    with translate_postgres_errors(), _snapshot():
        skew = read_database_clock()
        now = clock.now() if clock else skew.server_at
        stages = stages_of(sweep)
        found = [each.plan(now, limit, argument) for each in stages]
        branches = sampled_branches(sweep, stages, now, declared, read_known_tables(sweep, stages))
        branches = counted_branches(branches, {each.name: each.stale for each in found}, now)
        triggers = triggers_of(stages, now)
        pairs = list(zip(stages, found, strict=True))
        warnings = [line for each, made in pairs for line in warnings_of(sweep, each, made, now)]
        warnings += [hint for each in stages if (hint := hint_of(each, now)) is not None]
    passes = [(made, Batching.of(sweep, each, made.stale.rows)) for each, made in pairs]
    rows_per_s, limit_per_s = None, sweep.limits.rows_per_s
    with suppress(ProgrammingError), translate_postgres_errors():  # before `housekeeping init`
        rows_per_s = pace(sweep, last_ended(sweep))
    return Plan(sweep.name, now, passes, rows_per_s, skew, branches, triggers, warnings, limit_per_s, unit=sweep.unit)


def warnings_of(sweep: Sweep, stage: Stage, planned: StagePlan, now: datetime) -> Iterator[str]:
    """Yield what is unusual about the stale rows of a stage: the newest ones, times in the future, no time."""
    if not isinstance(stage, TableStage) or not planned.stale.rows:
        return
    column, newest = stage.age_column(now), planned.newest
    today: date = now if isinstance(newest, datetime) else now.date()
    if isinstance(newest, date) and newest > today:
        found = _count(sweep, stage, now, column > today)
        yield f"{found} in the future ({column.name}); check the direction of the comparison in {sweep.predicate_name}"
    elif (line := inverted_comparison(stage, now)) is not None:
        yield line
    if may_be_null(column, stage.stale(now)) and (found := _count(sweep, stage, now, column.is_null())):
        yield f"{found} NULL in {column.name}; a run takes such rows last"


def inverted_comparison(stage: TableStage, now: datetime) -> str | None:
    """Return a warning if stale rows would no longer be stale when they are older; None if they would.

    Only the first rows are asked. A predicate that does not use the time it is given is never inverted.
    """
    later = is_not_true(stage.stale(now + _LATER))
    first = stage.first_stale(now, [later], _SAMPLE, in_order=True)
    query: Any = Select((first,), [fn.COUNT(SQL("1")), fn.COUNT(SQL("1")).filter(first.c.c0)])
    rows, fresh_later = next(iter(query.tuples().execute(database)))
    if not fresh_later:
        return None
    which = "the only stale row" if rows == 1 else f"{fresh_later} of the first {rows} stale rows"
    return (
        f"{which} will not be stale when older: `stale` takes newer rows and leaves older ones; check the direction of "
        "its comparison"
    )


def _count(sweep: Sweep, stage: TableStage, now: datetime, condition: Any) -> str:
    """Return how many stale rows meet the condition, as the beginning of a sentence; empty if none does."""
    found = replace(stage, stale=lambda at: stage.stale(at) & condition).backlog(now, _COUNTED)
    return f"{found} {sweep.rows_called} {'row is' if found == Backlog(1) else 'rows are'}" if found.rows else ""


@dataclass(frozen=True, slots=True)
class DryRun(RunResult):
    """Result that a run would have, as far as it is known beforehand.

    The counts are those of a run that nothing stops or limits, time included.

    Attributes:
      checks: What the gates would do to the run.
    """

    checks: Sequence[Check] = field(default=(), compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the object of ``housekeeping run --dry-run --json``."""
        return {**RunResult.as_json(self), "checks": self.checks}


def dry_run(
    sweep: Sweep,
    argument: Any = None,
    *,
    clock: Clock | None = None,
    settings: Settings | None = None,
    force: bool = False,
    confirmed: bool = False,
) -> DryRun:
    """Return the plan as a run's result; never raises. For the parameters see `plan`."""
    run_clock = clock or SYSTEM_CLOCK
    started, now, counts = run_clock.monotonic(), run_clock.now(), initial_counts(sweep)
    try:
        planned = plan(sweep, argument, clock=clock, settings=settings, force=force, confirmed=confirmed)
    except (HousekeepingError, PeeweeException) as error:
        spent = run_clock.monotonic() - started
        return DryRun(sweep.name, "failed", error_line(error), None, now, spent, counts, dry_run=True, error=error)
    for each, batches in planned.stages:
        for name, number in each.counts.items():
            counts[name] = counts.get(name, 0) + number
        if "batches" in counts:
            counts["batches"] += batches.number
    # A run in the foreground needs no queue. It fails after it has waited for a locked table.
    deciding = next(
        (each for each in planned.checks if each.effect in OUTCOME_OF_EFFECT or each.reason == "locked"), None
    )
    outcome = "done" if deciding is None else OUTCOME_OF_EFFECT.get(deciding.effect, "failed")
    reason = None if deciding is None else deciding.reason
    return DryRun(
        sweep.name,
        outcome,
        reason or (None if planned.stale.exact else "counted_up_to_limit"),
        None,
        planned.now,
        run_clock.monotonic() - started,
        counts,
        dry_run=True,
        error=HousekeepingError(deciding.text) if deciding is not None and outcome == "failed" else None,
        checks=planned.checks,
    )


@contextmanager
def _snapshot() -> Iterator[None]:
    with database.atomic():
        database.execute_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        shorten_time_limits(_COUNT_TIME, LOCK_TIME)
        yield


def _plain(value: Any) -> Any:
    return None if value is None else (as_cursor((value,)) or [None])[0]


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """What a purge would do now.

    Attributes:
      indexes: Indexes that a batch of a large table reads; empty: it reads the whole table.
      is_sorted: Whether a batch sorts the rows that match, because no index has their order.
      held_by: The declared sweeps whose holds it applies.
      statement: The statement of the first batch, without its part for the ledger.
    """

    request: PurgeRequest
    plan: Plan
    indexes: tuple[str, ...]
    is_sorted: bool
    held_by: tuple[str, ...]
    statement: str

    @property
    def rows(self) -> Backlog:
        """The number of rows that it would delete, as far as they were counted."""
        most, stale = self.request.max_rows, self.plan.stale
        return Backlog(most) if most is not None and stale.rows >= most else stale

    @property
    def index_in_words(self) -> str:
        """The indexes as text."""
        found = ", ".join(self.indexes) or "none, the whole table is read"
        return f"{found}; each batch sorts the rows that match" if self.is_sorted else found

    def as_json(self) -> dict[str, Any]:
        """Return the object ``plan`` of ``housekeeping purge --dry-run --json``."""
        return {
            **self.plan.as_json(),
            "table": self.request.table,
            "where": self.request.where,
            "indexes": list(self.indexes),
            "sorted": self.is_sorted,
            "held_by": list(self.held_by),
            "statement": self.statement,
        }


def plan_purge(request: PurgeRequest, sweep: PurgeSweep, *, force: bool = False) -> PurgePlan:
    """Return what the purge would do now, and change nothing.

    Parameters:
      force: Accept an order without an index on a large table.

    Raises:
      WrongArgument: PostgreSQL rejects the WHERE, a large table has no index for the order, the archive cannot take
        the rows, or a dependent cannot be deleted.
      Refused: The count took too long, or a foreign key cascades to rows that a declared sweep holds.
      peewee.PeeweeException: The database fails for another reason.
    """
    try:
        (stage,) = sweep.stages_for_run()
    except DependentsRefused as error:
        raise WrongArgument(f"--cascade: {with_options(error)}") from None
    assert isinstance(stage, TableStage)
    if problems := list(problems_of([stage])):
        statements = dict.fromkeys(each for problem in problems for each in problem.statements)
        text = ", ".join(each.text for each in problems)
        raise WrongArgument("; ".join((f"--archive-to: {text}", *statements)))
    if (refusal := refused_by_citus(stage)) is not None:
        raise WrongArgument("; ".join(each for each in refusal if each))
    now = database_now()
    rows = stage.explain_queries(now)[0].query
    try:
        nodes = explain(rows)
    except PeeweeException as error:
        if kind_of(error) not in (Kind.STATEMENT, Kind.ROW):
            raise
        raise WrongArgument(f"--where is no condition on {request.table}: {error_line(error)}") from None
    is_sorted = any(node["Node Type"] == "Sort" for node in nodes)
    if is_sorted and request.order_by and not force:
        refuse_large_table(request, sweep, stage)
    indexes = dict.fromkeys(node["Index Name"] for node in nodes if "Index Name" in node)
    try:
        planned = plan(sweep, force=force, confirmed=True, declared=sweep.declared)
    except (PeeweeException, HousekeepingError) as error:
        if not is_timeout(error.__cause__ or error):
            raise
        raise Refused(
            "the rows could not be counted within statement_timeout; create an index for --where, or raise the limit: "
            "add ?options=-cstatement_timeout%3D10min to the database's URL"
        ) from None
    for each in () if request.ignore_holds else planned.dependents:
        if each.deletes_held_rows:
            raise Refused(f"{each.text}. Leave the rows above them out of --where, or add --ignore-holds")
    return PurgePlan(
        request, planned, tuple(indexes), is_sorted, sweep.held_by, written_out(stage.statements_of_a_run(now)[0])
    )
