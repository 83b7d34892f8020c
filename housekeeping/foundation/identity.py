"""What identifies a row: asked of the database, where a partitioned table has a longer key than was declared."""

from __future__ import annotations

import threading
from typing import Any, Final

from peewee import BigIntegerField, CompositeKey, Field, Model

from housekeeping.foundation.catalog import forget_table, leave_out_absent, place_of, table_of

_COMPOSITE: Final = "__composite_key__"

_lock: Final = threading.RLock()
#: Model -> the database and table it was last identified in.
_identified: Final[dict[type[Model], tuple[Any, ...]]] = {}
#: Model -> the primary key it was declared with.
_declared: Final[dict[type[Model], Field]] = {}


def identify(model: type[Model]) -> None:
    """Give the model the primary key that its table has in this database; asks once for each database and table.

    A key column that was not declared, such as ``partition_id``, becomes a field of the model; an optional field whose
    column is absent is left out. A table that is not there, or has no primary key, leaves the model as it was declared.

    Raises:
      peewee.PeeweeException: When the database cannot be asked.
    """
    place = place_of(model)
    if _identified.get(model) == place:
        return
    with _lock:
        table = table_of(model)
        _use(model, list(table.key))
        leave_out_absent(model)
        if table.there:
            _identified[model] = place


def forget(model: type[Model]) -> None:
    """Take the model back to what it was declared with; it is identified anew when that is asked for."""
    with _lock:
        _identified.pop(model, None)
        _use(model, [])
        forget_table(model)


def key_of(model: type[Model]) -> tuple[Any, ...]:
    """The columns that identify a row, as far as is known by now."""
    meta: Any = model._meta
    return tuple(meta.get_primary_keys())


def _use(model: type[Model], columns: list[str]) -> None:
    meta: Any = model._meta
    declared = _declared.setdefault(model, meta.primary_key)
    further = [column for column in columns if column != declared.column_name]
    for field in key_of(model):
        if field is not declared and field.column_name not in further:
            meta.remove_field(field.name)
            delattr(model, field.name)
    if not further:
        meta.primary_key, meta.composite_key, meta.auto_increment = declared, False, declared.auto_increment
        return
    for column in further:
        if column not in meta.columns:
            meta.add_field(column, BigIntegerField())
    names = [meta.columns[column].name for column in columns]
    meta.set_primary_key(_COMPOSITE, CompositeKey(*names))
