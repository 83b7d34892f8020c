"""Links to the dependents of the rows that a sweep deletes, for `plan`, `doctor`, the guard and the first run's log.

`branches_of` describes each link of a stage's graph. `sampled` adds what happens to the first stale rows, and `counted`
the number of dependents.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from peewee import Column, PeeweeException, ProgrammingError

from housekeeping.core.logs import error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.database.catalog import escaped, quoted, table_ids
from housekeeping.database.connection import database, shorten_time_limits
from housekeeping.database.errors import is_connection_lost, is_timeout
from housekeeping.database.queries import condition_sql
from housekeeping.ledger.runs import Counts, RunRow, past_runs
from housekeeping.sweeps.actions import Delete, archiving, delete_of, graph_of, is_bounded
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.dependents import Graph, Link
from housekeeping.sweeps.keyset import held_condition
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.rows import Call
from housekeeping.sweeps.stage import DETAILS, Backlog, Stage
from housekeeping.sweeps.table_stage import TableStage

logger = named_logger(__name__)

#: Stale rows that are looked up in each table of dependents.
SAMPLE: Final = 100
#: Time to look them up, or to count them. A link may lead from one stale row to millions of others.
_TIME: Final = timedelta(seconds=2)
_DEPENDENTS: Final = "dependents"
#: Dependents that a plan counts exactly. Above it, those of the first `SAMPLE` stale rows are taken for usual.
COUNTED: Final = 100_000


@dataclass(frozen=True, slots=True)
class TreeBranch:
    """A link of the graph, and how the deletion by one stage affects it.

    Attributes:
      sweep, stage: The stage that deletes the rows, of this sweep.
      path: The links that lead from the deleted rows to it; it is the last one.
      reached: Whether the rows are also deleted by another link.
      is_new: Whether the last run of the sweep did not know the table.
      others: Stages of declared sweeps that hold or archive rows of the table, if its rows are deleted, by the sweep's
        name.
      referenced_rows: How many of the sampled stale rows it keeps from being deleted, or have held rows behind it; None
        if not counted.
      sampled_rows: How many stale rows were looked up.
      rows: How many dependents the deletion reaches by this link; None if not counted.
      is_exact: Whether they were all counted; else the number is an estimate.
      at_most: Whether fewer may be changed, because other dependents keep their parents.
    """

    sweep: Sweep
    stage: TableStage
    path: tuple[Link, ...]
    reached: bool = False
    is_new: bool = False
    others: tuple[tuple[str, TableStage | PartitionStage], ...] = ()
    referenced_rows: int | None = None
    sampled_rows: int | None = None
    rows: int | None = None
    is_exact: bool = False
    at_most: bool = False

    @property
    def link(self) -> Link:
        """The link."""
        return self.path[-1]

    @property
    def is_bounded(self) -> bool:
        """Whether the stage deletes dependents itself, in separate transactions; otherwise PostgreSQL does."""
        return is_bounded(self.stage)

    @property
    def handled(self) -> bool:
        """Whether the action of the stage is a custom one, which may delete the dependents itself."""
        delete = delete_of(self.stage)
        return delete is not None and type(delete).write is not Delete.write

    @property
    def holding(self) -> str:
        """Names of the declared sweeps that hold rows of its table; empty without one."""
        return ", ".join(dict.fromkeys(name for name, stage in self.others if stage.hold is not None))

    @property
    def archiving(self) -> str:
        """Names of the declared sweeps whose archives miss the deleted dependents; empty without one."""
        if self.is_bounded and archiving(self.stage.action) is not None:
            return ""
        return ", ".join(dict.fromkeys(name for name, stage in self.others if _archives(stage)))

    @property
    def restricts(self) -> bool:
        """Whether PostgreSQL refuses to delete a referenced row."""
        if self.handled or (self.reached and "NO ACTION" in str(self.link.on_delete)):
            return False
        return self.link.decision is None

    @property
    def keeps(self) -> bool:
        """Whether a row with such a dependent stays."""
        return self.restricts or self.link.decision == "keep"

    @property
    def deletes_held_rows(self) -> bool:
        """Whether PostgreSQL may delete rows that a declared sweep holds."""
        return bool(self.holding) and not self.is_bounded and self.referenced_rows != 0

    @property
    def countable(self) -> bool:
        """Whether indexes can count the rows that it reaches."""
        here = self.sweep.database
        return all(each.indexed and each.readable and each.database == here for each in self.path)

    @property
    def batches(self) -> int | None:
        """Number of transactions for its rows; None if unknown, 0 if they are changed with their parents."""
        if not self.is_bounded or self.link.decision == "keep":
            return 0
        return None if self.rows is None else -(-self.rows // self.stage.batch_size)

    @property
    def rows_in_words(self) -> str:
        """The number of its dependents as text."""
        if self.rows is None:
            return "unknown"
        return f"{'at most ' * self.at_most}{'' if self.is_exact else 'about '}{self.rows:,}"

    @property
    def batches_in_words(self) -> str:
        """The number of transactions for its rows as text."""
        return "unknown" if self.batches is None else f"{self.batches:,}" if self.batches else "-"

    @property
    def index_in_words(self) -> str:
        """Whether there is an index, as a word."""
        return "yes" if self.link.indexed else "missing"

    @property
    def level(self) -> Literal["fine", "warning"]:
        """``warning`` if the link needs a remedy, otherwise ``fine``."""
        return "warning" if self.way_out else "fine"

    @property
    def text(self) -> str:
        """Description of the link and its effect, in one line."""
        link = self.link
        rule = "by a Reference" if link.on_delete is None else f"ON DELETE {link.on_delete}"
        declared = f"{link.table} ({', '.join(link.columns)}) references {link.parent}, {rule}"
        text = f"{declared}, {'indexed' if link.indexed else 'not indexed'}: {self._effect()}"
        text += "; the table is new since the last run" * self.is_new
        return text if len(self.path) == 1 else f"{text}; {self.path_in_words}"

    @property
    def path_in_words(self) -> str:
        """The path, such as ``cart <- item (CASCADE) <- note (RESTRICT)``."""
        links = [f"{each.table} ({(self.is_bounded and each.decision) or each.on_delete})" for each in self.path]
        return " <- ".join([self.path[0].parent, *links])

    @property
    def way_out(self) -> str | None:
        """Remedy; None if none is needed."""
        link, predicate, steps = self.link, self.sweep.predicate_name, []
        if link.index_statement is not None and (len(self.path) == 1 or link.large):
            steps.append(link.index_statement)
        if self.restricts and self.referenced_rows != 0:
            steps.append(f"leave referenced rows out of {predicate}, or {self.sweep.decides_by.format(link.name)}")
        if self.deletes_held_rows or self.archiving:
            steps.append(
                f"leave rows with rows of {link.table} out of {predicate}, or declare the foreign key "
                "ON DELETE RESTRICT"
            )
        return "; ".join(steps) or None

    def as_json(self) -> dict[str, Any]:
        """One element of ``dependents`` in ``housekeeping plan --json``."""
        link = self.link
        return {
            "stage": self.stage.name,
            "depth": len(self.path),
            "name": link.name,
            "table": link.table,
            "columns": link.columns,
            "parent": link.parent,
            "decision": link.decision,
            "on_delete": link.on_delete,
            "where": link.where,
            "indexed": link.indexed,
            "large": link.large,
            "database": link.database,
            "path": self.path_in_words,
            "rows": self.rows,
            "exact": self.is_exact,
            "at_most": self.at_most,
            "batches": self.batches,
            "new": self.is_new,
            "referenced_rows": self.referenced_rows,
            "sampled_rows": self.sampled_rows,
            "level": self.level,
            "text": self.text,
            "way_out": self.way_out,
        }

    def _effect(self) -> str:
        scan = "" if self.link.indexed else f"; each {'batch' if self.is_bounded else 'deleted row'} reads all of it"
        archived = archiving(self.stage.action) is not None
        again = "; every run calls the function of its Call for them again" * isinstance(self.stage.action, Call)
        if self.handled:
            return f"the sweep's own action decides about its rows{scan}"
        if self.link.decision == "keep":
            return f"{self._kept('stays')}{scan}"
        if self.is_bounded:
            change = "its rows are deleted"
            if self.link.decision == "clear":
                columns = ", ".join(self.link.cleared or self.link.columns)
                change = f"{columns} of its rows is set to {'its default' if self.link.defaults else 'NULL'}"
            return f"{change} first, in transactions of their own{self._of_others()}{scan}"
        if self.link.decision == "delete":
            kept = " or archived" if archived else ""
            return f"its rows are deleted as well, and not counted{kept}{self._of_others()}{scan}"
        if self.link.decision == "clear":
            kept = "; a restore does not change them back" if archived else ""
            return f"its rows are changed as well, and not counted{kept}{scan}"
        if not self.restricts:
            return f"its rows are deleted as well by another chain; any other row prevents the deletion{scan}"
        return f"{self._kept('cannot be deleted')}{again}{'' if self.referenced_rows is not None else scan}"

    def _kept(self, what: str) -> str:
        if self.referenced_rows is None:
            return f"referenced rows {what.replace('stays', 'stay')}{self._why_not_counted()}"
        if not self.sampled_rows:
            return f"no row is {self.sweep.rows_called} now"
        if self.referenced_rows == 0:
            return f"none of {self._sample} is referenced"
        one = self.referenced_rows == 1
        what = what if one else what.replace("stays", "stay")
        return f"{self.referenced_rows} of {self._sample} {'is' if one else 'are'} referenced and {what}"

    def _why_not_counted(self) -> str:
        named = [(link, "it" if link is self.link else link.table) for link in self.path]
        texts = [f"{name} has no index" for link, name in named if not link.indexed]
        texts += [f"this role cannot read {name}" for link, name in named if not link.readable]
        texts += [
            f"{name} is in the database {link.database!r}"
            for link, name in named
            if link.database != self.sweep.database
        ]
        return f" (not counted, {texts[0]})" if texts else ""

    def _of_others(self) -> str:
        """Return what the deletion does to rows that a declared sweep holds or archives."""
        text = ""
        if self.holding and self.is_bounded:
            text = f"; those that {self.holding} holds stay, with the rows above them"
        elif self.holding and self.referenced_rows is None:
            text = f"; also those that {self.holding} holds"
        elif self.holding:
            number, verb = self.referenced_rows or "none", "lead" if (self.referenced_rows or 1) != 1 else "leads"
            text = f"; {number} of {self._sample} {verb} to rows that {self.holding} holds"
        return f"{text}; they do not reach the archive of {self.archiving}" if self.archiving else text

    @property
    def _sample(self) -> str:
        rows = self.sweep.rows_called
        return f"the only {rows} row" if self.sampled_rows == 1 else f"the first {self.sampled_rows} {rows} rows"


def branches_of(
    sweep: Sweep, stages: Sequence[Stage], declared: Iterable[Sweep] = (), known: Collection[str] | None = None
) -> list[TreeBranch]:
    """Return the links to the rows that the stages delete.

    Parameters:
      declared: All sweeps; those on a table whose rows are deleted along are named.
      known: Tables of dependents that the last run knew; None if there was none.

    Raises:
      DependentsRefused: As `graph_of`.
      peewee.PeeweeException: If the database cannot be read.
    """
    found = []
    for stage in stages:
        graph = graph_of(stage)
        if graph is None:
            continue
        assert isinstance(stage, TableStage)
        deleted = {each.table_id for each in graph.links if each.decision == "delete"}
        for link in graph.links:
            is_new = is_bounded(stage) and known is not None and link.table not in known
            found.append(TreeBranch(sweep, stage, graph.path_to(link), link.table_id in deleted, is_new))
    # A cascade from a table to itself passes the sweep's own hold and archive by.
    by_name = {each.name: each for each in (*declared, sweep)} if found else {}
    others = [each for other in by_name.values() for each in _stages_on(other, sweep.database)]
    if not others:
        return found
    of_table: dict[int | None, list[tuple[str, TableStage | PartitionStage]]] = {}
    for number, each in zip(table_ids([stage.model for _, stage in others]), others, strict=True):
        of_table.setdefault(number, []).append(each)
    return [
        replace(each, others=tuple(of_table.get(each.link.table_id, ())))
        if each.link.decision == "delete" and each.link.database == sweep.database
        else each
        for each in found
    ]


def known_tables(history: Iterable[RunRow]) -> frozenset[str] | None:
    """Return the tables of dependents that the newest of these runs recorded; None if no run recorded any.

    Parameters:
      history: Runs of one worker, newest first.
    """
    for row in history:
        details = row.counts.get(DETAILS)
        if isinstance(details, dict) and isinstance(tables := details.get(_DEPENDENTS), dict):
            return frozenset(tables)
    return None


def read_known_tables(sweep: Sweep, stages: Iterable[Stage]) -> frozenset[str] | None:
    """Return `known_tables` of the sweep's past runs; None if it has no such stage, or before ``housekeeping init``.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    if not any(is_bounded(stage) for stage in stages):
        return None
    with suppress(ProgrammingError), database.atomic():
        return known_tables(past_runs(sweep.name))
    return None


