"""Findings on the tables of an application's sweeps name the sweeps that use them."""

from __future__ import annotations

import pytest
import redis

from housekeeping import Settings
from tests.integration.doctor import partition_shop
from tests.internals.database import Database
from tests.internals.doctor import examine
from tests.internals.engine import Finding
from tests.internals.workers import configured_sweeps


@pytest.fixture
def findings(postgres: Database, settings: Settings, redis_client: redis.Redis) -> list[Finding]:
    postgres.create_tables([partition_shop.Coupon])
    postgres.execute_sql(
        "CREATE TABLE metric (id bigint, expires_at timestamptz, PRIMARY KEY (id, expires_at)) "
        "PARTITION BY RANGE (expires_at)"
    )
    postgres.execute_sql("CREATE TABLE metric_new PARTITION OF metric FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')")
    told = Settings.load(**settings.model_dump(exclude={"sweeps"}), sweeps=partition_shop.__name__)
    return list(examine(told, configured_sweeps(told)))


def test_partition_is_reported_for_the_sweep_that_uses_it(findings: list[Finding]) -> None:
    [warning] = [each for each in findings if "is a partition of" in each.text]

    assert warning.area == "shop.metrics"
    assert warning.text == "metric_new is a partition of metric: shop.metrics sees only the rows of this partition"
    assert warning.way_out is not None and 'HOUSEKEEPING_WORKERS["shop.metrics"]["tables"]' in warning.way_out


def test_table_names_all_sweeps_that_use_it(findings: list[Finding]) -> None:
    [table] = [each for each in findings if each.subject == "table coupon"]

    assert (table.area, table.text) == (
        "shop.coupons",
        "exists, with all needed rights; also used by shop.mistyped",
    )


def test_error_of_a_broken_sweep_is_reported_once(findings: list[Finding]) -> None:
    assert [(each.subject, each.level) for each in findings if each.area == "shop.mistyped"] == [
        ("declaration", "error")
    ]
