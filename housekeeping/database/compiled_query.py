"""Queries that are compiled to SQL once and executed many times.

Compiling the statement of a batch takes peewee longer than PostgreSQL needs to execute it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeVar

from peewee import Query, Value

from housekeeping.database.connection import database

T = TypeVar("T")


class Parameter(Value):
    """Placeholder for a value that is known only when the query is executed.

    Parameters:
      number: Index of the value. Values are sent unchanged; no column converts them.
    """

    def __init__(self, number: int) -> None:
        super().__init__(_Number(number), converter=False, unpack=False)
        self.number = number


class _Number:
    def __init__(self, number: int) -> None:
        self.number = number


class CompiledQuery:
    """SQL text of a query with its parameters, some of them a `Parameter`.

    Attributes:
      query: The query it was compiled from.
    """

    def __init__(self, query: Query) -> None:
        self.query: Final = query
        self._sql, self._parameters = database.get_sql_context().sql(query).query()
        self._placeholders = [
            (index, value.number) for index, value in enumerate(self._parameters) if isinstance(value, _Number)
        ]

    def rows(self, *values: Any) -> list[tuple[Any, ...]]:
        """Execute the query with these values for its placeholders; return the driver's rows."""
        rows: list[tuple[Any, ...]] = database.execute_sql(self._sql, self._with(values)).fetchall()
        return rows

    def _with(self, values: Sequence[Any] | Mapping[int, Any]) -> list[Any]:
        """Return the parameters with these values for the placeholders."""
        parameters = list(self._parameters)
        for index, number in self._placeholders:
            parameters[index] = values[number]
        return parameters


class QueryCache:
    """Cache of compiled queries for one purpose at a time, such as one run."""

    def __init__(self) -> None:
        self._cached: tuple[Hashable, dict[Hashable, Any]] = (None, {})

    def get(self, purpose: Hashable, form: Hashable, make: Callable[[], T]) -> T:
        """Return the cached query; compile it first if it is missing.

        Parameters:
          purpose: First part of the cache key, such as the current run. A new value empties the cache.
          form: Second part of the cache key: which of the purpose's queries.
          make: Compiles the query.
        """
        cached_purpose, queries = self._cached  # read once, because another thread may replace both
        if cached_purpose != purpose:
            queries = {}
            self._cached = (purpose, queries)
        if form not in queries:
            queries[form] = make()
        query: T = queries[form]
        return query
