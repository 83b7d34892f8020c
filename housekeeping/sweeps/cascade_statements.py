"""Statements of a cascade: find dependents of known rows, lock rows with the chain that they depend on, change them.

The text of a statement depends on the tables only, so that it can be prepared. Rows are passed to PostgreSQL as arrays
of their values, so each statement processes many rows. Values other than integers are passed as PostgreSQL's text,
because the driver may change them in a round trip.
"""

# ruff: noqa: S608 - names come from the catalog, quoted; values are parameters

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

from peewee import Model

from housekeeping.core.errors import ArchiveMismatch
from housekeeping.database.catalog import escaped, key_of, of_any_length, quoted_name, sql_name, table_of
from housekeeping.database.connection import database, handle_of
from housekeeping.database.queries import condition_sql
from housekeeping.sweeps.actions import ARCHIVED_AT, ARCHIVED_BY_RUN, CLEARED_COLUMNS, COLUMNS_NOW, takes_cleared
from housekeeping.sweeps.dependents import Graph, Link
from housekeeping.sweeps.keyset import Hold, held_condition
from housekeeping.sweeps.table_stage import NOT_ARCHIVED

#: Values of a row, in the order of its window's columns.
Values = tuple[Any, ...]
#: SQL text with its parameters.
Sql = tuple[str, list[Any]]

_INTEGERS: Final = frozenset(("smallint", "integer", "bigint"))


@dataclass(frozen=True, slots=True)
class CascadeTable:
    """A table of the graph, as the statements need it.

    Attributes:
      name: Its name as SQL has it.
      key: The columns that identify a row, by name.
      types: Column -> type.
      plain: Whether a ctid names a row.
      links: The links to its rows.
      holds: Model and hold of each declared sweep that holds rows of the table.
      circular: Whether rows of the table can depend on each other.
    """

    name: str
    database: str
    model: type[Model]
    key: tuple[str, ...]
    types: Mapping[str, str]
    plain: bool
    links: tuple[Link, ...]
    holds: Sequence[tuple[type[Model], Hold]]
    circular: bool

    @classmethod
    def of(cls, graph: Graph, name: str, of_database: str, holds: Mapping[Any, Any]) -> Self:
        model = graph.model_of(name, of_database)
        with database.using(of_database):
            table = table_of(model)
        return cls(
            name,
            of_database,
            model,
            tuple(each.column_name for each in key_of(model)),
            {column: of_any_length(kind) for column, kind in table.columns.items()},
            table.plain,
            graph.links_of(name, of_database),
            holds.get((of_database, name), ()),
            (of_database, name) in graph.reached(name, of_database),
        )

    @property
    def sql(self) -> str:
        """Its name for SQL with parameters."""
        return escaped(self.name)

    @property
    def alias(self) -> str:
        """Name of the table in statements that have a raw condition on it, which may name the table itself."""
        meta: Any = self.model._meta
        return sql_name(meta.table_name)

    def columns_by(self, link: Link | None) -> tuple[str, ...]:
        """Return the columns to read of its rows that a link reaches: first the key, then those that links compare."""
        compared = (name for each in self.links for name in each.parent_columns)
        return tuple(dict.fromkeys((*self.key, *(link.columns if link else ()), *compared)))

    @property
    def id(self) -> tuple[str, str]:
        """Database and name."""
        return self.database, self.name

    def key_in(self, row: Values) -> Values:
        """Return the key in the values of a row."""
        return row[: len(self.key)]

    @property
    def numbered_key(self) -> str:
        """Names of the key's columns in the CTEs of statements."""
        return ", ".join(f"k{number}" for number in range(len(self.key)))

    def is_integer(self, column: str) -> bool:
        """Return whether a column's values are read as integers; others are read as text."""
        return self.types[column] in _INTEGERS

    def follows(self) -> list[Link]:
        """Return the links whose rows are deleted or changed."""
        return [each for each in self.links if each.decision in ("delete", "clear")]

    def selected(self, alias: str, columns: Sequence[str]) -> str:
        return ", ".join(f"{alias}.{sql_name(each)}{'' if self.is_integer(each) else '::text'}" for each in columns)

    def given(self, columns: Sequence[str], rows: Sequence[Values]) -> Sql:
        """Return the rows, whose first values are those of the columns, as a table ``u (v0, v1, ..., n)``.

        `n` is their number, from 1.
        """
        arrays = [_array(self.types[each], [row[place] for row in rows]) for place, each in enumerate(columns)]
        names = [*(f"v{number}" for number in range(len(columns))), "n"]
        text = ", ".join(f"%s::{self.types[each]}[]" for each in columns)
        return f"unnest({text}) WITH ORDINALITY AS u ({', '.join(names)})", arrays


