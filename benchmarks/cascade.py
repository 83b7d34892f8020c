"""Parents with everything attached: ON DELETE CASCADE, a loop written by hand, and a sweep with dependents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import psycopg2
from peewee import BigIntegerField
from psycopg2.errors import QueryCanceled
from psycopg2.extensions import connection as Connection

from benchmarks.comparison import GROWING, OURS, Comparison, Contestant, Place
from benchmarks.contestants import ours
from housekeeping import BaseModel, Delete, Guard, Limits, Rows, Sweep, UtcDateTimeField

_BY_HAND: Final = "leaf first, by hand"
_TIMEOUT: Final = "5s"
OURS_IN_TIME: Final = "ours, statement_timeout 5 s"
_AGE: Final = timedelta(days=90)
_BATCH: Final = 1_000
#: Rows three levels below one parent: 10 orders of 10 items of 30 events.
_EVENTS: Final = 3_000
_FILL: Final = """
CREATE TABLE accounts (id bigint PRIMARY KEY, closed_at timestamptz);
CREATE TABLE orders (id bigint PRIMARY KEY, account_id bigint NOT NULL REFERENCES accounts ON DELETE CASCADE);
CREATE TABLE items (id bigint PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders ON DELETE CASCADE);
CREATE TABLE events (
    id bigint PRIMARY KEY, item_id bigint NOT NULL REFERENCES items ON DELETE CASCADE, text text NOT NULL
);
INSERT INTO accounts SELECT n, CASE WHEN n <= %(closed)s THEN now() - n * interval '1 second' - interval '100 days' END
FROM generate_series(1::bigint, %(accounts)s) AS n;
INSERT INTO orders SELECT n, 1 + (n - 1) / 10 FROM generate_series(1::bigint, %(accounts)s * 10) AS n;
INSERT INTO items SELECT n, 1 + (n - 1) / 10 FROM generate_series(1::bigint, %(accounts)s * 100) AS n;
INSERT INTO events SELECT n, 1 + (n - 1) / 30, 'event ' || n FROM generate_series(1::bigint, %(accounts)s * 3000) AS n;
CREATE INDEX ON accounts (closed_at, id);
CREATE INDEX ON orders (account_id);
CREATE INDEX ON items (order_id);
CREATE INDEX ON events (item_id);
"""
_ALL: Final = """
SELECT (SELECT count(*) FROM accounts) + (SELECT count(*) FROM orders) + (SELECT count(*) FROM items)
    + (SELECT count(*) FROM events)
"""
_CLOSED: Final = f"closed_at < now() - interval '{_AGE.days} days'"


class Account(BaseModel):
    """Parent."""

    id = BigIntegerField(primary_key=True)
    closed_at = UtcDateTimeField(null=True)

    class Meta:
        table_name = "accounts"


def _fill(connection: Connection, rows: int, among: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_FILL, {"closed": max(1, rows // _EVENTS), "accounts": max(2, among // _EVENTS)})


def _by_constraint(statement_timeout: str) -> Contestant:
    """Delete the parents by one statement; the constraints delete the rest, unless the timeout ends it."""

    def ready(place: Place) -> Callable[[], object]:
        cursor = _connected(place)
        cursor.execute("SET statement_timeout = %s", (statement_timeout,))

        def work() -> None:
            with suppress(QueryCanceled):
                cursor.execute(f"DELETE FROM accounts WHERE {_CLOSED}")  # noqa: S608 - a constant

        return work

    return ready


def _by_hand(place: Place) -> Callable[[], object]:
    """Read the keys of each level, and delete them from the leaves up, a batch in a transaction."""
    cursor = _connected(place)

    def keys(statement: str, *values: Any) -> list[int]:
        cursor.execute(statement, values)
        return [key for (key,) in cursor]

    def delete(table: str, ids: Sequence[int]) -> None:
        for some in _parts(ids):
            cursor.execute(f"DELETE FROM {table} WHERE id = ANY(%s)", (some,))  # noqa: S608 - a constant

    def work() -> None:
        accounts = keys(f"SELECT id FROM accounts WHERE {_CLOSED} ORDER BY closed_at, id")  # noqa: S608 - a constant
        orders = keys("SELECT id FROM orders WHERE account_id = ANY(%s)", accounts)
        for some_orders in _parts(orders):
            items = keys("SELECT id FROM items WHERE order_id = ANY(%s)", some_orders)
            for some_items in _parts(items):
                delete("events", keys("SELECT id FROM events WHERE item_id = ANY(%s)", some_items))
            delete("items", items)
        delete("orders", orders)
        delete("accounts", accounts)

    return work


def _parts(ids: Sequence[int]) -> Iterator[list[int]]:
    for start in range(0, len(ids), _BATCH):
        yield list(ids[start : start + _BATCH])


def _connected(place: Place) -> Any:
    connection = psycopg2.connect(place.database_url)
    connection.autocommit = True
    return connection.cursor()


_SWEEP: Final = Sweep(
    "accounts.closed",
    Rows(
        Account,
        stale=lambda row, limit: row.closed_at < limit,
        order="closed_at",
        age=_AGE,
        action=Delete(dependents=True),
    ),
    limits=Limits(batch=_BATCH, batch_takes=None),
    guard=Guard(first_run=False),
)


def _with_timeout(place: Place) -> Callable[[], object]:
    url = f"{place.database_url}&options=-cstatement_timeout%3D{_TIMEOUT}"
    return ours(_SWEEP.name, sweeps=[_SWEEP])(replace(place, database_url=url))


COMPARISON: Final = Comparison(
    name="cascade",
    template="accounts",
    fill=_fill,
    undone=_ALL,
    rows=1_000 * _EVENTS,
    among=1_100 * _EVENTS,
    rounds_at_most=3,
    times_transactions=True,
    contestants={
        _BY_HAND: _by_hand,
        "ON DELETE CASCADE": _by_constraint("0"),
        "ON DELETE CASCADE, statement_timeout 5 s": _by_constraint(_TIMEOUT),
        OURS: ours(_SWEEP.name, sweeps=[_SWEEP]),
        OURS_IN_TIME: _with_timeout,
        GROWING: ours(_SWEEP.name, sweeps=[_SWEEP], target_batch_s=0.2),
    },
    targets={OURS: 0.8},
)
