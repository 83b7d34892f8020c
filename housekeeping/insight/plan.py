"""Preview of a run: the run's own query, in one read-only snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta, tzinfo
from typing import Any, Final

from peewee import OP, SQL, Expression, PeeweeException, ProgrammingError, Query, Select, fn

from housekeeping.core.clock import SYSTEM_CLOCK, Clock
from housekeeping.core.errors import HousekeepingError, Refused, WrongArgument
from housekeeping.core.logs import error_line, format_duration
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.errors import Kind, is_timeout, kind_of
from housekeeping.database.times import ClockSkew, database_now, read_database_clock
from housekeeping.engine import RunRequest, RunResult, initial_counts
from housekeeping.engine.alerts import first_of, last_ended, pace, total_held
from housekeeping.engine.gates import (
    OUTCOME_OF_EFFECT,
    Check,
    Gate,
    LeaseGate,
    OverrideGate,
    ThrottleGate,
    before_batches,
)
from housekeeping.engine.guard import UNCONFIRMED, CountFailed, RowGuard, count_rows
from housekeeping.engine.purge import PurgeRequest, PurgeSweep
from housekeeping.engine.run import classify_error
from housekeeping.insight.wording import next_tick
from housekeeping.ledger import runs
from housekeeping.ledger.runs import Outcome
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.keyset import may_be_null
from housekeeping.sweeps.partition_catalog import hint_of
from housekeeping.sweeps.stage import Backlog, Stage, StagePlan, as_cursor, other_clocks
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.validate_tables import (
    Reference,
    Trigger,
    problems_of,
    sampled_references,
    stages_of,
    triggers_of,
)

#: Rows counted at most, so that a plan never takes minutes; above it the plan says "at least".
COUNT_LIMIT: Final = 1_000_000
#: Rows up to which a batch may sort the table. Each batch sorts all rows that match, so the work grows with its square.
SORTED_ROWS: Final = 100_000
_COUNTED: Final = 100_000  # rows counted at most for a warning
_SAMPLE: Final = 100  # stale rows that are compared with a later time
_LATER: Final = timedelta(days=3650)  # longer than any age that a sweep waits for


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of a run that would begin at `now`.

    Attributes:
      stages: The plan of each stage, with its number of batches.
      warnings: What is unusual about the stale rows.
      references: Foreign keys that reach the rows it would delete.
      triggers: Triggers and rules that it would fire.
      clock_skew: The difference between this machine's clock and the database's; None if not measured.
      checks: What the gates would do to the run, in its order.
      next_tick: When the schedule starts the next run, in UTC; None if never, or unknown.
      pace: Rows per second in the worker's last runs; None without such runs.
      max_rows_per_s: The worker's limit; None for no limit.
    """

    worker: str
    now: datetime
    stages: list[tuple[StagePlan, int]]
    pace: float | None = None
    clock_skew: ClockSkew | None = None
    references: Sequence[Reference] = ()
    triggers: Sequence[Trigger] = ()
    warnings: Sequence[str] = ()
    checks: Sequence[Check] = ()
    next_tick: datetime | None = None
    max_rows_per_s: float | None = None

    @property
    def deciding(self) -> Check | None:
        """The first check that decides the outcome; None if the run continues."""
        return next((each for each in self.checks if each.effect in OUTCOME_OF_EFFECT), None)

    @property
    def outcome(self) -> Outcome:
        """The outcome, as far as the checks decide it; ``done`` if the run continues."""
        return "done" if self.deciding is None else OUTCOME_OF_EFFECT[self.deciding.effect]

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
            "now": self.now,
            **self._numbers(self, self.batches),
            "records_per_s": self.pace,
            "clock_skew_s": None if self.clock_skew is None else self.clock_skew.seconds,
            "unconfirmed": self.unconfirmed,
            "passes": [
                {
                    "pass": each.name,
                    **self._numbers(each, batches),
                    "samples": [{name: _plain(value) for name, value in row.items()} for row in each.samples],
                }
                for each, batches in self.stages
            ],
            "outcome": self.outcome,
            "reason": self.reason,
            "checks": self.checks,
            "next_tick": self.next_tick,
            "warnings": self.warnings,
            "references": self.references,
            "triggers": self.triggers,
        }

    def _numbers(self, part: Plan | StagePlan, batches: int) -> dict[str, Any]:
        return {
            "stale_rows": part.stale.rows,
            "exact": part.stale.exact,
            "held": None if part.held is None else part.held.rows,
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
    zone: tzinfo | None = None,
    force: bool = False,
    confirmed: bool = False,
    declared: Iterable[Sweep] = (),
) -> Plan:
    """Return what a run would do, in one read-only transaction without a lease or a row in the ledger.

    Parameters:
      declared: All sweeps, to name those whose rows would be deleted along.
      clock: Time by which rows are stale, for tests; default: the database's clock.
      zone: Time zone of the schedule; None if the plan should not name the next tick.
      force, confirmed: As for `run_sweep`.

    Raises:
      DatabaseUnavailable: PostgreSQL does not answer.
      DeclarationError: A stage identifies its rows by columns that are not unique.
    """
    with database.using(sweep.database):
        planned = _counted(sweep, argument, clock, limit, declared)
        stages = stages_of(sweep)
        skews = [] if clock or planned.clock_skew is None else [planned.clock_skew, *other_clocks(stages)]
        request = RunRequest(sweep=sweep, argument=argument, force=force, confirmed=confirmed)
        # Not in the snapshot: it must work before the library's own tables exist, and a timed-out count would end it.
        with translate_postgres_errors():
            return _with_checks(planned, request, stages, skews, zone)


