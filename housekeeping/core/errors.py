"""Every exception this library raises on purpose.

::

    HousekeepingError            exit status 1
    ├── Refused                  exit status 2: asked for something that cannot be
    │   ├── SettingsError        a setting is missing or wrong
    │   ├── DeclarationError     an actor or sweep was declared with options that cannot work
    │   ├── UnknownWorker        no worker has this name
    │   ├── UploadRefused        a location, path or time that no pending upload can have
    │   ├── WrongArgument        a run was asked for with an argument its worker does not take
    │   ├── PlanRefused          a run was confirmed by a plan id that is wrong, old, or another worker's
    │   ├── DeadLetterRefused    a dead letter was asked for that is not there, or cannot be read
    │   └── SchemaMissing        the library's own tables are not there (or too old)
    ├── DatabaseUnavailable      PostgreSQL did not answer
    ├── RedisUnavailable         Redis did not answer, so nothing is known about the lease or key
    ├── BrokerUnavailable        RabbitMQ did not answer
    ├── ObjectStoreUnavailable   an object store, its bucket or its folder was not to be reached
    ├── EmbeddedServerError      a server from a wheel did not start
    ├── BreakerTripped           a run would have touched far more records than runs before it
    ├── ClocksDiffer             this machine's clock is over a minute from the database's
    ├── LeaseHeld                somebody else holds the lease
    ├── LeaseLost                the lease was ours and is no longer
    ├── ObjectNotDeleted         a store refused to delete one object
    ├── UploadBeingDeleted       the object an upload would write to is just being deleted
    ├── IllegalEvent             a record's state does not allow the event
    ├── RecordChanged            a record was changed or deleted by others while it was to be moved
    ├── RowNotChanged            a row was left as it was by a trigger, a rule or a policy
    ├── SameErrorRepeated        so many rows in a row failed with the same error that their stage ended
    ├── HandlerFailed            a handler of an event raised within the batch's transaction
    ├── TransactionEnded         a handler of an event tried to end the batch's transaction, or did
    └── RunTakenOver             another run took this one for dead and goes on in its place

What a *middleware* raises to steer a message is not in this tree: Dramatiq gives
meaning to the type (``SkipMessage`` drops the message, any other
``MiddlewareError`` fails it), so those live beside the middleware that raises them.
"""

from __future__ import annotations


class HousekeepingError(Exception):
    """Base class of every error raised by this library.

    Attributes:
      exit_code: What the command line exits with when this error ends it.
    """

    exit_code = 1


class Refused(HousekeepingError):
    """The request itself is wrong; trying again unchanged cannot help."""

    exit_code = 2


class SettingsError(Refused):
    """A setting is missing or wrong; the text names it, its value and what it should be."""


class DeclarationError(Refused, ValueError):
    """An actor or sweep was declared with options that cannot work; the text shows the right form."""


class UnknownWorker(Refused):
    """No worker has the name that was asked for."""


class WrongArgument(Refused):
    """A run was asked for without the argument its worker takes, or with one it does not take."""


class PlanRefused(Refused):
    """A run was confirmed by a plan id that is wrong, old, or of another worker or argument; nothing was begun."""


class DeadLetterRefused(Refused):
    """A dead letter was asked for that is not there, or one to be sent again that cannot be read."""


class UploadRefused(Refused, ValueError):
    """A location, path or time that no pending upload can have; nothing was written or deleted."""


class SchemaMissing(Refused):
    """The library's own tables are missing or older than the code; ``housekeeping init`` makes them."""


class DatabaseUnavailable(HousekeepingError):
    """PostgreSQL did not answer; what was committed before stays committed."""


class RedisUnavailable(HousekeepingError):
    """Redis did not answer, so nothing is known about the lease or key in question."""


class BrokerUnavailable(HousekeepingError):
    """RabbitMQ, which carries the messages, did not answer."""


class ObjectStoreUnavailable(HousekeepingError):
    """An object store, its bucket or its folder was not to be reached; nothing of it is taken for deleted."""


class EmbeddedServerError(HousekeepingError):
    """An embedded server could not be found or did not start; nothing is left running."""


class BreakerTripped(HousekeepingError):
    """A run found far more stale rows than its breaker allows, and is set to stop then, before the first change."""


class ClocksDiffer(HousekeepingError):
    """This machine's clock is over a minute from the database's; the run stopped before the first change."""


class LeaseHeld(HousekeepingError):
    """Somebody else holds the lease."""


class LeaseLost(HousekeepingError):
    """The lease was ours and is no longer; whoever holds it now may be at work."""


class RunTakenOver(HousekeepingError):
    """Another run took this one for dead and goes on in its place; the batch in hand is rolled back."""


class ObjectNotDeleted(HousekeepingError):
    """A store refused to delete one object, which is still there, or may be."""


class UploadBeingDeleted(HousekeepingError):
    """The path's earlier, stale upload is just being deleted; nothing was prepared."""


class IllegalEvent(HousekeepingError):
    """A record's state does not allow the event; nothing was changed."""


class RowNotChanged(HousekeepingError):
    """PostgreSQL left a row as it was, without an error; the others of its batch were changed."""


class SameErrorRepeated(HousekeepingError):
    """Too many rows in a row failed with the same error; their stage ended, and the next run continues behind them."""


class RecordChanged(HousekeepingError):
    """A record was changed by others each time it was to be moved, or is gone; nothing was changed."""


class HandlerFailed(HousekeepingError):
    """A handler of an event raised within the batch's transaction, which is rolled back."""


class TransactionEnded(HousekeepingError):
    """A handler of an event tried to commit or roll back the batch's transaction, or did so; the run fails."""
