"""Guard: one rule for more stale rows than usual, checked once before the first change of a run.

=====================  ============================================  =================================================
Rule                   More stale rows than                          A run over the limit
=====================  ============================================  =================================================
`RowGuard.first_run`   a fifth of a table, if no run with this       is skipped until an operator confirms a run
                       predicate has completed; the tables of
                       dependents count, too
`RowGuard.breaker`     many times the most rows of a past run, or a  does what the breaker's action says: it alerts,
                       share of the tables                           stops at the limit, or does not begin
`stale_if_outgrown`    twice the rows that a plan showed             is not begun; the operator looks at a new plan
=====================  ============================================  =================================================

The numbers that decide are counted, up to the limit and in at most five seconds, not estimated. A count that takes
longer decides like one that is over the limit. Only the breaker estimates dependents, if they are many.

`RowGuard.first_run` also finds a large table of dependents without an index.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any, Final, ParamSpec, TypeVar

from peewee import PeeweeException, ProgrammingError

from housekeeping.core.logs import counted, error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.database.catalog import escaped, quoted_name
from housekeeping.database.connection import database, time_limit
from housekeeping.database.errors import is_of_statement_alone, is_timeout, is_unavailable
from housekeeping.database.queries import database_now
from housekeeping.ledger import runs
from housekeeping.ledger.runs import Counts, Outcome, RunRow, RunStart
from housekeeping.sweeps.actions import graph_of, is_bounded
from housekeeping.sweeps.conditions import TWO_TIMES, WithoutLists
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.dependents import LARGE
from housekeeping.sweeps.partition_catalog import outcome_of
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.stage import Backlog, Stage
from housekeeping.sweeps.table_stage import TableStage, counts_rows, read_together
from housekeeping.sweeps.tree import backlog_of_dependents, count_dependents
from housekeeping.sweeps.validate_tables import stages_of

logger = named_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: Reason of the skipped run, its count, and the name of its alert.
UNCONFIRMED: Final = "unconfirmed"
#: A first run may process one row in five (20 %) without a confirmation.
ONE_IN: Final = 5
#: Fewer stale rows need no confirmation, whatever their share: a trial, or a small table.
AT_LEAST: Final = 1000
#: Minimum number of past runs for a usual number of rows.
ENOUGH: Final = 10
#: Rows that never exceed the breaker by history: a worker that processed three a day may process a few thousand after
#: a holiday.
FLOOR: Final = 10_000
#: Growth since a plan that needs no new look: up to twice the rows, or 1,000 rows more.
_GROWTH: Final = 2
_GROWN_ROWS: Final = 1000
#: Options that bound what one run processes, however much is stale.
_AT_MOST: Final = ("max_deletes", "max_projects")
#: Time limit of a count, and the largest part of the run's time (1/4) that it may take.
_MAX_COUNT_TIME: Final = timedelta(seconds=5)
_PART_OF_RUN: Final = 4
#: Rows of tables counted exactly; above this PostgreSQL's estimate is good enough, unless more rows are stale.
_EXACT: Final = 100_000
_LARGEST_LIMIT: Final = 2**62  # PostgreSQL's LIMIT is a bigint
#: A list of values, which the application may read from anywhere, or one value.
_VALUES: Final = re.compile(r"\(%s(?:, %s)*\)|%s")


@dataclass(frozen=True, slots=True)
class RowLimit:
    """The most rows a run may process.

    Attributes:
      rows: The limit; None for no limit.
      expected: Number of stale rows before the run; None if more than the limit, or unknown.
      progress_counts: Names of the counts whose sum is the number of processed rows.
      exceeded: Details that the ledger stores as the count ``breaker`` if the run reaches the limit with rows left.
      reason: The run's reason if it reaches the limit with rows left.
    """

    rows: int | None = None
    expected: int | None = None
    progress_counts: Sequence[str] = ()
    exceeded: Counts = field(default_factory=dict)
    reason: str = "breaker"

    def left(self, counts: Counts) -> int | None:
        """Return how many rows the next batch may have; None for no limit."""
        return None if self.rows is None else max(1, self.rows - processed_rows(counts, self.progress_counts))

    def reached(self, counts: Counts) -> tuple[Outcome, str | None] | None:
        """Return the outcome and reason of a run that has reached the limit; None if it continues."""
        rows = processed_rows(counts, self.progress_counts)
        if self.rows is None or rows < self.rows:
            return None
        return ("done", None) if rows == self.expected else ("partial", self.reason)

    def noted(self, counts: Counts, reason: str | None) -> Counts:
        """Return the counts at the end of a run, with ``breaker`` if the breaker ended it."""
        return counts | {"breaker": self.exceeded} if reason == "breaker" else counts


class RowGuard:
    """The rules for one run that would begin at `now`.

    Parameters:
      confirmed: An operator has confirmed that the run may process any number of rows.
      begun: Start of the run, with `RunStart.predicate`; None if no run has begun.

    Attributes:
      worker: The worker, with its argument, as the command line takes it.
      fingerprint: What the run writes into its row once it has completed; None if the ledger has it already.
      row_limit: The breaker's limit for the run.
      exceeded: Whether `breaker` found more rows than allowed, or could not count them.
    """

    def __init__(
        self,
        sweep: Sweep,
        stages: Sequence[Stage],
        now: datetime,
        argument: Any = None,
        *,
        confirmed: bool = False,
        begun: RunStart | None = None,
    ) -> None:
        self.worker = with_argument(sweep.name, argument)
        self.fingerprint: str | None = None
        self.row_limit = RowLimit()
        self.exceeded = False
        self._sweep = sweep
        self._stages = stages
        self._now = now
        self._count = partial(count_stale, now=now, argument=argument, max_runtime=sweep.limits.runtime)
        self._confirmed = confirmed
        self._begun = begun

    def first_run(self) -> Counts | None:
        """Return why the run needs a confirmation, as its count ``unconfirmed``; None if it needs none.

        It needs one if it is the sweep's first run, or the first of a changed predicate, and would process much of a
        table, or read a large table of dependents for each batch. A changed graph of dependents is a changed predicate.

        Raises:
          DependentsRefused: A `Delete` cannot delete the dependents of its rows as declared.
          peewee.PeeweeException: The database does not answer, or the library's own tables are missing.
        """
        if not self._sweep.guard.first_run:
            return None
        current = fingerprint(self._sweep, self._stages)
        last = runs.last_predicate(self._sweep.name) if self._begun is None else self._begun.predicate
        if last is not None and last[0] == current:
            self.fingerprint = None if last[1] else current
            return None
        self.fingerprint = current
        # A run may have completed without writing its fingerprint.
        if self._confirmed or (last is None and runs.has_worked(self._sweep.name)):
            return None
        known: Counts = {"worker": self.worker, "changed": last is not None}
        links = [link for each in self._stages if (graph := graph_of(each)) is not None for link in graph.links]
        if scanned := [link for link in links if link.large and not link.indexed]:
            index = "; ".join(dict.fromkeys(str(each.index_statement) for each in scanned))
            found = {"table": scanned[0].table, "rows": scanned[0].rows, "index": index}
            return {**known, **found, "stale": None, "exact": False, "limit": LARGE}
        much = self.much_of_a_table()
        return None if much is None else {**known, **much}

    def much_of_a_table(self) -> Counts | None:
        """Return the numbers of the first table of which over a fifth, and at least 1,000 rows, are stale.

        ``stale`` is None if they could not be counted in time.

        Raises:
          peewee.PeeweeException: The database does not answer.
        """
        for table, stale, rows in self._tables():
            limit = max(AT_LEAST - 1, (rows or 0) // ONE_IN)
            if stale is None or stale.exceeds(limit):
                numbers = {"stale": None if stale is None else stale.rows, "exact": stale is not None and stale.exact}
                return {"table": table, **numbers, "limit": limit, "rows": rows}
        return None

    def breaker(self, history: Sequence[RunRow]) -> Counts | None:
        """Compare the stale rows with the usual number. Return the numbers, as the count ``breaker`` of a run.

        Returns None if the breaker has no limit. Sets `exceeded` and `row_limit`.

        Parameters:
          history: The past runs; with fewer than ten, `times_history` does not apply.

        Raises:
          peewee.PeeweeException: The database does not answer.
        """
        sweep = self._sweep
        usual = usual_rows(history, sweep.progress_counts)
        limits = self._allowed(_most_by_history(sweep, usual))
        if limits is None or _is_bounded(sweep, limits[0]):
            return None
        allowed, stale = limits
        self.exceeded = stale is None or stale.exceeds(allowed)
        numbers: Counts = {
            "action": sweep.guard.action,
            "stale": None if stale is None else stale.rows,
            "exact": stale is not None and stale.exact,
            "allowed": allowed,
            "usual": max(usual, default=0),
            "runs": len(usual),
        }
        if sweep.guard.action == "limit" and self.exceeded:
            self.row_limit = RowLimit(max(1, allowed), None, sweep.progress_counts, numbers)
        elif sweep.guard.action == "limit":
            # More rows may become stale during the run.
            later = {**numbers, "stale": allowed, "exact": False}
            self.row_limit = RowLimit(allowed, numbers["stale"], sweep.progress_counts, later)
        return numbers

    def _allowed(self, most: int | None) -> tuple[int, Backlog | None] | None:
        """Return the allowed rows and the stale rows (None: they could not be counted); None without a limit."""
        share, names = self._sweep.guard.share, _names_of(self._stages)
        count = self._count_all
        try:
            if share is not None and names:
                tables = [name for name, *_ in _by_table(names)]
                part = Fraction(str(share))
                stale, rows = _count_share(tables, count, part, self._sweep.limits.runtime, most=most)
                of_table = int(part * (rows or 0))
                return of_table if most is None else min(most, of_table), stale
            return None if most is None else (most, count(limit=most))
        except CountFailed as error:
            if error.__cause__ is not None and is_of_statement_alone(error.__cause__):
                raise error.__cause__ from None  # as `_share_of`
            logger.warning("Breaker could not count the stale rows", error=str(error))
            return most or 0, None

    def _count_all(self, limit: int) -> Backlog:
        """Count the stale rows up to the limit, and add the number of their dependents, which may be estimated."""
        stale = self._count(self._stages, limit=limit)
        for each in self._stages:
            if isinstance(each, TableStage) and is_bounded(each) and not stale.exceeds(limit):
                stale += backlog_of_dependents(each, self._now, self._count([each], limit=limit))
        return stale

    def _tables(self) -> Iterator[tuple[str, Backlog | None, int | None]]:
        """Yield each table with its number of stale rows (or rows in expired partitions) and its total number of rows.

        In a table of dependents, the rows that a cascade deletes or clears count as stale.
        """
        tables: dict[str, list[Stage]] = {}
        for each in self._stages:
            if isinstance(each, TableStage):
                tables.setdefault(quoted_name(each.model), []).append(each)
        for names in _by_table(list(tables)):
            of_table = [each for name in names for each in tables[name]]
            yield names[0], *self._share_of(names[0], partial(self._count, of_table))
        for each in self._stages:
            if isinstance(each, PartitionStage):
                yield quoted_name(each.model), *self._partitions(each)
            elif isinstance(each, TableStage) and is_bounded(each):
                yield from self._dependents(each)

    def _dependents(self, stage: TableStage) -> Iterator[tuple[str, Backlog | None, int | None]]:
        graph = graph_of(stage)
        assert graph is not None
        changed = [link for link in graph.links if link.decision in ("delete", "clear")]
        tables = {link.table: link.rows for link in changed}
        limit = max(_EXACT, sum(tables.values()) // ONE_IN)
        try:
            with _bounded(self._sweep.limits.runtime):
                numbers, is_complete = count_dependents(stage, graph, self._now, limit, limit)
        except CountFailed as error:
            if not error.timed_out:
                raise error.__cause__ or error from None
            numbers, is_complete = {}, False
        for table in tables:
            stale = sum(numbers.get(link, 0) for link in changed if link.table == table)
            if stale >= AT_LEAST:
                bound = max(_EXACT, stale * ONE_IN)
                yield table, Backlog(stale, is_complete), _rows_of([table], bound, self._sweep.limits.runtime)
        for link in changed:
            if not is_complete or link not in numbers:
                yield link.table, None, link.rows

    def _partitions(self, stage: PartitionStage) -> tuple[Backlog | None, int | None]:
        ended = [each.name for each in stage.candidates(self._now) if each.state != "detached"]

        def count(limit: int) -> Backlog:
            rows = _rows_of(ended, limit + 1, self._sweep.limits.runtime) or 0
            return Backlog(min(rows, limit), rows <= limit)

        if not ended:
            return Backlog(0), None
        try:
            return self._share_of(quoted_name(stage.model), count)
        except ProgrammingError as error:
            if outcome_of(error) != "gone":
                raise
            return self._partitions(stage)  # another session has dropped one meanwhile

    def _share_of(self, table: str, count: Callable[..., Backlog]) -> tuple[Backlog | None, int | None]:
        try:
            return _count_share([table], count, Fraction(1, ONE_IN), self._sweep.limits.runtime, at_least=AT_LEAST)
        except CountFailed as error:
            # The run would fail with the same error, because it sends the same predicate.
            raise error.__cause__ or error from None


def in_words(count: Mapping[str, Any], *, in_plan: bool = False) -> str:
    """Return why a run needs a confirmation, with the commands to type, from the count of `RowGuard.first_run`.

    Parameters:
      in_plan: Whether the text is part of the plan to look at.
    """
    worker = count["worker"]
    if (index := count.get("index")) is not None:
        found = (
            f"{count['table']} has about {count['rows']:,} rows and no index by which dependents are found, so that "
            f"each batch would read all of it ({index})"
        )
    else:
        found = much_in_words(count, "are stale", "the first run's limit")
    if count["changed"]:
        why = "its predicate, its age or its table has changed since the last completed run"
    else:
        why = "no run of this worker has completed yet"
    look = "If these rows should go" if in_plan else f"Look: housekeeping plan {worker}; then"
    confirm = f"housekeeping run {worker} --confirm"
    return f"{found}, and {why}: its runs are skipped until one is confirmed. {look}: {confirm}"


def much_in_words(count: Mapping[str, Any], what: str, limit: str) -> str:
    """Return the numbers of `RowGuard.much_of_a_table` as text.

    Parameters:
      what: What these rows are, such as ``are stale``.
      limit: Whose limit they exceed.
    """
    table, stale, rows = count["table"], count["stale"], count["rows"]
    if stale is None:
        return f"the rows of {table} that {what} could not be counted in time"
    size = "" if rows is None else f" of about {rows:,}"
    least = "" if count["exact"] else "at least "
    return f"{least}{stale:,}{size} rows of {table} {what}, over {limit} of {count['limit']:,}"


def in_numbers(count: Mapping[str, Any]) -> str:
    """Return the count ``breaker`` of a run as text."""
    stale, allowed = count["stale"], f"{count['allowed']:,}"
    if stale is None:
        found = "the stale rows could not be counted"
    else:
        found = f"{'' if count['exact'] else 'more than '}{counted(stale, 'row is', 'rows are')} stale"
    runs = count["runs"]
    last = "run" if runs == 1 else f"{runs} runs"
    usual = f"the last {last} processed {count['usual']:,} at most" if runs else "no run before it has ended"
    return f"{found}; {usual}, the breaker allows {allowed}"


def with_argument(worker: str, argument: Any) -> str:
    """Return the worker and its argument as the command line takes them."""
    return worker if argument is None else f"{worker} {argument}"


def usual_rows(history: Sequence[RunRow], progress_counts: Sequence[str]) -> list[int]:
    """Return the rows of each past run that count as usual.

    A run over the limit counts with the usual number before it, so that a flood does not become usual while it lasts.
    Ten such runs that ended as ``done`` are a new load and count in full.
    """
    if not progress_counts:
        return []
    exceeded = [past for past in history if is_exceeded(past.counts)]
    grown = sum(past.outcome == "done" for past in exceeded) >= ENOUGH
    return [
        int(past.counts["breaker"]["usual"])
        if is_exceeded(past.counts) and not (grown and past.outcome == "done")
        else processed_rows(past.counts, progress_counts)
        for past in history
    ]


def is_exceeded(counts: Mapping[str, Any]) -> bool:
    """Return whether a run with these counts exceeded its breaker."""
    return isinstance(counts.get("breaker"), dict)


def processed_rows(counts: Counts, progress_counts: Sequence[str]) -> int:
    """Return the number of rows a run processed, by its counts. Texts, which a custom stage may store, do not count."""
    found = (counts.get(name) for name in progress_counts)
    return sum(int(each) for each in found if isinstance(each, int | float))


def stale_if_outgrown(sweep: Sweep, argument: Any, seen: Backlog) -> Backlog | None:
    """Return the stale rows if they are far more than a plan showed, or cannot be counted (then 0, not exact).

    Returns None if the plan still holds. The worker's database must be the current one.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    if not seen.exact:
        return None  # the plan showed that there is no end to them
    most = max(_GROWTH * seen.rows, seen.rows + _GROWN_ROWS)
    try:
        stale = count_stale(stages_of(sweep), database_now(), most, argument, sweep.limits.runtime)
    except CountFailed:
        return Backlog(0, exact=False)
    return stale if stale.exceeds(most) else None


