"""A declaration with a wrong type, or a usual mistake, is rejected in one line that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

import pytest
import sqlalchemy
from peewee import BigAutoField, TextField

from housekeeping import events
from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps import (
    AlertThresholds,
    BaseModel,
    Breaker,
    Call,
    Delete,
    LeaseConfig,
    StateMachine,
    Sweep,
    TableStage,
    ThrottleLimits,
    Transition,
    UtcDateTimeField,
    model_of,
)


class Ticket(BaseModel):
    id = BigAutoField()
    state = TextField()
    ends = UtcDateTimeField()


class Other(BaseModel):
    id = BigAutoField()


class State(StrEnum):
    OPEN = "open"
    CLOSED = "closed"


machine: Final = StateMachine(Ticket.state, State, {"close": ([State.OPEN], State.CLOSED)})


class Rows:
    """Stands for a QuerySet, which sends its query when it is written out."""

    def __repr__(self) -> str:
        raise AssertionError("the query was sent")


def sweep(**given: Any) -> Sweep:
    whole = {"stale": lambda now: Ticket.ends <= now, "order": (Ticket.ends, Ticket.id), "action": Delete()}
    return Sweep(**{"name": "shop.tickets", **whole, **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stale_after": 14}, "stale_after is 14; write timedelta(days=14) or None"),
        ({"max_runtime": 300}, "max_runtime is 300; write timedelta(seconds=300)"),
        ({"target_batch": "1 s"}, "target_batch is '1 s'; write timedelta(seconds=1) or None"),
        ({"batch_size": "100"}, "batch_size is '100'; write a whole number, such as 100"),
        ({"batch_size": True}, "batch_size is True; write a whole number, such as 100"),
        ({"shards": 2.5}, "shards is 2.5; write a whole number, such as 100"),
        ({"enabled": "no"}, "enabled is 'no'; write True or False"),
        ({"schedule": 5}, 'schedule is 5; write a cron expression: "*/5 * * * *" or None'),
        ({"counts": ("rows", 3)}, "counts is ('rows', 3); write a tuple, such as (\"deleted_rows\",) with the comma"),
        (
            {"progress_counts": "rows"},
            "progress_counts is 'rows'; write a tuple, such as (\"deleted_rows\",) with the comma",
        ),
        ({"lease": "shop/tickets"}, "lease is 'shop/tickets'; write LeaseConfig(...) or None"),
        ({"alerts": {"backlog": 5}}, "alerts is {'backlog': 5}; write AlertThresholds(...)"),
        ({"breaker": 0.5}, "breaker is 0.5; write Breaker(...)"),
        ({"options": ["page_size"]}, "options is ['page_size']; write a dictionary"),
        ({"data_consistency": "eventual"}, "data_consistency is 'eventual'; write 'always', 'sticky', 'delayed'"),
        ({"action": "delete"}, "action is 'delete'; write Delete(), Transition(machine, event) or Call(function, "),
        ({"parse_argument": "int"}, "parse_argument is 'int'; write a function"),
        ({"queue": None}, 'queue is None; write a text, such as "shop.expired"'),
        ({"order": ()}, "give stale, order and action, or stages; missing: order=(Session.expires_at, Session.id)"),
        ({"order": (Ticket.ends.desc(), Ticket.id)}, "order is always oldest first; write ends without .asc() and .de"),
        ({"order": (-Ticket.ends, Ticket.id)}, "order is always oldest first; write ends without .asc() and .desc()"),
        ({"order": ("ends", "id")}, "order has 'ends'; write columns: (Session.expires_at, Session.id)"),
        (
            {"order": (Ticket.ends, Other.id)},
            "order has Other.id, but begins with a column of Ticket; write columns of one model: (Session.expires_at, ",
        ),
        (
            {"event": events.event("shop.ticket_ended"), "event_columns": {"id": "id"}},
            "event_columns has 'id' as 'id'; write {\"order_id\": Order.id}",
        ),
        ({"stale_afer": 14}, "there is no field 'stale_afer'; did you mean stale_after?"),
        ({"nothing": 14}, "there is no field 'nothing'; the fields are name, stale, hold, always_stale, order, "),
        (
            {"stale_after": timedelta(days=999_999)},
            "stale_after is 999,999 days, over 100 years, so no row is ever stale; write how old a row must",
        ),
        (
            {"action": lambda rows: None},
            "action is a lambda; write Delete(), Transition(machine, event) or Call(function, then=Delete())",
        ),
        ({"action": Rows()}, "action is an object of type Rows; write Delete(), "),
        (
            {"order": (sqlalchemy.column("ends"), Ticket.id)},
            "order has an object of type ColumnClause; write columns: (Session.expires_at, Session.id); for a table of "
            "Django or SQLAlchemy write Sweep.on(table, ...), with columns by name: row.expires_at",
        ),
        (
            {"stale": lambda now: sqlalchemy.column("ends") < now},
            "stale returns an object of type BinaryExpression; write a condition on columns: lambda now: "
            "Session.expires_at <= now; for a table of Django or SQLAlchemy write Sweep.on(table, ...)",
        ),
        ({"stages": lambda sweep: []}, "give stale, order and action, or stages; not both"),
    ],
)
def test_wrong_field_of_a_sweep_is_rejected_with_what_to_write(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError) as refused:
        sweep(**given)

    assert str(refused.value).startswith(f"shop.tickets: {said}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda: sweep(name=7), 'Sweep: name is 7; write a text, such as "sessions.expired"'),
        (
            lambda: AlertThresholds(longest_run=60),  # type: ignore[arg-type]
            "AlertThresholds: longest_run is 60; write timedelta(seconds=60) or None",
        ),
        (
            lambda: AlertThresholds(most={"failed": "5"}),  # type: ignore[dict-item]
            "AlertThresholds: most is {'failed': '5'}; write limits by count: ",
        ),
        (lambda: Breaker(share="half"), "Breaker: share is 'half'; write a number, such as 0.5 or None"),  # type: ignore[arg-type]
        (
            lambda: ThrottleLimits(waiting_locks=1.5),  # type: ignore[arg-type]
            "ThrottleLimits: waiting_locks is 1.5; write a whole number, such as 100 or None",
        ),
        (lambda: LeaseConfig("tickets", 600), "LeaseConfig: ttl is 600; write timedelta(seconds=600)"),  # type: ignore[arg-type]
        (lambda: LeaseConfig(None, timedelta(hours=1)), "LeaseConfig: key is None; write a text, such as"),  # type: ignore[arg-type]
        (lambda: Call("tell", then=Delete()), "Call: function is 'tell'; write a function"),  # type: ignore[arg-type]
        (lambda: Call(print, then=Delete), "Call: then is <class "),  # type: ignore[arg-type]
        (
            lambda: Call(print, then=Delete(), unavailable_errors=OSError),  # type: ignore[arg-type]
            "Call: unavailable_errors is <class 'OSError'>; write types of errors: ",
        ),
        (lambda: Delete(5), 'Delete: rows_counted_as is 5; write a text, such as "shop.expired"'),  # type: ignore[arg-type]
        (lambda: Transition(Ticket, "close"), "Transition: machine is <Model: Ticket>; write StateMachine(...)"),  # type: ignore[arg-type]
        (lambda: Transition(machine, "clsoe"), "Transition: the machine has no event 'clsoe'; write 'close'"),
        (
            lambda: Transition(machine, "close", changes={"state": "x"}),  # type: ignore[arg-type]
            "Transition: changes is {'state': 'x'}; write a function",
        ),
    ],
)
def test_wrong_option_of_a_part_is_rejected_with_what_to_write(declare: Callable[[], object], said: str) -> None:
    with pytest.raises(DeclarationError) as refused:
        declare()

    assert str(refused.value).startswith(said)


class Keyless(BaseModel):
    ends = UtcDateTimeField()


class Token(BaseModel):
    ends = UtcDateTimeField()
    token = TextField(primary_key=True)


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ((Ticket.ends,), "key (id), or rows could be missed; write order=(Ticket.ends, Ticket.id)"),
        ((Ticket.id, Ticket.ends), "key (id), or rows could be missed; write order=(Ticket.ends, Ticket.id)"),
        ((Token.ends,), "key (token), or rows could be missed; write order=(Token.ends, Token.token)"),
        (
            (Keyless.ends,),
            "key (id), or rows could be missed; Keyless declares no primary key, so peewee assumes a column id; "
            "declare the key of the table keyless, such as token = TextField(primary_key=True)",
        ),
    ],
)
def test_order_without_the_primary_key_is_rejected_with_what_to_write(order: tuple[Any, ...], text: str) -> None:
    with pytest.raises(DeclarationError) as rejected:
        sweep(order=order)

    assert str(rejected.value) == f"shop.tickets: order must end with the primary {text}"


def test_order_of_a_stage_is_checked_as_well() -> None:
    stage = TableStage(
        name="tickets", stale=lambda now: Ticket.ends <= now, order=(Ticket.ends.desc(), Ticket.id), action=Delete()
    )

    with pytest.raises(DeclarationError, match="shop.tickets: order is always oldest first; write ends without"):
        Sweep(name="shop.tickets", stages=lambda sweep: [stage])


def test_field_that_does_not_exist_is_rejected_on_any_table() -> None:
    with pytest.raises(DeclarationError, match="shop.tickets: there is no field 'schedul'; did you mean schedule?"):
        Sweep.on(
            Ticket,
            name="shop.tickets",
            stale=lambda row, now: row.ends < now,
            action=Delete(),
            schedul="* * * * *",  # type: ignore[call-arg]
        )


def test_object_that_is_no_table_is_rejected_without_writing_it_out() -> None:
    with pytest.raises(DeclarationError, match="an object of type Rows is no table"):
        model_of(Rows())
