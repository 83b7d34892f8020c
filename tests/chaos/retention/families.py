"""Test data of the archive, the partitions, the purge and the cascade."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.chaos.families import FRESH, SPAN, STALE, Family, Place, State

MODULE: Final = "tests.chaos.retention.sweeps"
ACCOUNTS_MODULE: Final = "tests.chaos.retention.account_sweeps"
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
#: Closed accounts of a round. Each has two purchases of three items, and a comment.
CLOSED: Final = 12
#: The one with an invoice, which is kept, and those that the application may open again.
INVOICED: Final = 5
REOPENED: Final = (11, 12)
#: A purchase follows a foreign key that cascades, an item none at all.
_ACCOUNTS: Final = """
CREATE TABLE account (id bigint PRIMARY KEY, closed_at timestamptz);
CREATE TABLE purchase (id bigint PRIMARY KEY, account_id bigint NOT NULL REFERENCES account ON DELETE CASCADE);
CREATE TABLE item (id bigint PRIMARY KEY, order_id bigint NOT NULL, of_account bigint NOT NULL);
CREATE TABLE comment (id bigint PRIMARY KEY, author_id bigint REFERENCES account ON DELETE SET NULL);
CREATE TABLE invoice (id bigint PRIMARY KEY, account_id bigint NOT NULL REFERENCES account);
CREATE INDEX ON account (closed_at, id); CREATE INDEX ON purchase (account_id); CREATE INDEX ON item (order_id);
CREATE INDEX ON comment (author_id); CREATE INDEX ON invoice (account_id);
CREATE FUNCTION slow_down() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.005); RETURN OLD; END';
CREATE TRIGGER slow_down BEFORE DELETE ON item FOR EACH ROW EXECUTE FUNCTION slow_down()
"""
_ACCOUNT_ROWS: Final = """
INSERT INTO account SELECT {base} + n, CASE WHEN n < 500 THEN now() - n * interval '1 minute' END
FROM (SELECT generate_series(1, {closed}) UNION SELECT generate_series(501, 503)) AS ns (n);
INSERT INTO purchase SELECT id + (id - {base}) % 500 * 9 + m, id FROM account, generate_series(1, 2) AS m
WHERE id BETWEEN {base} AND {base} + 999;
INSERT INTO item SELECT account_id + (account_id - {base}) % 500 * 29 + (id % 2) * 3 + k, id, account_id
FROM purchase, generate_series(1, 3) AS k WHERE account_id BETWEEN {base} AND {base} + 999;
INSERT INTO comment SELECT id, id FROM account WHERE id BETWEEN {base} AND {base} + 999;
INSERT INTO invoice VALUES ({base}, {base} + {invoiced})
"""
_ORPHANS: Final = """
SELECT 'purchase', id FROM purchase WHERE NOT EXISTS (SELECT FROM account WHERE id = account_id)
UNION ALL SELECT 'item', id FROM item WHERE NOT EXISTS (SELECT FROM purchase WHERE id = order_id)
"""
#: Changes of dependents: transaction, table, row, and the rows that it depended on.
_CHANGED: Final = """
WITH changed AS (
    SELECT pg_xact_commit_timestamp(xid) AS at, tbl, old->>'id' AS id,
        coalesce(old->>'account_id', old->>'author_id', old->>'of_account') AS account, old->>'order_id' AS purchase
    FROM audit WHERE tbl IN ('purchase', 'item', 'comment')
    AND (op = 'DELETE' OR old->>'author_id' IS DISTINCT FROM new->>'author_id')
)
"""
_TOO_LATE: Final = f"""{_CHANGED}
SELECT changed.tbl, changed.id FROM changed JOIN audit ON audit.op = 'DELETE' AND (
    (audit.tbl = 'account' AND audit.old->>'id' = account) OR (audit.tbl = 'purchase' AND audit.old->>'id' = purchase)
) WHERE at >= pg_xact_commit_timestamp(xid)
"""
_OF_FRESH_ONES: Final = f"""{_CHANGED}
SELECT changed.tbl, changed.id FROM changed
JOIN audit ON audit.tbl = 'account' AND audit.op = 'UPDATE' AND audit.old->>'id' = account
WHERE audit.new->>'closed_at' IS NULL AND at > pg_xact_commit_timestamp(xid)
"""


class Accounts(Family):
    """Accounts that are deleted with what depends on them, and some that are opened again meanwhile."""

    def expected(self) -> State:
        """Return the final state of every round."""
        left = (INVOICED, 501, 502, 503)
        return [
            *(("account", n) for n in left),
            *(("purchase", n + n % 500 * 9 + m) for n in left for m in (1, 2)),
            *(("item", n + n % 500 * 29 + k) for n in left for k in range(1, 7)),
            *(("comment", n, n if n in left else None) for n in (*range(1, CLOSED - 1), 501, 502, 503)),
        ]

    def fill(self, place: Place, round: int) -> None:
        place.do(_ACCOUNT_ROWS.format(base=round * SPAN, closed=CLOSED, invoiced=INVOICED))

    def reopen(self, place: Place, round: int) -> None:
        """Open two accounts of a round again, unless they are gone."""
        ids = [round * SPAN + n for n in REOPENED]
        place.rows("UPDATE account SET closed_at = NULL WHERE id = ANY(%s) RETURNING id", ids)

    def complaints(self, place: Place) -> Iterator[str]:
        for table, id in place.rows(_ORPHANS):
            yield f"{table} {id} depends on a row that is gone"
        for table, id in place.rows(_TOO_LATE):
            yield f"{table} {id} was changed by the commit that deleted what it depended on, or later"
        for table, id in place.rows(_OF_FRESH_ONES):
            yield f"{table} {id} was changed after its account was opened again"


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
#: Records of a round without those of the accounts that may be opened again.
_OF_ROUND: Final = (
    "FROM {0} CROSS JOIN (SELECT %s::bigint AS base) AS round "
    "WHERE {1} BETWEEN %s AND %s AND {1} - base <> ALL(ARRAY[11, 12]) ORDER BY 2"
)
ACCOUNTS: Final = Accounts(
    "shop.closed_accounts",
    [],
    queries=[
        f"SELECT 'account', id - base {_OF_ROUND.format('account', 'id')}",
        f"SELECT 'purchase', id - base {_OF_ROUND.format('purchase', 'account_id')}",
        f"SELECT 'item', id - base {_OF_ROUND.format('item', 'of_account')}",
        f"SELECT 'comment', id - base, author_id - base {_OF_ROUND.format('comment', 'id')}",
    ],
    counts={
        "account": ("deleted_rows",),
        "purchase": ("details,dependents,purchase,deleted",),
        "item": ("details,dependents,item,deleted",),
        "comment": ("details,dependents,comment,cleared",),
    },
    settings={"batch_size": 5},
    leased=True,
    setup=_ACCOUNTS,
    stale=CLOSED,
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
