"""Every exception that this library raises on purpose.

Exceptions that a *middleware* raises to drop, fail or requeue a message are not here. Dramatiq gives meaning to their
types, see `brokers.dramatiq_internals`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping


class HousekeepingError(Exception):
    """Base class of every error raised by this library.

    Attributes:
      exit_code: Exit status of a command that ends with this error.
      concerns_all: Whether every run of a worker would fail like this, whatever its argument. Then no argument is
        deferred for it.
    """

    exit_code = 1
    concerns_all = False


class Refused(HousekeepingError):
    """The request itself is wrong; retrying it unchanged cannot help."""

    exit_code = 2
    concerns_all = True


class SettingsError(Refused):
    """A setting is missing or wrong; the text names it, its value and what it should be."""


class DeclarationError(Refused, ValueError):
    """An actor or sweep was declared with options that cannot work; the text shows the right form."""


class DependentsRefused(DeclarationError):
    """A `Delete` cannot delete the dependents of its rows as declared; nothing was changed.

    Attributes:
      problem: What is wrong.
      advice: What to write or execute; None if `problem` contains it.
      decisions: The decisions to write, by the names of links; empty without any.
    """

    def __init__(self, problem: str, advice: str | None = None, decisions: Mapping[str, str] | None = None) -> None:
        self.problem, self.advice, self.decisions = problem, advice, decisions or {}
        super().__init__(problem if self.way_out is None else f"{problem}; {self.way_out}")

    @property
    def way_out(self) -> str | None:
        """The advice with the decisions as a declaration has them."""
        return f"{self.advice}: dependents={json.dumps(self.decisions)}" if self.decisions else self.advice


class UnknownWorker(Refused):
    """No worker has the requested name."""


class WrongArgument(Refused):
    """A run was requested without the argument that its worker takes, or with one that it does not take."""


class DeadLetterRefused(Refused):
    """The requested dead letter does not exist, or cannot be read and so not be requeued."""


class UploadRefused(Refused, ValueError):
    """No pending upload can have this location, path or time; nothing was written or deleted."""


class SchemaMissing(Refused):
    """The library's own tables are missing or older than the code; ``housekeeping init`` creates them."""


class ServerUnavailable(HousekeepingError):
    """A server did not answer, so its state is unknown."""

    concerns_all = True


class DatabaseUnavailable(ServerUnavailable):
    """PostgreSQL did not answer; earlier commits stay."""


class RedisUnavailable(ServerUnavailable):
    """Redis did not answer, so the state of leases and keys is unknown."""


class RedisFull(RedisUnavailable):
    """Redis rejects writes, because its disk or its memory is full."""


class BrokerUnavailable(ServerUnavailable):
    """RabbitMQ, which carries the messages, did not answer."""


class ObjectStoreUnavailable(HousekeepingError):
    """An object store, its bucket or its folder could not be reached; none of its objects counts as deleted."""


class EmbeddedServerError(HousekeepingError):
    """An embedded server was not found or did not start; nothing is left running."""


class BreakerTripped(HousekeepingError):
    """A run found far more stale rows than its breaker allows; it stopped before the first change."""

    concerns_all = True


class ClocksDiffer(HousekeepingError):
    """This machine's clock is over a minute from the database's or Redis's; the run stopped before the first change."""

    concerns_all = True


class LeaseHeld(HousekeepingError):
    """The lease has another holder."""


class LeaseLost(HousekeepingError):
    """The caller held the lease and lost it; its next holder may have started."""


class RunTakenOver(HousekeepingError):
    """Another run considered this one dead and continues it; the current batch is rolled back."""


class UnknownSubject(Refused):
    """Nothing of this kind can be erased, or there is no row with this key and none was erased."""


class ErasureInterrupted(HousekeepingError):
    """An erasure has not ended and is continued later.

    Attributes:
      after_s: Seconds until it can go on.
    """

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s


class ObjectNotDeleted(HousekeepingError):
    """A store refused to delete one object, which may still exist."""


class UploadBeingDeleted(HousekeepingError):
    """The earlier, stale upload of this path is being deleted; nothing was prepared."""


class IllegalEvent(HousekeepingError):
    """A record's state does not allow the event; nothing was changed."""


class RowNotChanged(HousekeepingError):
    """PostgreSQL left a row unchanged, or with other values than were written, without an error; only it fails."""


class ArchiveMismatch(HousekeepingError):
    """An archive is missing, lacks a column, would change values or did not take all rows; the batch was undone."""

    concerns_all = True


class TooManyRowsFailed(HousekeepingError):
    """Row after row failed; their stage ended, and the next run continues behind them."""


class Unconfirmed(HousekeepingError):
    """An effect outside was not confirmed for every row of a batch; its transaction is rolled back and repeated."""


class RecordChanged(HousekeepingError):
    """Others changed the record at every try of the event, or deleted it; the event changed nothing."""


class HandlerFailed(HousekeepingError):
    """An event handler raised within the batch's transaction, which is rolled back."""


class TransactionEnded(HousekeepingError):
    """An event handler tried to commit or roll back the batch's transaction, or did so; the run fails."""
