"""State machines of status columns, for single records and for sets of rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final

from peewee import Field, Model
from transitions import Machine

from housekeeping.core.errors import DeclarationError, IllegalEvent, RecordChanged, RowNotChanged
from housekeeping.database.queries import UNDONE, has_written_values

#: After a conflict the record is read again and the event retried at once (document 6, リトライ仕様).
CONFLICT_RETRIES: Final = 3


class StateMachine:
    """Events of a table's status column, each with its allowed source states and its target.

    One machine serves the whole table. A single row is protected by the compare-and-set of the statement that changes
    it. Sources are listed one by one, because a wildcard would include final states.

    Parameters:
      field: The status column.
      states: All values of the column; the first is the initial one.
      events: Event -> (source states, target state).
      final: Final states. An event that is allowed from one of them changes a record only if the caller has read the
        record in that state. If another session moves it there meanwhile, nothing changes.

    Raises:
      DeclarationError: If an event has no source, or a state that is not one of `states`.
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
                raise DeclarationError(
                    f"{event}: its sources and its target should be states of {states.__name__}, not {named!r}"
                )
            transitions.append({"trigger": event, "source": named[:-1], "dest": target})
        self._machine = Machine(
            model=None, states=states, transitions=transitions, initial=next(iter(states)), auto_transitions=False
        )

    @property
    def events(self) -> list[str]:
        """Names of all events."""
        return list(self._machine.events)

    def sources(self, event: str) -> list[Any]:
        """Return the column values from which the event is allowed."""
        return [self.states[transition.source].value for transition in self._machine.get_transitions(event)]

    def target(self, event: str) -> Any:
        """Return the column value after the event."""
        targets = {self.states[str(transition.dest)].value for transition in self._machine.get_transitions(event)}
        (target,) = targets
        return target

    def state_name(self, value: Any) -> str:
        """Return the name of a column value, as the documents write it; an unknown value as it is."""
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
        """Apply an event to one record, in the database and in the object, if it is unchanged since it was read.

        After a conflict the record is read again and the event retried, up to three times.

        Parameters:
          changes: Further columns to set, column -> value; `statement_time(column)` is the time of the change.
          version: The table's ``lock_version`` column for optimistic locking; without it only the status is compared.
          within_transaction: Called in the same transaction; if it raises, nothing is changed.

        Raises:
          IllegalEvent: If the record's state does not allow the event; nothing is changed.
          RecordChanged: If others changed the record at every try, moved it to a final state, or deleted it; nothing
            is changed, and the object has the values of the database.
          RowNotChanged: If the row has other values than were written, because of a trigger; nothing is changed.
        """
        name = self.field.name
        for _ in range(1 + CONFLICT_RETRIES):
            state = getattr(record, name)
            if state not in self.sources(event):
                allowed = ", ".join(self.state_name(source) for source in self.sources(event))
                raise IllegalEvent(
                    f"{_name_of(record)} is {self.state_name(state)}: {event} is allowed from {allowed} only"
                )
            values = {self.field: self.target(event), **changes}
            unchanged = _same_row(record) & (self.field == state)
            if version is not None:
                unchanged &= version == getattr(record, version.name)
                values[version] = (getattr(record, version.name) or 0) + 1
            update: Any = type(record).update(values).where(unchanged)
            update = update.returning(*values, has_written_values(update))
            with type(record)._meta.database.atomic():
                *written, as_written = next(iter(update.tuples().execute()), (None,))
                if as_written is False:
                    raise RowNotChanged(f"{_name_of(record)}, {event}: {UNDONE}")
                if written and within_transaction is not None:
                    within_transaction()
            if written:
                for column, value in zip(values, written, strict=True):
                    # Not by setattr, so that with `only_save_dirty` a later save() does not write it again.
                    record.__data__[column.name] = value
                return
            _reload(record)
            now = getattr(record, name)
            if now != state and now in self._final and now in self.sources(event):
                raise RecordChanged(f"{_name_of(record)} became {self.state_name(now)} during {event}")
        raise RecordChanged(f"{_name_of(record)} was changed by others at every try of {event}")

    def diagram(self) -> str:
        """Return a Mermaid state diagram; events between the same two states share a line."""
        lines: dict[tuple[str, str], list[str]] = {}
        for event in self.events:
            for source in self.sources(event):
                lines.setdefault((self.state_name(source), self.state_name(self.target(event))), []).append(event)
        arrows = [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in lines.items()]
        first = next(iter(self.states))
        return "\n".join(["stateDiagram-v2", f"    [*] --> {self.state_name(first.value)}", *arrows])


def _name_of(record: Model) -> str:
    return f"{type(record).__name__} {record.get_id()}"


def _same_row(record: Model) -> Any:
    meta: Any = record._meta
    keys = [field == getattr(record, field.name) for field in meta.get_primary_keys()]
    return functools.reduce(operator.and_, keys)


def _reload(record: Model) -> None:
    fresh = type(record).select().where(_same_row(record)).first()
    if fresh is None:
        raise RecordChanged(f"{_name_of(record)} was deleted")
    record.__data__.update(fresh.__data__)
