"""Alarms: what a run's end shows that somebody should look at."""

from __future__ import annotations

from peewee import PeeweeException

from housekeeping.foundation.clock import Clock
from housekeeping.foundation.db import one_line
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.sweeps.backlog import backlog
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.results import RunResult

logger = named_logger(__name__)


def ring(sweep: Sweep, result: RunResult, clock: Clock) -> None:
    """Log one warning for each alarm this run's end sets off; never raises."""
    if result.run_id is None:
        return
    limit = sweep.alarms.longest_run
    if limit is not None and result.duration_s > limit.total_seconds():
        logger.warning("Alarm", alarm="longest_run", limit_s=limit.total_seconds(), duration_s=result.duration_s)
    if result.counts.get("failed"):
        logger.warning("Alarm", alarm="failed_rows", failed=result.counts["failed"])
    if sweep.alarms.backlog is not None and result.outcome != "skipped":
        try:
            waiting = backlog(sweep, clock.now(), sweep.alarms.backlog)
        except PeeweeException as error:
            logger.warning("Could not count the backlog", error=one_line(error))
            return
        if not waiting.exact:
            logger.warning("Alarm", alarm="backlog", limit=sweep.alarms.backlog)
