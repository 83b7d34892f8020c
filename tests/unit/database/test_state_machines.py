"""Properties of a state machine. Firing is tested on PostgreSQL."""

from __future__ import annotations

from enum import IntEnum

import pytest
from peewee import SmallIntegerField

from housekeeping import BaseModel, StateMachine
from tests.internals.core import DeclarationError


class Light(IntEnum):
    RED = 0
    GREEN = 1
    BROKEN = -1


class Sound(IntEnum):
    RED = 0


class Lamp(BaseModel):
    status = SmallIntegerField()


machine = StateMachine(
    Lamp.status,
    Light,
    {"go": ([Light.RED], Light.GREEN), "turn": ([Light.RED], Light.GREEN), "break_down": (list(Light), Light.BROKEN)},
)


def test_sources_and_target_are_values_of_the_column() -> None:
    assert machine.sources("go") == [0]
    assert machine.sources("break_down") == [0, 1, -1]
    assert machine.target("break_down") == -1


def test_events_are_in_the_order_they_were_declared() -> None:
    assert machine.events == ["go", "turn", "break_down"]


def test_state_name_returns_the_documents_name_or_the_value() -> None:
    assert machine.state_name(1) == "green"
    assert machine.state_name(Light.GREEN) == "green"
    assert machine.state_name(9) == "9"


def test_event_without_a_source_is_rejected() -> None:
    # In SQL it would be `status IN ()`: an event that can never happen.
    with pytest.raises(DeclarationError, match="go: its sources"):
        StateMachine(Lamp.status, Light, {"go": ([], Light.GREEN)})


@pytest.mark.parametrize("event", [([Sound.RED], Light.GREEN), ([Light.RED], Sound.RED)])
def test_a_state_of_another_column_is_refused_though_its_name_is_known(event: tuple[list[Light], Light]) -> None:
    with pytest.raises(DeclarationError, match="states of Light"):
        StateMachine(Lamp.status, Light, {"go": event})


def test_the_diagram_has_an_arrow_for_each_two_states_that_events_join() -> None:
    assert machine.diagram().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> red",
        "    red --> green: go, turn",
        "    red --> broken: break_down",
        "    green --> broken: break_down",
        "    broken --> broken: break_down",
    ]
