"""peewee's private attributes that `peewee_database` uses."""

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
