"""Columns of a built model by their names, for declarations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from peewee import Expression, Field, Model

from housekeeping.core.errors import DeclarationError

if TYPE_CHECKING:

    class AnyColumn(Field[Any]):
        """A column whose type only the database knows, with what the fields of JSON and arrays add."""

        def __getitem__(self, item: Any) -> AnyColumn: ...
        def __getattr__(self, name: str) -> Any: ...
        def contains(self, rhs: Any) -> Expression: ...
        def startswith(self, rhs: Any) -> Expression: ...
        def endswith(self, rhs: Any) -> Expression: ...


class Columns(Protocol):
    """The columns of a table, as attributes: peewee fields, for comparisons joined by ``&`` and ``|``."""

    def __getattr__(self, name: str, /) -> AnyColumn: ...


def column_named(sweep: str, model: type[Model], name: str) -> Field:
    """Return the column with this name, in the model or in the database.

    Raises:
      DeclarationError: When there is none; it lists those that there are.
    """
    meta: Any = model._meta
    if name not in meta.combined:
        raise DeclarationError(f"{sweep}: {_without(model, name)}")
    column: Field = meta.combined[name]
    return column


def keyset_order(sweep: str, model: type[Model], names: str | Sequence[str]) -> tuple[Field, ...]:
    """Return the columns with these names, then those of the primary key that are not among them.

    Raises:
      DeclarationError: When there is no such column.
    """
    meta: Any = model._meta
    named = [column_named(sweep, model, name) for name in ([names] if isinstance(names, str) else names)]
    return (*named, *(column for column in meta.get_primary_keys() if not any(column is each for each in named)))


def predicate_on(
    sweep: str, model: type[Model], stale: Callable[[Columns, datetime], Expression]
) -> Callable[[datetime], Expression]:
    """Return the predicate as a function of the time alone.

    It raises `DeclarationError` when `stale` names a column that the table does not have.
    """
    columns: Any = model

    def predicate(now: datetime) -> Expression:
        try:
            return stale(columns, now)
        except AttributeError as error:
            if error.obj is not model:
                raise
            raise DeclarationError(f"{sweep}: stale: {_without(model, str(error.name))}") from error

    return predicate


def event_columns_of(sweep: str, model: type[Model], names: Mapping[str, str]) -> dict[str, Field]:
    """Return the columns of an event's rows by their keys.

    Raises:
      DeclarationError: When there is no such column.
    """
    return {key: column_named(sweep, model, name) for key, name in names.items()}


def _without(model: type[Model], name: str) -> str:
    meta: Any = model._meta
    return f"{model.__name__} has no column {name!r}; its columns are {', '.join(meta.sorted_field_names)}"
