"""Query that is executed many times on a thread's connection, each time in one round trip."""

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


class PreparedQuery(CompiledQuery):
    """Query that commits by itself. From its second execution on a connection it is a prepared statement there.

    A run that ends after one batch is spared the preparation, and later batches are spared parsing and planning.
    """

    def __init__(self, query: Query) -> None:
        super().__init__(query)
        self._numbers = sorted({number for _, number in self._placeholders})
        self._is_used = False
        self._can_prepare = True

    def rows_at_once(self, *values: Any) -> list[tuple[Any, ...]]:
        """Execute the query in one round trip, in a transaction of its own; return the driver's rows.

        Raises:
          peewee.PeeweeException: After a lost connection it is unknown whether the query has taken effect.
        """
        prepared: dict[PreparedQuery, str] = database.prepared_statements()
        fetch: Callable[[bytes], list[tuple[Any, ...]]] = database.fetch_at_once
        if self in prepared:
            try:
                return fetch(self._execute(prepared[self], values))
            except PeeweeException as error:
                if sqlstate(error) in _OUTDATED:
                    prepared.pop(self)  # the next execution prepares the query again
                raise
        if not self._is_used or not self._can_prepare:
            self._is_used = True
            return fetch(database.mogrify(self._sql, self._with(values)))
        name = f"housekeeping_{next(_numbers)}"
        text = b"; ".join([*self._forget_oldest(prepared), self._prepare(name), self._execute(name, values)])
        try:
            rows = fetch(text)
        except ProgrammingError:
            # PostgreSQL cannot infer the type of each parameter. Nothing was executed.
            self._can_prepare = False
            return self.rows_at_once(*values)
        prepared[self] = name
        return rows

    def _prepare(self, name: str) -> bytes:
        places = {number: AsIs(f"${place}") for place, number in enumerate(self._numbers, start=1)}
        text: bytes = b"PREPARE %b AS %b" % (name.encode(), database.mogrify(self._sql, self._with(places)))
        return text

    def _execute(self, name: str, values: Sequence[Any]) -> bytes:
        given = [values[number] for number in self._numbers]
        arguments: bytes = database.mogrify(f"({', '.join(['%s'] * len(given))})", given)
        return b"EXECUTE %b%b" % (name.encode(), arguments)

    @staticmethod
    def _forget_oldest(prepared: dict[Any, str]) -> list[bytes]:
        if len(prepared) < _MOST:
            return []
        oldest = next(iter(prepared))
        return [b"DEALLOCATE %b" % prepared.pop(oldest).encode()]
