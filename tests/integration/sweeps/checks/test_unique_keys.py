"""Which columns identify a row: a sweep whose model says otherwise than its table does not begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from peewee import BigAutoField, BigIntegerField, CompositeKey, IntegerField, TextField, UUIDField
from psycopg2.extensions import connection as Connection

import housekeeping
from housekeeping import BaseModel, Call, Delete, Limits, Rows, Settings, Sweep, TableStage, UtcDateTimeField
from tests.integration.conftest import Plant
from tests.internals.core import DeclarationError, event
from tests.internals.database import Database, restore_declared_key
from tests.internals.doctor import stages
from tests.internals.engine import Finding, run_sweep
from tests.internals.insight import plan
from tests.internals.sweeps import CallStage

Do = Callable[[str], Any]


class Event(BaseModel):
    """Declared with a part of its table's key."""

    id = BigAutoField()
    happened_at = UtcDateTimeField()
    kind = IntegerField(null=True)


def sweep_of(*order: str, action: Any = None) -> Sweep:
    rows = Rows(Event, stale=lambda row, now: row.happened_at < now, order=order, action=action or Delete())
    return Sweep("shop.events", rows, limits=Limits(batch=5, batch_takes=None))


def by_id_alone(action: Any) -> Sweep:
    """Return a sweep of a custom stage, whose order lacks a part of the key."""
    kind: Any = CallStage if isinstance(action, Call) else TableStage
    stage = kind(name="rows", stale=lambda now: Event.happened_at < now, order=(Event.id,), action=action, batch_size=5)
    return Sweep("shop.events", stage)


by_id = by_id_alone(Delete())
by_time = sweep_of("happened_at")


@pytest.fixture
def do(postgres: Database, admin: Connection) -> Iterator[Do]:
    def execute(statement: str) -> Any:
        with admin.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()[0] if cursor.description else None

    yield execute
    restore_declared_key(Event)


@pytest.fixture
def events(do: Do) -> None:
    """Ten events of each of five ids."""
    do("CREATE TABLE event (id bigint, happened_at timestamptz, kind integer, PRIMARY KEY (id, happened_at))")
    do(
        "INSERT INTO event SELECT n % 5, '2026-01-01'::timestamptz + n * interval '1 s' "
        "FROM generate_series(1, 50) AS n"
    )


def found(sweep: Sweep) -> list[Finding]:
    findings = stages.examine_stages(Settings.load(), {sweep.name: sweep})
    return [each for each in findings if each.subject.startswith("key")]


WRONG = 'Event declares the key (id) and order is (id), but rows of "event" are identified by (id, happened_at)'
WRITE = "declare the primary key (id, happened_at) in Event, and end the order with it"


def test_order_without_the_whole_key_fails_the_run(events: None, do: Do, last_run: Callable[[], Any]) -> None:
    archived: list[Event] = []
    archive = by_id_alone(Call(archived.append, then=Delete()))

    result = run_sweep(archive)

    assert (result.outcome, result.reason) == ("failed", f"shop.events: {WRONG}; {WRITE}")
    assert (last_run().outcome, last_run().reason) == ("failed", result.reason)
    assert (archived, do("SELECT count(*) FROM event")) == ([], 50)


def test_key_added_after_a_failed_run_is_used_by_the_next(do: Do) -> None:
    do("CREATE TABLE event (id bigint, happened_at timestamptz, kind integer)")
    do("INSERT INTO event SELECT n % 5, '2026-01-01'::timestamptz + n * interval '1 s' FROM generate_series(1, 50) n")

    before = run_sweep(by_time)
    do("ALTER TABLE event ADD PRIMARY KEY (id, happened_at)")
    after = run_sweep(by_time)

    assert "has no primary key" in str(before.reason)
    assert (after.outcome, after.counts["deleted_rows"], do("SELECT count(*) FROM event")) == ("done", 50, 0)


def test_plan_and_doctor_refuse_the_same_key(events: None) -> None:
    with pytest.raises(DeclarationError) as refused:
        plan(by_id)

    assert str(refused.value) == f"shop.events: {WRONG}; {WRITE}"
    (error,) = found(by_id)
    assert (error.level, error.area, error.text, error.way_out) == ("error", "shop.events", WRONG, WRITE)


@pytest.mark.parametrize("whole_batch", [True, False])
def test_call_acts_on_the_rows_it_was_given_by_the_real_key(events: None, do: Do, whole_batch: bool) -> None:
    given: list[Event] = []
    function = given.extend if whole_batch else given.append
    some = sweep_of("happened_at", action=Call(function, then=Delete(), whole_batch=whole_batch))
    planned = plan(some).stale.rows

    result = run_sweep(some)

    assert (result.outcome, result.counts["deleted_rows"], planned, len(given)) == ("done", 50, 50, 50)
    assert len({(event.id, event.happened_at) for event in given}) == 50
    assert found(some) == []


def test_bisection_acts_on_single_rows_of_a_composite_key(events: None, do: Do, plant: Plant) -> None:
    plant("DELETE ON event", "OLD.happened_at = '2026-01-01 00:00:07+00'", "RAISE EXCEPTION 'kept'")

    result = run_sweep(by_time)

    assert (result.outcome, result.counts["deleted_rows"], do("SELECT count(*) FROM event")) == ("done", 49, 1)


