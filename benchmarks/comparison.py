"""Comparison of programs that do the same work on copies of the same data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from psycopg2.extensions import connection as Connection

FLOOR: Final = "floor"
PREPARED: Final = "floor, prepared"
BY_CTID: Final = "floor, prepared, by ctid"
OURS: Final = "ours"
WARM: Final = "ours, warm"
LINES: Final = "ours, a line a record"
LIMITED: Final = "floor, LIMIT without a cursor"
PURGE: Final = "ours, by purge"
SAME_ARCHIVE: Final = "floor, same archive as ours"
GROWING: Final = "ours, batches that grow"


@dataclass(frozen=True, slots=True)
class Place:
    """Servers, database and folder of a contestant.

    Attributes:
      rows: How many records are stale.
      folder: For what it writes: logs, stores, repositories.
    """

    database_url: str
    redis_url: str
    rows: int
    folder: Path

    @property
    def store(self) -> Path:
        """Return the folder of the object store."""
        return self.folder / "store"


#: Function that prepares (connects, imports) and returns the function to measure.
Contestant = Callable[[Place], Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Contestants that do the same work. Every contestant is compared with the first one, or the best of the first.

    Attributes:
      contestants: By name, in the order of their turns.
      floors: How many of the first contestants are candidates for the one that all are compared with: the fastest.
      targets: Minimum ratio of a contestant's speed to that of this one.
      times_transactions: Whether the longest transaction of each turn is measured, by a look every 20 ms.
      models: The tables, by their models.
      fill: Fills them: a connection in autocommit, how many records are stale, how many rows there are in all.
      undone: How many stale records are left: an SQL query of one number, or a function where they are elsewhere.
      prepare: What is to be done besides the copied database before each turn (files, keys); its folder is new.
      rounds_at_most: Fewer than asked for, where a round takes long.
    """

    name: str
    contestants: Mapping[str, Contestant]
    targets: Mapping[str, float]
    models: tuple[Any, ...] = ()
    template: str = "empty"
    fill: Callable[[Connection, int, int], None] = lambda connection, rows, among: None
    undone: str | Callable[[Place], int]
    prepare: Callable[[Place], None] = lambda place: None
    rows: int = 100_000
    among: int = 1_000_000
    unit: str = "rows"
    rounds_at_most: int = 100
    floors: int = 1
    times_transactions: bool = False
