"""Status columns as state machines: one a table, for single records and for whole sets of rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final

from peewee import Field, Model
from transitions import Machine
from transitions.extensions import GraphMachine

from housekeeping.foundation.db import database
from housekeeping.foundation.errors import IllegalEvent, RecordChanged

#: On a conflict the record is read again and the event tried again at once (document 6, リトライ仕様).
CONFLICT_RETRIES: Final = 3


class StateMachine:
    """The events a table's status column knows: from which states, to which.

    One machine serves the table, not one a row; what guards a row is the compare-and-set of the
    statement that changes it. Sources are listed one by one: a wildcard would include final states.

    Parameters:
      field: The status column.
      states: All values the column has.
      events: Event -> (states it may come from, state it leads to).
    """

    def __init__(self, field: Any, states: type[Enum], events: Mapping[str, tuple[Iterable[Enum], Enum]]) -> None:
        self.field: Any = field
        self.states = states
        self._transitions = [
            {"trigger": event, "source": list(sources), "dest": target} for event, (sources, target) in events.items()
        ]
        self._machine = Machine(
            model=None, states=states, transitions=self._transitions, initial=next(iter(states)), auto_transitions=False
        )

    @property
    def events(self) -> list[str]:
        """The names of all events."""
        return list(self._machine.events)

    def sources(self, event: str) -> list[Any]:
        """The column's values from which the event is allowed."""
        return [self.states[transition.source].value for transition in self._machine.get_transitions(event)]

    def target(self, event: str) -> Any:
        """The column's value after the event."""
        targets = {self.states[str(transition.dest)].value for transition in self._machine.get_transitions(event)}
        (target,) = targets
        return target

    def name_of(self, value: Any) -> str:
        """The name of a value of the column; the value itself when it is none of ours."""
        try:
            return self.states(value).name
        except ValueError:
            return repr(value)

    def fire(self, record: Model, event: str, changes: Mapping[Any, Any], version: Field | None = None) -> None:
        """Move one record, in the database and in the object, if it is still as it was read.

        On a conflict the record is read again and the event tried again, up to three times.

        Parameters:
          changes: Further columns to set, column -> value.
          version: The table's ``lock_version`` column, for optimistic locking; the status alone decides without it.

        Raises:
          IllegalEvent: When its state does not allow the event; nothing is changed.
          RecordChanged: When it was changed by others at every try, or is gone; nothing is changed.
        """
        name = self.field.name
        for _ in range(1 + CONFLICT_RETRIES):
            state = getattr(record, name)
            if state not in self.sources(event):
                allowed = ", ".join(self.name_of(source) for source in self.sources(event))
                raise IllegalEvent(
                    f"{_known_as(record)} is {self.name_of(state)}: {event} is allowed from {allowed} only"
                )
            values = {self.field: self.target(event), **changes}
            unchanged = _same_row(record) & (self.field == state)
            if version is not None:
                unchanged &= version == getattr(record, version.name)
                values[version] = getattr(record, version.name) + 1
            with database.atomic():
                moved = type(record).update(values).where(unchanged).execute()
            if moved == 1:
                for column, value in values.items():
                    setattr(record, column.name, value)
                return
            _read_again(record)
        raise RecordChanged(f"{_known_as(record)} was changed by others each time {event} was tried")

    def diagram(self) -> str:
        """The machine as a Mermaid state diagram."""
        shown: Any = type("Shown", (), {})()
        GraphMachine(
            model=shown,
            states=self.states,
            transitions=self._transitions,
            initial=next(iter(self.states)),
            auto_transitions=False,
            graph_engine="mermaid",
        )
        text: str = shown.get_graph().draw(None)
        return text


def _known_as(record: Model) -> str:
    return f"{type(record).__name__} {record.get_id()}"


def _same_row(record: Model) -> Any:
    meta: Any = record._meta
    keys = [field == getattr(record, field.name) for field in meta.get_primary_keys()]
    return functools.reduce(operator.and_, keys)


def _read_again(record: Model) -> None:
    fresh = type(record).select().where(_same_row(record)).first()
    if fresh is None:
        raise RecordChanged(f"{_known_as(record)} is gone")
    record.__data__.update(fresh.__data__)
