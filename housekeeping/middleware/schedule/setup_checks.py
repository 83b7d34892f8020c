"""Setup checks of scheduled sweeps: a sweep that is not set up gets no messages."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from dramatiq import Actor
from peewee import PeeweeException

from housekeeping.core.errors import HousekeepingError
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.sweeps.declaration import SetupProblem, Sweep

logger = named_logger(__name__)


class SetupChecks:
    """Setup checks for the actors of one scheduler; each change of a result is logged once.

    While the database does not answer, an actor keeps its last result, or counts as set up: its message is sent, and
    the run checks again.
    """

    def __init__(self) -> None:
        self._problems: dict[str, SetupProblem] = {}
        #: By database: when it last did not answer.
        self._unavailable_at: dict[str, datetime] = {}

    def is_set_up(self, actor: Actor[..., Any], now: datetime) -> bool:
        """Return whether to send the actor's ticks; never raises. Actors that are no sweeps are always set up."""
        sweep: Sweep | None = actor.options.get("sweep")
        if sweep is None or sweep.setup_problem is None:
            return True
        name = actor.actor_name
        # Waiting for the database once per actor would take more than a minute.
        if self._unavailable_at.get(sweep.database) != now:
            try:
                self._note(name, sweep.lacks())
            except (PeeweeException, HousekeepingError) as error:
                self._unavailable_at[sweep.database] = now
                logger.warning("Setup could not be checked", worker=name, error=error_line(error))
        return name not in self._problems

    def _note(self, name: str, problem: SetupProblem | None) -> None:
        known = self._problems.pop(name, None)
        if problem is not None:
            self._problems[name] = problem
        if problem is None and known is not None:
            logger.info("Worker set up, scheduled from now on", worker=name)
        elif problem is not None and problem != known:
            logger.info("Worker not set up, not scheduled", worker=name, family=problem.family, text=problem.text)
