"""Columns of a built model by their names, for declarations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from peewee import Expression, Field, Model

from housekeeping.core.errors import DeclarationError

if TYPE_CHECKING:

    class AnyColumn(Field[Any]):
        """Column whose type only the database knows, with the operations of JSON and array fields."""

        def __getitem__(self, item: Any) -> AnyColumn: ...
        def __getattr__(self, name: str) -> Any: ...
        def contains(self, rhs: Any) -> Expression: ...
        def startswith(self, rhs: Any) -> Expression: ...
        def endswith(self, rhs: Any) -> Expression: ...


class Columns(Protocol):
    """The columns of a table, as attributes: peewee fields, for comparisons joined by ``&`` and ``|``."""

    def __getattr__(self, name: str, /) -> AnyColumn: ...


#: Predicate of `Sweep.on` in error texts.
EXAMPLE: Final = "lambda row, now: row.expires_at <= now"
#: Hold of `Sweep.on` in error texts.
HOLD_EXAMPLE: Final = "lambda row: row.on_hold"


def column_named(sweep: str, model: type[Model], name: object) -> Field:
    """Return the column with this name, in the model or in the database.

    Raises:
      DeclarationError: When there is none, listing the columns; or when the name is not a text.
    """
    meta: Any = model._meta
    if not isinstance(name, str):
        raise DeclarationError(f"{sweep}: {_described(name)} is no name of a column; write it as text{_as_text(name)}")
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
    given = names if isinstance(names, list | tuple) else [names]
    named = [column_named(sweep, model, name) for name in given]
    return (*named, *(column for column in meta.get_primary_keys() if not any(column is each for each in named)))


@dataclass(frozen=True, slots=True)
class RowPredicate:
    """Predicate of `Sweep.on` as a function of the time alone."""

    sweep: str
    model: type[Model]
    stale: Callable[[Columns, datetime], Expression]

    def __call__(self, now: datetime) -> Expression:
        """Return the condition.

        Raises:
          DeclarationError: When it names a column that the table does not have.
        """
        columns: Any = self.model
        try:
            return self.stale(columns, now)
        except AttributeError as error:
            if error.obj is not self.model:
                raise
            raise DeclarationError(f"{self.sweep}: stale: {_without(self.model, str(error.name))}") from error


def predicate_on(sweep: str, model: type[Model], stale: Callable[[Columns, datetime], Expression]) -> RowPredicate:
    """Return the predicate as a function of the time alone.

    Raises:
      DeclarationError: When `stale` is no function of a row and the time.
    """
    if not callable(stale):
        raise DeclarationError(f"{sweep}: stale should be a function of a row and the time: {EXAMPLE}")
    try:
        signature = inspect.signature(stale)
    except ValueError:  # some functions written in C have none
        return RowPredicate(sweep, model, stale)
    try:
        signature.bind(model, None)
    except TypeError as error:
        raise DeclarationError(f"{sweep}: stale is called with a row and the time ({error}); write {EXAMPLE}") from None
    return RowPredicate(sweep, model, stale)


@dataclass(frozen=True, slots=True)
class RowHold:
    """Hold of `Sweep.on` as a function without an argument."""

    sweep: str
    model: type[Model]
    hold: Callable[[Columns], Any]

    def __call__(self) -> Any:
        """Return the condition.

        Raises:
          DeclarationError: When it names a column that the table does not have.
        """
        columns: Any = self.model
        try:
            return self.hold(columns)
        except AttributeError as error:
            if error.obj is not self.model:
                raise
            raise DeclarationError(f"{self.sweep}: hold: {_without(self.model, str(error.name))}") from error


def hold_on(sweep: str, model: type[Model], hold: Callable[[Columns], Any]) -> RowHold:
    """Return the hold as a function without an argument.

    Raises:
      DeclarationError: When `hold` is no function of a row.
    """
    if not callable(hold):
        raise DeclarationError(f"{sweep}: hold should be a function of a row: {HOLD_EXAMPLE}")
    try:
        inspect.signature(hold).bind(model)
    except TypeError as error:
        raise DeclarationError(f"{sweep}: hold is called with a row ({error}); write {HOLD_EXAMPLE}") from None
    except ValueError:  # some functions written in C have no signature
        pass
    return RowHold(sweep, model, hold)


def event_columns_of(sweep: str, model: type[Model], names: Mapping[str, str]) -> dict[str, Field]:
    """Return the columns of an event's rows by their keys.

    Raises:
      DeclarationError: When there is no such column.
    """
    return {key: column_named(sweep, model, name) for key, name in names.items()}


def of_another_library(value: object) -> str:
    """Return the end of an error text that names `Sweep.on`, if the value belongs to Django or SQLAlchemy."""
    library = type(value).__module__.partition(".")[0]
    if library not in ("django", "sqlalchemy"):
        return ""
    return "; for a table of Django or SQLAlchemy write Sweep.on(table, ...), with columns by name: row.expires_at"


def _described(column: object) -> str:
    owner = getattr(getattr(column, "class_", None) or getattr(column, "model", None), "__name__", None)
    name = _name_of(column)
    if name is None:
        return f"an object of type {type(column).__name__}"
    return name if owner is None else f"{owner}.{name}"


def _as_text(column: object) -> str:
    name = _name_of(column)
    return "" if name is None else f': "{name}"'


def _name_of(column: object) -> str | None:
    """Return the name of a column of SQLAlchemy, Django or peewee."""
    field = getattr(column, "field", None)  # of Django
    found = (getattr(field, "attname", None), getattr(column, "key", None), getattr(column, "name", None))
    return next((name for name in found if isinstance(name, str)), None)


def _without(model: type[Model], name: str) -> str:
    meta: Any = model._meta
    return f"{model.__name__} has no column {name!r}; its columns are {', '.join(meta.sorted_field_names)}"
