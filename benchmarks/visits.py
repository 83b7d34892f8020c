"""Old rows of one table: deleted, moved to an archive, and dropped with their partitions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import psycopg2
from peewee import BigIntegerField
from psycopg2.extensions import connection as Connection

from benchmarks.comparison import FLOOR, OURS, PURGE, SAME_ARCHIVE, Comparison, Contestant, Place
from benchmarks.contestants import Floor, composed, ours, run
from housekeeping.purge.request import PurgeRequest
from housekeeping.purge.sweep import sweep_of
from housekeeping.sweeps import BaseModel, Delete, DropPartitions, Sweep, UtcDateTimeField

#: A row is old after so many days. No row is between 190 and 200 days old, so that whole partitions are old.
AGE: Final = timedelta(days=195)
ROWS: Final = 200_000
BATCH: Final = 1_000
PARTITIONS: Final = 20  # with old rows; as many have none
COLUMNS: Final = "id bigint NOT NULL, seen_at timestamptz NOT NULL, user_id bigint NOT NULL, path text NOT NULL"
#: Also for MariaDB: when row n was seen, in seconds after midnight; half of the rows are old.
SECONDS: Final = """CASE WHEN n <= {rows} THEN -400 * 86400 + (n - 0.5) * 200 * 86400 / {rows}
    ELSE -190 * 86400 + (n - {rows} - 0.5) * 190 * 86400 / ({among} - {rows}) END"""
_FILL: Final = """
INSERT INTO visits SELECT n, date_trunc('day', now()) + (SECONDS) * interval '1 second', n % 5000, '/articles/' || n
FROM generate_series(1::bigint, {among}) AS n
""".replace("SECONDS", SECONDS)
_TABLES: Final = f"""
CREATE TABLE visits ({COLUMNS}, PRIMARY KEY (id));
CREATE INDEX ON visits (seen_at, id);
CREATE TABLE old_visits ({COLUMNS}, PRIMARY KEY (id));
CREATE TABLE archived_visits ({COLUMNS}, archived_at timestamptz NOT NULL, archived_by_run bigint NOT NULL,
    PRIMARY KEY (archived_by_run, archived_at, id));
"""
_RANGES: Final = f"""
CREATE TABLE visits ({COLUMNS}, PRIMARY KEY (seen_at, id)) PARTITION BY RANGE (seen_at);
DO $$ BEGIN
    FOR n IN 0 .. {2 * PARTITIONS} LOOP
        EXECUTE format('CREATE TABLE visits_%s PARTITION OF visits FOR VALUES FROM (%L) TO (%L)', n,
            date_trunc('day', now()) + (n * 10 - 400) * interval '1 day',
            date_trunc('day', now()) + (n * 10 - 390) * interval '1 day');
    END LOOP;
END $$;
"""
_LEFT: Final = "SELECT count(*) FROM visits WHERE {old}"
_OLD: Final = f"seen_at < now() - interval '{AGE.days} days'"


class Visit(BaseModel):
    """Row of the table."""

    id = BigIntegerField(primary_key=True)
    seen_at = UtcDateTimeField()

    class Meta:
        table_name = "visits"


def _sweep(name: str, action: Any) -> Sweep:
    return Sweep(
        name=f"visits.{name}",
        stale=None if isinstance(action, DropPartitions) else lambda now: Visit.seen_at < now - AGE,
        order=(Visit.seen_at, Visit.id),
        action=action,
        batch_size=BATCH,
        confirm_first_run=False,
    )


_DELETE: Final = _sweep("delete", Delete())
_ARCHIVE: Final = _sweep("archive", Delete(archive_to="archived_visits"))
_DROP: Final = _sweep("drop", DropPartitions(older_than=AGE))


def _purge(place: Place) -> Callable[[], object]:
    """Return what ``housekeeping purge`` does once its plan was confirmed."""
    composed(place, _DELETE.name, sweeps=[_DELETE])
    request = PurgeRequest(table="visits", where=_OLD, order_by=("seen_at",), batch_size=BATCH)
    sweep = sweep_of(request)
    return lambda: run(sweep, confirmed=True, noted=request.as_count())


def _floor(*changes: str) -> dict[str, Contestant]:
    return Floor(
        table="visits",
        stale=f"seen_at < %(now)s::timestamptz - interval '{AGE.days} days'",
        order=("seen_at", "id"),
        changes=("DELETE FROM visits WHERE {chosen} RETURNING *", *changes) if changes else (_DELETED,),
        batch=BATCH,
    ).contestants()


_DELETED: Final = "DELETE FROM visits WHERE {chosen}"
_COPIED: Final = "INSERT INTO old_visits SELECT * FROM change0"
_COPIED_ALIKE: Final = "INSERT INTO archived_visits SELECT *, statement_timestamp(), 1 FROM change0"


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


def _filling(tables: str) -> Callable[[Connection, int, int], None]:
    def fill(connection: Connection, rows: int, among: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute(tables + _FILL.format(rows=rows, among=among))

    return fill


def _comparison(name: str, tables: str, contestants: dict[str, Contestant]) -> Comparison:
    return Comparison(
        name=name,
        template="visits" if tables is _TABLES else "visits_by_range",
        fill=_filling(tables),
        undone=_LEFT.format(old=_OLD),
        rows=ROWS,
        among=2 * ROWS,
        contestants=contestants,
        targets={},
    )


#: The costs of a batch are those of `tables`; these show what an archive and partitions change.
COMPARISONS: Final = (
    _comparison("delete", _TABLES, {**_floor(), OURS: ours(_DELETE.name, sweeps=[_DELETE]), PURGE: _purge}),
    _comparison(
        "archive",
        _TABLES,
        {
            **_floor(_COPIED),
            SAME_ARCHIVE: _floor(_COPIED_ALIKE)[FLOOR],
            OURS: ours(_ARCHIVE.name, sweeps=[_ARCHIVE]),
        },
    ),
    _comparison("partitions", _RANGES, {FLOOR: _drops, OURS: ours(_DROP.name, sweeps=[_DROP])}),
)
