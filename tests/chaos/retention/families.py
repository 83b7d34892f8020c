"""Test data of the archive, the partitions and the purge."""

from __future__ import annotations

from typing import Final

from tests.chaos.families import FRESH, SPAN, STALE, Family, Place, State

MODULE: Final = "tests.chaos.retention.sweeps"
#: Partitions of a round whose range is over.
OVER: Final = 5
#: Rows of a round that a purge may delete, and those that its limit lets it delete.
EXPIRED, PURGED = 300, 250
ORDERS_TABLE: Final = "orders"

_SESSIONS: Final = """
CREATE TABLE sessions (id bigint PRIMARY KEY, expires_at timestamptz NOT NULL, note text NOT NULL);
CREATE TABLE old_sessions (LIKE sessions, archived_at timestamptz NOT NULL, archived_by_run bigint NOT NULL,
    PRIMARY KEY (archived_by_run, archived_at, id));
CREATE FUNCTION slow_down() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN PERFORM pg_sleep(0.005); RETURN coalesce(NEW, OLD); END';
CREATE TRIGGER slow_down BEFORE INSERT OR DELETE ON old_sessions FOR EACH ROW EXECUTE FUNCTION slow_down()
"""
_EVENTS: Final = """
CREATE TABLE events (id bigint, happened_at timestamptz NOT NULL, on_hold boolean NOT NULL,
    PRIMARY KEY (id, happened_at)) PARTITION BY RANGE (happened_at)
"""
_ROWS: Final = """
INSERT INTO {table} SELECT {base} + n, now() - n * interval '1 minute', 'note ' || n
FROM generate_series(1, {stale}) AS n
UNION ALL SELECT {base} + 500 + n, now() + interval '1 day', 'fresh ' || n FROM generate_series(1, {fresh}) AS n
"""
_PARTITION: Final = """
CREATE TABLE events_{name} PARTITION OF events FOR VALUES FROM ('{year}-01-01') TO ('{next}-01-01');
INSERT INTO events SELECT {base} + n, '{year}-06-01', {on_hold} FROM generate_series(1, 3) AS n
"""


class Sessions(Family):
    """Sessions that a worker archives and that operators restore. In the end all stale ones are archived."""

    def expected(self) -> State:
        """Return the final state of every round."""
        archived = [("old_sessions", n, f"note {n}") for n in range(1, STALE + 1)]
        return [*archived, *(("sessions", 500 + n, f"fresh {n}") for n in range(1, FRESH + 1))]

    def fill(self, place: Place, round: int) -> None:
        place.do(_ROWS.format(table="sessions", base=round * SPAN, stale=STALE, fresh=FRESH))


class Events(Family):
    """Partitions. One of a round has a row on hold, and the range of another is not over."""

    def expected(self) -> State:
        """Return the final state of every round."""
        rows = [(name, n) for name in ("fresh", "held") for n in (1, 2, 3)]
        return [("fresh", True, None), ("held", True, None), *rows]

    def fill(self, place: Place, round: int) -> None:
        base, year = round * SPAN, 1000 + round * (OVER + 1)
        for number in range(OVER):
            name = f"{round}_over{number}"
            place.do(_PARTITION.format(name=name, year=year + number, next=year + number + 1, base=base, on_hold=False))
        for name, begins, on_hold in ((f"{round}_held", year + OVER, True), (f"{round}_fresh", 2200 + round, False)):
            place.do(_PARTITION.format(name=name, year=begins, next=begins + 1, base=base, on_hold=on_hold))

    def left(self, place: Place, round: int) -> State:
        start = f"events_{round}_"
        tables = place.rows(
            "SELECT substr(relname, %s), relispartition, obj_description(oid, 'pg_class') FROM pg_class "
            "WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace AND starts_with(relname, %s) "
            "ORDER BY 1",
            len(start) + 1,
            start,
        )
        rows = place.rows(
            "SELECT substr(tableoid::regclass::text, %s), id - %s FROM events "
            "WHERE starts_with(tableoid::regclass::text, %s) ORDER BY 1, 2",
            len(start) + 1,
            round * SPAN,
            start,
        )
        return [*tables, *rows]


class Orders(Family):
    """Rows that an operator purges, up to a limit."""

    def expected(self) -> State:
        """Return the final state of every round."""
        return [(n,) for n in range(PURGED + 1, EXPIRED + 1)] + [(500 + n,) for n in range(1, FRESH + 1)]

    def fill(self, place: Place, round: int) -> None:
        place.do(_ROWS.format(table=ORDERS_TABLE, base=round * SPAN, stale=EXPIRED, fresh=FRESH))


SESSIONS: Final = Sessions(
    "shop.expired_sessions",
    [],
    queries=[
        "SELECT * FROM (SELECT 'old_sessions', id - %s AS n, note FROM old_sessions WHERE id BETWEEN %s AND %s "
        "ORDER BY 2) AS archived",
        "SELECT 'sessions', id - %s AS n, note FROM sessions WHERE id BETWEEN %s AND %s ORDER BY 2",
    ],
    counts={"sessions": ("archived_rows",)},
    settings={"batch_size": 10},
    leased=True,
    setup=_SESSIONS,
    archive=("sessions", "old_sessions"),
)
EVENTS: Final = Events(
    "shop.old_events",
    [],
    counts={"events": ("dropped_partitions",)},
    leased=True,
    setup=_EVENTS,
    partitions="events",
    stale=OVER,
)
ORDERS: Final = Orders(
    f"purge:{ORDERS_TABLE}",
    [],
    queries=["SELECT id - %s AS n FROM orders WHERE id BETWEEN %s AND %s ORDER BY 1"],
    counts={ORDERS_TABLE: ("deleted_rows",)},
    setup="CREATE TABLE orders (id bigint PRIMARY KEY, expires_at timestamptz NOT NULL, note text NOT NULL)",
    is_worker=False,
    stale=PURGED,
)
