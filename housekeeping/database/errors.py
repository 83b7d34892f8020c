"""What an error says: its kind by PostgreSQL's code, its cause, and whether the database does not answer.

A cause is the error's text without the parts specific to a record, so that equal errors can be grouped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final

from peewee import DataError, IntegrityError, InternalError, NotSupportedError, PeeweeException, ProgrammingError

from housekeeping.core.errors import DatabaseUnavailable
from housekeeping.core.logs import error_line, in_one_line, shortened


class Kind(Enum):
    """What an error of the database is about.

    After those up to TIMEOUT, the same statement may succeed elsewhere or later, whatever its rows. STATEMENT is an
    error in a statement's text or rights, which may be that of a row's trigger. ROW is any other error that leaves the
    connection usable.
    """

    LOST = auto()
    READ_ONLY = auto()
    RESOURCES = auto()
    CONFLICT = auto()
    TIMEOUT = auto()
    STATEMENT = auto()
    ROW = auto()


#: Kinds by SQLSTATE or the beginning of one. All others are ROW.
_KINDS: Final = {
    "08": Kind.LOST,
    "57P": Kind.LOST,  # shutdown
    "25": Kind.READ_ONLY,  # after a failover, for example
    "53": Kind.RESOURCES,  # disk, memory, connections
    "40": Kind.CONFLICT,  # serialization failure, deadlock
    "57014": Kind.TIMEOUT,  # statement_timeout, or a person who cancels
    "55P03": Kind.TIMEOUT,  # lock_timeout
    "0A": Kind.STATEMENT,  # not supported, such as a batch of a table with a rule
    "42": Kind.STATEMENT,
    "3D": Kind.STATEMENT,
    "3F": Kind.STATEMENT,
}
_LOCK_TIMEOUT: Final = "55P03"
_DISK_FULL: Final = "53100"
#: SQLSTATE of a missing right.
NO_RIGHT: Final = "42501"
_MISSING: Final = "housekeeping doctor names missing rights, tables and columns"
#: SQLSTATE -> the command that shows the cause of the error.
_WAYS_OUT: Final = {
    **dict.fromkeys((NO_RIGHT, "42P01", "42703", "3F000"), _MISSING),
    "57014": "housekeeping doctor --database shows what slows the database, housekeeping doctor names missing indexes",
    _LOCK_TIMEOUT: "housekeeping doctor --database shows which session holds the lock",
}


def kind_of(error: PeeweeException) -> Kind:
    """Return the kind of a database error."""
    code = sqlstate(error)
    if code is not None:
        kind = next((kind for begin, kind in _KINDS.items() if code.startswith(begin)), Kind.ROW)
        # A trigger can raise the code of a lost connection. The connection that delivers the error is not lost.
        return Kind.RESOURCES if kind is Kind.LOST and is_raised(error) else kind
    # The driver, peewee or the library raised it.
    if isinstance(error, DataError | IntegrityError | InternalError):
        return Kind.ROW
    return Kind.STATEMENT if isinstance(error, ProgrammingError | NotSupportedError) else Kind.LOST


def sqlstate(error: BaseException) -> str | None:
    """Return PostgreSQL's five-character code of the error; None if it did not come from the server."""
    code: str | None = getattr(getattr(error, "orig", None), "pgcode", None)
    return code


def with_way_out(error: BaseException) -> str:
    """Return the error in one line, with the command that shows its cause if there is one."""
    code = sqlstate(error)
    return error_line(error) + (f"; {_WAYS_OUT[code]}" if code in _WAYS_OUT and not is_raised(error) else "")


def is_raised(error: BaseException) -> bool:
    """Return whether a RAISE of PL/pgSQL is the origin of the error, so that its code says nothing about the server."""
    return getattr(getattr(getattr(error, "orig", None), "diag", None), "source_function", None) == "exec_stmt_raise"


def is_of_statement_alone(error: BaseException) -> bool:
    """Return whether a statement lacks a right, a table or a column itself: no function or trigger was running."""
    if not isinstance(error, PeeweeException) or kind_of(error) is not Kind.STATEMENT:
        return False
    return getattr(getattr(getattr(error, "orig", None), "diag", None), "context", None) is None


def is_timeout(error: BaseException) -> bool:
    """Return whether PostgreSQL ended a statement because it ran, or waited for a lock, too long."""
    return isinstance(error, PeeweeException) and kind_of(error) is Kind.TIMEOUT


