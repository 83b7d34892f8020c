"""Tables and rows of a cascade, as its walk and its statements share them.

Rows are passed to PostgreSQL as arrays of their values, so each statement processes many rows. Values other than
integers are passed as PostgreSQL's text, because the driver may change them in a round trip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from peewee import Model

from housekeeping.database.catalog import key_of, quoted, table_of
from housekeeping.database.connection import database
from housekeeping.sweeps.dependents import Graph, Link
from housekeeping.sweeps.keyset import Hold

#: Values of a row, in the order of its window's columns.
Values = tuple[Any, ...]
#: SQL text with its parameters.
Sql = tuple[str, list[Any]]

_INTEGERS: Final = frozenset(("smallint", "integer", "bigint"))
#: Types whose name alone means a length of one.
_UNLIMITED: Final = {"character": "bpchar", "bit": "bit varying"}


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
            {column: _UNLIMITED.get(kind, kind) for column, kind in table.columns.items()},
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


def escaped(text: str) -> str:
    """Return SQL with escaped percent signs, for statements with parameters."""
    return text.replace("%", "%%")


def sql_name(name: str) -> str:
    """Return a name quoted for SQL with parameters."""
    return escaped(quoted(name))


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
    """Rows of one table that depend on rows of the window below, by one link.

    Attributes:
      link: None for the parents, on which all other rows depend.
      columns: The columns of `rows`; the key first.
      rows: None for a row that is done, or left for this run.
      owners: The row of the window below that each row depends on, by its number; ``-1 - number``: of this window.
      pending: Links by which dependents may be left.
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
        rows = [self.rows[number] for number in numbers]
        return [row for row in rows if row is not None]
