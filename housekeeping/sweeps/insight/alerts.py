"""Alerts: conditions that need a person. Log, status, metrics and dashboard use the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

from housekeeping.core.clock import Clock
from housekeeping.core.durations import format_duration
from housekeeping.core.plural import counted
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.database.clock_skew import TOLERATED
from housekeeping.database.connection import database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine import run_metrics
from housekeeping.sweeps.engine.counts import CLOCK_SKEW
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.insight.backlog import Backlog, backlog, oldest
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.limits.breaker import in_numbers, is_exceeded
from housekeeping.sweeps.limits.first_run import AT_LEAST, UNCONFIRMED, in_words

logger = named_logger(__name__)

#: Counted up to here for a worker that sets no alarm on its backlog.
LOOK_AT: Final = 10_000
UNSEEN: Final = "what waits cannot be seen"
_ENDED_BADLY: Final = ("failed", "lost", "lost_lease")
#: Throttled runs in a row that are no passing trouble.
THROTTLED_RUNS: Final = 3
#: Runs looked at for what the last ones say; a few may be at work at the same time.
_LAST_RUNS: Final = 10
#: What an operator does about an exceeded breaker, by its action.
_ADVICE: Final = {
    "alert": "the run goes on; if these rows should stay: housekeeping pause NAME",
    "limit": "each run stops there; to process all at once: housekeeping plan NAME, then run --confirm",
    "stop": "runs stop; to go on: housekeeping plan NAME, then run --confirm",
}


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing that rings.

    Attributes:
      name: Which alarm: ``longest_run``, ``backlog``, ``failed_rows``, ``clock``, ``most_…`` with a count's name,
        ``failed_runs``, ``last_run``, ``overdue``, ``unseen``, ``breaker``, ``unconfirmed`` or ``throttled``; of the
        whole installation, ``no_worker`` or ``no_scheduler``.
      text: What it is, for a person.
      limit, value: What it must not exceed, and what it is; null where it is no number.
    """

    name: str
    text: str
    limit: float | None = None
    value: float | None = None

    def __str__(self) -> str:
        return self.text

    def as_json(self) -> dict[str, Any]:
        """As programs read it."""
        return asdict(self)


def run_alerts(sweep: Sweep, duration_s: float, counts: Mapping[str, Any]) -> Iterator[Alert]:
    """What a run shows by itself, ended or at work."""
    longest = sweep.alerts.longest_run
    if longest is not None and duration_s > longest.total_seconds():
        most_s = longest.total_seconds()
        yield Alert("longest_run", f"the last run took {duration_s:.0f} s, over {most_s:.0f} s", most_s, duration_s)
    if failed := counts.get("failed"):
        yield Alert("failed_rows", f"{counted(failed, 'row')} could not be settled", 0, failed)
    if (ahead_s := counts.get(CLOCK_SKEW)) is not None:
        tolerated_s, side = TOLERATED.total_seconds(), "ahead of" if ahead_s > 0 else "behind"
        text = f"the clock of the last run's machine was {abs(ahead_s):,.1f} s {side} the database's; check NTP"
        yield Alert("clock", text, tolerated_s, abs(ahead_s))
    for name, most in sweep.alerts.most.items():
        if (number := counts.get(name, 0)) > most:
            yield Alert(f"most_{name}", f"the last run counted {number:,} {name}, over {most:,}", most, number)


def backlog_alerts(sweep: Sweep, waiting: Backlog) -> Iterator[Alert]:
    """What waits, counted up to the limit."""
    most = sweep.alerts.backlog
    if most is not None and (waiting.rows > most or not waiting.exact):
        yield Alert("backlog", f"more than {counted(most, 'row waits', 'rows wait')}", most, waiting.rows)


def failed_runs_alerts(sweep: Sweep) -> Iterator[Alert]:
    """Runs in a row that ended badly.

    Raises:
      peewee.PeeweeException: The ledger cannot be asked.
    """
    most = sweep.alerts.failed_runs
    if most is None:
        return
    ended = (Run.worker == sweep.name) & Run.outcome.is_null(False) & Run.outcome.not_in(("skipped", "missed"))
    last: Any = Run.select(Run.outcome).where(ended).order_by(Run.id.desc()).limit(most).tuples()
    outcomes = [outcome for (outcome,) in last]
    if len(outcomes) == most and set(outcomes) <= set(_ENDED_BADLY):
        yield Alert("failed_runs", f"{counted(most, 'run')} in a row ended badly", most, most)


def last_run_alerts(outcome: str | None, why: str | None) -> Iterator[Alert]:
    """That the last run ended badly, and how."""
    if outcome in _ENDED_BADLY:
        yield Alert("last_run", f"the last run ended as {outcome}: {why}")


def breaker_alerts(sweep: Sweep, counts: Mapping[str, Any]) -> Iterator[Alert]:
    """That a run exceeded its breaker, by its counts: the numbers, and what to do."""
    if not is_exceeded(counts):
        return
    said = counts["breaker"]
    stale, allowed = said["stale"], said["allowed"]
    found = None if stale is None else stale + (not said["exact"])
    yield Alert("breaker", f"{in_numbers(said)}; {_ADVICE[said['action']]}".replace("NAME", sweep.name), allowed, found)