def is_lock_timeout(error: BaseException) -> bool:
    """Return whether PostgreSQL ended a statement because it waited for a lock too long."""
    return sqlstate(error) == _LOCK_TIMEOUT


def is_disk_full(error: BaseException) -> bool:
    """Return whether the disk of the database, or of a tablespace, is full."""
    return sqlstate(error) == _DISK_FULL


def is_conflict(error: BaseException) -> bool:
    """Return whether the same transaction may succeed at once: it met another one."""
    return isinstance(error, PeeweeException) and kind_of(error) is Kind.CONFLICT


def is_connection_lost(error: BaseException) -> bool:
    """Return whether the driver has lost its connection, or had none."""
    return isinstance(error, PeeweeException) and kind_of(error) is Kind.LOST


def is_unreachable(error: BaseException) -> bool:
    """Return whether the database may be unreachable, so that nothing can be recorded there."""
    recordable = (Kind.ROW, Kind.STATEMENT, Kind.READ_ONLY)
    return isinstance(error, PeeweeException) and kind_of(error) not in recordable


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


#: What Python writes between the traceback of a cause and that of the error raised from it.
DIRECT_CAUSE: Final = "\n\nThe above exception was the direct cause of the following exception:"
_BEFORE: Final = "\n\nDuring handling of the above exception, another exception occurred:"
_LONGEST_CAUSE: Final = 300  # characters
_LOOKED_AT: Final = 2000  # characters of an error's text
_SHORTEST_VALUE: Final = 4  # characters; a shorter value may be part of any word
#: What differs from record to record: quoted values (the last quote may be cut off), paths, words that hold a digit.
#: The name that PostgreSQL quotes after its kind is not specific to a record, unless it has a digit, as a partition's.
_OF_ONE_RECORD: Final = re.compile(
    r"""
    (?P<name> \b(?:relation|table|column|schema|sequence|view|type|role)\ "[^"\d]*" )
    | (?<!\w)'(?:[^'\\]|\\.)*(?:'(?!\w)|$) | "(?:[^"\\]|\\.)*(?:"|$) | `[^`]*(?:`|$) | \S*/\S* | \w*\d\w*
    """,
    re.VERBOSE,
)


def cause_of(error: BaseException, record: Mapping[str, Any]) -> str:
    """Return the error's type and text without the parts that are specific to the record."""
    error = innermost(error)
    kind = type(error).__name__
    if isinstance(error, PeeweeException) and (code := sqlstate(error)):
        kind = f"{kind} {code}"
        broken = _broken_rule(error)
        if broken is not None:
            return in_one_line(f"{kind}: {broken}", _LONGEST_CAUSE)
    text = shortened(error_line(error), _LOOKED_AT)
    for value in record.values():
        if isinstance(value, str) and len(value) >= _SHORTEST_VALUE:
            text = text.replace(value, "...")
    return without_values(text, f"{kind}: ")


def innermost(error: BaseException) -> BaseException:
    """Return the error that an error was raised from, through all of them; an error of the database stays itself."""
    seen = {id(error)}
    while error.__cause__ is not None and not isinstance(error, PeeweeException) and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def error_in(traceback: str) -> str:
    """Return the line with the error in a traceback, that of the innermost cause; empty without one."""
    text = traceback.partition(DIRECT_CAUSE)[0].rpartition(_BEFORE)[2].strip()
    # Not simply the last line: an error's text may have several lines, and the first says most.
    _, frame, rest = text.rpartition('\n  File "')
    lines = rest.splitlines()
    after = lines[1:] if frame else lines
    return next((line for line in after if not line.startswith(" ")), lines[-1] if lines else "")


def without_values(line: str, kind: str = "") -> str:
    """Return an error's line without the parts that are specific to a record.

    Parameters:
      kind: Text before the line, which stays as it is.
    """
    return in_one_line(kind + _OF_ONE_RECORD.sub(_kept_name, shortened(line, _LOOKED_AT)), _LONGEST_CAUSE)


def _kept_name(found: re.Match[str]) -> str:
    return found["name"] or "..."


def _broken_rule(error: PeeweeException) -> str | None:
    """Return the constraint or column that PostgreSQL names for the error; None when it names neither."""
    named = getattr(getattr(error, "orig", None), "diag", None)
    if constraint := getattr(named, "constraint_name", None):
        return f"constraint {constraint}"
    if column := getattr(named, "column_name", None):
        return f"column {column}"
    return None
