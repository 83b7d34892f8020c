"""Partition keys of other types than times, ages in months, and a missing next partition."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from peewee import BareField

from housekeeping import BaseModel, DropPartitions, Settings, Sweep
from tests.integration.sweeps.partitions.events import run
from tests.internals.core import DeclarationError
from tests.internals.database import Database, database
from tests.internals.doctor import tables
from tests.internals.engine import run_sweep
from tests.internals.insight import plan

AGE: Final = timedelta(days=40)
OCTOBER: Final = datetime(2025, 10, 1, tzinfo=UTC)
NOVEMBER: Final = datetime(2025, 11, 1, tzinfo=UTC)
#: Key -> types of the column, and the values of October and November.
KEYS: Final[dict[str, tuple[list[str], str, str]]] = {
    "uuid7": (["uuid"], "'01999d11-9800-0000-0000-000000000000'", "'019a3cb6-bc00-7000-8000-000000000000'"),
    "epoch_s": (["bigint", "integer"], "1759276800", "1761955200"),
    "epoch_ms": (["bigint"], "1759276800000", "1761955200000"),
    "text": (["text", "varchar(20)", 'text COLLATE "C"'], "'2025-10'", "'2025-11'"),
}
OF_KEYS: Final = [(key, kind) for key, (kinds, _, _) in KEYS.items() for kind in kinds]


class Log(BaseModel):
    at = BareField(primary_key=True)

    class Meta:
        table_name = "logs"


def create(kind: str, **partitions: str) -> None:
    """Create the table with these partitions: name -> bounds."""
    database.execute_sql(f"CREATE TABLE logs (at {kind} NOT NULL) PARTITION BY RANGE (at)")
    for name, bounds in partitions.items():
        database.execute_sql(f"CREATE TABLE {name} PARTITION OF logs {bounds}")


def left() -> list[str]:
    rows = database.execute_sql(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'logs'::regclass ORDER BY 1"
    )
    return [name for (name,) in rows]


def sweep(**given: Any) -> Sweep:
    options = {"older_than": None if "older_than_months" in given else AGE, **given}
    return Sweep("shop.old_logs", DropPartitions(Log, "at", **options))


@pytest.mark.parametrize("default", [{}, {"log_9": "DEFAULT"}], ids=["concurrently", "with DEFAULT partition"])
@pytest.mark.parametrize(("key", "kind"), OF_KEYS)
def test_partition_is_dropped_when_its_range_is_over(
    postgres: Database, key: str, kind: str, default: dict[str, str]
) -> None:
    _, october, november = KEYS[key]
    create(
        kind,
        log_1=f"FOR VALUES FROM (MINVALUE) TO ({october})",
        log_2=f"FOR VALUES FROM ({october}) TO ({november})",
        log_3=f"FOR VALUES FROM ({november}) TO (MAXVALUE)",
        **default,
    )
    always = ["log_3", *default]

    early = run(sweep(key=key), OCTOBER + AGE - timedelta(microseconds=1))
    assert (early.outcome, left()) == ("done", ["log_1", "log_2", *always])
    run(sweep(key=key), OCTOBER + AGE)
    assert left() == ["log_2", *always]
    run(sweep(key=key), NOVEMBER + AGE - timedelta(microseconds=1))
    assert left() == ["log_2", *always]
    late = run(sweep(key=key), datetime(2190, 1, 1, tzinfo=UTC))

    assert (late.counts["dropped_partitions"], left()) == (1, always)


@pytest.mark.parametrize(
    ("begin", "end", "at"),
    [
        ("2024", "2025", datetime(2025, 1, 1, tzinfo=UTC)),
        ("202509", "202510", OCTOBER),
        ("20250901", "20251001", OCTOBER),
        ("2025-09-01", "2025-10-01", OCTOBER),
        ("2025-W36", "2025-W40", datetime(2025, 9, 29, tzinfo=UTC)),
        ("2025-09-01T00:00:00Z", "2025-10-01T02:00:00+02:00", OCTOBER),
        ("2025-09-01 00:00", "2025-10-01 00:00", OCTOBER),
    ],
)
def test_text_of_iso_8601_is_read_as_utc(postgres: Database, begin: str, end: str, at: datetime) -> None:
    create("text", log_1=f"FOR VALUES FROM ('{begin}') TO ('{end}')")

    planned = plan(sweep(key="text"))
    early = run(sweep(key="text"), at + AGE - timedelta(microseconds=1))
    late = run(sweep(key="text"), at + AGE)

    assert (planned.stale.rows, early.counts["dropped_partitions"], late.counts["dropped_partitions"]) == (1, 0, 1)


@pytest.mark.parametrize(
    ("kind", "end"),
    [("uuid", "'ffffffff-ffff-ffff-ffff-ffffffffffff'"), ("bigint", "9223372036854775807"), ("integer", "2147483647")],
)
def test_largest_value_is_an_open_end(postgres: Database, kind: str, end: str) -> None:
    key = "uuid7" if kind == "uuid" else "epoch_s"
    _, october, _ = KEYS[key]
    create(kind, log_1=f"FOR VALUES FROM (MINVALUE) TO ({october})", log_2=f"FOR VALUES FROM ({october}) TO ({end})")

    result = run(sweep(key=key), datetime(2190, 1, 1, tzinfo=UTC))

    assert (result.outcome, left()) == ("done", ["log_2"])


@pytest.mark.parametrize(
    ("key", "kind", "end", "text"),
    [
        ("time", "uuid", "'20000000-0000-0000-0000-000000000000'", r'by at \(uuid\); .*, write key="uuid7"$'),
        ("time", "bigint", "1759276800", 'write key="epoch_s" or key="epoch_ms"$'),
        ("time", "text", "'2025-10'", 'write key="text"$'),
        ("time", "numeric", "1", "DropPartitions needs a date or a time$"),
        ("uuid7", "timestamptz", "'2025-10-01'", r'\(timestamp with time zone\), which is not key="uuid7"; omit key$'),
        ("uuid7", "bigint", "1", 'which is not key="uuid7"; if its values are times, write key="epoch_s"'),
        ("uuid7", "uuid", "'20000000-0000-4000-8000-000000000000'", "would be the year 3084"),
        ("epoch_s", "bigint", "1759276800000", "ends at '1759276800000', which cannot be read with key=\"epoch_s\""),
        ("epoch_ms", "bigint", "1759276800", 'ends at .*, which would be the year 1970 with key="epoch_ms"'),
        ("epoch_ms", "integer", "1759276800", r'\(integer\), which is not key="epoch_ms"; .* key="epoch_s"$'),
        ("text", "text", "'october'", "cannot be read"),
        ("text", "text", "'2025-13'", "cannot be read"),
        ("text", "text", "'2025-10,01'", "cannot be read"),
        ("text", "text", "'010225'", "cannot be read"),  # 1 February 2025
        ("text", "text", "'010203'", "would be the year 102"),
    ],
)
def test_key_that_cannot_be_read_as_a_time_is_refused(
    postgres: Database, key: str, kind: str, end: str, text: str
) -> None:
    create(kind, log_1=f"FOR VALUES FROM (MINVALUE) TO ({end})")

    result = run_sweep(sweep(key=key))

    assert (result.outcome, left()) == ("failed", ["log_1"])
    with pytest.raises(DeclarationError, match=text):
        plan(sweep(key=key))


@pytest.mark.parametrize(
    ("months", "now", "end", "dropped"),
    [
        (1, "2026-03-31 12:00", "2026-02-28 12:00", 1),
        (1, "2026-03-31 12:00", "2026-02-28 12:01", 0),
        (1, "2024-03-31 12:00", "2024-02-29 12:00", 1),
        (1, "2026-01-15", "2025-12-15", 1),
        (1, "2026-01-15", "2025-12-16", 0),
        (12, "2024-02-29", "2023-02-28", 1),
        (12, "2024-02-29", "2023-03-01", 0),
        (13, "2026-01-01", "2024-12-01", 1),
    ],
)
def test_months_end_like_those_of_postgresql(postgres: Database, months: int, now: str, end: str, dropped: int) -> None:
    create("timestamptz", log_1=f"FOR VALUES FROM (MINVALUE) TO ('{end}+00')")
    interval = f"SELECT ('{now}'::timestamp - interval '{months} months' >= '{end}'::timestamp)::int"
    assert database.execute_sql(interval).fetchone() == (dropped,)

    result = run(sweep(older_than_months=months), datetime.fromisoformat(now).replace(tzinfo=UTC))

    assert result.counts["dropped_partitions"] == dropped


def test_age_before_the_year_1_is_rejected(postgres: Database) -> None:
    create("date")

    assert run_sweep(sweep(older_than_months=12 * 3000)).outcome == "failed"
    with pytest.raises(DeclarationError, match="older_than is 36000 months, which is before the year 1"):
        plan(sweep(older_than_months=12 * 3000))


@pytest.mark.parametrize(
    ("partitions", "warning"),
    [
        ({"log_1": (-10, 10)}, "rows after it cannot be inserted"),
        ({"log_1": (-30, -10)}, "rows after it cannot be inserted"),
        ({"log_1": (-10, 10), "log_9": None}, "log_9, which is never dropped"),
        ({"log_1": (-10, 10), "log_2": (10, 30)}, None),
        ({"log_1": (-10, 10), "log_2": (10, "MAXVALUE")}, None),
        ({"log_1": (-10, "'infinity'")}, None),
        ({"log_9": None}, None),
        ({}, None),
    ],
)
def test_plan_doctor_and_run_warn_if_no_partition_follows(
    postgres: Database,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
    partitions: dict[str, tuple[int, int | str] | None],
    warning: str | None,
) -> None:
    today = datetime.now(UTC)

    def bounds(of: tuple[int, int | str] | None) -> str:
        days = [f"'{today + timedelta(days=each)}'" if isinstance(each, int) else each for each in of or ()]
        return "FOR VALUES FROM ({}) TO ({})".format(*days) if days else "DEFAULT"

    create("timestamptz", **{name: bounds(of) for name, of in partitions.items()})

    planned = [each for each in plan(sweep()).warnings if "the last partition" in each]
    found = [each.text for each in tables.examine_partitions(settings, {"shop.old_logs": sweep()}) if each.way_out]
    run_sweep(sweep())

    logged = [each for each in caplog.messages if "No partition follows" in each]
    assert (len(planned), len(found), len(logged)) == ((1, 1, 1) if warning else (0, 0, 0))
    assert all(each.endswith(warning or "") for each in [*planned, *found])