def fingerprint(sweep: Sweep, stages: Sequence[Stage]) -> str:
    """Return a short text that changes with the tables, the predicates and the age of the stale rows.

    It also changes with the graph of the dependents that a stage deletes. Values that depend on the time, and the
    values of lists, do not change it.
    """
    parts = [str(sweep.stale_after)]
    for stage in stages:
        if isinstance(stage, TableStage):
            parts += [stage.name, quoted_name(stage.model), _predicate(stage.stale)]
            graph = graph_of(stage) if is_bounded(stage) else None
            parts += [f"{each.name} {each.decision} {each.where}" for each in (graph.links if graph else ())]
        elif isinstance(stage, PartitionStage):
            stale = "" if stage.stale is None else _predicate(stage.stale)
            parts += [stage.name, quoted_name(stage.model), stale, stage.action.age]
            parts += [stage.action.key] if stage.action.key != "time" else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def reads_time(stale: Callable[[datetime], Any]) -> bool:
    """Return whether a predicate depends on the time that it is given."""
    earlier, later = _at_two_times(stale)
    return earlier != later


def _at_two_times(stale: Callable[[datetime], Any]) -> Sequence[tuple[str, Sequence[Any]]]:
    return [WithoutLists().sql(stale(at)).query() for at in TWO_TIMES]


