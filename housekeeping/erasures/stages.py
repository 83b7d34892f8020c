"""Stages of an erasure, and the conditions that the rows of a table belong to a subject.

A row belongs to it if links lead from the row to the subject's row, whose values the erasure has stored. So the
conditions hold as well after that row was deleted. Rows are changed or deleted before those that they depend on, and a
row that is kept is changed only once nothing that depends on it is left to do.
"""

# ruff: noqa: S608 - names come from the catalog, quoted; values are parameters

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, ClassVar, Final, TypeVar

from peewee import SQL, Case, Column, EnclosedNodeList, Expression, Model, Tuple

from housekeeping.core.errors import DeclarationError, HousekeepingError
from housekeeping.database.catalog import escaped, key_of, of_any_length, sql_name, table_of
from housekeeping.database.connection import database, handle_of
from housekeeping.database.errors import NO_RIGHT
from housekeeping.erasures.graph import Branch, Reach, TableName
from housekeeping.sweeps.actions import Delete
from housekeeping.sweeps.cascade import CascadeStage
from housekeeping.sweeps.cascade_statements import Sql
from housekeeping.sweeps.dependents import Link
from housekeeping.sweeps.keyset import Hold
from housekeeping.sweeps.stage import DETAILS, Batch, BatchResult, Position, Unrecorded, merged
from housekeeping.sweeps.table_stage import TableStage, Write

T = TypeVar("T")

#: Values of a link in another database that are passed as one array.
_MOST_VALUES: Final = 100_000
_NOTHING: Final[Sql] = ("FALSE", [])


