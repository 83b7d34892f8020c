"""What a declaration is refused for, where it is made and in words that show the right form."""

from __future__ import annotations

from typing import Any

from blinker import NamedSignal

from housekeeping.foundation.db import database
from housekeeping.foundation.errors import DeclarationError
from housekeeping.foundation.identity import key_of
from housekeeping.sweeps.call import Call, CallPass
from housekeeping.sweeps.table_pass import TablePass


def refuse_form(name: str, stale: Any, order: Any, action: Any) -> None:
    """Refuse what is easily written, and would fail far from here."""
    if stale is not None and not callable(stale):
        raise DeclarationError(f"{name}: stale should be a function of the time: lambda now: Session.ends <= now")
    if not isinstance(order, tuple):
        raise DeclarationError(f"{name}: order should be a tuple of columns, such as (Session.ends, Session.id)")
    if isinstance(action, type):
        raise DeclarationError(f"{name}: action should be {action.__name__}(), with brackets")


def refuse_event(name: str, event: Any, columns: Any, *, has_passes: bool) -> None:
    """Refuse an event that no batch would announce."""
    if has_passes and (event is not None or columns):
        raise DeclarationError(f"{name}: a sweep of passes has no event; give it to each TablePass, as sends")
    if event is None and columns:
        raise DeclarationError(f"{name}: event_columns without an event; give event=events.event('shop.order_expired')")
    if event is not None and not isinstance(event, NamedSignal):
        raise DeclarationError(f"{name}: event is {event!r}; it should be events.event('shop.order_expired')")


def refuse_walk(name: str, table: TablePass) -> None:
    """Refuse a walk that would miss rows, look elsewhere, or call nothing."""
    kind = table.model
    meta: Any = kind._meta
    if meta.database is not database:
        raise DeclarationError(f"{name}: {kind.__name__} should be derived from housekeeping.BaseModel")
    key = tuple(column.column_name for column in key_of(kind))
    if not key or {column.column_name for column in table.order[-len(key) :]} != set(key):
        raise DeclarationError(
            f"{name}: order must end with the primary key ({', '.join(key)}), or rows could be missed"
        )
    if isinstance(table.action, Call) and not isinstance(table, CallPass):
        raise DeclarationError(f"{name}: a Call needs a CallPass, or nothing would be called")