def _array(kind: str, values: list[Any]) -> str:
    """Return PostgreSQL's text of an array."""
    if kind in _INTEGERS and None not in values:
        return "{" + repr(values)[1:-1] + "}"  # faster than number by number
    values = [each if each is None or isinstance(each, str) else str(each) for each in values]
    texts = ["NULL" if each is None else '"' + each.replace("\\", r"\\").replace('"', r"\"") + '"' for each in values]
    return "{" + ",".join(texts) + "}"


@dataclass(slots=True, eq=False)
class Pending:
    """A link by which rows of a window may have dependents that were not looked for yet.

    Attributes:
      numbers: The rows to look at; None for all of the window.
      has_dependents: Whether each of these rows was found to have one, so that the dependents can be changed unseen.
      is_listed: Whether the dependents are read first and then changed by their keys.
      last_row: The row at which the last batch of dependents ended, which may have more of them.
    """

    link: Link
    numbers: list[int] | None = None
    has_dependents: bool = False
    is_listed: bool = False
    last_row: int | None = None


@dataclass(slots=True)
class Window:
    """Rows of one table that depend by one foreign key on rows of the window below it on the stack.

    Attributes:
      link: The foreign key; None for the stale rows at the bottom of the stack, the parents.
      columns: The columns of `rows`; the key first.
      rows: The values of each row, by its number; None once it is deleted, changed or skipped in this run.
      owners: The number of the row below that each row depends on; ``-1 - number`` for a row of this window.
      pending: Foreign keys by which some of these rows may still have dependents.
      is_tree: Whether its rows may depend on each other.
    """

    table: CascadeTable
    link: Link | None
    columns: tuple[str, ...]
    rows: list[Values | None]
    owners: list[int]
    pending: list[Pending]
    is_tree: bool = False

    @property
    def clears(self) -> bool:
        """Whether its rows are changed, not deleted."""
        return self.link is not None and self.link.decision == "clear"

    @property
    def clearing(self) -> Link | None:
        """The link that is cleared; None if the rows are deleted."""
        return self.link if self.clears else None

    @property
    def alias(self) -> str:
        return self.table.alias if self.link is not None and self.link.where is not None else "t"

    def values(self, numbers: Sequence[int]) -> list[Values]:
        """Return the values of the rows with these numbers, in this order. None of the rows may be done."""
        rows = [self.rows[number] for number in numbers]
        found = [row for row in rows if row is not None]
        assert len(found) == len(numbers)
        return found

    def keys(self, numbers: Sequence[int]) -> list[Values]:
        """Return the keys of the rows with these numbers, in this order."""
        return [self.table.key_in(row) for row in self.values(numbers)]


