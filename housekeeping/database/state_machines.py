"""Status columns as state machines: one a table, for single records and for whole sets of rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final

from peewee import Field, Model
from transitions import Machine

from housekeeping.core.errors import DeclarationError, IllegalEvent, RecordChanged
from housekeeping.database.connection import database

#: On a conflict the record is read again and the event tried again at once (document 6, リトライ仕様).
CONFLICT_RETRIES: Final = 3


class StateMachine:
    """The events a table's status column knows: from which states, to which.

    One machine serves the table, not one a row; what guards a row is the compare-and-set of the
    statement that changes it. Sources are listed one by one: a wildcard would include final states.

    Parameters:
      field: The status column.
      states: All values the column has; the first is the one a record begins in.
      events: Event -> (states it may come from, state it leads to).
      final: States that are an end. An event that may leave one does so only for a caller who has seen the record
        there: a record that got there while the event was on its way stays.

    Raises:
      DeclarationError: When an event is allowed from nowhere, or names a state of another column.
    """

    def __init__(
        self,
        field: Any,
        states: type[Enum],
        events: Mapping[str, tuple[Iterable[Enum], Enum]],
        final: Iterable[Enum] = (),
    ) -> None:
        self.field: Any = field
        self.states = states
        self._final = [state.value for state in final]
        transitions = []
        for event, (sources, target) in events.items():
            named = [*sources, target]
            if len(named) < 2 or any(not isinstance(state, states) for state in named):
                raise DeclarationError(f"{event} should come from, and lead to, states of {states.__name__}: {named!r}")
            transitions.append({"trigger": event, "source": named[:-1], "dest": target})
        self._machine = Machine(
            model=None, states=states, transitions=transitions, initial=next(iter(states)), auto_transitions=False
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

    def state_name(self, value: Any) -> str:
        """The name of a value of the column, as the documents write it; the value itself when it is none of ours."""
        try:
            return self.states(value).name.lower()
        except ValueError:
            return repr(value)

    def fire(
        self,
        record: Model,
        event: str,
        changes: Mapping[Any, Any],
        version: Field | None = None,
        within_transaction: Callable[[], object] | None = None,
    ) -> None:
        """Move one record, in the database and in the object, if it is still as it was read.

        On a conflict the record is read again and the event tried again, up to three times.

        Parameters:
          changes: Further columns to set, column -> value; `statement_time(column)` is the time of the change.
          version: The table's ``lock_version`` column, for optimistic locking; the status alone decides without it.
          within_transaction: What changes with the record, in the same transaction; when it raises, nothing is changed.

        Raises:
          IllegalEvent: When its state does not allow the event; nothing is changed.
          RecordChanged: When it was changed by others at every try, has reached a final state meanwhile, or is gone;
            nothing is changed, and the object is as the database has it.
        """
        name = self.field.name
        for _ in range(1 + CONFLICT_RETRIES):
            state = getattr(record, name)
            if state not in self.sources(event):
                allowed = ", ".join(self.state_name(source) for source in self.sources(event))
                raise IllegalEvent(
                    f"{_known_as(record)} is {self.state_name(state)}: {event} is allowed from {allowed} only"
                )
            values = {self.field: self.target(event), **changes}
            unchanged = _same_row(record) & (self.field == state)
            if version is not None:
                unchanged &= version == getattr(record, version.name)
                values[version] = (getattr(record, version.name) or 0) + 1
            update: Any = type(record).update(values).where(unchanged).returning(*values)
            with database.atomic():
                written = next(iter(update.tuples().execute()), None)
                if written is not None and within_transaction is not None:
                    within_transaction()
            if written is not None:
                for column, value in zip(values, written, strict=True):
                    # Not by setattr: with `only_save_dirty`, a later save() must not write again what is saved.
                    record.__data__[column.name] = value
                return
            _read_again(record)
            now = getattr(record, name)
            if now != state and now in self._final and now in self.sources(event):
                raise RecordChanged(
                    f"{_known_as(record)} has become {self.state_name(now)} while {event} was on its way"
                )
        raise RecordChanged(f"{_known_as(record)} was changed by others each time {event} was tried")

    def diagram(self) -> str:
        """The machine as a Mermaid state diagram; events that join the same two states share a line."""
        lines: dict[tuple[str, str], list[str]] = {}
        for event in self.events:
            for source in self.sources(event):
                lines.setdefault((self.state_name(source), self.state_name(self.target(event))), []).append(event)
        arrows = [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in lines.items()]
        first = next(iter(self.states))
        return "\n".join(["stateDiagram-v2", f"    [*] --> {self.state_name(first.value)}", *arrows])


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