@pytest.mark.parametrize(
    ("unique", "accepted"),
    [
        ("CREATE UNIQUE INDEX ON event (id)", True),
        ("CREATE UNIQUE INDEX ON event (id) INCLUDE (kind)", True),
        ("CREATE UNIQUE INDEX ON event (id) WHERE kind IS NULL", False),
        ("CREATE UNIQUE INDEX ON event (id, kind)", False),
        ("CREATE UNIQUE INDEX ON event ((id + 1))", False),
        ("ALTER TABLE event ALTER id DROP NOT NULL; CREATE UNIQUE INDEX ON event (id)", False),
        ("CREATE INDEX ON event (id)", False),
    ],
)
def test_unique_index_over_not_null_columns_is_a_key(do: Do, unique: str, accepted: bool) -> None:
    do("CREATE TABLE event (id bigint NOT NULL, happened_at timestamptz, kind integer)")
    do("INSERT INTO event SELECT n, '2026-01-01' FROM generate_series(1, 8) AS n")
    do(unique)

    result = run_sweep(by_id)

    assert (result.outcome, do("SELECT count(*) FROM event")) == (("done", 0) if accepted else ("failed", 8))
    if not accepted:
        assert "has no primary key and no unique index over NOT NULL columns" in str(result.reason)
        assert 'ALTER TABLE "event" ADD PRIMARY KEY (id)' in str(result.reason)


@pytest.mark.parametrize(
    "form",
    [
        "CREATE VIEW event AS SELECT * FROM base",
        "CREATE TABLE event (LIKE base INCLUDING ALL); CREATE TABLE child () INHERITS (event)",
    ],
)
def test_key_unknown_to_the_catalog_is_trusted_with_a_warning(do: Do, form: str) -> None:
    do("CREATE TABLE base (id bigint PRIMARY KEY, happened_at timestamptz, kind integer)")
    do(form)
    do("INSERT INTO event SELECT n, '2026-01-01' FROM generate_series(1, 8) AS n")

    result = run_sweep(by_id)

    assert (result.outcome, do("SELECT count(*) FROM event")) == ("done", 0)
    (warning,) = found(by_id)
    assert warning.level == "warning"
    assert "(id) may not be unique" in warning.text


KEYS = {"text": (TextField, "'k' || n"), "uuid": (UUIDField, "md5(n::text)::uuid"), "bigint": (BigIntegerField, "n")}


@pytest.mark.parametrize("kind", sorted(KEYS))
@pytest.mark.parametrize("partitioned", [True, False])
def test_composite_key_of_any_type_needs_no_option(do: Do, kind: str, partitioned: bool) -> None:
    field, value = KEYS[kind]

    class Reading(BaseModel):
        at = UtcDateTimeField()
        device = field()

        class Meta:
            primary_key = CompositeKey("device", "at")

    parts = " PARTITION BY RANGE (at)" if partitioned else ""
    do(f"CREATE TABLE reading (device {kind}, at timestamptz, PRIMARY KEY (at, device)){parts}")
    if partitioned:
        do("CREATE TABLE reading_1 PARTITION OF reading DEFAULT")
    do(f"INSERT INTO reading SELECT {value}, '2026-01-01' FROM generate_series(1, 20) AS n")
    seen: list[Any] = []
    explain_queries = Sweep(
        "shop.explain_queries",
        Rows(
            Reading,
            stale=lambda row, now: row.at < now,
            order=("at", "device"),
            action=Call(seen.append, then=Delete()),
        ),
        limits=Limits(batch=3, batch_takes=None),
    )

    result = run_sweep(explain_queries)

    assert (result.outcome, result.reason) == ("done", None)
    assert (len(seen), do("SELECT count(*) FROM reading")) == (20, 0)


class Vouched(BaseModel):
    """Says of a key that is not unique that it is."""

    id = BigAutoField()
    happened_at = UtcDateTimeField()

    class Meta:
        table_name = "event"
        key_is_unique = True


@pytest.mark.parametrize("action", [Delete(), Call(lambda row: None, then=Delete())])
@pytest.mark.parametrize("told", [True, False])
def test_key_that_is_not_unique_changes_no_row(events: None, do: Do, action: Any, told: bool) -> None:
    gone = event("shop.event_gone")
    vouched = Sweep(
        "shop.vouched",
        Rows(
            Vouched,
            stale=lambda row, now: row.happened_at < now,
            order="happened_at",
            action=action,
            event=housekeeping.Event(gone),
        ),
        limits=Limits(batch=2, batch_takes=None),
    )
    heard: list[Any] = []

    def hear(sender: str, **rows: Any) -> None:
        heard.append(rows)

    with gone.connected_to(hear) if told else nullcontext():
        result = run_sweep(vouched)

    assert (result.outcome, do("SELECT count(*) FROM event"), heard) == ("failed", 50, [])
    assert "Either the key (id) of Vouched is not unique, then declare" in str(result.reason)
