"""Writing many records together so that one that the database refuses costs itself only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from peewee import DataError, IntegrityError, InternalError

from housekeeping.foundation.db import database

T = TypeVar("T")
R = TypeVar("R")

#: What a single row can cause (a constraint, a trigger that raises, a value out of range). Anything
#: else (a lost connection, a lock or statement timeout, a missing right) concerns the whole run. So does a server that
#: became read-only, an internal error to the driver: the ledger's statement fails then, too.
ROW_ERRORS: Final = (IntegrityError, DataError, InternalError)


def in_halves(items: Sequence[T], write: Callable[[Sequence[T]], R]) -> tuple[list[R], list[tuple[T, Exception]]]:
    """Write the items within the transaction at hand, in halves should the database refuse some.

    Parameters:
      write: Writes these; called within a savepoint.

    Returns:
      What `write` returned for each part that was written, in order, and the items that were refused, with the error.
    """
    written: list[R] = []
    refused: list[tuple[T, Exception]] = []
    parts = [items] if items else []
    while parts:
        part = parts.pop()
        try:
            with database.atomic():
                written.append(write(part))
        except ROW_ERRORS as error:
            if len(part) == 1:
                refused.append((part[0], error))
                continue
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
    return written, refused