def _predicate(stale: Callable[[datetime], Any]) -> str:
    (sql, values), (_, later) = _at_two_times(stale)
    pairs = zip(values, later, strict=False)
    return _VALUES.sub(lambda found: _written(found[0], pairs), sql)


def _written(place: str, pairs: Iterator[tuple[Any, Any]]) -> str:
    taken = [next(pairs, (None, None)) for _ in range(place.count("%s"))]
    if place != "%s":
        return "(...)"
    ((value, later),) = taken
    return repr(value) if value == later and not isinstance(value, list | tuple) else "..."


def _most_by_history(sweep: Sweep, usual: Sequence[int]) -> int | None:
    """Return the most rows by the past runs; None if they are too few, or if a run's own limit is lower."""
    times = sweep.guard.times_history
    if times is None or len(usual) < ENOUGH:
        return None
    most = max(FLOOR, int(times * max(usual)))
    return None if _is_bounded(sweep, most) else most


def _is_bounded(sweep: Sweep, allowed: int) -> bool:
    return any(sweep.options[name] <= allowed for name in _AT_MOST if name in sweep.options)


class CountFailed(Exception):
    """A count that timed out or was rejected by PostgreSQL.

    Attributes:
      timed_out: Whether it took too long or waited too long for a lock.
    """

    def __init__(self, error: PeeweeException) -> None:
        super().__init__(error_line(error))
        self.timed_out = is_timeout(error)