def of_the_first_run(reason: str | None, counts: Mapping[str, Any]) -> Iterator[Alert]:
    """That the worker's runs wait for a confirmation: the numbers, and the commands to type."""
    if reason == UNCONFIRMED and (said := counts.get(UNCONFIRMED)) is not None:
        yield Alert(UNCONFIRMED, in_words(said), said.get("limit", AT_LEAST), said["stale"])


def recent_runs_alerts(sweep: Sweep) -> Iterator[Alert]:
    """What the last runs show whatever was skipped since: an exceeded breaker, a throttle that stays.

    Raises:
      peewee.PeeweeException: The ledger cannot be asked.
    """
    runs = _recent_runs(sweep)
    # One that has not counted anything yet says nothing.
    yield from breaker_alerts(sweep, next((counts for outcome, _, counts in runs if outcome or counts), {}))
    yield from _of_throttled_runs(runs)


def throttle_alerts(sweep: Sweep) -> Iterator[Alert]:
    """That the last runs all ended because the database was not well.

    Raises:
      peewee.PeeweeException: The ledger cannot be asked.
    """
    yield from _of_throttled_runs(_recent_runs(sweep))


def _recent_runs(sweep: Sweep) -> list[tuple[str | None, str | None, dict[str, Any]]]:
    """Outcome, reason and counts of the last runs that began, the newest first."""
    began = (Run.worker == sweep.name) & (Run.outcome.is_null() | Run.outcome.not_in(("skipped", "missed")))
    began &= Run.reason.is_null() | (Run.reason != "clock")  # such a run has not looked at the rows
    rows: Any = Run.select(Run.outcome, Run.reason, Run.counts).where(began).order_by(Run.id.desc()).limit(_LAST_RUNS)
    return list(rows.tuples())


def _of_throttled_runs(runs: Sequence[tuple[str | None, str | None, dict[str, Any]]]) -> Iterator[Alert]:
    ended = [(reason, counts.get("throttled")) for outcome, reason, counts in runs if outcome][:THROTTLED_RUNS]
    if len(ended) < THROTTLED_RUNS or any(reason != "gate" for reason, _ in ended) or ended[0][1] is None:
        return
    gate, value, limit = (ended[0][1][name] for name in ("gate", "value", "limit"))
    yield Alert(
        "throttled",
        f"{gate} {value:g} > {limit:g} slowed the last {THROTTLED_RUNS} runs and ended them early; each did a little. "
        f"Mend that, or set another limit: gates.{gate}",
        limit,
        value,
    )


def overdue_alerts(sweep: Sweep, last_at: datetime | None, now: datetime, period_s: float) -> Iterator[Alert]:
    """That a scheduled worker has not run for too many of its periods; its ticks that were missed are no runs."""
    most = sweep.alerts.overdue
    if last_at is None or most is None:
        return
    silent_s = (now - last_at).total_seconds()
    if silent_s > most * period_s:
        text = f"it has not run for {format_duration(silent_s)}, over {most} of its periods; is the scheduler alive?"
        yield Alert("overdue", text, most * period_s, silent_s)


def send_alerts(sweep: Sweep, result: RunResult, clock: Clock) -> None:
    """Log one warning for each alarm this run's end sets off, and note in its row what waits; never raises."""
    badly = [*last_run_alerts(result.outcome, result.reason)]
    if result.run_id is None:
        run_metrics.record_alerts(sweep, badly, clear_others=False)  # the database is away, nobody can ask
        return
    if result.reason == UNCONFIRMED:
        rings = [*of_the_first_run(result.reason, result.counts)]
        run_metrics.record_alerts(sweep, rings, clear_others=False)
        _log(rings)
        return
    rings = [*run_alerts(sweep, result.duration_s, result.counts), *breaker_alerts(sweep, result.counts)]
    if result.exit_code:
        rings += _asked(lambda: failed_runs_alerts(sweep), "Could not read the ledger")
    if result.reason == "gate":
        rings += _asked(lambda: throttle_alerts(sweep), "Could not read the ledger")
    # For a worker that takes an argument, what waits is not what this run left.
    counted = sweep.argument_name is None and (sweep.progress_counts or sweep.alerts.backlog is not None)
    if result.outcome != "skipped" and counted:
        rings += _asked(lambda: _left(sweep, result.run_id, clock), "Could not count the backlog", UNSEEN)
    if result.outcome != "skipped":
        run_metrics.record_alerts(sweep, [*rings, *badly])
    _log(rings)


def _log(rings: Sequence[Alert]) -> None:
    for alarm in rings:
        logger.warning("Alert", alarm=alarm.name, text=alarm.text, limit=alarm.limit, value=alarm.value)


def _left(sweep: Sweep, run_id: int | None, clock: Clock) -> Iterator[Alert]:
    waiting = backlog(sweep, clock.now(), sweep.alerts.backlog or LOOK_AT)
    Run.update(backlog=waiting.rows, backlog_exact=waiting.exact).where(Run.id == run_id).execute()
    run_metrics.record_backlog(sweep, waiting, oldest(sweep, clock.now()) if waiting.rows else None, clock.now())
    yield from backlog_alerts(sweep, waiting)


def _asked(question: Callable[[], Iterator[Alert]], otherwise: str, unseen: str | None = None) -> list[Alert]:
    try:
        with database.atomic():
            return list(question())
    except Exception as error:  # a predicate may raise anything
        logger.warning(otherwise, error=error_line(error))
        return [] if unseen is None else [Alert("unseen", f"{unseen}: {error_line(error)}")]
