"""Log of operators' actions: who changed what, when, and with which result."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from housekeeping.core.sanitize import error_line, in_one_line
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.time_limit import time_limit
from housekeeping.sweeps.ledger.models import NOW, Action

logger = named_logger(__name__)

ActionName = Literal[
    "pause",
    "narrow",
    "resume",
    "run",
    "confirm",
    "purge",
    "restore",
    "acknowledge",
    "release_lease",
    "release_key",
    "requeue",
    "delete",
]

_MAX_TEXT: Final = 500  # characters of a user, a target or a result
#: An action must not wait for its log.
_TIME: Final = timedelta(seconds=1)


@dataclass(slots=True)
class Outcome:
    """Result of an action, set by the block that carries it out.

    Attributes:
      result: One line for operators.
    """

    result: str = "done"


@dataclass(frozen=True, slots=True)
class LoggedAction:
    """One entry of the log.

    Attributes:
      user: The operator: ``user@machine`` on the command line; on the dashboard the user of the proxy's header, or
        ``dashboard``.
      target: The worker, lease, key, message or alert.
      result: What it did; None if the action has not ended, or its process was killed.
    """

    action_id: int
    at: datetime
    user: str
    action: str
    target: str
    result: str | None

    @property
    def result_in_words(self) -> str:
        """The result, or that there is none."""
        return self.result or "not ended, or its process was killed"

    def as_json(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        shown = {"id": self.action_id, "at": self.at.isoformat(), "user": self.user, "action": self.action}
        return {**shown, "target": self.target, "result": self.result}


@contextmanager
def record_action(action: ActionName, target: str, user: str) -> Iterator[Outcome]:
    """Record the action that the block carries out, with its result, in the table `actions`.

    The row is written before the block and gets its result after it, so that it also shows an action whose process was
    killed. An error of the block becomes the result, and is raised again. The row is in the database ``main``. If that
    database does not answer, the action is carried out, and a log line has it instead.

    Parameters:
      target: What is changed: a worker, lease, key, message or alert.
      user: The operator: `command_line_user`, or the user of the dashboard.
    """
    row = {name: in_one_line(text, _MAX_TEXT) for name, text in (("user_name", user), ("target", target))}
    outcome = Outcome()
    row_id, problem = _in_main(lambda: Action.insert(action=action, at=NOW, **row).execute())
    try:
        yield outcome
    except Exception as error:
        outcome.result = f"failed: {error_line(error)}"
        raise
    except BaseException:
        outcome.result = "interrupted"
        raise
    finally:
        result = in_one_line(outcome.result, _MAX_TEXT)
        if row_id is not None:
            _, problem = _in_main(lambda: Action.update(result=result).where(Action.id == row_id).execute())
        if problem is not None:
            logger.warning(
                "Action not recorded",
                user=row["user_name"],
                action=action,
                target=row["target"],
                result=result,
                error=problem,
            )


def command_line_user() -> str:
    """Return who uses the command line: user and machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = "?"
    return f"{user}@{socket.gethostname()}"


def logged_actions(
    limit: int, *, before: int | None = None, target: str | None = None, user: str | None = None
) -> list[LoggedAction]:
    """Return the newest actions, newest first.

    Parameters:
      before: Only older ones than the one with this id.
      target: Only those with this target.
      user: Only those of this operator.

    Raises:
      DatabaseUnavailable: The database ``main`` does not answer.
    """
    with database.using(MAIN), translate_postgres_errors():
        rows: Any = Action.select().order_by(Action.id.desc()).limit(limit)
        if before is not None:
            rows = rows.where(Action.id < before)
        # PostgreSQL text cannot contain NUL characters, and none is stored.
        for column, wanted in ((Action.target, target), (Action.user_name, user)):
            if wanted is not None:
                rows = rows.where(column == in_one_line(wanted, _MAX_TEXT))
        return [LoggedAction(row.id, row.at, row.user_name, row.action, row.target, row.result) for row in rows]


def _in_main(write: Callable[[], int]) -> tuple[int | None, str | None]:
    """Execute a statement in the database ``main``; return its result, and why it failed. No database is no failure."""
    with database.using(MAIN):
        if database.obj is None:
            return None, None
        try:
            with time_limit(_TIME):
                return write(), None
        except Exception as error:
            return None, error_line(error)
