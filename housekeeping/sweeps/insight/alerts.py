"""Alerts: conditions that need a person, the same in log, status, metrics and dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

from housekeeping.core.clock import Clock
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.wording import counted, format_duration
from housekeeping.database.clock_skew import TOLERATED
from housekeeping.database.connection import database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine import run_metrics
from housekeeping.sweeps.engine.counts import CLOCK_SKEW
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.insight.backlog import backlog, oldest
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.limits.breaker import in_numbers, is_exceeded
from housekeeping.sweeps.limits.first_run import AT_LEAST, UNCONFIRMED, in_words
from housekeeping.sweeps.stages.stage import Backlog

logger = named_logger(__name__)

#: Backlog rows counted at most for a worker without an alert threshold for its backlog.
DEFAULT_COUNT_LIMIT: Final = 10_000
UNKNOWN_BACKLOG: Final = "the backlog cannot be counted"
_FAILED: Final = ("failed", "lost", "lost_lease")
#: Throttled runs in a row that raise an alert; fewer may be a passing problem.
THROTTLED_RUNS: Final = 3
#: Past runs read for alerts; the newest may still be running.
_LAST_RUNS: Final = 10
#: Advice about an exceeded breaker, by its action.
_ADVICE: Final = {
    "alert": "the run continues; if these rows should stay: housekeeping pause NAME",
    "limit": "each run stops there; to process all at once: housekeeping plan NAME, then run --confirm",
    "stop": "runs stop; to continue: housekeeping plan NAME, then run --confirm",
}


@dataclass(frozen=True, slots=True)
class Alert:
    """An active alert.

    Attributes:
      name: ``longest_run``, ``backlog``, ``failed_rows``, ``clock``, ``most_…`` with a count's name,
        ``failed_runs``, ``last_run``, ``overdue``, ``unseen``, ``breaker``, ``unconfirmed`` or ``throttled``; of the
        whole installation, ``no_worker`` or ``no_scheduler``.
      text: A description for operators.
      limit: The threshold; None where it is not a number.
      value: The number that exceeds it; None where it is not a number.
      since: When it began; None if unknown.
    """

    name: str
    text: str
    limit: float | None = None
    value: float | None = None
    since: datetime | None = None

    def __str__(self) -> str:
        return self.text

    def as_json(self) -> dict[str, Any]:
        """Return the alert as JSON values."""
        return {**asdict(self), "since": self.since.isoformat() if self.since else None}


def run_alerts(sweep: Sweep, duration_s: float, counts: Mapping[str, Any]) -> Iterator[Alert]:
    """Yield the alerts of one run, ended or running."""
    longest = sweep.alerts.longest_run
    if longest is not None and duration_s > longest.total_seconds():
        most_s = longest.total_seconds()
        yield Alert("longest_run", f"the last run took {duration_s:.0f} s, over {most_s:.0f} s", most_s, duration_s)
    if failed := counts.get("failed"):
        yield Alert("failed_rows", f"{counted(failed, 'row')} could not be processed", 0, failed)
    if (ahead_s := counts.get(CLOCK_SKEW)) is not None:
        tolerated_s, side = TOLERATED.total_seconds(), "ahead of" if ahead_s > 0 else "behind"
        text = f"the clock of the last run's machine was {abs(ahead_s):,.1f} s {side} the database's; check NTP"
        yield Alert("clock", text, tolerated_s, abs(ahead_s))
    for name, most in sweep.alerts.most.items():
        if (number := counts.get(name, 0)) > most:
            yield Alert(f"most_{name}", f"the last run counted {number:,} {name}, over {most:,}", most, number)


def backlog_alerts(sweep: Sweep, waiting: Backlog) -> Iterator[Alert]:
    """Yield an alert if the backlog exceeds its threshold."""
    most = sweep.alerts.backlog
    if most is not None and (waiting.rows > most or not waiting.exact):
        yield Alert("backlog", f"more than {counted(most, 'row waits', 'rows wait')}", most, waiting.rows)


def failed_runs_alerts(sweep: Sweep) -> Iterator[Alert]:
    """Yield an alert if too many runs in a row failed.

    Raises:
      peewee.PeeweeException: The ledger cannot be read.
    """
    most = sweep.alerts.failed_runs
    if most is None:
        return
    ended = (Run.worker == sweep.name) & Run.outcome.is_null(False) & Run.outcome.not_in(("skipped", "missed"))
    last: Any = Run.select(Run.outcome).where(ended).order_by(Run.id.desc()).limit(most).tuples()
    outcomes = [outcome for (outcome,) in last]
    if len(outcomes) == most and set(outcomes) <= set(_FAILED):
        yield Alert("failed_runs", f"{counted(most, 'run')} in a row failed", most, most)


def is_failed(outcome: str | None) -> bool:
    """Return whether a run with this outcome has failed."""
    return outcome in _FAILED


def last_run_alerts(outcome: str | None, why: str | None) -> Iterator[Alert]:
    """Yield an alert if the last run failed."""
    if is_failed(outcome):
        yield Alert("last_run", f"the last run ended as {outcome}: {why}")


def breaker_alerts(sweep: Sweep, counts: Mapping[str, Any]) -> Iterator[Alert]:
    """Yield an alert if a run exceeded its breaker, with the numbers and what to do."""
    if not is_exceeded(counts):
        return
    count = counts["breaker"]
    stale, allowed = count["stale"], count["allowed"]
    found = None if stale is None else stale + (not count["exact"])
    text = f"{in_numbers(count)}; {_ADVICE[count['action']]}".replace("NAME", sweep.name)
    yield Alert("breaker", text, allowed, found)


def first_run_alerts(reason: str | None, counts: Mapping[str, Any]) -> Iterator[Alert]:
    """Yield an alert if the worker's runs wait for a confirmation, with the commands to type."""
    if reason == UNCONFIRMED and (count := counts.get(UNCONFIRMED)) is not None:
        yield Alert(UNCONFIRMED, in_words(count), count.get("limit", AT_LEAST), count["stale"])


