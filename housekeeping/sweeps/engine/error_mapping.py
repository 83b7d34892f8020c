"""What broke a run off, in our own words where we know better than the driver."""

from __future__ import annotations

from typing import Final

from peewee import InterfaceError, OperationalError, PeeweeException, ProgrammingError

from housekeeping.core.errors import ClocksDiffer, DatabaseUnavailable, HousekeepingError
from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import sqlstate
from housekeeping.sweeps.ledger import schema

#: SQLSTATE classes of a server that goes away or is not there.
_AWAY: Final = ("08", "57P")


def is_unreachable(error: BaseException) -> bool:
    """Whether it came from a database that did not answer, so that nothing can be recorded there."""
    return isinstance(error, OperationalError | InterfaceError)


def is_unavailable(error: BaseException) -> bool:
    """Whether the database does not answer; not a statement that it refused or that took too long."""
    if isinstance(error, DatabaseUnavailable):
        return True
    state = sqlstate(error)
    return is_unreachable(error) and (state is None or state.startswith(_AWAY))


def reason_of(error: BaseException) -> str:
    """The error as the ledger and the logs have it: one line, and where it came from."""
    if isinstance(error, ClocksDiffer):
        return "clock"
    place = "database: " if isinstance(error, PeeweeException) else ""
    return f"{place}{error_line(error)}"


def classify_error(error: Exception) -> Exception:
    """The error as one of ours where the driver's says less: the database is away, or not made."""
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
    # An error object that is raised more than once may have led to itself.
    while cause is not None and not any(cause is each for each in seen):
        if isinstance(cause, kinds):
            return True
        seen.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
