"""Cascades of three levels that are killed at every point."""

from __future__ import annotations

import pytest
import redis

from housekeeping import testing
from tests.integration.cascades import shop
from tests.integration.cascades.shop import NOW, execute, sweep
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

    assert sum(point.startswith("WITH l0 AS MATERIALIZED") for point in points) == 6