def _with_checks(
    planned: Plan, request: RunRequest, stages: Sequence[Stage], skews: Sequence[ClockSkew], zone: tzinfo | None
) -> Plan:
    """Return the plan with what the gates would do to the run, and its next tick."""
    sweep, now = request.sweep, planned.now
    guard = RowGuard(sweep, stages, now, request.argument, confirmed=request.confirmed)
    entry = OverrideGate(request)
    gates: list[Gate] = [
        entry,
        LeaseGate(sweep, request.argument),
        *before_batches(request, stages, skews, guard, lambda: runs.past_runs(sweep.name)),
    ]
    checks, tick = [], None
    try:
        checks += [gate.examine() for gate in gates]
    except ProgrammingError as error:
        # The library's own tables are missing. An error of the worker's predicate is raised by its own count.
        checks, zone = [Check("ledger", "unknown", str(classify_error(error)))], None
    checks.append(ThrottleGate(sweep, stages, now).examine())
    if zone is not None:
        tick = next_tick(sweep, now, zone, entry.override)
        checks.append(Check("schedule", "none", _tick_in_words(sweep, tick, now)))
    return replace(planned, checks=[each for each in checks if each.text], next_tick=tick)


def _tick_in_words(sweep: Sweep, tick: datetime | None, now: datetime) -> str:
    if sweep.schedule is None:
        return "none: the worker runs when it is enqueued or started by hand"
    if tick is None:
        return f"no tick of {sweep.schedule!r} until the worker is on again"
    return f"the next tick is {tick:%Y-%m-%d %H:%M} UTC, in {format_duration((tick - now).total_seconds())}"


def notable(checks: Iterable[Check]) -> list[Check]:
    """Return the checks that affect the run or could not be made."""
    return [each for each in checks if each.effect != "none"]


