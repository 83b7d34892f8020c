"""Decision of a scheduler, once a minute, whether to send an actor's latest tick."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal
from uuid import uuid4

from dramatiq import Actor
from peewee import PeeweeException

from housekeeping.core.cron import Cron
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.middleware_errors import fail_message_on_error
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.middleware.schedule.tick_recorder import TickRecorder, last_recorded
from housekeeping.middleware.schedule.tick_rows import MINUTE
from housekeeping.middleware.schedule.tick_store import TickStore
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.setup_problem import SetupProblem

logger = named_logger(__name__)


class DueTicks:
    """Ticks that a scheduler sends: each once, in its minute or when the scheduler catches up.

    Parameters:
      schedules: By actor; filled while actors are declared.
      catch_up: ``latest`` sends the latest missed tick, ``none`` sends no missed tick.
    """

    def __init__(
        self,
        store: TickStore,
        recorder: TickRecorder,
        schedules: Mapping[str, Cron],
        catch_up: Literal["latest", "none"],
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._schedules = schedules
        self._catch_up = catch_up
        self._setup = _SetupChecks()
        self._unavailable_at: datetime | None = None
        self._flushed_at: datetime | None = None
        #: By actor: the last tick that was over when Redis last knew the actor, or when this process first asked.
        self._began_after: dict[str, datetime] = {}

    def is_due(self, actor: Actor[..., Any], now: datetime) -> bool:
        """Return whether to send the actor's latest tick. Never raises."""
        cron = self._schedules[actor.actor_name]
        if not self._setup.is_set_up(actor, now):
            # Its schedule begins once it is set up. No tick before that counts as missed.
            self._began_after[actor.actor_name] = cron.latest(now)
            return False
        self._began_after.setdefault(actor.actor_name, _last_before(cron, now))
        if self._unavailable_at == now:
            return False  # waiting for Redis once per actor would take more than a minute
        try:
            with fail_message_on_error():
                if self._flushed_at != now:
                    self._recorder.flush(self._schedules)
                    self._flushed_at = now
                return self._is_due(actor, cron, now)
        except Exception as error:
            self._unavailable_at = now
            logger.error(
                "Ticks could not be checked, tried again in a minute", worker=actor.actor_name, error=error_line(error)
            )
            return False

    def _is_due(self, actor: Actor[..., Any], cron: Cron, now: datetime) -> bool:
        tick = cron.latest(now)
        in_its_minute = now - tick < MINUTE
        state = self._store.state_of(actor.actor_name, tick)
        if state.actor_known:
            self._began_after[actor.actor_name] = _last_before(cron, now)
        if state.recorded or state.being_sent:
            return False
        known = state.actor_known
        if not known:
            try:
                # A new actor, or Redis has lost its data: then the ledger has the last tick.
                last = last_recorded(actor, tick + MINUTE)
            except PeeweeException as error:
                logger.error("Ledger could not be read", worker=actor.actor_name, error=error_line(error))
                return in_its_minute
            if last is None and self._began_after[actor.actor_name] < _last_before(cron, now):
                last = self._began_after[actor.actor_name]  # Redis has not answered since the first tick
            if last is not None:
                self._store.remember(actor.actor_name, last)
                known = True
            if last == tick:
                return False
        if in_its_minute or (known and self._catch_up == "latest"):
            return True
        if known:
            self._record_missed(actor.actor_name, tick)
        else:
            # A new actor's memory begins with this tick.
            self._store.remember(actor.actor_name, tick)
        return False

    def _record_missed(self, actor: str, tick: datetime) -> None:
        """Record a tick as missed, so that its message does not run if it is in the queue after all."""
        noting = self._recorder.has_ledger
        _, noted = self._store.record(actor, tick, uuid4().hex, "missed", last_missed=tick, noting=noting)
        if noted:
            self._recorder.flush(self._schedules)


def _last_before(cron: Cron, now: datetime) -> datetime:
    """Return the last tick whose minute has passed."""
    tick = cron.latest(now)
    return cron.latest(tick - MINUTE) if now - tick < MINUTE else tick


class _SetupChecks:
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
