"""Deferral of arguments whose last run rejected every record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from peewee import SQL, Value, fn

from housekeeping.sweeps.ledger.models import Rejection

#: Not `clock_timestamp()`, which no index can be asked about.
_NOW: Final = SQL("now()")


def deferred(worker: str, arguments: Iterable[Any] | None = None) -> Any:
    """Return a query of the worker's arguments whose delay has not passed, for the sweep that enqueues its runs.

    Its columns are `subject`, the argument as text, and `position`, where the last run ended. An argument may come
    several times, once for each cause.

    Parameters:
      arguments: Only these; None: all.
    """
    waiting = (Rejection.worker == worker) & (Rejection.not_before > _NOW)
    if arguments is not None:
        # One array: a placeholder for each of a thousand arguments takes longer than the query.
        waiting &= Rejection.subject == fn.ANY(Value([str(each) for each in arguments], converter=False, unpack=False))
    return Rejection.select(Rejection.subject, Rejection.position).where(waiting)
