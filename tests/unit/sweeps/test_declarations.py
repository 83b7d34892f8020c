"""A declaration with a wrong type, or a usual mistake, is rejected in one line that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Final

import click
import pydantic
import pytest
from peewee import BigAutoField, TextField

from housekeeping import (
    Alerts,
    Argument,
    BaseModel,
    Call,
    Delete,
    Guard,
    Lease,
    Limits,
    Rows,
    StateMachine,
    Sweep,
    Throttle,
    Transition,
    UtcDateTimeField,
)
from tests.internals.cli import narrow, purge
from tests.internals.core import LARGEST_BATCH, BreakerSettings, DeclarationError, ThrottleSettings, WorkerSettings
from tests.internals.sweeps import TableStage, model_of


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


class Query:
    """Stands for a QuerySet, which sends its query when it is written out."""

    def __repr__(self) -> str:
        raise AssertionError("the query was sent")


def rows(**given: Any) -> Rows:
    return Rows(Ticket, **{"stale": lambda row, now: row.ends <= now, "action": Delete(), **given})


def sweep(**given: Any) -> Sweep:
    return Sweep(**{"name": "shop.tickets", "stages": rows(), **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schedule": 5}, 'schedule is 5; write a cron expression: "*/5 * * * *"'),
        ({"lease": "shop/tickets"}, "lease is 'shop/tickets'; write Lease(...)"),
        ({"alerts": {"backlog": 5}}, "alerts is {'backlog': 5}; write Alerts(...)"),
        ({"guard": 0.5}, "guard is 0.5; write Guard(...)"),
        ({"limits": 100}, "limits is 100; write Limits(...)"),
        ({"options": ["page_size"]}, "options is ['page_size']; write a dictionary"),
        ({"actor": "cronjob"}, "actor is 'cronjob'; write a dictionary"),
        ({"argument": "project"}, "argument is 'project'; write Argument(...)"),
        ({"database": None}, 'database is None; write a text, such as "shop.expired"'),
        ({"schedul": "* * * * *"}, "there is no field 'schedul'; did you mean schedule?"),
        ({"stale_after": 14}, "there is no field 'stale_after'; the fields are name, stages"),
        ({"nothing": 14}, "there is no field 'nothing'; the fields are name, stages, schedule, lease, limits, "),
        ({"stages": ()}, "has no stage; write Sweep('shop.tickets', Rows("),
        ({"stages": lambda sweep: []}, "has no stage; write Sweep('shop.tickets', Rows("),
        ({"stages": "delete"}, "'delete' is no stage; write Rows("),
        ({"stages": Ticket}, "is no stage; write Rows("),
        ({"stages": Delete()}, "an object of type Delete is no stage; write Rows("),
        ({"options": {"page_size": 0}}, "the option page_size is 0; it should be greater than or equal to 1"),
        (
            {"schedule": "* * * * *", "argument": Argument("project id", int)},
            "takes an argument (project id), so it has no schedule",
        ),
        ({"lease": Lease("tickets", timedelta(minutes=5))}, "limits.runtime must be below the lease's ttl (0:05:00)"),
    ],
)
def test_wrong_field_of_a_sweep_is_rejected_with_what_to_write(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError) as refused:
        sweep(**given)

    assert said in str(refused.value) and str(refused.value).startswith("shop.tickets")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "two words", "1st", "a/b", "purge:x", "x" * 101])
def test_wrong_name_of_a_sweep_is_rejected(name: str) -> None:
    with pytest.raises(DeclarationError, match="is no name for a sweep; it should be letters, digits and _ . -"):
        sweep(name=name)


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda: sweep(name=7), 'Sweep: name is 7; write a text, such as "shop.expired"'),
        (lambda: rows(age=14), "Rows: age is 14; write timedelta(days=14)"),
        (lambda: rows(age=timedelta(days=999_999)), "Rows: age is timedelta(days=999999); write a time at most"),
        (
            lambda: rows(action="delete"),
            "Rows: action is 'delete'; write Delete(), Transition(machine, event) or Call(",
        ),
        (lambda: rows(action=Delete), "Rows: action should be Delete(), with brackets"),
        (lambda: rows(action=Query()), "Rows: action is an object of type Query; write Delete(), "),
        (lambda: rows(batch=True), "Rows: batch is True; write a whole number, such as 100"),
        (lambda: rows(hold=True), "Rows: hold is True; write a function"),
        (lambda: rows(event="gone"), "Rows: event is 'gone'; write Event(events.event("),
        (lambda: rows(stale_after=timedelta(days=1)), "Rows: there is no field 'stale_after'"),
        (lambda: Rows(Ticket, action=Delete()), "Rows: stale is missing"),  # type: ignore[call-arg]
        (lambda: Limits(batch="100"), "Limits: batch is '100'; write a whole number, such as 100"),  # type: ignore[arg-type]
        (lambda: Limits(runtime=300), "Limits: runtime is 300; write timedelta(seconds=300)"),  # type: ignore[arg-type]
        (lambda: Limits(batch_takes="1 s"), "Limits: batch_takes is '1 s'; write timedelta("),  # type: ignore[arg-type]
        (lambda: Limits(rows_per_s=0), "Limits: rows_per_s is 0; write a number above 0"),
        (lambda: Limits(rest=-0.1), "Limits: rest is -0.1; write a number at least 0"),
        (
            lambda: Limits(resume="always"),  # type: ignore[arg-type]
            "Limits: resume is 'always'; write 'interrupted', 'after_limit' or 'never'",
        ),
        (lambda: Alerts(longest_run=60), "Alerts: longest_run is 60; write timedelta(seconds=60)"),  # type: ignore[arg-type]
        (lambda: Alerts(most={"failed": "5"}), "Alerts: most is '5'; write limits by count: "),  # type: ignore[dict-item]
        (lambda: Guard(share="half"), "Guard: share is 'half'; write a number, such as 0.5"),  # type: ignore[arg-type]
        (lambda: Throttle(waiting_locks=1.5), "Throttle: waiting_locks is 1.5; write a whole number"),  # type: ignore[arg-type]
        (lambda: Lease("tickets", 600), "Lease: ttl is 600; write timedelta(seconds=600)"),  # type: ignore[arg-type]
        (lambda: Lease(None, timedelta(hours=1)), "Lease: key is None; write a text, such as"),  # type: ignore[arg-type]
        (lambda: Argument("project", "int"), "Argument: type is 'int'; write a function"),  # type: ignore[arg-type]
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


class NoCounts:
    name, batch_size = "tickets", 100

    def prepare(self, batch: Any) -> None: ...


def test_stage_that_does_not_name_its_counts_is_rejected() -> None:
    with pytest.raises(DeclarationError, match="NoCounts does not name its counts; give it counts and progress_counts"):
        sweep(stages=NoCounts())


class Keyless(BaseModel):
    ends = UtcDateTimeField()

    class Meta:
        primary_key = False


def test_table_without_a_primary_key_is_rejected() -> None:
    with pytest.raises(DeclarationError, match="Keyless has no primary key; declare that of its table"):
        Sweep("shop.keyless", Rows(Keyless, stale=lambda row, now: row.ends <= now, order="ends", action=Delete()))


def test_order_of_a_stage_without_the_primary_key_is_rejected() -> None:
    stage = TableStage(name="tickets", stale=lambda now: Ticket.ends <= now, order=(Ticket.ends,), action=Delete())

    with pytest.raises(DeclarationError, match=r"order of stage tickets must end with the primary key \(id\)"):
        Sweep("shop.tickets", stage)


def test_several_stages_count_together() -> None:
    several = sweep(stages=[rows(name="a"), rows(name="b", action=Call(print, then=Delete("told_rows")))])

    assert several.counts == ("deleted_rows", "told_rows", "failed", "batches", "out_of_time")
    assert several.progress_counts == ("deleted_rows", "told_rows")


def test_object_that_is_no_table_is_rejected_without_writing_it_out() -> None:
    with pytest.raises(DeclarationError, match="an object of type Query is no table"):
        model_of(Query())


def with_option(name: str) -> Callable[[Any], object]:
    return lambda number: sweep(options={name: number})


def with_limit(kind: Callable[..., object], name: str) -> Callable[[Any], object]:
    return lambda number: kind(**{name: number})


#: Builds the declaration with one number, by the setting of the same meaning.
DECLARED: Final[dict[str, Callable[[Any], object]]] = {
    "batch_size": lambda number: Limits(batch=number),
    "max_rows_per_s": lambda number: Limits(rows_per_s=number),
    "rest": lambda number: Limits(rest=number),
    "max_runtime_s": lambda seconds: Limits(runtime=timedelta(seconds=seconds)),
    "stale_after_s": lambda seconds: rows(age=timedelta(seconds=seconds)),
    "lease_ttl_s": lambda seconds: Lease("tickets", timedelta(seconds=seconds)),
    "target_batch_s": lambda seconds: Limits(batch_takes=timedelta(seconds=seconds)),
    **{name: with_option(name) for name in ("page_size", "git_batch_size", "max_projects", "max_deletes")},
    **{
        f"gates.{name}": with_limit(Throttle, name)
        for name in ("replication_lag_s", "waiting_locks", "batch_s", "wal_mb_per_s", "slot_lag_mb", "wait_s")
    },
    **{f"breaker.{name}": with_limit(Guard, name) for name in ("times_history", "share")},
    **{f"alarms.{name}": with_limit(Alerts, name) for name in ("backlog", "failed_runs", "overdue")},
    "alarms.deleted_rows": lambda number: Alerts(most={"deleted_rows": number}),
    "alarms.longest_run_s": lambda seconds: Alerts(longest_run=timedelta(seconds=seconds)),
}


def numbers_in_settings() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each number of a worker's settings, by its name."""
    found: dict[str, dict[str, Any]] = {}
    for prefix, model in (("", WorkerSettings), ("gates.", ThrottleSettings), ("breaker.", BreakerSettings)):
        for name, schema in model.model_json_schema(by_alias=False)["properties"].items():
            numbers = [each for each in schema.get("anyOf", [schema]) if each.get("type") in ("integer", "number")]
            found |= {f"{prefix}{name}": each for each in numbers}
    alarm = WorkerSettings.model_json_schema()["properties"]["alarms"]["anyOf"][0]["additionalProperties"]["anyOf"][0]
    return found | {name: alarm for name in DECLARED if name.startswith("alarms.")}


