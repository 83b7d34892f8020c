"""Columns that identify a row: the model's declared key, or the table's own key if the declared one is not unique."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, Final

from peewee import BareField, BigIntegerField, CompositeKey, Field, Model

from housekeeping.database.catalog import (
    Table,
    forget_table,
    remove_absent_fields,
    table_if_visible,
    table_of,
    table_version,
)
from housekeeping.database.connection import BaseModel, database

_COMPOSITE_KEY_NAME: Final = "__composite_key__"
_INTEGERS: Final = ("smallint", "integer", "bigint")

_lock: Final = threading.RLock()
#: Model -> the version of its table when it was last identified.
_identified: Final[dict[type[Model], tuple[Any, ...]]] = {}
#: Model -> its declared primary key: a field, a `CompositeKey`, or False for none.
_declared: Final[dict[type[Model], Any]] = {}
#: Model -> fields that were added for key columns of the table.
_added: Final[dict[type[Model], list[Field]]] = {}


def identify(model: type[Model]) -> None:
    """Give the model the key of its table if the declared key is not unique; reads the catalog once for each table.

    A key column that was not declared, such as ``partition_id``, becomes a field of the model. Optional fields whose
    columns are absent are removed. Without a table or a unique key the model stays as declared.

    Raises:
      peewee.PeeweeException: If the catalog cannot be read.
    """
    if database.obj is None:
        return
    version = table_version(model)
    if _identified.get(model) == version:
        return
    with _lock:
        table = table_of(model)
        declared = declared_key_columns(model)
        _use(model, declared if table.is_unique(declared) or not table.keys else table.keys[0], table)
        remove_absent_fields(model)
        if table.exists:
            _identified[model] = version


def restore_declared_key(model: type[Model]) -> None:
    """Restore the declared key and fields of the model; the next `identify` reads the catalog again."""
    with _lock:
        _identified.pop(model, None)
        _use(model, declared_key_columns(model), Table(exists=False))
        forget_table(model)


def key_of(model: type[Model]) -> tuple[Any, ...]:
    """Return the columns that identify a row, as currently known."""
    meta: Any = model._meta
    return tuple(meta.get_primary_keys())


def key_among(model: type[Model], columns: Collection[str]) -> tuple[Any, ...]:
    """Return the fields that identify a row, chosen among these columns.

    The result is the model's own key if that is unique or nothing better is known, else a key of its table.
    """
    key = key_of(model)
    if vouches_for_key(model):
        return key
    table = table_if_visible(model)
    if not table.enforced or table.is_unique([field.column_name for field in key]):
        return key
    meta: Any = model._meta
    found = next((names for names in table.keys if set(names) <= set(columns)), None)
    return key if found is None else tuple(meta.columns[name] for name in found)


def vouches_for_key(model: type[Model]) -> bool:
    """Return whether the model declares its key to be unique, without proof: ``class Meta: key_is_unique``."""
    return bool(getattr(model._meta, "key_is_unique", False))


def declared_key_columns(model: type[Model]) -> tuple[str, ...]:
    """Return the names of the declared key columns."""
    meta: Any = model._meta
    declared = _declared.get(model, meta.primary_key)
    if declared is False:
        return ()
    if isinstance(declared, CompositeKey):
        return tuple(meta.fields[name].column_name for name in declared.field_names)
    return (declared.column_name,)


def is_implicit_key(model: type[Model]) -> bool:
    """Return whether the key is the column ``id`` that peewee adds to a model without a declared key."""
    meta: Any = model._meta
    inherited: Any = BaseModel._meta
    # The key of the base class is copied, with the number that peewee gives each new field.
    return bool(getattr(meta.primary_key, "_order", None) == inherited.primary_key._order)


def _use(model: type[Model], columns: tuple[str, ...], table: Table) -> None:
    meta: Any = model._meta
    declared = _declared.setdefault(model, meta.primary_key)
    if set(columns) == set(declared_key_columns(model)):
        _set_key(meta, declared)
    else:
        for column in columns:
            if column not in meta.columns:
                integer = table.columns.get(column) in _INTEGERS
                meta.add_field(column, BigIntegerField() if integer else BareField())
                _added.setdefault(model, []).append(meta.columns[column])
        if len(columns) == 1:
            _set_key(meta, meta.columns[columns[0]])
        else:
            meta.set_primary_key(_COMPOSITE_KEY_NAME, CompositeKey(*(meta.columns[column].name for column in columns)))
    for field in [field for field in _added.get(model, ()) if field.column_name not in columns]:
        _added[model].remove(field)
        meta.remove_field(field.name)
        delattr(model, field.name)


def _set_key(meta: Any, key: Any) -> None:
    meta.primary_key, meta.composite_key = key, isinstance(key, CompositeKey)
    meta.auto_increment = isinstance(key, Field) and key.auto_increment
