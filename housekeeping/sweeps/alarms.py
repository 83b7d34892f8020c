"""Alarms: what a run's end shows that somebody should look at."""

from __future__ import annotations

from typing import Any

from peewee import PeeweeException

from housekeeping.foundation.clock import Clock
from housekeeping.foundation.db import one_line
from housekeeping.foundation.errors import HousekeepingError
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.sweeps.backlog import backlog
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.own_tables import Run
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
    for name, most in sweep.alarms.most.items():
        if result.counts.get(name, 0) > most:
            logger.warning("Alarm", alarm=f"most_{name}", limit=most, **{name: result.counts[name]})
    failures = sweep.alarms.failed_runs
    if failures is not None and result.exit_code and _failed_in_a_row(sweep.name, failures):
        logger.warning("Alarm", alarm="failed_runs", limit=failures)
    if sweep.alarms.backlog is not None and result.outcome != "skipped":
        try:
            waiting = backlog(sweep, clock.now(), sweep.alarms.backlog)
        except (PeeweeException, HousekeepingError) as error:
            logger.warning("Could not count the backlog", error=one_line(error))
            return
        if not waiting.exact:
            logger.warning("Alarm", alarm="backlog", limit=sweep.alarms.backlog)


def _failed_in_a_row(worker: str, number: int) -> bool:
    """Whether so many runs of the worker, up to the last, ended badly; False when the ledger cannot be asked."""
    ended = (Run.worker == worker) & Run.outcome.is_null(False) & Run.outcome.not_in(("skipped", "missed"))
    try:
        last: Any = Run.select(Run.outcome).where(ended).order_by(Run.id.desc()).limit(number).tuples()
        outcomes = [outcome for (outcome,) in last]
    except PeeweeException:
        return False
    return len(outcomes) == number and set(outcomes) <= {"failed", "lost", "lost_lease"}
