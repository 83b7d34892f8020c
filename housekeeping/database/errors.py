"""What an error says: PostgreSQL's code, what caused it, and whether the database does not answer."""

from __future__ import annotations

from peewee import InterfaceError, OperationalError

from housekeeping.core.errors import DatabaseUnavailable


def is_connection_lost(error: BaseException) -> bool:
    """Return whether the driver has lost its connection, or had none."""
    code = sqlstate(error)
    return isinstance(error, OperationalError | InterfaceError) and (code is None or code.startswith(("08", "57P")))


def sqlstate(error: BaseException) -> str | None:
    """Return PostgreSQL's five-character code of the error; None if it did not come from the server."""
    code: str | None = getattr(getattr(error, "orig", None), "pgcode", None)
    return code


def is_unreachable(error: BaseException) -> bool:
    """Return whether the database may be unreachable, so that nothing can be recorded there."""
    return isinstance(error, OperationalError | InterfaceError)


def is_unavailable(error: BaseException) -> bool:
    """Return whether the database does not answer; False for a rejected or slow statement."""
    return isinstance(error, DatabaseUnavailable) or is_connection_lost(error)


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