def count_stale(stages: Sequence[Stage], now: datetime, limit: int, argument: Any, max_runtime: timedelta) -> Backlog:
    """Count the stale rows, no further than the limit for each stage.

    Raises:
      CountFailed: The count took too long or PostgreSQL rejected it.
      peewee.PeeweeException: The database does not answer.
    """
    within = _count_time(max_runtime)
    with _failing_counts():
        if all(isinstance(each, TableStage) and counts_rows(each) for each in stages):
            probes = [each.probes(now, limit)[:1] for each in stages if isinstance(each, TableStage)]
            return sum((found for [found] in read_together(probes, within=within)), Backlog(0))
        with time_limit(within):
            return sum((each.backlog(now, limit, argument) for each in stages), Backlog(0))


def count_rows(tables: Sequence[str], limit: int, max_runtime: timedelta) -> int:
    """Count the rows of the tables, up to the limit.

    Parameters:
      tables: Their names, quoted for SQL.

    Raises:
      CountFailed, peewee.PeeweeException: As `count_stale`.
    """
    with _bounded(max_runtime):
        rows: Any = database.execute_sql(
            f"SELECT count(*) FROM (SELECT 1 FROM ({_all_rows(tables)}) AS rows LIMIT %s) AS counted",  # noqa: S608
            (min(limit, _LARGEST_LIMIT),),
        ).fetchone()
        return int(rows[0])