def sampled_branches(
    sweep: Sweep,
    stages: Sequence[Stage],
    now: datetime,
    declared: Iterable[Sweep] = (),
    known: Collection[str] | None = None,
) -> list[TreeBranch]:
    """Return `branches_of` with counts of the first stale rows: those that stay, or lead to held rows.

    Only with an index at every link, and for a limited time. Requires a transaction.

    Raises:
      DependentsRefused, peewee.PeeweeException: As `branches_of`.
    """
    return [
        _with_sample(each, now) if each.countable and (each.keeps or each.deletes_held_rows) else each
        for each in branches_of(sweep, stages, declared, known)
    ]


def note_branches(sweep: Sweep, stages: Sequence[Stage], history: Sequence[RunRow]) -> Counts:
    """Log each link to the rows that the stages delete in the first run, and those of new tables in later ones.

    Returns the tables of dependents as a count, so that the next run notices new ones.

    Raises:
      DependentsRefused, peewee.PeeweeException: As `graph_of`.
    """
    known = known_tables(history)
    logged = [stage for stage in stages if getattr(stage, "logs_links", True)]
    for each in branches_of(sweep, logged, known=known) if known is not None or not history else ():
        if each.is_new or (not history and each.way_out is not None):
            logger.warning("Deleted rows are referenced", text=each.text, way_out=each.way_out)
        elif not history:
            logger.info("Deleted rows are referenced", text=each.text)
    graphs = [graph_of(stage) for stage in stages if is_bounded(stage)]
    tables: dict[str, Any] = {link.table: {} for graph in graphs if graph is not None for link in graph.links}
    return {DETAILS: {_DEPENDENTS: tables}} if tables else {}


