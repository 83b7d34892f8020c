"""Statements that are put together once and carried out many times.

To put a batch's statement together takes longer than to carry it out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final

from peewee import Query, Value

from housekeeping.database.connection import database


class Parameter(Value):
    """Where a statement takes a value that is known only when it is carried out.

    Parameters:
      number: Which of the values, from 0. They are sent as they are given, no column converts them.
    """

    def __init__(self, number: int) -> None:
        super().__init__(_Number(number), converter=False, unpack=False)
        self.number = number


class _Number:
    def __init__(self, number: int) -> None:
        self.number = number


class CompiledQuery:
    """One statement, as text with its parameters; some of them are `Parameter`.

    Attributes:
      query: What it was put together from.
    """

    def __init__(self, query: Query) -> None:
        self.query: Final = query
        self._sql, self._parameters = database.get_sql_context().sql(query).query()
        self._places = [
            (index, value.number) for index, value in enumerate(self._parameters) if isinstance(value, _Number)
        ]

    def rows(self, *values: Any) -> list[tuple[Any, ...]]:
        """Carry it out with these values for its places; the rows as the driver reads them."""
        parameters = list(self._parameters)
        for index, number in self._places:
            parameters[index] = values[number]
        rows: list[tuple[Any, ...]] = database.execute_sql(self._sql, parameters).fetchall()
        return rows


class QueryCache:
    """The prepared statements of one purpose; those of the last one are dropped when another begins."""

    def __init__(self) -> None:
        self._made: tuple[Hashable, dict[Hashable, CompiledQuery]] = (None, {})

    def get(self, purpose: Hashable, form: Hashable, make: Callable[[], Query]) -> CompiledQuery:
        """The statement of this form, made unless it is there.

        Parameters:
          purpose: What all of them have in common, such as the run that they are made for.
        """
        made_for, made = self._made  # its own from here on: another thread may begin with another purpose
        if made_for != purpose:
            made = {}
            self._made = (purpose, made)
        if form not in made:
            made[form] = CompiledQuery(make())
        return made[form]
