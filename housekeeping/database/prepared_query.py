"""Queries that are executed many times on a thread's connection, each time in one round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

from peewee import PeeweeException, ProgrammingError, Query
from psycopg2.extensions import AsIs

from housekeeping.database.compiled_query import CompiledQuery
from housekeeping.database.connection import database, sqlstate

#: Prepared statements of a connection; the server keeps the plan of each.
_MOST: Final = 20
_numbers: Final = count(1)
#: PostgreSQL's codes for a prepared statement whose table has changed, and for one that is gone.
_OUTDATED: Final = ("0A000", "26000")


class _Part(CompiledQuery):
    """One of the queries of a `PreparedQuery`."""

    def __init__(self, query: Query) -> None:
        super().__init__(query)
        self._numbers = sorted({number for _, number in self._placeholders})

    def plain(self, values: Sequence[Any]) -> bytes:
        text: bytes = database.mogrify(self._sql, self._with(values))
        return text

    def prepare(self, name: str) -> bytes:
        places = {number: AsIs(f"${place}") for place, number in enumerate(self._numbers, start=1)}
        text: bytes = b"PREPARE %b AS %b" % (name.encode(), database.mogrify(self._sql, self._with(places)))
        return text

    def execute(self, name: str, values: Sequence[Any]) -> bytes:
        if not self._numbers:
            return b"EXECUTE %b" % name.encode()
        given = [values[number] for number in self._numbers]
        arguments: bytes = database.mogrify(f"({', '.join(['%s'] * len(given))})", given)
        return b"EXECUTE %b%b" % (name.encode(), arguments)


class PreparedQuery:
    """Queries that are sent together, as one transaction.

    The second execution on a direct connection prepares them. So a run that ends after one batch prepares nothing, and
    later batches need no parsing and planning.
    """

    def __init__(self, *queries: Query) -> None:
        self._parts = [_Part(query) for query in queries]
        self._is_used = False
        self._can_prepare = True

    def rows_at_once(self, *values: Any) -> list[tuple[Any, ...]]:
        """Execute the queries in one round trip, in a transaction of their own; return the rows of the last one.

        Raises:
          peewee.PeeweeException: After a lost connection it is unknown whether the queries have taken effect.
        """
        prepared: dict[PreparedQuery, list[str]] | None = database.prepared()
        fetch: Callable[[bytes], list[tuple[Any, ...]]] = database.fetch_at_once
        if prepared is None:
            return fetch(self._plain(values))
        if self in prepared:
            try:
                return fetch(b"; ".join(self._executions(prepared[self], values)))
            except PeeweeException as error:
                if sqlstate(error) in _OUTDATED:
                    prepared.pop(self)  # the next execution prepares the queries again
                raise
        if not self._is_used or not self._can_prepare:
            self._is_used = True
            return fetch(self._plain(values))
        names = [f"housekeeping_{next(_numbers)}" for _ in self._parts]
        forgotten = prepared.pop(next(iter(prepared))) if len(prepared) >= _MOST else []
        texts = [b"DEALLOCATE %b" % name.encode() for name in forgotten]
        texts += [part.prepare(name) for part, name in zip(self._parts, names, strict=True)]
        try:
            rows = fetch(b"; ".join([*texts, *self._executions(names, values)]))
        except ProgrammingError:
            # PostgreSQL cannot infer the type of each parameter. Nothing was executed.
            self._can_prepare = False
            return self.rows_at_once(*values)
        prepared[self] = names
        return rows

    def _plain(self, values: Sequence[Any]) -> bytes:
        return b"; ".join(part.plain(values) for part in self._parts)

    def _executions(self, names: Sequence[str], values: Sequence[Any]) -> list[bytes]:
        return [part.execute(name, values) for part, name in zip(self._parts, names, strict=True)]
