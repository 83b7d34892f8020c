"""Old rows of one table: deleted, moved to an archive, and dropped with their partitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import psycopg2
from peewee import BigIntegerField

from benchmarks.comparison import (
    BY_CTID,
    FLOOR,
    GROWING,
    LIMITED,
    OURS,
    PURGE,
    SAME_ARCHIVE,
    Comparison,
    Contestant,
    Place,
)
from benchmarks.contestants import Floor, composed, ours, run
from benchmarks.visits import AGE, BATCH, LEFT, OLD, PARTITIONS, RANGES, ROWS, TABLES, filling
from housekeeping import BaseModel, Delete, DropPartitions, Guard, Limits, Rows, Sweep, UtcDateTimeField
from housekeeping.engine.purge import PurgeRequest, sweep_of

_DELETED: Final = "DELETE FROM visits WHERE {chosen}"
_COPIED: Final = "INSERT INTO old_visits SELECT * FROM change0"
_COPIED_ALIKE: Final = "INSERT INTO archived_visits SELECT *, statement_timestamp(), 1 FROM change0"


class Visit(BaseModel):
    """Row of the table."""

    id = BigIntegerField(primary_key=True)
    seen_at = UtcDateTimeField()

    class Meta:
        table_name = "visits"


def _sweep(name: str, stage: Rows | DropPartitions) -> Sweep:
    return Sweep(f"visits.{name}", stage, limits=Limits(batch=BATCH, batch_takes=None), guard=Guard(first_run=False))


def _rows(action: Delete) -> Rows:
    return Rows(Visit, stale=lambda row, limit: row.seen_at < limit, order="seen_at", age=AGE, action=action)


_DELETE: Final = _sweep("delete", _rows(Delete()))
_ARCHIVE: Final = _sweep("archive", _rows(Delete(archive_to="archived_visits")))
_DROP: Final = _sweep("drop", DropPartitions(Visit, "seen_at", older_than=AGE))


#: As it is declared without any limit: batches of 100 at first.
_GROW: Final = Sweep("visits.grow", _rows(Delete()), guard=Guard(first_run=False))


def _purge(place: Place) -> Callable[[], object]:
    """Return what ``housekeeping purge`` does once its plan was confirmed."""
    composed(place, _DELETE.name, sweeps=[_DELETE])
    request = PurgeRequest(table="visits", where=OLD, order_by=("seen_at",))
    sweep = sweep_of(request)
    return lambda: run(sweep, confirmed=True, noted=request.as_count())


def _floor(*changes: str, after: str | None = None) -> dict[str, Contestant]:
    return Floor(
        table="visits",
        stale=f"seen_at < %(now)s::timestamptz - interval '{AGE.days} days'",
        order=("seen_at", "id"),
        changes=(f"{_DELETED} RETURNING *", *changes) if changes else (_DELETED,),
        batch=BATCH,
        after=after,
    ).contestants()


def _drops(place: Place) -> Callable[[], object]:
    """Detach and drop each partition whose range is old."""
    connection = psycopg2.connect(place.database_url)
    connection.autocommit = True
    cursor = connection.cursor()

    def work() -> None:
        for number in range(PARTITIONS):
            cursor.execute(f"ALTER TABLE visits DETACH PARTITION visits_{number} CONCURRENTLY")
            cursor.execute(f"DROP TABLE visits_{number}")

    return work


def _comparison(name: str, tables: str, contestants: dict[str, Contestant]) -> Comparison:
    return Comparison(
        name=name,
        template="visits" if tables is TABLES else "visits_by_range",
        fill=filling(tables),
        undone=LEFT.format(old=OLD),
        rows=ROWS,
        among=2 * ROWS,
        contestants=contestants,
        targets={},
    )


_SIMPLE: Final = _floor()
#: The costs of a batch are those of `tables`; these show what an archive and partitions change.
COMPARISONS: Final = (
    _comparison(
        "delete",
        TABLES,
        {
            FLOOR: _SIMPLE[FLOOR],
            LIMITED: _floor(after="true")[FLOOR],
            BY_CTID: _SIMPLE[BY_CTID],
            OURS: ours(_DELETE.name, sweeps=[_DELETE]),
            PURGE: _purge,
        },
    ),
    _comparison(
        "archive",
        TABLES,
        {
            FLOOR: _floor(_COPIED)[FLOOR],
            LIMITED: _floor(_COPIED, after="true")[FLOOR],
            SAME_ARCHIVE: _floor(_COPIED_ALIKE)[FLOOR],
            OURS: ours(_ARCHIVE.name, sweeps=[_ARCHIVE]),
        },
    ),
    _comparison("partitions", RANGES, {FLOOR: _drops, OURS: ours(_DROP.name, sweeps=[_DROP])}),
)
_FIXED: Final = (100, 500, 1_000, 2_000, 5_000, 10_000)
#: A million rows in batches that grow, compared with the best of these sizes.
GROWING_BATCHES: Final = replace(
    _comparison(
        "growing",
        TABLES,
        {
            **{f"ours, batches of {size:,}": ours(_DELETE.name, sweeps=[_DELETE], batch_size=size) for size in _FIXED},
            GROWING: ours(_GROW.name, sweeps=[_GROW]),
            PURGE: _purge,
        },
    ),
    rows=1_000_000,
    among=1_100_000,
    rounds_at_most=3,
    floors=len(_FIXED),
    times_transactions=True,
    targets={GROWING: 0.9, PURGE: 0.9},
)
