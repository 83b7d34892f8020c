"""Classification of the errors that end a run early."""

from __future__ import annotations

from peewee import InterfaceError, OperationalError, PeeweeException, ProgrammingError

from housekeeping.core.errors import ClocksDiffer, DatabaseUnavailable, HousekeepingError
from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import is_connection_lost
from housekeeping.sweeps.ledger import schema


def is_unreachable(error: BaseException) -> bool:
    """Return whether the database may be unreachable, so that nothing can be recorded there."""
    return isinstance(error, OperationalError | InterfaceError)


def is_unavailable(error: BaseException) -> bool:
    """Return whether the database does not answer; False for a rejected or slow statement."""
    return isinstance(error, DatabaseUnavailable) or is_connection_lost(error)


def reason_of(error: BaseException) -> str:
    """Return the error as one line for the ledger and the logs, after ``database:`` if it comes from there."""
    if isinstance(error, ClocksDiffer):
        return "clock"
    place = "database: " if isinstance(error, PeeweeException) else ""
    return f"{place}{error_line(error)}"


def classify_error(error: Exception) -> Exception:
    """Return the library's error for a database that is unreachable or lacks the schema, else the error itself."""
    if is_unreachable(error):
        return DatabaseUnavailable(reason_of(error))
    if isinstance(error, ProgrammingError):
        try:
            schema.require()
        except HousekeepingError as missing:
            return missing
    return error


def caused_by(error: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    """Return whether the error, or one that led to it, is of one of these types."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    # An error that is raised more than once may be its own cause.
    while cause is not None and not any(cause is each for each in seen):
        if isinstance(cause, kinds):
            return True
        seen.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
