"""`changes` writes the database's time of the statement as the time of a change."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from peewee import AutoField, TextField
from psycopg2.extensions import connection as Connection

from housekeeping import BaseModel, Call, Limits, Rows, StateMachine, Sweep, Transition, UtcDateTimeField
from tests.database_times import DatabaseTimes
from tests.integration.sweeps.orders import Status
from tests.internals.core import DeclarationError
from tests.internals.database import Database, NaiveUtcDateTimeField, statement_time
from tests.internals.engine import declared_by, run_sweep
from tests.session_settings import set_in_session

OLD = datetime(2026, 1, 1, tzinfo=UTC)


class Parcel(BaseModel):
    id = AutoField()
    status = TextField(default=Status.PENDING)
    due_at = UtcDateTimeField(default=OLD)
    updated_at = UtcDateTimeField(null=True)
    naive_at = NaiveUtcDateTimeField(null=True)
    later_at = UtcDateTimeField(null=True)
    naive_earlier_at = NaiveUtcDateTimeField(null=True)

    class Meta:
        table_name = "parcels"


machine = StateMachine(Parcel.status, Status, {"expire": ([Status.PENDING], Status.EXPIRED)})


def changes(now: Any) -> dict[Any, Any]:
    return {
        Parcel.updated_at: now,
        "naive_at": now,
        Parcel.later_at: timedelta(days=1) + now + timedelta(hours=1),
        Parcel.naive_earlier_at: now - timedelta(minutes=5),
    }


EXPIRE = Transition(machine, "expire", changes=changes)


def sweep(action: Any = EXPIRE, batch_size: int = 1) -> Sweep:
    return Sweep(
        "shop.parcels",
        Rows(
            Parcel,
            stale=lambda row, now: (row.status == Status.PENDING) & (row.due_at < now),
            order="due_at",
            action=action,
        ),
        limits=Limits(batch=batch_size, batch_takes=None),
    )


@pytest.fixture(params=["UTC", "America/New_York"])
def parcels(request: pytest.FixtureRequest, postgres: Database) -> Iterator[None]:
    """Three stale parcels; the session is in one zone or another."""
    postgres.create_tables([Parcel])
    for number in range(3):
        Parcel.create(due_at=OLD + timedelta(seconds=number))
    set_in_session(postgres, f"TIME ZONE '{request.param}'")
    yield
    postgres.close()


def times_of_all() -> list[tuple[datetime, ...]]:
    rows = Parcel.select().order_by(Parcel.id)
    return [
        (
            row.updated_at,
            row.naive_at,
            row.later_at - timedelta(days=1, hours=1),
            row.naive_earlier_at + timedelta(minutes=5),
        )
        for row in rows
    ]


@pytest.mark.parametrize("action", [EXPIRE, Call(lambda row: None, then=EXPIRE)], ids=["transition", "call"])
def test_each_batch_writes_the_time_of_its_own_statement(parcels: None, times: DatabaseTimes, action: Any) -> None:
    result = run_sweep(sweep(action), on_batch=times.note)

    assert result.counts["moved_rows"] == 3
    assert [len(set(each)) for each in times_of_all()] == [1, 1, 1]
    assert [times.batch_of(each[0]) for each in times_of_all()] == [0, 1, 2]


def test_each_part_of_a_bisected_batch_writes_its_statement_time(
    parcels: None, times: DatabaseTimes, admin: Connection
) -> None:
    with admin.cursor() as cursor:
        cursor.execute("ALTER TABLE parcels ADD CHECK (id <> 2 OR status = 'pending')")

    result = run_sweep(sweep(batch_size=3), on_batch=times.note)

    first, refused, last = Parcel.select().order_by(Parcel.id)
    assert (result.counts["moved_rows"], result.counts["failed"], refused.updated_at) == (2, 1, None)
    parts = [times.batch_of(row.updated_at) for row in (first, last)]
    assert None not in parts and parts[0] != parts[1]
    assert [row.naive_at for row in (first, last)] == [row.updated_at for row in (first, last)]


def test_single_record_has_the_time_of_its_change_in_the_object_too(parcels: None, times: DatabaseTimes) -> None:
    parcel = Parcel.get_by_id(1)

    machine.fire(parcel, "expire", {each: statement_time(each) for each in (Parcel.updated_at, Parcel.naive_at)})
    times.note()

    assert (times.batch_of(parcel.updated_at), parcel.naive_at) == (0, parcel.updated_at)
    assert parcel.__data__ == Parcel.get_by_id(1).__data__


def test_changes_that_use_the_time_as_a_datetime_are_rejected() -> None:
    wrong = Transition(machine, "expire", changes=lambda now: {Parcel.updated_at: now.isoformat()})  # type: ignore[attr-defined]

    with pytest.raises(DeclarationError, match="'expire': its `changes` fails: .*isoformat.*timedelta added"):
        declared_by("shop", [sweep(wrong)])