def accepted(make: Callable[[], object]) -> bool:
    try:
        make()
    except (DeclarationError, pydantic.ValidationError):
        return False
    return True


@pytest.mark.parametrize("name", numbers_in_settings())
def test_number_has_the_same_bounds_in_declaration_and_setting(name: str) -> None:
    schema = numbers_in_settings()[name]
    is_whole = schema["type"] == "integer" or name.startswith("alarms.")
    step = 1 if is_whole else 0.001
    bounds = [schema[key] for key in ("minimum", "exclusiveMinimum", "maximum") if key in schema]
    first, *rest = reversed(name.split("."))

    for number in [bound + by for bound in bounds for by in (-step, 0, step)]:
        value: Any = int(number) if is_whole else number
        given: dict[str, Any] = {first: value}
        for outer in rest:
            given = {outer: given}
        by_setting = accepted(partial(WorkerSettings, **given))
        assert accepted(partial(DECLARED[name], value)) is by_setting, value


@pytest.mark.parametrize("command", [purge, narrow])
def test_commands_take_the_batch_sizes_of_a_declaration(command: click.Command) -> None:
    (option,) = [each for each in command.params if each.name == "batch_size"]
    bounds: Any = option.type

    assert (bounds.min, bounds.max) == (1, LARGEST_BATCH)


def test_batch_of_an_own_stage_is_bounded() -> None:
    def stages(of: Sweep) -> list[TableStage]:
        order = (Ticket.ends, Ticket.id)
        return [
            TableStage(
                name="all", stale=lambda now: Ticket.ends <= now, order=order, action=Delete(), batch_size=10_000_000
            )
        ]

    with pytest.raises(DeclarationError, match="stage all: batch_size is 10,000,000; it should be 1 to 10,000"):
        Sweep("shop.tickets", stages)