def estimated_rows(tables: Sequence[str], max_runtime: timedelta) -> int:
    """Return the tables' rows as PostgreSQL's planner estimates them, by statistics and the size of the files.

    Rows that were deleted since the last vacuum may be among them.

    Raises:
      CountFailed, peewee.PeeweeException: As `count_stale`.
    """
    with _bounded(max_runtime):
        explained: Any = database.execute_sql(f"EXPLAIN (FORMAT JSON) {_all_rows(tables)}", ()).fetchone()
        return int(explained[0][0]["Plan"]["Plan Rows"])


def _rows_of(tables: Sequence[str], bound: int, max_runtime: timedelta, estimate: int | None = None) -> int | None:
    """Return the tables' rows: exact below the bound, an estimate of at least the bound above; None if unknown.

    Raises:
      CountFailed, peewee.PeeweeException: As `count_stale`, but not if the count took too long.
    """
    estimate = _in_time(estimated_rows, tables, max_runtime) if estimate is None else estimate
    counted = _in_time(count_rows, tables, bound, max_runtime)
    if counted is None:
        return estimate
    return counted if counted < bound else max(counted, estimate or 0)


def _count_share(
    tables: Sequence[str],
    count: Callable[..., Backlog],
    share: Fraction,
    max_runtime: timedelta,
    *,
    at_least: int = 1,
    most: int | None = None,
) -> tuple[Backlog | None, int | None]:
    """Count stale rows, and rows of the tables as far as it takes to tell whether more than the share are stale.

    Returns the stale rows (None: the count took too long; not exact: more than the share) and all rows (None: unknown).
    All rows are an estimate only if the table has 100,000 rows and enough for the stale ones to be within the share.

    Parameters:
      count: Counts the stale rows, up to its argument `limit`.
      at_least: The number of stale rows from which the share matters.
      most: The stale rows are counted no further than this.

    Raises:
      CountFailed: PostgreSQL rejected a count.
      peewee.PeeweeException: The database does not answer.
    """
    estimate = _in_time(estimated_rows, tables, max_runtime)
    bound = max(_EXACT, ceil(share * (estimate or 0)))
    stale = _in_time(count, limit=bound if most is None else min(bound, most))
    if stale is not None and stale.exact and stale.rows < at_least:
        return stale, estimate
    needed = 0 if stale is None else ceil(stale.rows / share)
    return stale, _rows_of(tables, max(_EXACT, needed), max_runtime, estimate)


