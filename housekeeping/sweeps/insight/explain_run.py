"""Explanation of a run: why it began, how it ended and what comes next."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, tzinfo
from typing import Final

from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.explain_outcome import Attempt, Explanation, meaning_of
from housekeeping.sweeps.insight.status import next_tick
from housekeeping.sweeps.ledger import history
from housekeeping.sweeps.ledger.history import RunRecord
from housekeeping.sweeps.ledger.overrides import override_of

#: What started a run, by its trigger.
_ORIGINS: Final = {
    "schedule": "the schedule sent it",
    "enqueue": "it was enqueued, by the application or by housekeeping enqueue",
    "cli": "it was started by hand: housekeeping run",
    "parent": "another worker's run enqueued it",
}


def explain_run(record: RunRecord, sweep: Sweep | None, now: datetime, zone: tzinfo) -> Explanation:
    """Explain one run.

    Parameters:
      sweep: Its worker; None for one that is no longer declared.
    """
    attempts = history.attempts_of(record)
    explained = _attempt(record)
    return Explanation(
        record.worker,
        record.tick,
        explained.outcome,
        meaning_of(record.worker, explained),
        [_attempt(each) for each in attempts],
        run_id=record.run_id,
        origin=_origin(record),
        next_step=_next_step(record, attempts, sweep, now, zone),
    )


def with_newer_run(explanation: Explanation) -> Explanation:
    """Add the worker's latest run, if it belongs to no tick and began after the last attempt at this tick."""
    latest = next(iter(history.recent(worker=explanation.worker, limit=1)), None)
    if latest is None or latest.tick is not None or explanation.tick is None:
        return explanation
    is_newer = (
        latest.run_id > explanation.attempts[-1].run_id
        if explanation.attempts
        else latest.started_at > explanation.tick
    )
    return replace(explanation, newer_run=_attempt(latest)) if is_newer else explanation


def _attempt(record: RunRecord) -> Attempt:
    return Attempt(
        record.run_id,
        record.trigger,
        record.outcome or ("silent" if record.lost else "running"),
        record.reason,
        record.started_at,
        record.finished_at,
        record.counts,
        record.error,
        record.silent_s,
    )


def _origin(record: RunRecord) -> str:
    origin = _ORIGINS.get(record.trigger, record.trigger)
    if record.tick is not None:
        origin += f" for the tick {record.tick:%Y-%m-%d %H:%M} UTC"
    lost = history.took_over_from(record)
    if lost:
        ids = ", ".join(map(str, lost))
        origin += f"; it took over from lost {'run' if len(lost) == 1 else 'runs'} {ids}"
    return origin


def _next_step(
    record: RunRecord, attempts: list[RunRecord], sweep: Sweep | None, now: datetime, zone: tzinfo
) -> str | None:
    tick = None if sweep is None else next_tick(sweep, now, zone)
    steps = [
        *filter(None, [_follow_up(record, attempts)]),
        *([f"the next tick is {tick:%Y-%m-%d %H:%M} UTC"] if tick is not None else []),
    ]
    if sweep is not None and not sweep.enabled:
        steps.append("the worker is disabled in HOUSEKEEPING_WORKERS")
    elif (switch := override_of(record.worker)) is not None and switch.state == "paused":
        steps.append(f"the worker is paused, and its runs are skipped: housekeeping resume {record.worker}")
    return "; ".join(steps) or None


def _follow_up(record: RunRecord, attempts: list[RunRecord]) -> str | None:
    """Return what happens to the work that this run left; None if it left none."""
    if record.outcome in ("done", "skipped", "missed") or (record.outcome is None and not record.lost):
        return None
    taker = history.taken_over_by(record)
    if taker is not None:
        return f"run {taker} took over"
    later = next((each.run_id for each in attempts if each.run_id > record.run_id), None)
    if later is not None:
        return f"the next attempt at its message is run {later}"
    if record.outcome is None and record.message_id is not None:
        return "its message is delivered again, and that attempt takes over"
    if record.outcome == "failed" and record.message_id is not None and record.reason != "breaker":
        return "its message is retried, and after the last retry it is in housekeeping deadletters list"
    return "the next run does the rest"
