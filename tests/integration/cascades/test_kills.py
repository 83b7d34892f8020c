"""Cascades of three levels that are killed at every point."""

from __future__ import annotations

import pytest
import redis

from housekeeping import Delete, Guard, Limits, Rows, Sweep, testing
from tests.integration.archives.tickets import create_archives
from tests.integration.cascades import shop
from tests.integration.cascades.shop import NOW, execute, sweep, value
from tests.internals.database import Database
from tests.session_settings import NEEDS_SESSION

#: Many processes.
pytestmark = pytest.mark.slow


@NEEDS_SESSION
def test_killed_cascade_ends_like_any_other(postgres: Database, housekeeping_redis: redis.Redis) -> None:
    shop.create()
    shop.fill(accounts=2, orders=2, items=2)
    execute("CREATE TABLE invoice (account_id bigint REFERENCES account); INSERT INTO invoice VALUES (3)")
    execute("UPDATE account SET closed_at = '2026-01-01' WHERE id = 3")

    points = testing.assert_survives_kill(sweep({"invoice": "keep"}), now=NOW)

    assert sum("WITH l0 AS MATERIALIZED" in point for point in points) >= 5


@NEEDS_SESSION
def test_killed_cascade_of_a_tree_archives_each_row_once(postgres: Database, housekeeping_redis: redis.Redis) -> None:
    execute(
        "CREATE TABLE node (id bigint PRIMARY KEY, node_id bigint REFERENCES node, old boolean NOT NULL);"
        "CREATE TABLE leaf (id bigint PRIMARY KEY, node_id bigint NOT NULL REFERENCES node ON DELETE CASCADE,"
        " other_id bigint REFERENCES node ON DELETE SET NULL);"
        "CREATE INDEX ON node (node_id); CREATE INDEX ON leaf (node_id); CREATE INDEX ON leaf (other_id);"
        "INSERT INTO node SELECT n, nullif(n / 2, 0), n = 1 FROM generate_series(1, 6) AS n;"
        "INSERT INTO node VALUES (7, NULL, false); INSERT INTO leaf VALUES (1, 3, 7), (2, 7, 5), (3, 5, NULL)"
    )
    schema = f"{value('SELECT current_schema()')}_old"
    action = Delete(dependents={"node": "delete"}, archive_to=schema)
    rows = Rows("node", stale=lambda row: row.old, action=action)
    of = Sweep("shop.nodes", rows, limits=Limits(batch=2, batch_takes=None), guard=Guard(first_run=False))
    create_archives(of)

    testing.assert_survives_kill(of, now=NOW, ignoring=["archived_at"])

    execute(f'DROP SCHEMA "{schema}" CASCADE')
