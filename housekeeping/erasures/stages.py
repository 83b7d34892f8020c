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

from housekeeping.core.errors import HousekeepingError
from housekeeping.database.catalog import escaped, key_of, quoted_name, sql_name, table_of
from housekeeping.database.connection import database, handle_of
from housekeeping.database.errors import NO_RIGHT
from housekeeping.erasures.graph import Branch, Reach, Table
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
    """Conditions on the rows that belong to a subject.

    Attributes:
      versions: The values that the subject's row had, by column, as PostgreSQL writes them; the newest version last.
    """

    reach: Reach
    versions: Sequence[Mapping[str, str | None]]
    _aliases: int = field(default=0, init=False)
    #: Link of another database -> the values to which its rows refer. Links with the same name may have other parents.
    _known: dict[Link, list[tuple[Any, ...]]] = field(default_factory=dict, init=False)

    def of_root(self, alias: str) -> Sql:
        """Return the condition that a row is the subject's."""
        model = self.reach.model_of(self.reach.root)
        with database.using(self.reach.root[0]):
            key = typed_key(model)
        texts = [f"{alias}.{name} = ANY(%s::text[]::{kind}[])" for name, kind in key.items()]
        return " AND ".join(texts), [[self.versions[-1][each.column_name]] for each in key_of(model)]

    def belongs(self, branch: Branch, alias: str) -> Sql:
        """Return the condition that a row of the link's `source` belongs to the subject by this link."""
        link = branch.link
        own = [f"{alias}.{sql_name(each)}" for each in link.columns]
        if branch.parent == self.reach.root:
            versions = [tuple(row.get(each) for each in link.parent_columns) for row in self.versions]
            known = list(dict.fromkeys(each for each in versions if None not in each))
            return self._among(branch, own, known) if known else _NOTHING
        if not branch.is_local:
            return self._among(branch, own, self._values(branch))
        parent = self._alias()
        member, parameters = self.member(branch.parent, parent)
        above = ", ".join(f"{parent}.{sql_name(each)}" for each in link.parent_columns)
        table = escaped(link.parent)
        return f"({', '.join(own)}) IN (SELECT {above} FROM {table} AS {parent} WHERE {member})", parameters

    def _among(self, branch: Branch, own: Sequence[str], rows: Sequence[Sequence[Any]]) -> Sql:
        # As arrays: the values of lists are not part of the fingerprint of a predicate.
        types = [escaped(each) for each in branch.link.parent_types]
        arrays = [[row[number] for row in rows] for number in range(len(own))]
        if len(own) == 1:
            return f"{own[0]} = ANY(%s::text[]::{types[0]}[])", arrays
        given = ", ".join(f"%s::text[]::{kind}[]" for kind in types)
        return f"({', '.join(own)}) IN (SELECT * FROM unnest({given}))", arrays

    def _values(self, branch: Branch) -> list[tuple[Any, ...]]:
        """Return the values in the parent's database to which rows of another database refer."""
        link, alias = branch.link, self._alias()
        if link in self._known:
            return self._known[link]
        member, parameters = self.member(branch.parent, alias)
        columns = ", ".join(f"{alias}.{sql_name(each)}::text" for each in link.parent_columns)
        sql = (
            f"SELECT DISTINCT {columns} FROM {escaped(link.parent)} AS {alias} WHERE {member} LIMIT {_MOST_VALUES + 1}"
        )
        rows: list[tuple[Any, ...]] = handle_of(link.parent_database).execute_sql(sql, parameters).fetchall()
        if len(rows) > _MOST_VALUES:
            raise HousekeepingError(f"over {_MOST_VALUES:,} rows of {link.parent} are referred to by {link.name}")
        self._known[link] = [row for row in rows if None not in row]
        return self._known[link]

    def member(self, table: Table, alias: str) -> Sql:
        """Return the condition that a row of a table belongs to the subject, by any link."""
        if table == self.reach.root:
            return self.of_root(alias)
        trees = self.reach.trees_of(table)
        if not trees:
            return _joined(" OR ", [self._part(branch, alias) for branch in self.reach.into(table)])
        key, source = self._key(table), escaped(table[1])
        named = dict.fromkeys((*key, *(name for each in trees for name in each.link.parent_columns)))
        child, (first, parameters) = (
            self._alias(),
            _joined(" OR ", [self._part(b, "t") for b in self.reach.into(table)]),
        )

        def own_of(at: str) -> str:
            return ", ".join(f"{at}.{sql_name(each)}" for each in key)

        steps = [
            " AND ".join(
                f"{child}.{sql_name(a)} = tree.{sql_name(b)}"
                for a, b in zip(each.link.columns, each.link.parent_columns, strict=True)
            )
            + (
                ""
                if each.link.where is None
                else f" AND ({own_of(child)}) IN (SELECT {own_of('w')} FROM {_source(each)} AS w)"
            )
            for each in trees
        ]
        of_base, of_child = (", ".join(f"{at}.{sql_name(name)}" for name in named) for at in ("t", child))
        keys = ", ".join(map(sql_name, key))
        return (
            f"({own_of(alias)}) IN (WITH RECURSIVE tree AS (SELECT {of_base} FROM {source} AS t WHERE {first} UNION "
            f"SELECT {of_child} FROM {source} AS {child} JOIN tree ON {' OR '.join(steps)}) SELECT {keys} FROM tree)",
            parameters,
        )

    def _part(self, branch: Branch, alias: str) -> Sql:
        if branch.link.where is None:
            return self.belongs(branch, alias)
        inner, key = self._alias(), self._key(branch.table)
        text, parameters = self.belongs(branch, inner)
        own, keys = (", ".join(f"{at}.{sql_name(each)}" for each in key) for at in (alias, inner))
        return f"({own}) IN (SELECT {keys} FROM {_source(branch)} AS {inner} WHERE {text})", parameters

    def to_do(self, branch: Branch, alias: str) -> Sql:
        """Return the condition that a row that belongs to the subject by this link is not what it should be yet."""
        if branch.deletes:
            return "TRUE", []
        parts = [_differs(branch, alias)] if branch.values else []
        return _joined(" OR ", [*parts, *self._blocking(branch, alias)])

    def _blocking(self, branch: Branch, alias: str) -> list[Sql]:
        """Return the conditions under which a row has dependents with which something is left to do."""
        found = []
        for below in self.reach.below(branch.table) if branch.leads_on and not branch.leads_back else ():
            if not below.is_local:
                waiting = self._waiting_for(below)
                own = [f"{alias}.{sql_name(each)}" for each in below.link.parent_columns]
                found += [self._among(below, own, waiting)] if waiting else []
                continue
            child, pairs = self._alias(), zip(below.link.columns, below.link.parent_columns, strict=True)
            on = " AND ".join(f"{child}.{sql_name(a)} = {alias}.{sql_name(b)}" for a, b in pairs)
            text, parameters = self.to_do(below, child)
            if text != _NOTHING[0]:
                found.append((f"EXISTS (SELECT FROM {_source(below)} AS {child} WHERE {on} AND ({text}))", parameters))
        return found

    def _waiting_for(self, branch: Branch) -> list[tuple[Any, ...]]:
        """Return the values by which rows of another database refer to a row and are not what they should be yet."""
        child, link = self._alias(), branch.link
        own = [f"{child}.{sql_name(each)}" for each in link.columns]
        among, values = self._among(branch, own, self._values(branch))
        text, parameters = self.to_do(branch, child)
        columns = ", ".join(f"{each}::text" for each in own)
        sql = f"SELECT DISTINCT {columns} FROM {_source(branch)} AS {child} WHERE {among} AND ({text})"
        return list(handle_of(link.database).execute_sql(sql, [*values, *parameters]).fetchall())

    def changeable(self, branch: Branch, alias: str) -> Sql:
        """Return the condition on the rows of a link that can be changed now."""
        parts = [self._part(branch, alias)]
        if not branch.deletes:
            parts.append(_differs(branch, alias))
            blocking = _joined(" OR ", self._blocking(branch, alias))
            if blocking != _NOTHING:
                parts.append((f"NOT ({blocking[0]})", blocking[1]))
        return _joined(" AND ", parts)

    def left(self, branch: Branch, limit: int) -> int:
        """Count the rows of a link that are not what they should be yet, up to a limit."""
        alias = self._alias()
        if not (branch.deletes or branch.values):
            return 0
        text, parameters = self._part(branch, alias)
        more, further = ("TRUE", list[Any]()) if branch.deletes else _differs(branch, alias)
        table = escaped(branch.link.table)
        sql = f"SELECT count(*) FROM (SELECT FROM {table} AS {alias} WHERE {text} AND ({more}) LIMIT {limit}) AS found"
        row: Any = handle_of(branch.link.database).execute_sql(sql, [*parameters, *further]).fetchone()
        return int(row[0])

    def kept(self, table: Table, limit: int) -> int | None:
        """Count the subject's rows that are kept unchanged, up to a limit; None if they can no longer be found."""
        branches = self.reach.kept_by(table)
        if not all(self.reach.is_found_afterwards(each) for each in branches):
            return None
        queries, parameters = list[str](), list[Any]()
        for branch in branches:
            text, values = self.belongs(branch, "t")
            source = rows_with_places(branch.link.table, branch.link.where)
            queries.append(f"SELECT t.housekeeping_table, t.housekeeping_row FROM {source} WHERE {text}")
            parameters += values
        sql = f"SELECT count(*) FROM ({' UNION '.join(queries)} LIMIT {limit}) AS found"
        row: Any = handle_of(table[0]).execute_sql(sql, parameters).fetchone()
        return int(row[0])

    def _key(self, table: Table) -> list[str]:
        return [each.column_name for each in key_of(self.reach.model_of(table))]

    def restart(self) -> None:
        """Begin a statement, so that the same condition has the same text again."""
        self._aliases = 0

    def _alias(self) -> str:
        self._aliases += 1
        return f"r{self._aliases}"


