"""Index that `doctor` advises for the query of a run."""

from __future__ import annotations

import pytest
from peewee import BigAutoField, ForeignKeyField, TextField
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Delete, Rows, Settings, Sweep, UtcDateTimeField
from tests.integration.sweeps.documents import DOCUMENTS
from tests.integration.sweeps.documents import documents as documents
from tests.internals.database import Database
from tests.internals.doctor import stages
from tests.internals.engine import Finding


class Customer(BaseModel):
    id = BigAutoField()


class Cart(BaseModel):
    id = BigAutoField()
    customer = ForeignKeyField(Customer)
    state = TextField(index=True)
    touched_at = UtcDateTimeField(column_name="touchedAt")


abandoned = Sweep(
    "shop.carts",
    Rows(
        Cart,
        stale=lambda row, now: (row.state == "abandoned") & (row.touched_at < now) & (row.customer != 7),
        order="touched_at",
        action=Delete(),
    ),
)


@pytest.fixture
def tables(postgres: Database) -> None:
    postgres.execute_sql("CREATE TABLE customer (id bigint PRIMARY KEY)")
    postgres.execute_sql(
        "CREATE TABLE cart (id bigint PRIMARY KEY, customer_id bigint, state text NOT NULL, "
        '"touchedAt" timestamptz NOT NULL)'
    )


def found() -> Finding:
    (finding,) = [
        each for each in stages.examine_stages(Settings.load(), {"shop.carts": abandoned}) if each.subject == "indexes"
    ]
    return finding


def test_hold_without_an_index_is_reported_with_its_table(documents: None, admin: Connection) -> None:
    def findings() -> list[Finding]:
        found = stages.examine_stages(Settings.load(), {DOCUMENTS.name: DOCUMENTS})
        return [each for each in found if each.subject == "indexes"]

    with admin.cursor() as cursor:
        cursor.execute("CREATE INDEX ON documents (expires_at, id)")
        (missing,) = findings()
        cursor.execute("CREATE INDEX ON legal_holds (user_id)")
        (fine,) = findings()

    assert missing.level == "warning"
    assert missing.text.endswith("each batch reads the whole table legal_holds of its hold")
    assert fine.level == "fine"


def test_index_advice_ignores_foreign_key_indexes(tables: None, admin: Connection) -> None:
    missing = found()

    assert missing.level == "warning"
    assert missing.way_out == 'CREATE INDEX CONCURRENTLY ON "cart" ("touchedAt", id) WHERE ("state" = \'abandoned\')'
    with admin.cursor() as cursor:
        cursor.execute(missing.way_out.replace(" CONCURRENTLY", ""))
    assert found().level == "fine"
