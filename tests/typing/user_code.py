"""Code of a user. mypy and pyright check the types that they infer; it is never run.

Both are strict, and both are told to complain of a comment that silences nothing: so each mistake below is one that
they find.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, assert_type

import dramatiq
from dramatiq import Actor, Message
from dramatiq.brokers.stub import StubBroker
from peewee import BigAutoField, TextField
from sqlalchemy import Column, Integer, MetaData, Table
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import housekeeping
from housekeeping import (
    Alerts,
    BaseModel,
    Call,
    Delete,
    Lease,
    Limits,
    Rows,
    RunResult,
    Stage,
    StateMachine,
    Sweep,
    Transition,
    UtcDateTimeField,
    model_of,
    run_sweep,
)
from housekeeping.core.settings import Settings
from housekeeping.testing.assertions import assert_idempotent, assert_survives_kill
from housekeeping.testing.stubs import ManualClock, MemoryLeaseStore

# -- a broker


broker = StubBroker()
actors = housekeeping.install(broker, Settings.load(database_url="postgresql:///shop"), workers=False)
assert_type(actors, dict[str, Actor[..., Any]])


def of_project(project_id: int) -> str:
    return f"projects/{project_id}"


@dramatiq.actor(
    broker=broker,
    idempotent=True,
    deduplicate="until_executed",
    exclusive_lease={"key": of_project, "ttl": timedelta(minutes=5), "fenced": True},
)
def clean_up(project_id: int) -> str:
    housekeeping.fence()
    housekeeping.complete_in(result=1)
    return "clean"


assert_type(clean_up.send(1), Message[str])
clean_up.send("1")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

assert_type(housekeeping.enqueue_many(clean_up, [1, 2, 3]), list[Message[str]])
housekeeping.enqueue_many(clean_up, 1)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

# -- leases


with housekeeping.ExclusiveLease("reports/nightly", timedelta(minutes=10), retries=3, sleep=lambda tries: 0.5) as lease:
    assert_type(lease, housekeeping.ExclusiveLease)
    assert_type(lease.try_obtain(), str | None)
    assert_type(lease.renew(), bool)
    assert_type(lease.owner(), str | None)
    assert_type(lease.remaining(), timedelta | None)
    lease.check()

housekeeping.ExclusiveLease("reports/nightly", 600)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

assert_type(housekeeping.throttle("mails", 10, timedelta(minutes=1)), bool)
housekeeping.throttle("mails", 10, 60)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

# -- your own sweeps


class State(Enum):
    OPEN = "open"
    STUCK = "stuck"


class Order(BaseModel):
    id = BigAutoField()
    state = TextField()
    touched_at = UtcDateTimeField()

    class Meta:
        table_name = "orders"


machine = StateMachine(Order.state, State, {"give_up": ([State.OPEN], State.STUCK)})


def cancel(order: Order) -> None: ...


def no_passes(sweep: Sweep) -> list[Stage]:
    return []


stuck_orders = Sweep(
    "orders.stuck",
    Rows(
        Order,
        stale=lambda row, now: row.touched_at <= now - timedelta(hours=1),
        order="touched_at",
        action=Call(cancel, then=Transition(machine, "give_up")),
    ),
    schedule="*/5 * * * *",
    lease=Lease("orders", timedelta(minutes=30)),
    limits=Limits(runtime=timedelta(minutes=5)),
    alerts=Alerts(backlog=1000),
)
old_orders = Sweep(
    "orders.old", Rows(Order, stale=lambda row, now: row.touched_at <= now, order="touched_at", action=Delete())
)
assert_type(old_orders, Sweep)
assert_type(stuck_orders.name, str)
assert_type(stuck_orders.schedule, str | None)
Sweep("old", no_passes, limits=Limits(batch="many"))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
Sweep("old", no_passes, batchsize=5)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]

# -- sweeps on tables that are declared elsewhere


class Base(DeclarativeBase): ...


class Token(Base):
    __tablename__ = "tokens"

    id: Mapped[int] = mapped_column(primary_key=True)
    expires_at: Mapped[datetime]


expired_tokens = Sweep(
    "tokens.expired",
    Rows(
        Token,
        stale=lambda row, now: (row.expires_at <= now - timedelta(days=1)) & (row.kind == "bot"),
        order="expires_at",
        action=Delete(),
    ),
    schedule="0 * * * *",
    limits=Limits(batch=500),
)
assert_type(expired_tokens, Sweep)
Sweep(
    "tokens.bots",
    Rows(
        Table("tokens", MetaData(), Column("id", Integer, primary_key=True)),
        stale=lambda row, now: (row.details["kind"] == "bot") | row.tags.contains("bot") | row.name.startswith("bot"),
        order=("expires_at", "id"),
        action=Delete(),
    ),
)
Sweep("tokens.all", Rows(Token, stale=lambda row, now: True, action=Delete()))
Sweep("tokens.old", Rows(Token, stale=lambda row, now: row.at < now, action=Delete()), limits=Limits(batch="many"))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
assert_type(model_of(Token), type[Any])

assert_type(run_sweep(stuck_orders), RunResult)
assert_type(run_sweep(stuck_orders).counts, dict[str, Any])

# -- events


def forget(sender: str, *, rows: Sequence[dict[str, Any]], worker: str, run_id: int | None) -> None: ...


housekeeping.events.user_status_cleared.connect(forget)

# -- tests


clock = ManualClock()
assert_type(clock.now(), datetime)
clock.advance(timedelta(hours=1))
store = MemoryLeaseStore(clock)
assert_type(housekeeping.ExclusiveLease("k", timedelta(minutes=1), client=store).exists(), bool)
assert_idempotent(stuck_orders)
assert_type(assert_survives_kill(stuck_orders), list[str])

# -- a slip


housekeeping.instal(broker)  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