class Statements:
    """The statements of one run's cascade.

    Parameters:
      stale: The condition of the parents, which are not on hold, given the time of the run.
      archives: Table -> its archive and the columns that are moved there; empty without archives.
    """

    def __init__(
        self,
        graph: Graph,
        holds: Mapping[Any, Any],
        stale: Any,
        now: datetime,
        archives: Mapping[type[Model], tuple[type[Model], Sequence[str]]],
        run_id: int | None,
    ) -> None:
        self._graph = graph
        self._holds = holds
        self._stale = stale
        self._now = now
        self._archives = archives
        self._run_id = run_id
        self._tables: dict[tuple[str, str], CascadeTable] = {}
        self._conditions: dict[Any, Sql] = {}
        self._cursors = 0
        self.root = self.table(graph.root, graph.database)

    def table(self, name: str, of_database: str) -> CascadeTable:
        key = of_database, name
        if key not in self._tables:
            self._tables[key] = CascadeTable.of(self._graph, name, of_database, self._holds)
        return self._tables[key]

    def of_link(self, link: Link) -> CascadeTable:
        """Return the table of the link's dependents."""
        return self.table(link.table, link.database)

    def find(
        self, link: Link, window: Window, numbers: Sequence[int], limit: int, without: Sequence[Values] = ()
    ) -> list[tuple[Any, ...]]:
        """Return the dependents of these rows of a window: the position in `numbers`, from 1, then the columns.

        With a link of a table to itself, the first column is followed by the key of the row it depends on, which is
        NULL if that is the given row, and their own dependents follow.

        Parameters:
          limit: The most rows.
          without: Keys of rows to leave out.
        """
        table, given, values = self.of_link(link), *self._given_owners(link, window, numbers)
        columns = table.columns_by(link)
        names = ", ".join(f"c.{sql_name(each)}" for each in columns)
        first, further = self._hanging(link, [f"u.v{number}" for number in range(len(link.columns))], names, without)
        limits = [*further, limit]
        if not self.recurses(link):
            sql = f"SELECT u.n, {table.selected('c', columns)} FROM {given} {first} LIMIT %s"
            return _rows(table.database, sql, [*values, *limits, limit])
        nulls = ", ".join(f"NULL::{table.types[each]}" for each in table.key)
        own = ", ".join(f"f.{sql_name(each)}" for each in table.key)
        keys = ", ".join(f"o{number}" for number in range(len(table.key)))
        following, _ = self._hanging(link, [f"f.{sql_name(each)}" for each in link.parent_columns], names, without)
        # UNION, not UNION ALL: a circle of rows ends. The rows come generation by generation.
        return _rows(
            table.database,
            f"WITH RECURSIVE f (n, {keys}, {', '.join(map(sql_name, columns))}) AS ("
            f"SELECT u.n, {nulls}, {names} FROM {given} {first} "
            f"UNION SELECT f.n, {own}, {names} FROM f {following}) "
            f"SELECT f.n, {', '.join(_as_text(f'f.o{n}', table, each) for n, each in enumerate(table.key))}, "
            f"{table.selected('f', columns)} FROM f LIMIT %s",
            [*values, *limits, *limits, limit],
        )

    def pages(self, link: Link, window: Window, numbers: Sequence[int], size: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the direct dependents of rows as `find` returns them, page by page."""
        table, given, values = self.of_link(link), *self._given_owners(link, window, numbers)
        columns = table.columns_by(link)
        names = ", ".join(f"c.{sql_name(each)}" for each in columns)
        first, further = self._hanging(link, [f"u.v{number}" for number in range(len(link.columns))], names, ())
        self._cursors += 1
        cursor = f"housekeeping_{self._cursors}"
        sql = f"SELECT u.n, {table.selected('c', columns)} FROM {given} {first}"
        handle = handle_of(table.database)
        with handle.atomic():
            handle.execute_sql(f"DECLARE {cursor} NO SCROLL CURSOR FOR {sql}", [*values, *further, None])
            while page := _rows(table.database, f"FETCH {size} FROM {cursor}", ()):
                yield page
            handle.execute_sql(f"CLOSE {cursor}", ())

    def having(self, link: Link, window: Window, numbers: Sequence[int], *, with_held: bool = True) -> list[int]:
        """Return which of these rows have a dependent by the link, as positions in `numbers` that begin with 1."""
        given, values = self._given_owners(link, window, numbers)
        source, conditions, further = self._dependents(link, "c", (), with_held=with_held)
        on = [f"c.{sql_name(each)} = u.v{number}" for number, each in enumerate(link.columns)]
        where = " AND ".join((*on, *conditions))
        sql = f"SELECT u.n FROM {given} CROSS JOIN LATERAL (SELECT FROM {source} WHERE {where} LIMIT 1) AS c"
        return [n for (n,) in _rows(link.database, sql, [*values, *further])]

    @staticmethod
    def _given_owners(link: Link, window: Window, numbers: Sequence[int]) -> Sql:
        return window.table.given(link.parent_columns, _picked(window, numbers, link.parent_columns))

    def _hanging(self, link: Link, owner: Sequence[str], names: str, without: Sequence[Values]) -> Sql:
        """Return the join with the dependents of a row; its last parameter is the most of them."""
        source, conditions, values = self._dependents(link, "c", without, with_held=False)
        on = [f"c.{sql_name(a)} = {b}" for a, b in zip(link.columns, owner, strict=True)]
        if link.decision == "clear" and link.defaults:
            # Nothing changes a row that has its default; it keeps the row that it depends on.
            cleared = ", ".join(f"c.{sql_name(each)}" for each in link.cleared or link.columns)
            on.append(escaped(f"ROW({cleared}) IS DISTINCT FROM ROW({', '.join(link.defaults)})"))
        # LIMIT keeps PostgreSQL from another join than by the index, row by row.
        limited = f"SELECT {names} FROM {source} WHERE {' AND '.join((*on, *conditions))} LIMIT %s"
        return f"CROSS JOIN LATERAL ({limited}) AS c", values

    def leading_to_kept(self) -> list[Link]:
        """Return the links to rows that are kept, and the links that lead to them."""
        found: list[Link] = []
        for _ in self._graph.links:
            parents = {(each.parent_database, each.parent) for each in found}
            found = [
                each
                for each in self._graph.links
                if each.decision == "keep" or (each.decision == "delete" and (each.database, each.table) in parents)
            ]
        return found

    def recurses(self, link: Link) -> bool:
        """Return whether `find` follows the link through a table that refers to itself."""
        is_own = (link.table, link.database) == (link.parent, link.parent_database)
        return is_own and link.decision == "delete"

    def _dependents(
        self, link: Link, alias: str, without: Sequence[Values], *, with_held: bool
    ) -> tuple[str, list[str], list[Any]]:
        """Return the source of a link's dependents, further conditions, and the parameters of the conditions."""
        source = f"{escaped(link.source)} AS {alias}"
        conditions, values = [], []
        # A table whose rows are kept needs no key.
        for text, parameters in [] if with_held else self._not_held(self.of_link(link), alias):
            conditions.append(text)
            values += parameters
        if without:
            table = self.of_link(link)
            key = ", ".join(f"{alias}.{sql_name(each)}" for each in table.key)
            given, arrays = table.given(table.key, without)
            names = ", ".join(f"u.v{number}" for number in range(len(table.key)))
            conditions.append(f"({key}) NOT IN (SELECT {names} FROM {given})")
            values += arrays
        return source, conditions, values

    def _not_held(self, table: CascadeTable, alias: str) -> list[Sql]:
        """Return the conditions that no declared sweep holds a row of the table."""
        found = []
        for number, (model, hold) in enumerate(table.holds):
            key = ("hold", table.database, table.name, number, alias)
            if key not in self._conditions:
                text, values = condition_sql(held_condition(hold, model, self._now), model, alias)
                self._conditions[key] = (f"({text}) IS NOT TRUE", values)
            found.append(self._conditions[key])
        return found

    def is_free(self, link: Link, alias: str, without: Sequence[Values] = ()) -> Sql:
        """Return the condition that a row has no dependent by the link, also none on hold.

        COALESCE keeps PostgreSQL from making it a join, for which it may read the whole table.
        """
        source, conditions, values = self._dependents(link, "c", without, with_held=True)
        on = [
            f"c.{sql_name(a)} = {alias}.{sql_name(b)}" for a, b in zip(link.columns, link.parent_columns, strict=True)
        ]
        where = " AND ".join((*on, *conditions))
        return f"COALESCE(NOT EXISTS (SELECT FROM {source} WHERE {where}), FALSE)", values

    def _may_change(self, window: Window) -> list[Sql]:
        """Return the conditions on a row, and on each row that it depends on, under which it may be deleted."""
        alias, conditions = window.alias, self._not_held(window.table, window.alias)
        if window.link is None:
            if "stale" not in self._conditions:
                text, values = condition_sql(self._stale(self._now), self.root.model, alias)
                self._conditions["stale"] = (f"COALESCE(({text}), FALSE)", values)
            conditions.append(self._conditions["stale"])
        elif window.link.where is not None:
            conditions.append((f"({escaped(window.link.where)})", []))
        if not window.clears:
            kept = [each for each in window.table.links if each.decision == "keep" and is_local(each)]
            conditions += [self.is_free(each, alias) for each in kept]
        return conditions

    def locked(
        self, window: Window, rows: Sequence[Values], lock: str, *, below: str = "", above: Sequence[str] = ()
    ) -> Sql:
        """Return the query that locks the rows which still depend on what they depended on, and are not on hold.

        Parameters:
          below: Name of the CTE that has locked the rows of the window below; only rows that depend on one of them are
            locked. Without one, rows whose references have the same values as in `rows`.
          above: The columns that rows of the window above refer to; the query returns them.
        """
        alias, table = window.alias, window.table
        columns = table.key if below else window.columns
        given, values = table.given(columns, rows)
        own = [f"{alias}.{sql_name(each)}" for each in columns]
        same = [f"{each} = u.v{number}" for number, each in enumerate(own[: len(table.key)])]
        same += [f"{own[n]} IS NOT DISTINCT FROM u.v{n}" for n in range(len(table.key), len(own))]
        if below:
            assert window.link is not None
            same.append(_refers(window.link, alias, below))
        for text, parameters in self._may_change(window):
            same.append(text)
            values = [*values, *parameters]
        ctid = f", {alias}.ctid" if table.plain else ""
        keys = ", ".join(f"u.v{number} AS k{number}" for number in range(len(table.key)))
        referenced = "".join(f", {alias}.{sql_name(each)} AS r{number}" for number, each in enumerate(above))
        return (
            f"SELECT u.n, {keys}{referenced}{ctid} FROM {given} JOIN {table.sql} AS {alias} ON {' AND '.join(same)} "
            f"FOR {lock} OF {alias} SKIP LOCKED",
            values,
        )

    def change(
        self,
        table: CascadeTable,
        clearing: Link | None,
        chosen: str,
        numbered: str,
        suffix: str = "",
        referenced: str = "",
    ) -> tuple[list[str], str]:
        """Return the CTEs that delete or clear rows of a table, and SQL that is false if one is not archived.

        The CTE ``gone`` has the keys of these rows.

        Parameters:
          clearing: The link that is cleared; None to delete the rows.
          numbered: Name of a CTE with the keys of the rows and their numbers. The archive has later ones as earlier, so
            that a restore brings them back after those that they depend on.
          suffix: Follows the names of the CTEs.
          referenced: Name of a CTE with the values that cleared rows referred to. A row to which a trigger gives one of
            them again is not in ``gone``.
        """
        archive, columns = self._archives.get(table.model, (None, ()))
        names = ", ".join(map(sql_name, columns))
        keys = [f"t.{sql_name(each)} AS k{number}" for number, each in enumerate(table.key)]
        whole = [f"t.{sql_name(each)}" for each in columns]
        returned = ", ".join(keys if clearing else [*keys, *whole])
        ctes, source, key = [], f"gone{suffix}", table.numbered_key
        if clearing is None:
            ctes.append(f"gone{suffix} AS (DELETE FROM {table.sql} AS t WHERE {chosen} RETURNING {returned})")
        else:
            value = "DEFAULT" if clearing.defaults else "NULL"
            written = ", ".join(f"{sql_name(each)} = {value}" for each in clearing.cleared or clearing.columns)
            if archive is not None:
                # As they were before the change: a CTE sees nothing of it.
                before = f"SELECT {', '.join([*keys, *whole])} FROM {table.sql} AS t WHERE {chosen}"
                ctes.append(f"before{suffix} AS MATERIALIZED ({before})")
                source = f"before{suffix} JOIN gone{suffix} USING ({key})"
            returned += f", {_refers(clearing, 't', referenced)} AS still"
            changed = f"UPDATE {table.sql} AS t SET {written} WHERE {chosen} RETURNING {returned}"
            ctes.append(f"written{suffix} AS ({changed})")
            ctes.append(f"gone{suffix} AS (SELECT * FROM written{suffix} WHERE NOT still)")
        if archive is None:
            return ctes, "TRUE"
        added = [ARCHIVED_AT, ARCHIVED_BY_RUN]
        run = "NULL" if self._run_id is None else self._run_id
        values = [f"statement_timestamp() - n * interval '1 microsecond', {run}::bigint"]
        if takes_cleared(archive):
            added.append(CLEARED_COLUMNS)
            values.append("NULL" if clearing is None else _texts(clearing.cleared or clearing.columns))
        name = escaped(quoted_name(archive))
        ctes.append(
            f"archived{suffix} AS (INSERT INTO {name} ({names}, {', '.join(added)}) "
            f"SELECT {names}, {', '.join(values)} FROM {source} JOIN {numbered} USING ({key}) RETURNING 1)"
        )
        now = COLUMNS_NOW.replace("%s", escaped(f"'{quoted_name(table.model)}'"))
        is_whole = f"(SELECT count(*) FROM archived{suffix}) = (SELECT count(*) FROM gone{suffix})"
        return ctes, f"{is_whole} AND {now} = {_texts(columns)}"

    def change_free(self, window: Window, numbers: Sequence[int]) -> list[int]:
        """Delete or clear the locked rows without dependents. Return their positions, from 1."""
        table, cleared = window.table, window.clearing
        columns = [*table.key, *(cleared.columns if cleared else ())]
        given, values = table.given(columns, _picked(window, numbers, columns))
        width = len(table.key)
        names = [f"u.v{n} AS {f'k{n}' if n < width else f'r{n - width}'}" for n in range(len(columns))]
        conditions = [_among(table, f"SELECT {table.numbered_key} FROM given")]
        for link in () if window.clears else table.links:
            if is_local(link):
                condition, parameters = self.is_free(link, "t")
                conditions.append(condition)
                values += parameters
        ctes, is_archived = self.change(table, cleared, " AND ".join(conditions), "given", referenced="given")
        sql = (
            f"WITH given AS MATERIALIZED (SELECT u.n, {', '.join(names)} FROM {given}), {', '.join(ctes)} "
            f"SELECT CASE WHEN (SELECT count(*) FROM gone) < {len(numbers)} "
            f"THEN ARRAY(SELECT n FROM given JOIN gone USING ({table.numbered_key})) END, {is_archived}"
        )
        ((found, is_archived_whole),) = _rows(table.database, sql, values)
        _require(is_archived_whole, table)
        return _places(found, len(numbers))

    def free(
        self, table: CascadeTable, rows: Sequence[Values], without: Mapping[tuple[str, str], Sequence[Values]]
    ) -> list[int]:
        """Return the positions, from 1, of the rows that exist and have no dependents except each other."""
        given, values = table.given(table.key, rows)
        same = " AND ".join(f"t.{sql_name(each)} = u.v{number}" for number, each in enumerate(table.key))
        conditions = []
        for link in table.links:
            if is_local(link):
                condition, parameters = self.is_free(link, "t", without.get(self.of_link(link).id, ()))
                conditions.append(condition)
                values += parameters
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        sql = f"SELECT u.n FROM {given} JOIN {table.sql} AS t ON {same}{where}"
        return [n for (n,) in _rows(table.database, sql, values)]

    def delete_together(self, tables: Mapping[tuple[str, str], Sequence[Values]]) -> int:
        """Delete rows of several tables by their keys in one statement; return their number."""
        ctes, values, checks = [], [], []
        for number, (name, keys) in enumerate(tables.items()):
            table = self._tables[name]
            given, arrays = table.given(table.key, keys)
            names = ", ".join(f"u.v{place} AS k{place}" for place in range(len(table.key)))
            ctes.append(f"given{number} AS MATERIALIZED (SELECT u.n, {names} FROM {given})")
            chosen = _among(table, f"SELECT {table.numbered_key} FROM given{number}")
            changes, is_archived = self.change(table, None, chosen, f"given{number}", str(number))
            ctes += changes
            checks.append(is_archived)
            values += arrays
        counts = " + ".join(f"(SELECT count(*) FROM gone{number})" for number in range(len(tables)))
        sql = f"WITH {', '.join(ctes)} SELECT {counts}, {' AND '.join(checks)}"
        ((rows, is_archived_whole),) = _rows(table.database, sql, values)
        _require(is_archived_whole, table)
        return int(rows)

    def lock(self, of_database: str, parts: Sequence[tuple[Sql, int]]) -> list[list[int]]:
        """Lock the rows of these queries, one query after another. Return the positions of the locked rows, from 1.

        Parameters:
          parts: The queries with the number of their rows. They are the CTEs ``l0``, ``l1`` and so on.
        """
        ctes, values = _locks(parts)
        sizes = [rows for _, rows in parts]
        found = "CASE WHEN (SELECT count(*) FROM {0}) < %s THEN ARRAY(SELECT n FROM {0}) END"
        selected = [found.format(f"l{number}") for number in range(len(parts))]
        (row,) = _rows(of_database, f"WITH {', '.join(ctes)} SELECT {', '.join(selected)}", [*values, *sizes])
        return [_places(places, rows) for places, rows in zip(row, sizes, strict=True)]

    def locks_and_changes(self, table: CascadeTable, link: Link | None) -> bool:
        """Return whether one statement can lock rows that a link reaches and change them.

        It cannot archive cleared rows without a ctid: it may lock a later version of a row than it archives.
        """
        is_cleared = link is not None and link.decision == "clear"
        return table.plain or not is_cleared or table.model not in self._archives

    def changes_unseen(self, link: Link) -> bool:
        """Return whether dependents by the link can be changed without being read first.

        Nothing depends on them, and after the change they are no dependents any more.
        """
        if not is_local(link) or link.database != self.root.database or self.recurses(link):
            return False
        if not self.locks_and_changes(self.of_link(link), link):
            return False
        return not link.defaults if link.decision == "clear" else not self.of_link(link).links

    def expected(
        self, parts: Sequence[tuple[Sql, int]], changed: Window, link: Link | None = None, most: int = 0
    ) -> Sql:
        """Return the locks of these parts and the change as a statement for a message of more statements.

        It sets ``housekeeping.batch`` to a JSON array: whether all rows were locked and changed, or `most` dependents;
        without that, the message must be rolled back. Then the places of the first and of the last row that had some.
        It may wait for a row that another transaction has locked.

        Parameters:
          link: The link of the dependents to change unseen; None to change the rows of the last part.
        """
        own = "own" if link is not None else f"l{len(parts) - 1}"
        if link is not None:
            (ctes, is_archived), values = self._unseen(link, parts, most)
        else:
            ctes, values = _locks(parts)
            chosen = _chosen_of(changed.table, own)
            changes, is_archived = self.change(changed.table, changed.clearing, chosen, own, referenced=own)
            ctes, most = [*ctes, *changes], parts[-1][1]
        numbers = {**{f"l{number}": rows for number, (_, rows) in enumerate(parts)}, own: most, "gone": most}
        complete = " AND ".join(f"(SELECT count(*) FROM {name}) = %s" for name in numbers)
        owner = "owner" if link is not None else "n"
        done = f"json_build_array({complete} AND {is_archived}, min({owner}), max({owner}))"
        sql = f"WITH {', '.join(ctes)} SELECT set_config('housekeeping.batch', {done}::text, true) FROM {own}"
        return sql, [*values, *numbers.values()]

    def _unseen(
        self, link: Link, parts: Sequence[tuple[Sql, int]], most: int
    ) -> tuple[tuple[list[str], str], list[Any]]:
        """Return the CTEs that change dependents unseen, SQL that is false if a row is not archived, and parameters."""
        table, above = self.of_link(link), f"l{len(parts) - 1}"
        # Without locks, which are nearly a third of the WAL, a row that was changed meanwhile is checked again by the
        # condition of the change alone, and a cleared one is archived as it was before.
        is_archived = table.model in self._archives
        locks = bool(table.holds) or link.where is not None or (is_archived and link.decision == "clear")
        ctes, values = _locks(parts)
        alias = "c" if link.where is None else table.alias
        conditions = [f"{alias}.{sql_name(each)} = o.r{number}" for number, each in enumerate(link.columns)]
        conditions += [] if link.where is None else [f"({escaped(link.where)})"]
        for text, parameters in self._not_held(table, alias):
            conditions.append(text)
            values += parameters
        columns = [f"{alias}.ctid"] if table.plain else []
        if is_archived or not table.plain:
            columns += [f"{alias}.{sql_name(each)} AS k{number}" for number, each in enumerate(table.key)]
        number = ", row_number() OVER () AS n" if is_archived else ""
        referenced = ", ".join(f"r{number}" for number in range(len(link.columns)))
        skipping = f" FOR UPDATE OF {alias} SKIP LOCKED" if locks else ""
        # The rows come in the order of those that they depend on, and LIMIT makes PostgreSQL read no more of them.
        ctes.append(
            f"own AS MATERIALIZED (SELECT o.n AS owner{number}, c.* "
            f"FROM (SELECT n, {referenced} FROM {above} ORDER BY n) AS o "
            f"CROSS JOIN LATERAL (SELECT {', '.join(columns)} FROM {table.sql} AS {alias} "
            f"WHERE {' AND '.join(conditions)} LIMIT %s{skipping}) AS c LIMIT %s)"
        )
        cleared = link if link.decision == "clear" else None
        chosen = _chosen_of(table, "own")
        if not locks:
            chosen += f" AND {_refers(link, 't', above)}"
        changes, is_whole = self.change(table, cleared, chosen, "own", referenced=above)
        return ([*ctes, *changes], is_whole), [*values, most, most]


def _refers(link: Link, alias: str, cte: str) -> str:
    """Return the condition that a row depends by the link on one of the rows of a CTE.

    COALESCE keeps PostgreSQL from reading all dependents of these rows instead of the rows that are given.
    """
    references = ", ".join(f"{alias}.{sql_name(each)}" for each in link.columns)
    referenced = ", ".join(f"r{number}" for number in range(len(link.columns)))
    return f"COALESCE(({references}) IN (SELECT {referenced} FROM {cte}), FALSE)"


def _locks(parts: Sequence[tuple[Sql, int]]) -> tuple[list[str], list[Any]]:
    """Return the CTEs of queries, and their parameters."""
    ctes = [f"l{number} AS MATERIALIZED ({text})" for number, ((text, _), _) in enumerate(parts)]
    return ctes, [value for (_, parameters), _ in parts for value in parameters]


def _chosen_of(table: CascadeTable, cte: str) -> str:
    """Return the condition that a row is one of those of a CTE with their places or keys."""
    if table.plain:
        return f"t.ctid = ANY(ARRAY(SELECT ctid FROM {cte}))"
    return _among(table, f"SELECT {table.numbered_key} FROM {cte}")


def _require(is_archived: bool, table: CascadeTable) -> None:
    """Raise ArchiveMismatch if an archive did not take all rows, or would lose a column."""
    if not is_archived:
        raise ArchiveMismatch(f"{table.name}: {NOT_ARCHIVED}")


def _texts(names: Sequence[str]) -> str:
    """Return names as SQL of an array, in statements with parameters."""
    return "ARRAY[" + ", ".join("'" + escaped(each.replace("'", "''")) + "'" for each in names) + "]::text[]"


def _places(found: list[int] | None, rows: int) -> list[int]:
    """Return the positions that a statement has found. Its answer is NULL if it has found all."""
    return list(range(1, rows + 1)) if found is None else found


def is_local(link: Link) -> bool:
    """Return whether a link's dependents are in the same database as what they depend on."""
    return link.database == link.parent_database


def _among(table: CascadeTable, query: str) -> str:
    if len(table.key) == 1:
        # An array instead of a join, for which PostgreSQL may read the whole table.
        return f"t.{sql_name(table.key[0])} = ANY(ARRAY({query}))"
    return f"({', '.join(f't.{sql_name(each)}' for each in table.key)}) IN ({query})"


def _as_text(name: str, table: CascadeTable, column: str) -> str:
    return name if table.is_integer(column) else f"{name}::text"


def _picked(window: Window, numbers: Sequence[int], columns: Sequence[str]) -> list[Values]:
    """Return values of some columns of rows."""
    places = [window.columns.index(each) for each in columns]
    return [tuple(row[place] for place in places) for row in window.values(numbers)]


def _rows(of_database: str, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = handle_of(of_database).execute_sql(sql, values).fetchall()
    return rows