def recent_runs_alerts(sweep: Sweep) -> Iterator[Alert]:
    """Yield the alerts of the last runs that began: an exceeded breaker, a lasting throttle.

    Raises:
      peewee.PeeweeException: The ledger cannot be read.
    """
    runs = _recent_runs(sweep)
    # A run that has not counted anything yet is passed over.
    yield from breaker_alerts(sweep, next((counts for outcome, _, counts in runs if outcome or counts), {}))
    yield from _throttle_alerts(runs)


def _recent_runs(sweep: Sweep) -> list[tuple[str | None, str | None, dict[str, Any]]]:
    """Return outcome, reason and counts of the last runs that began, newest first."""
    began = (Run.worker == sweep.name) & (Run.outcome.is_null() | Run.outcome.not_in(("skipped", "missed")))
    began &= Run.reason.is_null() | (Run.reason != "clock")  # such a run has not looked at the rows
    rows: Any = Run.select(Run.outcome, Run.reason, Run.counts).where(began).order_by(Run.id.desc()).limit(_LAST_RUNS)
    return list(rows.tuples())


def _throttle_alerts(runs: Sequence[tuple[str | None, str | None, dict[str, Any]]]) -> Iterator[Alert]:
    """Yield an alert if the last runs all ended early because they were throttled."""
    ended = [(reason, counts.get("throttled")) for outcome, reason, counts in runs if outcome][:THROTTLED_RUNS]
    if len(ended) < THROTTLED_RUNS or any(reason != "gate" for reason, _ in ended) or ended[0][1] is None:
        return
    gate, value, limit = (ended[0][1][name] for name in ("gate", "value", "limit"))
    by_number = limit is not None
    found = f"{gate} {value:g} > {limit:g}" if by_number else f"{gate} ({value})"
    yield Alert(
        "throttled",
        f"{found} slowed the last {THROTTLED_RUNS} runs and ended them early; "
        f"each processed a few rows. Fix the cause, or set another limit: gates.{gate}",
        limit,
        value if by_number else None,
    )


def overdue_alerts(sweep: Sweep, last_at: datetime | None, now: datetime, period_s: float) -> Iterator[Alert]:
    """Yield an alert if a scheduled worker has not run for too many periods; missed ticks are not runs."""
    most = sweep.alerts.overdue
    if last_at is None or most is None:
        return
    silent_s = (now - last_at).total_seconds()
    if silent_s > most * period_s:
        text = f"it has not run for {format_duration(silent_s)}, over {most} of its periods; is the scheduler alive?"
        yield Alert("overdue", text, most * period_s, silent_s)


def send_alerts(sweep: Sweep, result: RunResult, clock: Clock) -> None:
    """Log the alerts of a run that ended, and record the backlog in its row; never raises."""
    failure = [*last_run_alerts(result.outcome, result.reason)]
    if result.run_id is None:
        # Without the database the other alerts are unknown.
        run_metrics.record_alerts(sweep, failure, clear_others=False)
        return
    if result.reason == UNCONFIRMED:
        alerts = [*first_run_alerts(result.reason, result.counts)]
        run_metrics.record_alerts(sweep, alerts, clear_others=False)
        _log(alerts)
        return
    alerts = [*run_alerts(sweep, result.duration_s, result.counts), *breaker_alerts(sweep, result.counts)]
    if result.exit_code:
        alerts += _queried(lambda: failed_runs_alerts(sweep), "Could not read the ledger")
    if result.reason == "gate":
        alerts += _queried(lambda: _throttle_alerts(_recent_runs(sweep)), "Could not read the ledger")
    # The backlog of a worker with an argument says nothing about this run.
    counts_backlog = sweep.argument_name is None and (sweep.progress_counts or sweep.alerts.backlog is not None)
    if result.outcome != "skipped" and counts_backlog:
        alerts += _queried(
            lambda: _record_backlog(sweep, result.run_id, clock), "Could not count the backlog", UNKNOWN_BACKLOG
        )
    if result.outcome != "skipped":
        run_metrics.record_alerts(sweep, [*alerts, *failure])
    _log(alerts)


def _log(alerts: Sequence[Alert]) -> None:
    for alert in alerts:
        logger.warning("Alert", alarm=alert.name, text=alert.text, limit=alert.limit, value=alert.value)


def _record_backlog(sweep: Sweep, run_id: int | None, clock: Clock) -> Iterator[Alert]:
    waiting = backlog(sweep, clock.now(), sweep.alerts.backlog or DEFAULT_COUNT_LIMIT)
    Run.update(backlog=waiting.rows, backlog_exact=waiting.exact).where(Run.id == run_id).execute()
    run_metrics.record_backlog(sweep, waiting, oldest(sweep, clock.now()) if waiting.rows else None, clock.now())
    yield from backlog_alerts(sweep, waiting)


def _queried(query: Callable[[], Iterator[Alert]], event: str, unknown: str | None = None) -> list[Alert]:
    try:
        with database.atomic():
            return list(query())
    except Exception as error:  # a predicate may raise anything
        logger.warning(event, error=error_line(error))
        return [] if unknown is None else [Alert("unseen", f"{unknown}: {error_line(error)}")]
