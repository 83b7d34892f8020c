"""A purge that deletes what depends on its rows, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Delete, Rows, Sweep
from tests.integration.cascades import shop
from tests.integration.cascades.shop import ids
from tests.integration.purge.conftest import purge
from tests.internals.core import WrongArgument
from tests.internals.database import Database, database
from tests.internals.engine import PurgeRequest, recorded_request, request_of, restoration_of, sweep_of
from tests.internals.insight import plan_purge
from tests.internals.ledger import Counts, Override, history, operators

CLOSED = PurgeRequest(table="account", where="closed_at IS NOT NULL", cascade={}, batch_size=2)


@pytest.fixture(autouse=True)
def accounts(postgres: Database) -> None:
    shop.create()
    shop.fill()


@pytest.fixture
def spare(admin: Connection) -> Iterator[str]:
    """Name of a schema for archives, which does not exist yet."""
    name = f"{shop.value('SELECT current_schema()')}_old"
    yield name
    with admin.cursor() as cursor:
        cursor.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')


def contents() -> list[str]:
    """Return all rows of all tables, as texts."""
    query = " UNION ALL ".join(f"SELECT to_jsonb(t)::text AS row FROM {table} AS t" for table in shop.TABLES)
    return [row for (row,) in database.execute_sql(f"{query} ORDER BY row")]


def test_dependents_are_purged_before_their_rows() -> None:
    result = purge(CLOSED)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["deleted_dependents"]) == ("done", 3, 18)
    assert ids() == {"account": [4], "orders": [7, 8], "item": [13, 14, 15, 16], "comment": [1, 2, 3, 4]}


def test_decision_of_the_command_overrides_the_foreign_key() -> None:
    database.execute_sql("DELETE FROM comment WHERE id = 2")

    result = purge(PurgeRequest(table="account", where="closed_at IS NOT NULL", cascade={"comment": "keep"}))

    assert (result.counts["deleted_rows"], result.counts["blocked"], ids()["account"]) == (1, 2, [1, 3, 4])


def test_link_without_a_decision_is_refused_with_the_option_to_add() -> None:
    database.execute_sql("CREATE TABLE invoice (id int PRIMARY KEY, account_id bigint NOT NULL REFERENCES account)")

    with pytest.raises(WrongArgument, match=r"--cascade: .* for it: --decide invoice.account_id=keep$"):
        plan_purge(CLOSED, sweep_of(CLOSED))

    assert len(ids()["account"]) == 4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("orders.acount_id", "--cascade: no link has the name 'orders.acount_id'; did you mean 'orders.account_id'?"),
        ("orders", 'or decide "delete" or "keep" for it: --decide orders.account_id=delete'),
    ],
)
def test_wrong_decision_is_refused_with_the_option_to_write(name: str, text: str) -> None:
    with pytest.raises(WrongArgument) as refused:
        plan_purge(request := replace(CLOSED, cascade={name: "clear"}), sweep_of(request))

    assert text in str(refused.value)


def test_purge_with_dependents_is_resumed_with_them() -> None:
    request = replace(CLOSED, cascade={"comment": "delete"})

    def pause(counts: Counts) -> None:
        if counts["batches"] == 2:
            operators.switch(Override("purge:account", "paused"))

    first = purge(request, on_batch=pause)
    operators.resume("purge:account")
    resumed = request_of(first.run_id or 0)
    second = purge(resumed)

    assert (first.reason, resumed.cascade, second.outcome) == ("paused", {"comment": "delete"}, "done")
    assert ids() == {"account": [4], "orders": [7, 8], "item": [13, 14, 15, 16], "comment": [4]}


def test_held_dependents_keep_their_rows_unless_holds_are_ignored() -> None:
    database.execute_sql("UPDATE orders SET on_hold = true WHERE account_id = 2")
    held = Sweep(
        "shop.orders",
        Rows("orders", stale=lambda row: row.id < 0, hold=lambda row: row.on_hold, action=Delete()),
    )
    ignoring = PurgeRequest(table="account", where="closed_at IS NOT NULL", cascade={}, ignore_holds=True)

    purge(CLOSED, [held])
    assert ids()["account"] == [2, 4]
    purge(ignoring, [held])

    assert ids()["account"] == [4]


def test_purge_with_dependents_is_archived_and_restored(spare: str) -> None:
    request = replace(CLOSED, archive_to=spare)
    before = contents()
    with pytest.raises(WrongArgument, match='"item" is missing, .*"account" is missing') as missing:
        plan_purge(request, sweep_of(request))
    database.execute_sql(str(missing.value).partition("; ")[2])

    purged = purge(request)
    assert purged.run_id is not None
    counts, left = purged.counts, ids()["account"]
    record = history.find(purged.run_id)
    assert record is not None
    restored = restoration_of(sweep_of(recorded_request(record)), purged.run_id).carry_out(pause=True)

    assert (counts["archived_rows"], left) == (24, [4])
    assert (restored.outcome, restored.counts["restored"], contents()) == ("done", 24, before)


def test_archive_of_dependents_is_a_schema() -> None:
    with pytest.raises(WrongArgument, match="--archive-to is 'archive.account'; with --cascade, .* a schema"):
        sweep_of(replace(CLOSED, archive_to="archive.account"))