@dataclass(slots=True)
class Conditions:
    """Queries of the rows that belong to a subject.

    Attributes:
      versions: The values that the subject's row had, by column, as PostgreSQL writes them; the newest version last.
    """

    reach: Reach
    versions: Sequence[Mapping[str, str | None]]
    #: Link of another database -> the values to which its rows refer. Links with the same name may have other parents.
    _known: dict[Link, list[tuple[Any, ...]]] = field(default_factory=dict, init=False)

    def of_root(self, alias: str) -> Sql:
        """Return the condition that a row is the subject's."""
        model = self.reach.model_of(self.reach.root)
        with database.using(self.reach.root[0]):
            key = typed_key(model)
        texts = [f"{alias}.{name} = ANY(%s::text[]::{kind}[])" for name, kind in key.items()]
        return " AND ".join(texts), [[self.versions[-1][each.column_name]] for each in key_of(model)]

    def members(self, table: TableName) -> Sql:
        """Return the query of the keys of the rows of a table that belong to the subject, by any link."""
        statement = _Statement(self)
        return statement.whole(*statement.members(table, key_names(self.reach, table)))

    def changeable(self, branch: Branch) -> Sql:
        """Return the query of the keys of the rows of a link that can be changed now."""
        statement, further = _Statement(self), list[Sql]()
        if not branch.deletes:
            further.append(_differs(branch))
            text, parameters = statement.waits_for(branch, "t")
            if text != _NOTHING[0]:
                further.append((f"NOT ({text})", parameters))
        return statement.whole(*statement.rows(branch, key_names(self.reach, branch.table), further))

    def left(self, branch: Branch, limit: int) -> int:
        """Count the rows of a link that are still to be deleted or anonymised, up to a limit."""
        if not (branch.deletes or branch.values):
            return 0
        statement = _Statement(self)
        text, parameters = statement.rows(branch, (), [] if branch.deletes else [_differs(branch)])
        return self._count(branch.link.database, statement, f"{text} LIMIT {limit}", parameters)

    def kept(self, table: TableName, limit: int) -> int:
        """Count the subject's rows that stay as they are, up to a limit."""
        statement, place = _Statement(self), ("housekeeping_table", "housekeeping_row")
        of_table = [each for each in self.reach.branches if each.table == table]
        changing = [each for each in of_table if each.deletes or each.values]
        queries = [statement.rows(each, place, with_places=True) for each in (*self.reach.kept_by(table), *changing)]
        text, number = queries[0][0], len(queries) - len(changing)
        for at, (query, _) in enumerate(queries[1:], start=1):
            text = f"{text} {'UNION' if at < number else 'EXCEPT'} {query}"
        return self._count(table[0], statement, f"{text} LIMIT {limit}", [each for _, of in queries for each in of])

    @staticmethod
    def _count(of_database: str, statement: _Statement, text: str, parameters: Sequence[Any]) -> int:
        query, values = statement.whole(f"SELECT count(*) FROM ({text}) AS found", parameters)
        row: Any = handle_of(of_database).execute_sql(query, values).fetchone()
        return int(row[0])

    def values(self, branch: Branch) -> list[tuple[Any, ...]]:
        """Return the values in the parent's database to which rows of another database refer."""
        link = branch.link
        if link in self._known:
            return self._known[link]
        statement = _Statement(self)
        text, parameters = statement.members(branch.parent, link.parent_columns)
        columns = ", ".join(f"{sql_name(each)}::text" for each in link.parent_columns)
        rows = self._fetch(
            statement,
            link.parent_database,
            f"SELECT DISTINCT {columns} FROM ({text}) AS t LIMIT {_MOST_VALUES + 1}",
            parameters,
        )
        if len(rows) > _MOST_VALUES:
            raise HousekeepingError(f"over {_MOST_VALUES:,} rows of {link.parent} are referred to by {link.name}")
        self._known[link] = [row for row in rows if None not in row]
        return self._known[link]

    def waiting(self, branch: Branch) -> list[tuple[Any, ...]]:
        """Return the values by which rows of another database refer to a row and are still to be erased."""
        statement, link = _Statement(self), branch.link
        to_do = [_own(branch), statement.waits_for(branch, "t")]
        text, parameters = statement.rows(branch, link.columns, [_joined(" OR ", to_do)])
        columns = ", ".join(f"{sql_name(each)}::text" for each in link.columns)
        return self._fetch(statement, link.database, f"SELECT DISTINCT {columns} FROM ({text}) AS t", parameters)

    @staticmethod
    def _fetch(statement: _Statement, of_database: str, text: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        query, values = statement.whole(text, parameters)
        return list(handle_of(of_database).execute_sql(query, values).fetchall())


class _Statement:
    """One statement about rows that belong to a subject. Its length grows with the links, not with the paths.

    The members of a table to which several links lead are a CTE, so that each table below refers to it by name.
    """

    def __init__(self, conditions: Conditions) -> None:
        self._conditions, self._reach = conditions, conditions.reach
        #: Table -> the CTE of its rows.
        self._shared: dict[TableName, Sql] = {}

    def whole(self, text: str, parameters: Sequence[Any]) -> Sql:
        """Return the text with the CTEs that it refers to."""
        shared = list(self._shared.values())
        begin = f"WITH RECURSIVE {', '.join(each for each, _ in shared)} " if shared else ""
        return f"{begin}{text}", [*(value for _, values in shared for value in values), *parameters]

    def rows(
        self, branch: Branch, columns: Sequence[str], further: Sequence[Sql] = (), *, with_places: bool = False
    ) -> Sql:
        """Return the query of the rows ``t`` of a link that belong to the subject by it and meet further conditions."""
        source = rows_with_places(branch.link.table, branch.link.where) if with_places else f"{_source(branch)} AS t"
        where, parameters = _joined(" AND ", [self._belongs(branch), *further])
        return f"SELECT {', '.join(f't.{sql_name(each)}' for each in columns)} FROM {source} WHERE {where}", parameters

    def _belongs(self, branch: Branch) -> Sql:
        link = branch.link
        own = [f"t.{sql_name(each)}" for each in link.columns]
        if branch.parent == self._reach.root:
            versions = [tuple(row.get(each) for each in link.parent_columns) for row in self._conditions.versions]
            known = list(dict.fromkeys(each for each in versions if None not in each))
            return _among(branch, own, known) if known else _NOTHING
        if not branch.is_local:
            return _among(branch, own, self._conditions.values(branch))
        text, parameters = self.members(branch.parent, link.parent_columns)
        return f"({', '.join(own)}) IN ({text})", parameters

    def members(self, table: TableName, columns: Sequence[str]) -> Sql:
        """Return the query of the values of rows of a table that belong to the subject, by any link."""
        names = ", ".join(f"t.{sql_name(each)}" for each in columns)
        if table == self._reach.root:
            where, parameters = self._conditions.of_root("t")
            return f"SELECT {names} FROM {escaped(table[1])} AS t WHERE {where}", parameters
        into, trees = self._reach.into(table), self._reach.trees_of(table)
        if not into:
            return f"SELECT {names} FROM {escaped(table[1])} AS t WHERE FALSE", []
        if len(into) == 1 and not trees:
            return self.rows(into[0], columns)
        name = f"housekeeping_of_{self._reach.tables.index(table)}"
        if table not in self._shared:
            self._shared[table] = self._cte(name, table, into, trees)
        return f"SELECT {names} FROM {name} AS t", []

    def _cte(self, name: str, table: TableName, into: Sequence[Branch], trees: Sequence[Branch]) -> Sql:
        columns = list(dict.fromkeys((*key_names(self._reach, table), *_compared(self._reach, table))))
        parts = [self.rows(each, columns) for each in into]
        text = " UNION ".join(text for text, _ in parts)
        if trees:
            names = ", ".join(f"t.{sql_name(each)}" for each in columns)
            below = [f"SELECT {names} FROM {_source(each)} AS t WHERE {_refers(each, 't', 'above')}" for each in trees]
            next_rows = f"LATERAL ({' UNION ALL '.join(below)})"
            text = f"{text} UNION SELECT next.* FROM {name} AS above CROSS JOIN {next_rows} AS next"
        return f"{name} AS ({text})", [value for _, values in parts for value in values]

    def waits_for(self, branch: Branch, alias: str) -> Sql:
        """Return the condition that a row of a link has dependents that are still to be deleted or anonymised."""
        found, has_more = list[Sql](), False
        for below in self._reach.below(branch.table) if _leads_down(branch) else ():
            if not below.is_local:
                own = [f"{alias}.{sql_name(each)}" for each in below.link.parent_columns]
                found += self._waiting_among(below, own)
                continue
            text, parameters = _own(below, "c")
            if text != _NOTHING[0]:
                where = f"{_refers(below, 'c', alias)} AND {text}"
                found.append((f"EXISTS (SELECT FROM {_source(below)} AS c WHERE {where})", parameters))
            has_more |= _leads_down(below) and bool(self._reach.below(below.table))
        if has_more:
            found.append(self._waits_for_deeper(branch.table, alias))
        return _joined(" OR ", found)

    def _waiting_among(self, below: Branch, own: Sequence[str]) -> list[Sql]:
        waiting = self._conditions.waiting(below)
        return [_among(below, own, waiting)] if waiting else []

    def _waits_for_deeper(self, table: TableName, alias: str) -> Sql:
        """Return the condition that a row has dependents, at any depth, that are still to be deleted or anonymised.

        Each row of the recursion has the number of its table, and the values to which its dependents refer.
        """
        tables, steps, parameters = [table], list[str](), list[Any]()
        for place, at in enumerate(tables):  # it grows
            compared = _compared(self._reach, at)
            for below in self._reach.below(at):
                link = below.link
                above = [
                    f"(w.vals[{compared.index(name) + 1}])::{escaped(kind)}"
                    for name, kind in zip(link.parent_columns, link.parent_types, strict=True)
                ]
                if not below.is_local:
                    for text, values in self._waiting_among(below, above):
                        steps.append(f"SELECT -1, NULL::text[], TRUE WHERE w.place = {place} AND {text}")
                        parameters += values
                    continue
                own, values = _own(below)
                leads = _leads_down(below) and bool(self._reach.below(below.table))
                if leads and below.table not in tables:
                    tables.append(below.table)
                if leads or own != _NOTHING[0]:
                    number = tables.index(below.table) if leads else -1
                    pairs = zip(link.columns, above, strict=True)
                    same = " AND ".join(f"t.{sql_name(name)} = {value}" for name, value in pairs)
                    steps.append(
                        f"SELECT {number}, {_texts('t', _compared(self._reach, below.table) if leads else ())}, {own} "
                        f"FROM {_source(below)} AS t WHERE w.place = {place} AND {same}"
                    )
                    parameters += values
        return (
            "EXISTS (WITH RECURSIVE w (place, vals, waits) AS ("
            f"SELECT 0, {_texts(alias, _compared(self._reach, table))}, FALSE "
            f"UNION SELECT next.* FROM w CROSS JOIN LATERAL ({' UNION ALL '.join(steps)}) AS next) "
            "SELECT FROM w WHERE waits)",
            parameters,
        )


def _among(branch: Branch, own: Sequence[str], rows: Sequence[Sequence[Any]]) -> Sql:
    # As arrays: the values of lists are not part of the fingerprint of a predicate.
    types = [escaped(each) for each in branch.link.parent_types]
    arrays = [[row[number] for row in rows] for number in range(len(own))]
    if len(own) == 1:
        return f"{own[0]} = ANY(%s::text[]::{types[0]}[])", arrays
    given = ", ".join(f"%s::text[]::{kind}[]" for kind in types)
    return f"({', '.join(own)}) IN (SELECT * FROM unnest({given}))", arrays


def _leads_down(branch: Branch) -> bool:
    """Return whether rows that are kept by a link stay as they are until their dependents are done."""
    return branch.leads_on and not (branch.leads_back or branch.deletes)


def _own(branch: Branch, alias: str = "t") -> Sql:
    """Return the condition that a row of a link is itself still to be deleted or anonymised."""
    return ("TRUE", []) if branch.deletes else _differs(branch, alias) if branch.values else _NOTHING


def _compared(reach: Reach, table: TableName) -> list[str]:
    """Return the columns of a table to which other rows refer."""
    return list(dict.fromkeys(name for each in reach.below(table) for name in each.link.parent_columns))


def _refers(branch: Branch, alias: str, above: str) -> str:
    pairs = zip(branch.link.columns, branch.link.parent_columns, strict=True)
    return " AND ".join(f"{alias}.{sql_name(a)} = {above}.{sql_name(b)}" for a, b in pairs)


def _texts(alias: str, columns: Sequence[str]) -> str:
    return f"ARRAY[{', '.join(f'{alias}.{sql_name(each)}::text' for each in columns)}]::text[]"


def key_names(reach: Reach, table: TableName) -> list[str]:
    """Return the columns of a table's primary key; none for a table without one, whose rows are kept."""
    try:
        return [each.column_name for each in key_of(reach.model_of(table))]
    except DeclarationError:
        return []


def typed_key(model: type[Model]) -> dict[str, str]:
    """Return the primary key's columns with their types, written for SQL with parameters."""
    types = table_of(model).columns
    return {sql_name(each.column_name): escaped(of_any_length(types[each.column_name])) for each in key_of(model)}


def text_of(value: str, kind: str) -> str:
    """Return SQL that writes a key as text, so that equal values of citext and numeric have the same text."""
    if kind.rpartition(".")[2] == "citext":
        return f"lower({value}::text)"
    return f"trim_scale({value})::text" if kind == "numeric" else f"{value}::text"


def _source(branch: Branch) -> str:
    return escaped(branch.link.source)


def rows_with_places(table: str, where: str | None = None) -> str:
    """Return a FROM item ``t``: the rows of a table with their tableoid and ctid."""
    condition = "" if where is None else f" WHERE ({escaped(where)})"
    places = "tableoid AS housekeeping_table, ctid AS housekeeping_row"
    return f"(SELECT *, {places} FROM {escaped(table)}{condition}) AS t"


def _joined(by: str, parts: Sequence[Sql]) -> Sql:
    if not parts:
        return _NOTHING
    return f"({by.join(text for text, _ in parts)})", [value for _, values in parts for value in values]


def _differs(branch: Branch, alias: str = "t") -> Sql:
    texts, parameters = [], list[Any]()
    for name, value in branch.values.items():
        column = f"{alias}.{sql_name(name)}"
        texts.append(f"{column} IS NOT NULL" if value is None else f"{column}::text IS DISTINCT FROM %s")
        parameters += [] if value is None else [value]
    return f"({' OR '.join(texts)})", parameters


@dataclass(frozen=True, slots=True)
class WriteValues:
    """Action that writes the new values of a link into its rows.

    A row may belong to the subject by several links, such as a message to oneself. It gets the values of all of them at
    once, so that it is counted once.
    """

    conditions: Conditions
    branch: Branch

    counted_as = ("anonymised_rows",)

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        values = {name: self._value(name, self.branch) for name in self.branch.values}
        own = self.branch.table
        for other in (each for each in self.conditions.reach.branches if each.table == own and each.values):
            also = Stale(self.conditions, own, other)(batch.now)
            for name in other.values.keys() - self.branch.values:
                before = values.get(name, self._column(table, name))
                values[name] = Case(None, [(also, self._value(name, other))], before)
        changes = {self._column(table, name): value for name, value in values.items()}
        update: Any = table.model.update(changes).where(chosen).returning(*table.key)
        return Write([update.cte("changed")], self.counted_as)

    def _column(self, table: TableStage, name: str) -> Any:
        return table.model._meta.columns.get(name, Column(table.model._meta.table, name))

    def _value(self, name: str, branch: Branch) -> Any:
        return SQL(f"CAST(%s AS {escaped(branch.types[name])})", (branch.values[name],))


#: Kind of change in the numbers by table -> count of the rows of the stage's own table.
_OWN: Final = {"deleted": "deleted_rows", "anonymised": "anonymised_rows"}


class _WithoutIdentity:
    """Part of a stage that keeps keys and values of rows out of the ledger, the log and errors."""

    name: str
    model: type[Model]

    def prepare(self, batch: Batch) -> Any:
        return without_identity(super().prepare, batch)  # type: ignore[misc]

    def apply(self, batch: Batch, prepared: Any = None) -> BatchResult:
        result: BatchResult = without_identity(super().apply, batch, prepared)  # type: ignore[misc]
        return self._recorded(result)

    def after_all(self, batch: Batch, prepared: Any, positions: Sequence[Position]) -> BatchResult:
        return self._recorded(super().after_all(batch, prepared, positions))  # type: ignore[misc]

    def fallback(self, batch: Batch, error: BaseException) -> BatchResult | None:
        result: BatchResult | None = super().fallback(batch, error)  # type: ignore[misc]
        return result and self._recorded(result)

    def positions(self, batch: Batch, prepared: Any = None) -> list[Position]:
        found: list[Position] = without_identity(super().positions, batch, prepared)  # type: ignore[misc]
        return found

    def resumes_at(self, position: Position | None) -> Position | None:
        return None  # a run of an erasure begins at the front

    def describe(self, position: Position) -> dict[str, Any]:
        return {"table": self.model._meta.table_name}

    def _recorded(self, result: BatchResult) -> BatchResult:
        """Return the result for the ledger: its position withheld, the rows of the stage's table counted by table."""
        own = {kind: result.counts.get(name) for kind, name in _OWN.items() if result.counts.get(name)}
        dependents = result.counts.get(DETAILS, {}).get("dependents", {})
        if own:
            dependents = merged(dependents, {self.model._meta.table_name: own})
        counts = {**result.counts, DETAILS: {"dependents": dependents}}
        position = None if result.position is None else Unrecorded(result.position)
        return replace(result, counts=counts, position=position)


@dataclass(frozen=True, kw_only=True)
class ChangingStage(_WithoutIdentity, TableStage):
    """Stage that writes new values into rows that are kept."""


@dataclass(frozen=True, kw_only=True)
class DeletingStage(_WithoutIdentity, CascadeStage):
    """Stage that deletes rows with everything that depends on them."""

    logs_links: ClassVar[bool] = False  # the subject decides about each link


def without_identity(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function. Its error keeps its type, but has neither values of rows nor the frames that have them."""
    try:
        return function(*arguments)
    except Exception as error:
        hide_values(error)
        raise error.with_traceback(None)  # noqa: B904 - it is the same error


def hide_values(error: BaseException) -> None:
    """Replace the text of an error of the database, and of those that caused it, by one without values of rows."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each.__cause__, each.__context__, getattr(each, "orig", None)]
        each.__traceback__ = None
        if not isinstance(each, HousekeepingError):
            each.args = (error_text(each),)


def error_text(error: BaseException) -> str:
    """Return what an error says in one line, without values of rows: constraint, table and column stay."""
    if isinstance(error, HousekeepingError):
        return str(error)
    origin = getattr(error, "orig", error)
    diagnosis = getattr(origin, "diag", None)
    named = [getattr(diagnosis, name, None) for name in ("constraint_name", "table_name", "column_name")]
    code = getattr(origin, "pgcode", None)
    if code == NO_RIGHT:  # the message names only the table, no values
        return str(diagnosis.message_primary) if diagnosis is not None else code
    return ", ".join(each for each in (code, *named) if each) or type(error).__name__


def stage_of(conditions: Conditions, branch: Branch | None, name: str, hold: Hold | None, batch: int) -> TableStage:
    """Return the stage that changes or deletes the rows of a link; None deletes the subject's row.

    What is deleted because of a row is deleted with it.
    """
    table = conditions.reach.root if branch is None else branch.table
    stale = Stale(conditions, table, branch)
    common: Any = {"name": name, "stale": stale, "order": key_of(stale.model), "batch_size": batch, "hold": hold}
    if branch is not None and not branch.deletes:
        return ChangingStage(action=WriteValues(conditions, branch), **common)
    delete = Delete(dependents=True)
    return DeletingStage(action=delete, delete=delete, graph=conditions.reach.cascade_of(table), **common)


@dataclass(frozen=True, slots=True)
class Stale:
    """Predicate of the rows of a stage: those of a link that can be changed now; without one, all of the subject."""

    conditions: Conditions
    table: TableName
    branch: Branch | None = None

    @property
    def model(self) -> type[Model]:
        return self.conditions.reach.model_of(self.table)

    def __call__(self, now: datetime) -> Any:
        found = self.conditions.members(self.table) if self.branch is None else self.conditions.changeable(self.branch)
        key = key_of(self.model)
        own: Any = key[0] if len(key) == 1 else Tuple(*key)
        return EnclosedNodeList([Expression(own, "IN", SQL(f"({found[0]})", found[1]))])