def _stages_on(sweep: Sweep, database_name: str) -> list[tuple[str, TableStage | PartitionStage]]:
    """Return the stages of a sweep with a hold or an archive in a database, with the name of the sweep."""
    if sweep.database != database_name:
        return []
    try:
        declared = sweep.declared_stages()
    except Exception as error:  # its own plan, run and `doctor` report it
        logger.debug("Stages could not be read", worker=sweep.name, error=error_line(error))
        return []
    return [
        (sweep.name, stage)
        for stage in declared
        if isinstance(stage, TableStage | PartitionStage) and (stage.hold is not None or _archives(stage))
    ]


def _archives(stage: TableStage | PartitionStage) -> bool:
    return isinstance(stage, TableStage) and archiving(stage.action) is not None


def _sample(stage: TableStage, now: datetime, columns: Sequence[str], limit: int) -> tuple[str, list[Any]]:
    """Return the SQL of the first stale rows, with these columns as ``c0``, ``c1`` and so on, and its parameters."""
    meta: Any = stage.model._meta
    rows = stage.first_stale(now, [Column(meta.table, name) for name in columns], limit, in_order=True)
    sql, parameters = database.get_sql_context().sql(rows).query()
    return sql, parameters


def _with_sample(branch: TreeBranch, now: datetime) -> TreeBranch:
    path = branch.path
    rows, values = _sample(branch.stage, now, path[0].parent_columns, SAMPLE)
    tables = ", ".join(f"{link.source} AS link_{place}" for place, link in enumerate(path))
    found = escaped(f"SELECT FROM {tables} WHERE {_joined(path)}")
    try:
        held, of_hold = _held(branch, now)
        # Names come from the catalog, quoted by PostgreSQL.
        sql = f"SELECT count(*), count(*) FILTER (WHERE EXISTS ({found}{held})) FROM ({rows}) AS sample"  # noqa: S608
        with _in_time():
            row: Any = database.execute_sql(sql, [*of_hold, *values]).fetchone()
    except Exception as error:
        if is_connection_lost(error):
            raise
        # It took too long, or the hold of another sweep fails, which must not fail the plan of this one.
        logger.debug("Referenced rows could not be counted", error=error_line(error))
        return branch
    return replace(branch, sampled_rows=row[0], referenced_rows=row[1])


