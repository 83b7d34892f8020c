"""Table of page views, half of which are old, with and without partitions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

from psycopg2.extensions import connection as Connection

#: A row is old after this many days. No row is between 190 and 200 days old, so that whole partitions are old.
AGE: Final = timedelta(days=195)
ROWS: Final = 200_000
BATCH: Final = 1_000
PARTITIONS: Final = 20  # with old rows; 21 more have none
COLUMNS: Final = "id bigint NOT NULL, seen_at timestamptz NOT NULL, user_id bigint NOT NULL, path text NOT NULL"
#: Also for MariaDB: when row n was seen, in seconds after midnight; half of the rows are old.
SECONDS: Final = """CASE WHEN n <= {rows} THEN -400 * 86400 + (n - 0.5) * 200 * 86400 / {rows}
    ELSE -190 * 86400 + (n - {rows} - 0.5) * 190 * 86400 / ({among} - {rows}) END"""
_FILL: Final = """
INSERT INTO visits SELECT n, date_trunc('day', now()) + (SECONDS) * interval '1 second', n % 5000, '/articles/' || n
FROM generate_series(1::bigint, {among}) AS n
""".replace("SECONDS", SECONDS)
TABLES: Final = f"""
CREATE TABLE visits ({COLUMNS}, PRIMARY KEY (id));
CREATE INDEX ON visits (seen_at, id);
CREATE TABLE old_visits ({COLUMNS}, PRIMARY KEY (id));
CREATE TABLE archived_visits ({COLUMNS}, archived_at timestamptz NOT NULL, archived_by_run bigint NOT NULL,
    PRIMARY KEY (archived_by_run, archived_at, id));
"""
RANGES: Final = f"""
CREATE TABLE visits ({COLUMNS}, PRIMARY KEY (seen_at, id)) PARTITION BY RANGE (seen_at);
DO $$ BEGIN
    FOR n IN 0 .. {2 * PARTITIONS} LOOP
        EXECUTE format('CREATE TABLE visits_%s PARTITION OF visits FOR VALUES FROM (%L) TO (%L)', n,
            date_trunc('day', now()) + (n * 10 - 400) * interval '1 day',
            date_trunc('day', now()) + (n * 10 - 390) * interval '1 day');
    END LOOP;
END $$;
"""
LEFT: Final = "SELECT count(*) FROM visits WHERE {old}"
OLD: Final = f"seen_at < now() - interval '{AGE.days} days'"


def filling(tables: str) -> Callable[[Connection, int, int], None]:
    """Return the function that creates the tables and adds the rows, for `Comparison.fill`."""

    def fill(connection: Connection, rows: int, among: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute(tables + _FILL.format(rows=rows, among=among))

    return fill
