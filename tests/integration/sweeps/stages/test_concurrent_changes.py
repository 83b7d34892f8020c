"""Rows that another session changes after a batch's statement has begun (L3, I4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from peewee import BigIntegerField, CompositeKey, IntegerField, TextField
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Delete, Limits, Rows, Sweep, UtcDateTimeField
from tests.integration.pausing import changed_in_the_gap, pausing
from tests.internals.database import Database
from tests.internals.engine import run_sweep


class Visit(BaseModel):
    id = BigIntegerField()
    region = IntegerField()
    at = UtcDateTimeField()
    note = TextField()

    class Meta:
        table_name = "visits"
        primary_key = CompositeKey("id", "region")


VISITS = Sweep(
    "shop.visits",
    Rows(Visit, stale=lambda row, now: row.at < now, order=("at", "id", "region"), action=Delete()),
    limits=Limits(batch=3, batch_takes=None),
)
_COLUMNS = "(id bigint, region int, at timestamptz, note text, PRIMARY KEY (id, region))"
PLAIN = (f"CREATE TABLE visits {_COLUMNS} WITH (fillfactor = 50)",)
PARTITIONED = (
    f"CREATE TABLE visits {_COLUMNS} PARTITION BY LIST (region)",
    "CREATE TABLE visits_1 PARTITION OF visits FOR VALUES IN (1)",
    "CREATE TABLE visits_2 PARTITION OF visits FOR VALUES IN (2)",
)


@pytest.fixture
def visits(request: pytest.FixtureRequest, postgres: Database, admin: Connection) -> Iterator[None]:
    """Seven old visits, 1 to 7."""
    with admin.cursor() as cursor:
        for statement in request.param:
            cursor.execute(statement)
        cursor.execute("CREATE INDEX ON visits (at, id, region)")
        cursor.execute(
            "INSERT INTO visits SELECT n, 1, now() - interval '1 day' + n * interval '1 s', '' "
            "FROM generate_series(1, 7) n"
        )
        yield
        cursor.execute("DROP TABLE visits; DROP FUNCTION pause_at")


def left(admin: Connection) -> list[Any]:
    with admin.cursor() as cursor:
        cursor.execute("SELECT id FROM visits ORDER BY id")
        return [id for (id,) in cursor.fetchall()]


@pytest.mark.parametrize("visits", [PLAIN, PARTITIONED], ids=["plain", "partitioned"], indirect=True)
@pytest.mark.parametrize("at", [2, 4, 7], ids=["first batch", "second batch", "last batch"])
@pytest.mark.parametrize(
    ("change", "stays"),
    [
        ("UPDATE visits SET note = 'hot' WHERE id = {at}", False),
        ("UPDATE visits SET at = at + interval '1 ms' WHERE id = {at}", False),
        ("UPDATE visits SET at = now() + interval '1 day' WHERE id = {at}", True),
        ("DELETE FROM visits WHERE id = {at}", False),
    ],
    ids=["hot", "not hot", "renewed", "deleted"],
)
def test_row_changed_after_the_snapshot_is_judged_again(
    visits: None, admin: Connection, at: int, change: str, stays: bool
) -> None:
    with changed_in_the_gap(admin, change.format(at=at), "VACUUM visits"):
        result = run_sweep(pausing(VISITS, Visit.id, at), confirmed=True)

    assert result.outcome == "done" and "failed" not in result.counts
    assert left(admin) == ([at] if stays else [])
    assert result.counts["deleted_rows"] == 7 - (stays or change.startswith("DELETE"))


@pytest.mark.parametrize("visits", [PARTITIONED], ids=["partitioned"], indirect=True)
@pytest.mark.parametrize("at", [1, 7])
def test_row_moved_to_another_partition_meanwhile_is_deleted_there(visits: None, admin: Connection, at: int) -> None:
    with changed_in_the_gap(admin, f"UPDATE visits SET region = 2 WHERE id = {at}"):
        result = run_sweep(pausing(VISITS, Visit.id, at), confirmed=True)

    assert (result.outcome, result.counts["deleted_rows"], left(admin)) == ("done", 7, [])