def typed_key(model: type[Model]) -> dict[str, str]:
    """Return the primary key's columns with their types, written for SQL with parameters."""
    types = table_of(model).columns
    return {sql_name(each.column_name): escaped(types[each.column_name]) for each in key_of(model)}


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


def _differs(branch: Branch, alias: str) -> Sql:
    texts, parameters = [], list[Any]()
    for name, value in branch.values.items():
        column = f"{alias}.{sql_name(name)}"
        texts.append(f"{column} IS NOT NULL" if value is None else f"{column}::text IS DISTINCT FROM %s")
        parameters += [] if value is None else [value]
    return f"({' OR '.join(texts)})", parameters


@dataclass(frozen=True, slots=True)
class WriteValues:
    """Action that writes the new values of a link into its rows.

    Those of other links are written along into rows that belong to the subject by several links, such as a message to
    oneself. So a row is counted once.
    """

    conditions: Conditions
    branch: Branch

    counted_as = ("anonymised_rows",)

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        values = {name: self._value(name, self.branch) for name in self.branch.values}
        own = self.branch.table
        for other in (each for each in self.conditions.reach.branches if each.table == own and each.values):
            also = changeable_rows(self.conditions, other)(batch.now)
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
        """Return the result without keys, with its own rows counted by table as well."""
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
    if branch is None:
        table, model = conditions.reach.root, conditions.reach.model_of(conditions.reach.root)
        stale = Stale(conditions, model, conditions.of_root)
    else:
        table, stale = branch.table, changeable_rows(conditions, branch)
    common: Any = {"name": name, "stale": stale, "order": key_of(stale.model), "batch_size": batch, "hold": hold}
    if branch is not None and not branch.deletes:
        return ChangingStage(action=WriteValues(conditions, branch), **common)
    delete = Delete(dependents=True)
    return DeletingStage(action=delete, delete=delete, graph=conditions.reach.cascade_of(table), **common)


def changeable_rows(conditions: Conditions, branch: Branch) -> Stale:
    """Return the predicate of the rows of a link that can be changed now."""
    model = conditions.reach.model_of(branch.table)
    return Stale(conditions, model, lambda alias: conditions.changeable(branch, alias))


@dataclass(frozen=True, slots=True)
class Stale:
    """Predicate of the rows of a stage: their key is one of those that a condition finds."""

    conditions: Conditions
    model: type[Model]
    condition: Any

    def __call__(self, now: datetime) -> Any:
        key = key_of(self.model)
        self.conditions.restart()
        text, parameters = self.condition("s")
        names = ", ".join(f"s.{sql_name(each.column_name)}" for each in key)
        table = quoted_name(self.model)
        found = SQL(f"(SELECT {names} FROM {table} AS s WHERE {text})", parameters)
        own: Any = key[0] if len(key) == 1 else Tuple(*key)
        return EnclosedNodeList([Expression(own, "IN", found)])
