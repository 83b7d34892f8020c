"""Record of the columns that a predicate uses while Python evaluates it; changes peewee's classes meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from peewee import ColumnBase, Field, FieldAccessor, ForeignKeyAccessor, ObjectIdAccessor


@dataclass(slots=True)
class ColumnUsage:
    """Columns that a predicate used while Python evaluated it.

    Attributes:
      fields: The columns it read from a model.
      truth_tested: Whether Python asked a condition or a column for its truth.
    """

    fields: list[Field] = field(default_factory=list)
    truth_tested: bool = False


class _ThreadState(threading.local):
    usage: ColumnUsage | None = None


_of_thread: Final = _ThreadState()
_lock: Final = threading.Lock()
_watching = 0
_ACCESSORS: Final[dict[Any, Any]] = {
    kind: kind.__get__ for kind in (FieldAccessor, ForeignKeyAccessor, ObjectIdAccessor)
}


@contextmanager
def column_usage() -> Iterator[ColumnUsage]:
    """Record which columns this thread uses within the block.

    peewee has no hook for this, so its classes are changed as long as any thread is in here. Other threads see no
    difference: columns are as true, and models return the same fields, as before.
    """
    usage, before = ColumnUsage(), _of_thread.usage
    _watch(1)
    _of_thread.usage = usage
    try:
        yield usage
    finally:
        _of_thread.usage = before
        _watch(-1)


def _watch(change: int) -> None:
    global _watching
    with _lock:
        before, _watching = _watching, _watching + change
        if before == 0:
            ColumnBase.__bool__ = _truth  # type: ignore[attr-defined]
            for kind, get in _ACCESSORS.items():
                kind.__get__ = _noting(get)
        elif _watching == 0:
            del ColumnBase.__bool__  # type: ignore[attr-defined]
            for kind, get in _ACCESSORS.items():
                kind.__get__ = get


def _truth(column: ColumnBase) -> bool:
    usage = _of_thread.usage
    if usage is not None and not _is_of_peewee(2):
        usage.truth_tested = True
    return True


def _noting(get: Callable[..., Any]) -> Callable[..., Any]:
    def get_and_note(accessor: Any, instance: Any, instance_type: Any = None) -> Any:
        found = get(accessor, instance, instance_type)
        usage = _of_thread.usage
        if usage is not None and isinstance(found, Field) and not _is_of_peewee(2):
            usage.fields.append(found)
        return found

    return get_and_note


def _is_of_peewee(depth: int) -> bool:
    """Return whether the caller this many frames up is peewee's own code."""
    module = sys._getframe(depth).f_globals.get("__name__", "")
    return str(module).partition(".")[0] in ("peewee", "playhouse")
