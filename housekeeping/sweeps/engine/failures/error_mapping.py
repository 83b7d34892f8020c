"""Classification of the errors that end a run early."""

from __future__ import annotations

from peewee import PeeweeException, ProgrammingError

from housekeeping.core.errors import ClocksDiffer, DatabaseUnavailable, HousekeepingError
from housekeeping.core.sanitize import error_line
from housekeeping.database.errors import is_unreachable
from housekeeping.sweeps.ledger import schema


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