def _in_time(count: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T | None:
    try:
        return count(*arguments, **options)
    except CountFailed as error:
        if not error.timed_out:
            raise
        logger.warning("Could not count rows in time", error=str(error))
        return None


def _all_rows(tables: Sequence[str]) -> str:
    return " UNION ALL ".join(f"SELECT 1 FROM {escaped(name)}" for name in tables)  # noqa: S608 - names of the catalog, quoted


def _names_of(stages: Sequence[Stage]) -> list[str]:
    """Return the names of the tables of these stages, with those of dependents in the same database."""
    found = {quoted_name(each.model) for each in stages if isinstance(each, TableStage)}
    graphs = [graph for each in stages if is_bounded(each) and (graph := graph_of(each)) is not None]
    return sorted(found | {link.table for graph in graphs for link in graph.links if link.database == graph.database})


def _by_table(names: Sequence[str]) -> list[list[str]]:
    """Return names of tables, grouped by the table that they name with or without its schema."""
    if len(names) < 2:
        return [[name] for name in names]
    found = database.execute_sql(
        "SELECT array_agg(name) FROM unnest(%s::text[]) AS name GROUP BY coalesce(to_regclass(name)::text, name)",
        (list(names),),
    )
    return [grouped for (grouped,) in found.fetchall()]


def _count_time(max_runtime: timedelta) -> timedelta:
    return min(_MAX_COUNT_TIME, max_runtime / _PART_OF_RUN)


@contextmanager
def _bounded(max_runtime: timedelta) -> Iterator[None]:
    with _failing_counts(), time_limit(_count_time(max_runtime)):
        yield


@contextmanager
def _failing_counts() -> Iterator[None]:
    try:
        yield
    except PeeweeException as error:
        if is_unavailable(error):
            raise
        raise CountFailed(error) from error
