"""Checks of a declaration at its creation, with errors that show the right form."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Final

from blinker import NamedSignal
from peewee import Field, Model, Ordering

from housekeeping.core.errors import DeclarationError
from housekeeping.core.sanitize import described
from housekeeping.database.connection import DatabaseHandle
from housekeeping.database.primary_key import is_implicit_key, key_of
from housekeeping.sweeps.partitions.action import DropPartitions
from housekeeping.sweeps.stages.call import Call, CallStage
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.sweeps.table_models.naming import of_another_library

_FORMS: Final = {
    "stale": "lambda now: Session.expires_at <= now",
    "order": "(Session.expires_at, Session.id)",
    "action": "Delete()",
}


def check_form(sweep: Any) -> None:
    """Reject a sweep that has neither stages nor all of stale, order and action. Reject mistakes that would fail
    later."""
    name, order, has_stages = sweep.name, sweep.order, sweep.stages is not None
    if not isinstance(name, str):
        raise DeclarationError(f'Sweep: name is {name!r}; write a text, such as "sessions.expired"')
    if not sweep._name_form.fullmatch(name):
        raise DeclarationError(
            f"{name!r} is no name for a sweep; it should be letters, digits and _ . - such as sessions.expired"
        )
    given = {"stale": sweep.stale is not None, "order": bool(order), "action": sweep.action is not None}
    drops = isinstance(sweep.action, DropPartitions)
    missing = [field for field, there in given.items() if not there and not (drops and field == "stale")]
    if not has_stages and missing:
        forms = ", ".join(f"{field}={_FORMS[field]}" for field in missing)
        raise DeclarationError(f"{name}: give stale, order and action, or stages; missing: {forms}")
    if has_stages and not missing:
        raise DeclarationError(f"{name}: give stale, order and action, or stages; not both")
    if sweep.stale is not None and not callable(sweep.stale):
        raise DeclarationError(f"{name}: stale should be a function of the time: {_FORMS['stale']}")
    if not isinstance(order, tuple):
        raise DeclarationError(f"{name}: order should be a tuple of columns, such as {_FORMS['order']}")
    check_order(name, order)
    if isinstance(sweep.action, type):
        raise DeclarationError(f"{name}: action should be {sweep.action.__name__}(), with brackets")
    event, columns = sweep.event, sweep.event_columns
    if drops and (event is not None or sweep.row_log is not None or sweep.columns):
        raise DeclarationError(f"{name}: DropPartitions reads no rows, so it has no event, columns and row_log")
    if has_stages and (event is not None or columns):
        raise DeclarationError(f"{name}: a sweep with stages has no event; give it to each TableStage, as event")
    if event is None and columns:
        raise DeclarationError(f"{name}: event_columns without an event; give event=events.event('shop.order_expired')")
    if event is not None and not isinstance(event, NamedSignal):
        raise DeclarationError(f"{name}: event is {described(event)}; it should be events.event('shop.order_expired')")
    for key, column in columns.items() if isinstance(columns, Mapping) else ():
        if not isinstance(column, Field):
            raise DeclarationError(
                f'{name}: event_columns has {described(column)} as {key!r}; write {{"order_id": Order.id}}'
            )
    if has_stages and sweep.hold is not None:
        raise DeclarationError(f"{name}: a sweep of stages has no hold; give it to each TableStage")
    if has_stages and (sweep.columns or sweep.row_log is not None):
        raise DeclarationError(f"{name}: a sweep of stages has no columns and no row_log; give them to each TableStage")


def check_names(kind: type[Any], given: Mapping[str, Any]) -> None:
    """Reject a keyword that is no field of the declaration."""
    names = [field.name for field in dataclasses.fields(kind)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(names)}"
            raise DeclarationError(f"{given.get('name', kind.__name__)}: there is no field {name!r}; {hint}")


def check_order(name: str, order: tuple[Any, ...]) -> None:
    """Reject an order of anything else than the columns of one model, ascending."""
    for column in order:
        if isinstance(column, Ordering):
            known_as = getattr(column.node, "name", "the column")
            raise DeclarationError(f"{name}: order is always oldest first; write {known_as} without .asc() and .desc()")
        if not isinstance(column, Field):
            raise DeclarationError(
                f"{name}: order has {described(column)}; write columns: {_FORMS['order']}{of_another_library(column)}"
            )
        if column.model is not order[0].model:
            raise DeclarationError(
                f"{name}: order has {column.model.__name__}.{column.name}, but begins with a column of "
                f"{order[0].model.__name__}; write columns of one model: {_FORMS['order']}"
            )


def check_stage(name: str, table: TableStage) -> None:
    """Reject a stage that would miss rows, use another database, or call nothing."""
    check_order(name, table.order)
    kind = table.model
    meta: Any = kind._meta
    if not isinstance(meta.database, DatabaseHandle):
        raise DeclarationError(f"{name}: {kind.__name__} should be derived from housekeeping.BaseModel")
    key = key_of(kind)
    if not key:
        raise DeclarationError(f"{name}: {kind.__name__} has no primary key; declare that of its table")
    if {column.name for column in table.order[-len(key) :]} != {column.name for column in key}:
        raise DeclarationError(
            f"{name}: order must end with the primary key ({', '.join(column.column_name for column in key)}), or rows "
            f"could be missed; {_right_order(kind, table.order, key)}"
        )
    if isinstance(table.action, Call) and not isinstance(table, CallStage):
        raise DeclarationError(f"{name}: a Call needs a CallStage, or nothing would be called")


def _right_order(kind: type[Model], order: tuple[Any, ...], key: tuple[Any, ...]) -> str:
    """Suggest the order to write, or say that the model declares no key."""
    meta: Any = kind._meta
    if is_implicit_key(kind):
        return (
            f"{kind.__name__} declares no primary key, so peewee assumes a column id; declare the key of the table "
            f"{meta.table_name}, such as token = TextField(primary_key=True)"
        )
    columns = [*(column for column in order if all(column is not each for each in key)), *key]
    names = ", ".join(f"{kind.__name__}.{column.name}" for column in columns)
    return f"write order=({names}{',' if len(columns) == 1 else ''})"
