"""Index that `doctor` advises for the query of a run."""

from __future__ import annotations

import pytest
from peewee import BigAutoField, ForeignKeyField, TextField
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Delete, Sweep, UtcDateTimeField
from housekeeping.core.settings import Settings
from housekeeping.database.connection import Database
from housekeeping.doctor import stages
from housekeeping.sweeps.registry import Finding


class Customer(BaseModel):
    id = BigAutoField()


class Cart(BaseModel):
    id = BigAutoField()
    customer = ForeignKeyField(Customer)
    state = TextField(index=True)
    touched_at = UtcDateTimeField()


abandoned = Sweep(
    name="shop.carts",
    stale=lambda now: (Cart.state == "abandoned") & (Cart.touched_at < now) & (Cart.customer != 7),
    order=(Cart.touched_at, Cart.id),
    action=Delete(),
)


@pytest.fixture
def tables(postgres: Database) -> None:
    postgres.execute_sql("CREATE TABLE customer (id bigint PRIMARY KEY)")
    postgres.execute_sql(
        "CREATE TABLE cart (id bigint PRIMARY KEY, customer_id bigint, state text NOT NULL, "
        "touched_at timestamptz NOT NULL)"
    )


def found() -> Finding:
    (finding,) = [
        each for each in stages.examine(Settings.load(), {"shop.carts": abandoned}) if each.subject == "indexes"
    ]
    return finding


def test_index_advice_ignores_foreign_key_indexes(tables: None, admin: Connection) -> None:
    missing = found()

    assert missing.level == "warning"
    assert missing.way_out == ('CREATE INDEX CONCURRENTLY ON "cart" (touched_at, id) WHERE ("state" = \'abandoned\')')
    with admin.cursor() as cursor:
        cursor.execute(missing.way_out.replace(" CONCURRENTLY", ""))
    assert found().level == "fine"
