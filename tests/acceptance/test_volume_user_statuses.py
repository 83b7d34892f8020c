"""A million rows, a hundred thousand of them stale."""

from __future__ import annotations

import json

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.conftest import RunMeasured
from tests.internals.database import Database

pytestmark = pytest.mark.slow


def test_hundred_thousand_stale_statuses_clear_in_constant_memory(
    postgres: Database, admin: Connection, run_measured: RunMeasured
) -> None:
    postgres.create_tables([UserStatus])
    with admin.cursor() as cursor:
        cursor.execute(
            "INSERT INTO user_statuses (user_id, clear_status_at) "
            "SELECT n, now() + interval '1 second' * (n - 100000) FROM generate_series(1, 1000000) AS n"
        )
        cursor.execute("ANALYZE user_statuses")
    settings = {"user_status_cleanup.batch": {"batch_size": 1000, "max_runtime_s": 300}}

    run = run_measured("user_status_cleanup.batch", HOUSEKEEPING_WORKERS=json.dumps(settings))

    assert run.result["outcome"] == "done"
    assert 100_000 <= run.result["counts"]["deleted_rows"] <= 100_300, "and those that came due meanwhile"
    assert run.resident_mb < 200
