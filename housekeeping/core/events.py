"""Events, which tell an application that rows were changed, so that it can send a mail or update a pipeline.

::

    from housekeeping import events

    @events.build_dropped.connect                  # after the commit, at most once
    def tell_the_author(sender, *, rows, worker, run_id): ...

    def cancel_pipelines(connection, rows, *, worker, run_id): ...
    events.on(events.build_dropped, cancel_pipelines, within_transaction=True)

    def send_mails(rows, *, worker, run_id): ...
    events.on(events.build_dropped, send_mails, outbox="mails")    # after the commit, at least once

Functions registered by `connect` are called once per committed batch, in the worker's thread, outside of any
transaction. An exception is logged and reported. If the process is killed between the commit and the call, the call is
never made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, overload

from blinker import NamedSignal, Namespace
from psycopg2.extensions import connection as Connection

from housekeeping.core.errors import DeclarationError
from housekeeping.core.logs import described, error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.telemetry import report

logger = named_logger(__name__)

#: A row of an event: its keys and values.
EventRow = dict[str, Any]

_events: Final = Namespace()

#: rows: user_id, clear_status_at
user_status_cleared: Final[NamedSignal] = _events.signal("user_status_cleared")
#: rows: bulk_import_id
import_timed_out: Final[NamedSignal] = _events.signal("import_timed_out")
#: rows: bulk_import_entity_id, bulk_import_id
entity_timed_out: Final[NamedSignal] = _events.signal("entity_timed_out")
#: rows: build_id, project_id, pipeline_id, failure_reason
build_dropped: Final[NamedSignal] = _events.signal("build_dropped")
#: rows: build_id, project_id, pipeline_id, failure_reason
build_doomed: Final[NamedSignal] = _events.signal("build_doomed")
#: rows: location, path
upload_deleted: Final[NamedSignal] = _events.signal("upload_deleted")
#: rows: id, project_id, ref
refs_deleted: Final[NamedSignal] = _events.signal("refs_deleted")


class Event:
    """Event that announces the changed rows of each batch, with the given columns.

    ::

        event=Event(events.event("shop.order_expired"), "customer_id", order_id="id")

    Parameters:
      columns: Columns that have the same name in the event.
      renamed: Name in the event -> column.
    """

    def __init__(self, signal: NamedSignal, /, *columns: str, **renamed: str) -> None:
        if not isinstance(signal, NamedSignal):
            raise DeclarationError(f"Event: {described(signal)} is no event; write events.event('shop.order_expired')")
        self.signal = signal
        self.columns: Mapping[str, str] = {**dict(zip(columns, columns, strict=True)), **renamed}

    def __repr__(self) -> str:
        return f"Event({self.signal.name!r}, {dict(self.columns)})"


class TransactionHandler(Protocol):
    """Handler that is called within the batch's transaction, with its psycopg2 connection."""

    def __call__(
        self, connection: Connection, rows: list[EventRow], /, *, worker: str, run_id: int | None
    ) -> object: ...


class OutboxHandler(Protocol):
    """Handler that is called after the commit, until it has returned once for each row."""

    def __call__(self, rows: list[EventRow], /, *, worker: str, run_id: int | None) -> object: ...


@dataclass(frozen=True, slots=True)
class Handlers:
    """Handlers of one event.

    Attributes:
      within_transaction: In the order they were registered.
      outbox: By the name of their subscription.
    """

    within_transaction: list[TransactionHandler] = field(default_factory=list)
    outbox: dict[str, OutboxHandler] = field(default_factory=dict)


_handlers: Final[dict[NamedSignal, Handlers]] = {}


def event(name: str) -> NamedSignal:
    """Return the event of this name, for sweeps of your own; the same object for the same name."""
    return _events.signal(name)


@overload
def on(event: NamedSignal, handler: TransactionHandler, *, within_transaction: Literal[True]) -> None: ...
@overload
def on(event: NamedSignal, handler: OutboxHandler, *, outbox: str) -> None: ...
def on(event: NamedSignal, handler: Any, *, within_transaction: bool = False, outbox: str | None = None) -> None:
    """Register a handler that misses no row; to be called in every process that runs workers.

    Parameters:
      within_transaction: Call it in the batch's own transaction. When it raises, the batch is rolled back and
        bisected, and the rows it raises for stay as they were and count as ``failed``. It must not commit or roll back.
      outbox: Name of the subscription. The rows are stored in the batch's transaction and delivered after the commit,
        again and again until the handler returns. Each row has a ``delivery_id``, the same in every delivery.

    Raises:
      DeclarationError: When both or neither are given, the subscription has another handler already, or the event
        cannot be handled within a transaction.
    """
    if within_transaction == (outbox is not None):
        raise DeclarationError(
            f"{event.name}: give within_transaction=True or outbox='name'; "
            f"events.{event.name}.connect(handler) calls it after the commit, at most once"
        )
    handlers = _handlers.setdefault(event, Handlers())
    if outbox is None:
        if event is upload_deleted:
            raise DeclarationError(
                "upload_deleted: the object is gone before the batch's transaction begins, so that a handler that "
                "raises cannot keep it; use outbox='name'"
            )
        if handler not in handlers.within_transaction:
            handlers.within_transaction.append(handler)
        return
    if not outbox or handlers.outbox.setdefault(outbox, handler) != handler:  # methods are equal, but not the same
        raise DeclarationError(f"{event.name}: the subscription {outbox!r} needs a name and one handler")


def off(event: NamedSignal, handler: TransactionHandler | OutboxHandler) -> None:
    """Remove a handler; rows that wait for it in the outbox stay there."""
    handlers = handlers_of(event)
    if handler in handlers.within_transaction:
        handlers.within_transaction.remove(handler)
    for name in [name for name, each in handlers.outbox.items() if each == handler]:
        del handlers.outbox[name]


def handlers_of(event: NamedSignal) -> Handlers:
    """Return the event's handlers, without its subscribers."""
    return _handlers.get(event) or Handlers()


def has_listeners(event: NamedSignal) -> bool:
    """Return whether the event has a subscriber or a handler of any kind."""
    handlers = handlers_of(event)
    return bool(event.receivers or handlers.within_transaction or handlers.outbox)


def subscriptions() -> dict[tuple[str, str], OutboxHandler]:
    """Return the outbox handlers of this process, by names of event and subscription."""
    return {(event.name, name): handler for event, known in _handlers.items() for name, handler in known.outbox.items()}


def send(event: NamedSignal, rows: Sequence[EventRow], *, worker: str, run_id: int | None) -> None:
    """Call every subscriber of the event with these rows; never raises."""
    if not rows:
        return
    for subscriber in event.receivers_for(worker):
        try:
            # Copies, so that no subscriber sees what another changes in them.
            subscriber(worker, rows=[dict(row) for row in rows], worker=worker, run_id=run_id)
        except Exception as error:
            logger.exception("An event subscriber failed", subscribed_to=event.name, error=error_line(error))
            report(error, worker=worker, run_id=run_id, subscribed_to=event.name)