def _counted(sweep: Sweep, argument: Any, clock: Clock | None, limit: int, declared: Iterable[Sweep]) -> Plan:
    with translate_postgres_errors(), _snapshot():
        skew = read_database_clock()
        now = clock.now() if clock else skew.server_at
        stages = stages_of(sweep)
        found = [(each.plan(now, limit, argument), each.batch_size) for each in stages]
        referenced = sampled_references(sweep, stages, now, declared)
        triggers = triggers_of(stages, now)
        warnings = [
            line for each, (made, _) in zip(stages, found, strict=True) for line in warnings_of(sweep, each, made, now)
        ]
        warnings += [hint for each in stages if (hint := hint_of(each, now)) is not None]
    passes = [(planned, -(-planned.stale.rows // size)) for planned, size in found]
    rows_per_s = None
    with suppress(ProgrammingError), translate_postgres_errors():  # before `housekeeping init`
        rows_per_s = pace(sweep, last_ended(sweep))
    limit_per_s = sweep.limits.rows_per_s
    return Plan(sweep.name, now, passes, rows_per_s, skew, referenced, triggers, warnings, max_rows_per_s=limit_per_s)


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
    later = Expression(stage.stale(now + _LATER), OP.IS_NOT, SQL("TRUE"))
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
    deciding = planned.deciding
    return DryRun(
        sweep.name,
        planned.outcome,
        planned.reason or (None if planned.stale.exact else "counted_up_to_limit"),
        None,
        planned.now,
        run_clock.monotonic() - started,
        counts,
        dry_run=True,
        error=HousekeepingError(deciding.text) if deciding is not None and planned.outcome == "failed" else None,
        checks=planned.checks,
    )


@contextmanager
def _snapshot() -> Iterator[None]:
    with database.atomic():
        database.execute_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
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
      WrongArgument: PostgreSQL rejects the WHERE, a large table has no index for the order, or the archive cannot take
        the rows.
      Refused: The count took too long, or a foreign key cascades to rows that a declared sweep holds.
      peewee.PeeweeException: The database fails for another reason.
    """
    (stage,) = sweep.stages_for_run()
    assert isinstance(stage, TableStage)
    for problem in problems_of([stage]):
        raise WrongArgument(f"--archive-to: {problem.text}" + "".join(f"; {each}" for each in problem.statements))
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
        _refuse_large_table(request, sweep, stage)
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
    if not request.ignore_holds:
        _refuse_cascade_to_held_rows(planned)
    return PurgePlan(
        request, planned, tuple(indexes), is_sorted, sweep.held_by, _text_of(stage.statements_of_a_run(now)[0])
    )


def _refuse_cascade_to_held_rows(planned: Plan) -> None:
    for each in planned.references:
        if each.deletes_held_rows:
            raise Refused(f"{each.text}. Leave the rows above them out of --where, or add --ignore-holds")


def _refuse_large_table(request: PurgeRequest, sweep: Sweep, stage: TableStage) -> None:
    name = quoted_name(stage.model)
    try:
        rows = count_rows([name], SORTED_ROWS + 1, sweep.limits.runtime)
    except CountFailed as error:
        if not error.timed_out:
            raise
        rows = SORTED_ROWS + 1
    if rows > SORTED_ROWS:
        columns = ", ".join(request.order_by)
        raise WrongArgument(
            f"{request.table} has over {SORTED_ROWS:,} rows and no index for --order-by {columns}, so that each batch "
            f"would sort them; CREATE INDEX CONCURRENTLY ON {name} ({columns}), leave --order-by out, or add --force"
        )


def _text_of(query: Query) -> str:
    sql, parameters = database.get_sql_context().sql(query).query()
    text: bytes = database.mogrify(sql, parameters)
    return text.decode()


def explain(query: Any) -> list[dict[str, Any]]:
    """Return the nodes of PostgreSQL's plan of the statement, as for a large table."""
    # The database's context: a query that starts with a common table expression has none of its own.
    sql, parameters = database.get_sql_context().sql(query).query()
    with database.atomic() as transaction:
        # PostgreSQL scans small tables even if they have a suitable index.
        database.execute_sql("SET LOCAL enable_seqscan = off")
        database.execute_sql("SET LOCAL enable_sort = off")
        plan: Any = database.execute_sql(f"EXPLAIN (FORMAT JSON) {sql}", parameters).fetchone()[0]
        transaction.rollback()
    return list(_nodes(plan[0]["Plan"]))


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)
