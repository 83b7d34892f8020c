"""peewee's private attributes that connections and statements use."""

from __future__ import annotations

from typing import Any

import peewee
import pytest

from tests.internals.database import _BLOCKS, Database


@pytest.fixture
def fresh() -> Any:
    return Database("never_connected")


@pytest.mark.parametrize("name", [*_BLOCKS, "conn", "closed"])
def test_peewee_keeps_the_state_of_a_thread_where_it_is_expected(fresh: Any, name: str) -> None:
    assert hasattr(fresh._state, name)


def test_peewee_has_the_private_attributes_that_begin_a_transaction(fresh: Any) -> None:
    assert fresh._adapter.isolation_level_str("SERIALIZABLE") == "SERIALIZABLE"
    assert fresh._isolation_level is None
    assert hasattr(peewee.PostgresqlDatabase, "_connect") and hasattr(
        peewee.PostgresqlDatabase("never_connected"), "_lock"
    )


def test_peewee_resets_the_blocks_of_a_thread_when_it_connects() -> None:
    plain: Any = peewee.SqliteDatabase(":memory:")
    plain._state.transactions.append("open")

    plain.connect()

    assert plain._state.transactions == [], "Database.connect need not preserve them any more"
    plain.close()


def test_peewee_begins_transactions_by_its_private_class(fresh: Any) -> None:
    assert isinstance(peewee.PostgresqlDatabase("never_connected").transaction(), peewee._transaction)
    assert type(fresh.transaction()) is not peewee._transaction


class Named(peewee.Model):
    id = peewee.BigAutoField()


_SELECT = (
    "_where",
    "_from_list",
    "_returning",
    "_group_by",
    "_having",
    "_limit",
    "_offset",
    "_cte_list",
    "_for_update",
)


@pytest.mark.parametrize(
    ("part", "names"),
    [
        (Named.select(), _SELECT),
        (Named.update({Named.id: 1}), ("_update", "_returning")),
        (Named.select().cte("named"), ("_query", "_columns", "_alias")),
        (Named.id.alias("named"), ("_alias",)),
        (peewee.Table("named"), ("_alias",)),
        (peewee.RawQuery("SELECT 1"), ("_sql",)),
        (Named(), ("_dirty",)),
    ],
)
def test_peewee_keeps_the_parts_of_a_statement_where_they_are_expected(part: Any, names: tuple[str, ...]) -> None:
    assert [name for name in names if not hasattr(part, name)] == []