def counted_branches(branches: Sequence[TreeBranch], stale: Mapping[str, Backlog], now: datetime) -> list[TreeBranch]:
    """Return branches with the number of dependents that they reach. Requires a transaction.

    Up to `COUNTED` dependents of a stage are counted exactly. Above it, their number is estimated: from the dependents
    of the first stale rows, or from the sizes of the tables, as it is behind a missing index of a large table.

    Parameters:
      stale: Stage -> its stale rows.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    numbers: dict[str, dict[Link, tuple[int, bool]]] = {}
    for each in branches:
        name = each.stage.name
        if name not in numbers:
            graph = graph_of(each.stage)
            numbers[name] = {} if graph is None else _numbers(each.stage, graph, now, stale[name])
    counted = [numbers[each.stage.name].get(each.link, (None, False)) for each in branches]
    found = [
        replace(each, rows=rows, is_exact=is_exact) for each, (rows, is_exact) in zip(branches, counted, strict=True)
    ]
    keeping = {each.stage.name for each in found if (each.keeps or each.holding) and each.rows != 0}
    return [replace(each, at_most=bool(each.rows and not each.keeps and each.stage.name in keeping)) for each in found]


def _numbers(stage: TableStage, graph: Graph, now: datetime, stale: Backlog) -> dict[Link, tuple[int, bool]]:
    """Return the dependents by link, and whether they are all counted."""
    if stage.is_distributed:  # Citus refuses the recursion, and the coordinator has no sizes of shards
        return {}
    known, is_complete, scale = dict[Link, int](), False, 1.0
    if stale.exact and stale.rows <= COUNTED:
        known, is_complete = _counted_in_time(stage, graph, now, stale.rows)
    is_exact = is_complete
    if not is_complete and stale.rows > SAMPLE:
        known, is_complete = _counted_in_time(stage, graph, now, SAMPLE)
        scale = stale.rows / SAMPLE
    found = dict[Link, tuple[int, bool]]()
    tables = {graph.root: graph.root_rows, **{each.table: each.rows for each in graph.links}}
    for link in graph.links:
        counted = known.get(link)
        if counted is not None and is_complete:
            found[link] = round(counted * scale), is_exact
            continue
        above = [rows for each, (rows, _) in found.items() if each.decision == "delete" and each.table == link.parent]
        parents = sum(above) + (stale.rows if link.parent == graph.root else 0)
        usual = round(parents * link.rows / max(1, tables[link.parent]))
        found[link] = max(counted or 0, min(usual, link.rows)), False
    return found


def backlog_of_dependents(stage: TableStage, now: datetime, stale: Backlog) -> Backlog:
    """Return the number of dependents that are deleted or cleared with these stale rows; many are estimated.

    Raises:
      peewee.PeeweeException: If the database cannot be read.
    """
    graph = graph_of(stage)
    numbers = {} if graph is None else _numbers(stage, graph, now, stale)
    found = [number for link, number in numbers.items() if link.decision in ("delete", "clear")]
    return Backlog(sum(rows for rows, _ in found), all(is_exact for _, is_exact in found))


def _counted_in_time(stage: TableStage, graph: Graph, now: datetime, roots: int) -> tuple[dict[Link, int], bool]:
    try:
        with _in_time():
            return count_dependents(stage, graph, now, roots, COUNTED)
    except PeeweeException as error:
        if not is_timeout(error):
            raise
        logger.debug("Dependents could not be counted", error=error_line(error))
        return {}, False


def count_dependents(
    stage: TableStage, graph: Graph, now: datetime, roots: int, limit: int
) -> tuple[dict[Link, int], bool]:
    """Count the dependents of the first stale rows by link, up to the limit in all.

    Returns the numbers and whether that was all of them. A link in another database, to an unreadable table, or behind
    a missing index of a large table has no number.

    Raises:
      peewee.PeeweeException: The statement took too long, or the database does not answer.
    """
    links: dict[int, Link] = {}
    reached: dict[str, list[int]] = {graph.root: [0]}
    for number, link in enumerate(graph.links, start=1):
        is_fast = link.readable and (link.indexed or not link.large)
        if is_fast and link.database == link.parent_database == graph.database and link.parent in reached:
            links[number] = link
            if link.decision == "delete":
                reached.setdefault(link.table, []).append(number)
    if not links:
        return {}, True
    columns = _referenced(graph, graph.root)
    rows, parameters = _sample(stage, now, columns, roots)
    values = ", ".join(f"c{number}::text" for number, _ in enumerate(columns))
    below = [_rows_below(number, link, reached[link.parent], graph) for number, link in links.items()]
    # Names come from the catalog, quoted by PostgreSQL.
    # Breadth first: PostgreSQL computes no more rows of the recursion than the limit asks for.
    sql = (
        f"WITH RECURSIVE {_FOUND} (link, id, vals) AS (SELECT 0, ''::text, ARRAY[{values}] FROM ({rows}) AS sample "  # noqa: S608
        f"UNION SELECT next.* FROM {_FOUND} CROSS JOIN LATERAL ({' UNION ALL '.join(below)}) AS next) "
        f"SELECT link, count(*) FROM (SELECT link FROM {_FOUND} WHERE link > 0 LIMIT %s) AS counted GROUP BY link"
    )
    numbers = dict[int, int](database.execute_sql(sql, [*parameters, limit + 1]).fetchall())
    return {link: numbers.get(number, 0) for number, link in links.items()}, sum(numbers.values()) <= limit


#: Name of the recursion; no table should have it, because the condition of a `Reference` may name its table.
_FOUND: Final = "housekeeping_found"


def _referenced(graph: Graph, table: str) -> tuple[str, ...]:
    """Return the columns of a table by which its dependents are found."""
    return tuple(dict.fromkeys(column for link in graph.links_of(table) for column in link.parent_columns))


def _rows_below(number: int, link: Link, above: Sequence[int], graph: Graph) -> str:
    """Return the SQL of the dependents of one row of the recursion by a link.

    Parameters:
      above: Numbers of the links whose rows can have these dependents; 0 for the deleted rows themselves.
    """
    known, wanted = _referenced(graph, link.parent), _referenced(graph, link.table)
    compared = [
        f"{quoted(column)} = ({_FOUND}.vals[{known.index(referenced) + 1}])::{sql_type}"
        for column, referenced, sql_type in zip(link.columns, link.parent_columns, link.parent_types, strict=True)
    ]
    compared.append(f"{_FOUND}.link IN ({', '.join(map(str, above))})")
    compared += [] if link.where is None else [f"({link.where})"]
    values = ", ".join(f"{quoted(column)}::text" for column in wanted if link.decision == "delete")
    sql = (
        f"SELECT {number}, tableoid::text || ctid::text, ARRAY[{values}]::text[] "  # noqa: S608
        f"FROM {link.table} WHERE {' AND '.join(compared)}"
    )
    return escaped(sql)


@contextmanager
def _in_time() -> Iterator[None]:
    """Run the block with a limited time for each statement, in a savepoint that is rolled back."""
    with database.atomic() as savepoint:
        shorten_time_limits(_TIME)
        yield
        savepoint.rollback()  # restores the limits


def _joined(path: Sequence[Link]) -> str:
    """Return the condition that joins the tables of a path, ``link_0`` and so on, with the sample."""
    pairs = [f"link_0.{quoted(name)} = sample.c{number}" for number, name in enumerate(path[0].columns)]
    for place, link in enumerate(path[1:], start=1):
        for name, referenced in zip(link.columns, link.parent_columns, strict=True):
            pairs.append(f"link_{place}.{quoted(name)} = link_{place - 1}.{quoted(referenced)}")
    return " AND ".join(pairs)


def _held(branch: TreeBranch, now: datetime) -> tuple[str, list[Any]]:
    """Return the condition, with its parameters, that a declared sweep holds the row of the last table."""
    conditions, values = [], []
    for _, stage in branch.others:
        if stage.hold is None:
            continue
        held = held_condition(stage.hold, stage.model, now)
        condition, parameters = condition_sql(held, stage.model, f"link_{len(branch.path) - 1}")
        conditions.append(f"({condition})")
        values += parameters
    return (f" AND ({' OR '.join(conditions)})" if conditions else ""), values
