"""Partitions whose whole range is old are dropped or detached, and counted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from housekeeping import BaseModel, DropPartitions, Settings, Sweep, UtcDateTimeField
from housekeeping.testing.stubs import ManualClock
from tests.integration.sweeps.partitions.events import (
    AGE,
    NOW,
    comment_of,
    concurrently,
    create,
    partitions,
    run,
    sweep,
    tables,
)
from tests.internals.cli import print_plan
from tests.internals.core import DeclarationError
from tests.internals.database import Database, database
from tests.internals.engine import run_sweep
from tests.internals.insight import dry_run, plan


def _size(*names: str) -> int:
    row: Any = database.execute_sql(
        "SELECT sum(pg_total_relation_size(to_regclass(name))) FROM unnest(%s) AS name", (list(names),)
    ).fetchone()
    return int(row[0])


def test_partitions_whose_whole_range_is_old_are_dropped(either_way: None) -> None:
    size = _size("events_09", "events_10")

    result = run(sweep())

    assert result.outcome == "done", result.error
    assert [name for name in tables() if name != "events_other"] == ["events_11", "events_12"]
    counts = {name: result.counts[name] for name in ("dropped_partitions", "freed_bytes", "skipped_partitions")}
    assert counts == {"dropped_partitions": 2, "freed_bytes": size, "skipped_partitions": 0}


def test_second_run_drops_nothing(either_way: None) -> None:
    run(sweep())

    result = run(sweep())

    assert (result.outcome, result.counts["dropped_partitions"], result.counts["freed_bytes"]) == ("done", 0, 0)


@concurrently
def test_only_a_table_without_default_is_detached_concurrently(months: None, statements: list[str]) -> None:
    run(sweep())
    concurrently = [sql for sql in statements if "CONCURRENTLY" in sql]
    create(has_default=True)
    del statements[:]

    run(sweep())

    assert len(concurrently) == 2
    assert [sql for sql in statements if "CONCURRENTLY" in sql] == []


@pytest.mark.parametrize(
    ("end", "dropped"), [(timedelta(microseconds=-1), 0), (timedelta(), 1), (timedelta(microseconds=1), 1)]
)
def test_range_that_ends_exactly_at_the_age_is_dropped(months: None, end: timedelta, dropped: int) -> None:
    result = run(sweep(), datetime(2025, 10, 1, tzinfo=UTC) + AGE + end)

    assert result.counts["dropped_partitions"] == dropped


def test_default_partition_stays_whatever_it_contains(postgres: Database) -> None:
    create(has_default=True)
    database.execute_sql("INSERT INTO events VALUES (1, '1999-01-01', true)")

    run(sweep())

    assert partitions() == ["events_11", "events_12", "events_other"]


def test_keep_table_detaches_and_keeps_rows_and_comment(either_way: None) -> None:
    database.execute_sql("COMMENT ON TABLE events_09 IS 'of the shop'")

    result = run(sweep(keep_table=True))

    assert result.outcome == "done", result.error
    assert [name for name in partitions() if name != "events_other"] == ["events_11", "events_12"]
    assert {"events_09", "events_10"} <= set(tables())
    assert (comment_of("events_09"), comment_of("events_10")) == ("of the shop", None)
    assert result.counts["detached_partitions"] == 2 and "freed_bytes" not in result.counts


def test_plan_lists_partition_range_rows_and_bytes(
    months: None, capsys: pytest.CaptureFixture[str], settings: Settings
) -> None:
    database.execute_sql("ANALYZE events")
    database.execute_sql("UPDATE events SET exported = NULL WHERE happened_at = '2025-10-02'")

    planned = plan(sweep(stale=lambda row: row.exported == True), clock=ManualClock(NOW), settings=settings)  # noqa: E712

    (stage,) = planned.as_json()["stages"]
    september, october = stage["samples"]
    assert planned.stale.rows == stage["backlog"] == 1
    assert september["partition"].endswith(".events_09") and september["stays"] is None
    assert september["range"] == "FROM ('2025-09-01 00:00:00+00') TO ('2025-10-01 00:00:00+00')"
    assert (september["rows"], september["bytes"]) == (10, _size("events_09"))
    assert october["stays"] == "a row does not match `stale`"
    assert len(partitions()) == 4
    print_plan(planned)
    assert "STALE PARTITIONS" in capsys.readouterr().out and planned.backlog_forecast is not None
    assert planned.backlog_forecast.text.startswith("1 partition; ")


def test_dry_run_has_the_counts_of_the_run(months: None) -> None:
    planned = dry_run(sweep(), clock=ManualClock(NOW))

    assert planned.counts == run(sweep()).counts


class Reading(BaseModel):
    read_at = UtcDateTimeField(primary_key=True)

    class Meta:
        table_name = "events_of_sensors"


@pytest.mark.parametrize("kind", ["date", "timestamp", "timestamptz"])
def test_every_type_of_time_is_read_as_utc(postgres: Database, kind: str) -> None:
    database.execute_sql(f"CREATE TABLE events_of_sensors (read_at {kind}) PARTITION BY RANGE (read_at)")
    database.execute_sql(
        "CREATE TABLE reading_1 PARTITION OF events_of_sensors FOR VALUES FROM (MINVALUE) TO ('2025-10-01')"
    )
    database.execute_sql(
        "CREATE TABLE reading_2 PARTITION OF events_of_sensors FOR VALUES FROM ('2025-10-01') TO (MAXVALUE)"
    )
    old = Sweep("shop.readings", DropPartitions(Reading, "read_at", older_than=AGE))

    early = run(old, datetime(2025, 10, 1, tzinfo=UTC) + AGE - timedelta(microseconds=1))
    late = run(old, datetime(2025, 10, 1, tzinfo=UTC) + AGE)

    assert (early.counts["dropped_partitions"], late.counts["dropped_partitions"]) == (0, 1)


@pytest.mark.parametrize("end", ["'infinity'", "'20000-01-01'", "MAXVALUE"])
def test_bounds_beyond_the_years_of_python_are_compared(postgres: Database, end: str) -> None:
    database.execute_sql("CREATE TABLE events_of_sensors (read_at timestamptz) PARTITION BY RANGE (read_at)")
    for name, start, until in (("reading_1", "'4713-01-01 BC'", "'2025-10-01'"), ("reading_2", "'2025-10-01'", end)):
        database.execute_sql(
            f"CREATE TABLE {name} PARTITION OF events_of_sensors FOR VALUES FROM ({start}) TO ({until})"
        )
    old = Sweep("shop.readings", DropPartitions(Reading, "read_at", older_than=AGE))

    planned = plan(old)
    result = run_sweep(old)

    assert planned.stale.rows == result.counts["dropped_partitions"] == 1


def test_partition_with_partitions_of_its_own_is_dropped_whole(postgres: Database) -> None:
    database.execute_sql("CREATE TABLE events_of_sensors (read_at timestamptz, n int) PARTITION BY RANGE (read_at)")
    database.execute_sql(
        "CREATE TABLE reading_1 PARTITION OF events_of_sensors FOR VALUES FROM ('2025-01-01') TO ('2025-02-01') "
        "PARTITION BY LIST (n)"
    )
    database.execute_sql("CREATE TABLE reading_1_1 PARTITION OF reading_1 FOR VALUES IN (1)")
    database.execute_sql("INSERT INTO events_of_sensors VALUES ('2025-01-02', 1)")
    old = Sweep("shop.readings", DropPartitions(Reading, "read_at", older_than=AGE))

    result = run(old)

    row: Any = database.execute_sql("SELECT to_regclass('reading_1'), to_regclass('reading_1_1')").fetchone()
    assert row == (None, None) and result.counts["freed_bytes"] > 0


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("(read_at timestamptz)", "is not partitioned"),
        ("(read_at timestamptz) PARTITION BY LIST (read_at)", "is partitioned by list"),
        ("(read_at timestamptz, id bigint) PARTITION BY RANGE (id)", r"is partitioned by id \(bigint\)"),
        ("(read_at timestamptz) PARTITION BY RANGE ((read_at AT TIME ZONE 'UTC'))", "is partitioned by an expression"),
        ("(read_at date, at date) PARTITION BY RANGE (at)", r"write DropPartitions\(Reading, .at."),
    ],
)
def test_table_that_is_not_partitioned_by_its_time_is_rejected(postgres: Database, ddl: str, text: str) -> None:
    database.execute_sql(f"CREATE TABLE events_of_sensors {ddl}")
    old = Sweep("shop.readings", DropPartitions(Reading, "read_at", older_than=AGE))

    result = run_sweep(old)

    assert result.outcome == "failed"
    with pytest.raises(DeclarationError, match=text):
        plan(old)
