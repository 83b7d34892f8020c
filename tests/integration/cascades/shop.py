"""Tables of a shop whose closed accounts are deleted with everything that depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from peewee import BigAutoField, BooleanField
from psycopg2.errors import ForeignKeyViolation, LockNotAvailable

from housekeeping import BaseModel, Delete, Guard, Limits, Rows, Sweep, UtcDateTimeField
from tests.declarations import changed
from tests.internals.database import database

NOW: Final = datetime(2026, 5, 1, tzinfo=UTC)
TABLES: Final = ("account", "orders", "item", "comment")


class Account(BaseModel):
    id = BigAutoField()
    closed_at = UtcDateTimeField(null=True)
    on_hold = BooleanField()


def create() -> None:
    """Create accounts with orders, those with items, and comments that only name their author."""
    database.execute_sql(
        "CREATE TABLE account (id bigint PRIMARY KEY, closed_at timestamptz, on_hold boolean NOT NULL DEFAULT false);"
        "CREATE INDEX ON account (closed_at, id);"
        "CREATE TABLE orders (id bigint PRIMARY KEY, account_id bigint NOT NULL REFERENCES account ON DELETE CASCADE,"
        " on_hold boolean NOT NULL DEFAULT false);"
        "CREATE INDEX ON orders (account_id);"
        "CREATE TABLE item (id bigint PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders ON DELETE CASCADE);"
        "CREATE INDEX ON item (order_id);"
        "CREATE TABLE comment (id bigint PRIMARY KEY, author_id bigint REFERENCES account ON DELETE SET NULL);"
        "CREATE INDEX ON comment (author_id);"
    )


def fill(accounts: int = 3, orders: int = 2, items: int = 2, *, open_accounts: int = 1) -> None:
    """Add closed accounts, each with orders of items and one comment, and open ones with the same."""
    database.execute_sql(
        "INSERT INTO account SELECT n, CASE WHEN n <= %(closed)s THEN %(now)s::timestamptz - n * interval '1 day' END "
        "FROM generate_series(1, %(all)s) AS n;"
        "INSERT INTO orders SELECT (n - 1) * %(orders)s + m, n "
        "FROM generate_series(1, %(all)s) AS n, generate_series(1, %(orders)s) AS m;"
        "INSERT INTO item SELECT (o.id - 1) * %(items)s + m, o.id FROM orders AS o, generate_series(1, %(items)s) AS m;"
        "INSERT INTO comment SELECT id, id FROM account;",
        {"closed": accounts, "all": accounts + open_accounts, "orders": orders, "items": items, "now": NOW},
    )


def sweep(dependents: Any = True, **options: Any) -> Sweep:
    rows = Rows(
        Account,
        stale=lambda row, now: row.closed_at < now,
        hold=lambda row: row.on_hold,
        order="closed_at",
        action=Delete(dependents=dependents),
    )
    declared = Sweep(
        "shop.closed_accounts", rows, limits=Limits(batch=3, batch_takes=None), guard=Guard(first_run=False)
    )
    return changed(declared, **options)


def ids(*tables: str) -> dict[str, list[int]]:
    """Return the ids in each table."""
    found = {}
    for table in tables or TABLES:
        found[table] = [id for (id,) in database.execute_sql(f"SELECT id FROM {table} ORDER BY id")]
    return found


def value(sql: str, values: Mapping[str, Any] | None = None) -> Any:
    """Return the only value of a query."""
    return database.execute_sql(sql, values or ()).fetchone()[0]


def execute(sql: str) -> None:
    """Execute statements without parameters."""
    database.execute_sql(sql.replace("%", "%%"))


class Application:
    """Session of the application, beside the run."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '1ms'")

    def execute(self, sql: str) -> bool:
        """Execute statements as one transaction. Return whether they took effect: none of them had to wait."""
        with self.connection.cursor() as cursor:
            try:
                cursor.execute(sql)
            except (LockNotAvailable, ForeignKeyViolation):
                return False
            return True

    def rows(self, sql: str) -> list[Any]:
        """Return the rows of a query."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())


def depending_on(application: Application, account: int) -> list[Any]:
    """Return all rows of an account, as the application sees them."""
    return application.rows(
        f"SELECT 'account', id FROM account WHERE id = {account} "
        f"UNION ALL SELECT 'orders', id FROM orders WHERE account_id = {account} "
        f"UNION ALL SELECT 'item', item.id FROM item JOIN orders ON orders.id = order_id WHERE account_id = {account} "
        f"UNION ALL SELECT 'comment', id FROM comment WHERE author_id = {account} ORDER BY 1, 2"
    )
