"""Delivery of a batch's events: within its transaction, through the outbox and after its commit."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from peewee import PeeweeException, __exception_wrapper__  # type: ignore[attr-defined]
from psycopg2.extensions import TRANSACTION_STATUS_INERROR, TRANSACTION_STATUS_UNKNOWN

from housekeeping.core import events
from housekeeping.core.errors import HandlerFailed, HousekeepingError, TransactionEnded
from housekeeping.core.sanitize import error_line, typed_error_line
from housekeeping.core.telemetry.error_reporting import report
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import database, sqlstate
from housekeeping.database.errors import caused_by
from housekeeping.sweeps.ledger import outbox
from housekeeping.sweeps.ledger.outbox import Stored
from housekeeping.sweeps.stages.bisection import is_row_error, is_timeout
from housekeeping.sweeps.stages.stage import Announcement, Announcing, BatchResult, Stage
from housekeeping.sweeps.stages.table_stage import TableStage

logger = named_logger(__name__)

#: Errors of a handler that cannot reach its service. They end the run, because no row is at fault.
UNREACHABLE: Final = (ConnectionError, socket.gaierror)
_SAVEPOINT: Final = "housekeeping_handler"
#: SQLSTATEs of a savepoint that is gone: no transaction is open, or a new one.
_ENDED: Final = ("25P01", "3B001")


@dataclass
class Announcer:
    """Event delivery of one run."""

    worker: str
    run_id: int
    _announcements: Sequence[Announcement] = ()
    _stored: list[Stored] = field(default_factory=list)
    _failing: set[tuple[str, str]] = field(default_factory=set)

    @staticmethod
    def needs_transaction(stage: TableStage) -> bool:
        """Return whether the stage's event has handlers in the transaction, or an outbox."""
        if stage.event is None:
            return False
        handlers = events.handlers_of(stage.event[0])
        return bool(handlers.within_transaction or handlers.outbox)

    def collect(self, stage: Stage, result: BatchResult) -> None:
        """Keep the batch's events for `after_commit`; they replace those of an attempt that was rolled back."""
        found = stage.announcements(result) if isinstance(stage, Announcing) else ()
        self._announcements, self._stored = [each for each in found if each.rows], []

    def announce(self, stage: Stage, result: BatchResult) -> None:
        """Call the handlers within the batch's transaction, and store rows in the outbox.

        Raises:
          HandlerFailed: A handler fails, possibly because of a row.
          TransactionEnded: A handler ends the transaction, or tries to.
          Exception: Any other error of a handler, such as a lost connection. No row is at fault.
        """
        self.collect(stage, result)
        for each in self._announcements:
            for handler in events.handlers_of(each.event).within_transaction:
                self._call(handler, each)
            if not each.in_outbox:
                self._stored += outbox.store(each.event, each.rows, worker=self.worker, run_id=self.run_id)

    def after_commit(self) -> None:
        """Send the committed batch's events and deliver its outbox rows. Failed deliveries do not raise."""
        announcements, stored = self._announcements, self._stored
        self._announcements, self._stored = (), []
        for each in announcements:
            events.send(each.event, each.rows, worker=self.worker, run_id=self.run_id)
        handlers = events.subscriptions()
        for key in dict.fromkeys((row.event, row.subscription) for row in stored):
            # After a failure the run leaves this subscription to the outbox sweep, so that it cannot slow every batch.
            if key in handlers and key not in self._failing:
                self._deliver(handlers[key], [row for row in stored if (row.event, row.subscription) == key])

    def _deliver(self, handler: events.OutboxHandler, rows: Sequence[Stored]) -> None:
        first = rows[0]
        about = {"subscribed_to": first.event, "subscription": first.subscription}
        try:
            outbox.deliver(handler, rows)
        except Exception as error:
            self._failing.add((first.event, first.subscription))
            logger.exception("Delivery failed, the outbox retries it", **about, error=error_line(error))
            report(error, worker=self.worker, run_id=self.run_id, **about)
            return
        try:
            with database.atomic():
                outbox.remove(rows)
        except PeeweeException as error:
            logger.warning(
                "Could not remove delivered rows from the outbox, they are delivered again",
                **about,
                error=error_line(error),
            )

    def _call(self, handler: events.TransactionHandler, each: Announcement) -> None:
        connection = database.connection()
        name = f"{getattr(handler, '__module__', '')}.{getattr(handler, '__qualname__', repr(handler))}"
        with _detect_ended_transaction(connection, name):
            try:
                # Translates psycopg2's errors to peewee's.
                with connection.lent(), __exception_wrapper__:
                    handler(connection, [dict(row) for row in each.rows], worker=self.worker, run_id=self.run_id)
            except HousekeepingError:
                raise
            except Exception as error:
                no_row_at_fault = is_timeout(error) or not is_row_error(error)
                if (isinstance(error, PeeweeException) and no_row_at_fault) or caused_by(error, UNREACHABLE):
                    raise
                raise HandlerFailed(f"{name} failed for {each.event.name}: {typed_error_line(error)}") from error
            if connection.info.transaction_status == TRANSACTION_STATUS_INERROR:
                raise HandlerFailed(f"{name} left the transaction of {each.event.name} aborted by an error")


@contextmanager
def _detect_ended_transaction(connection: Any, handler: str) -> Iterator[None]:
    """Raise TransactionEnded if the handler ends the transaction: a savepoint set before it is then gone."""
    database.execute_sql(f"SAVEPOINT {_SAVEPOINT}")
    try:
        yield
    except Exception as error:
        if connection.info.transaction_status != TRANSACTION_STATUS_UNKNOWN:
            _refer_to_savepoint("ROLLBACK TO", handler, error)
        raise
    _refer_to_savepoint("RELEASE", handler, None)


def _refer_to_savepoint(verb: str, handler: str, error: Exception | None) -> None:
    try:
        database.execute_sql(f"{verb} SAVEPOINT {_SAVEPOINT}")
    except PeeweeException as gone:
        if sqlstate(gone) not in _ENDED:
            if error is not None:
                return  # the caller raises the handler's error
            raise
        raise TransactionEnded(
            f"{handler} ended the batch's transaction by a statement; its changes may be committed "
            "without being counted. Remove the COMMIT or ROLLBACK from it"
        ) from error
