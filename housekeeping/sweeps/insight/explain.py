"""Explanations, from the ledger: what became of a tick, why a run began, how it ended and what comes next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, tzinfo
from typing import Any, Final

from peewee import fn

from housekeeping.core.cron import Cron
from housekeeping.core.wording import counted
from housekeeping.database.connection import database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.attempts import REASONS, Attempt, meaning_of
from housekeeping.sweeps.insight.state import next_tick
from housekeeping.sweeps.ledger import history
from housekeeping.sweeps.ledger.history import RunRecord, name_database, run_label
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.ledger.overrides import describe_override, override_of
from housekeeping.sweeps.ledger.run_queries import resumed_by
from housekeeping.sweeps.ledger.runs import PURGE, RESTORE
from housekeeping.sweeps.processes.alerts import no_living_scheduler, no_living_worker
from housekeeping.sweeps.processes.heartbeats import UNKNOWN, Processes

#: Normal delay of a tick: it is sent within its minute, and a worker receives it at once.
_SOON: Final = timedelta(minutes=2)

_MADE_UP: Final = (
    "The next scheduler that starts catches up the latest tick (HOUSEKEEPING_CATCH_UP) and records the others as missed"
)
_NOT_TAKEN: Final = (
    "and no worker has taken it: is `housekeeping worker` alive, and for this queue? "
    "Look at the queues in `housekeeping status` (the tick before a first start of a scheduler counts as sent)"
)

#: What started a run, by its trigger.
_ORIGINS: Final = {
    "schedule": "the schedule sent it",
    "enqueue": "it was enqueued, by the application or by housekeeping enqueue",
    "cli": "it was started by hand: housekeeping run",
    "parent": "another worker's run enqueued it",
}

#: Whether a scheduler has sent a tick's message; None if unknown.
WasSent = Callable[[datetime], bool | None]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of one tick or run.

    Attributes:
      tick: In UTC; None when the worker has no schedule.
      outcome: The outcome of the last attempt, or ``missed``, ``not_a_tick``, ``not_yet``, ``waiting``, ``not_sent``,
        ``unknown``.
      meaning: The reason as text, with what to do.
      attempts: The runs for this tick, or for this run's message, oldest first; a hundred at most.
      newer_run: The worker's latest run, if it belongs to no tick and began later.
      run_id: The explained run; None when a tick is explained.
      origin: What started that run, and the lost run it took over from.
      next_step: What happens after that run.
      queued: The messages in the worker's queue, and whether a process serves it; None if there are none, or unknown.
    """

    worker: str
    tick: datetime | None
    outcome: str
    meaning: str
    attempts: list[Attempt]
    newer_run: Attempt | None = None
    run_id: int | None = None
    origin: str | None = None
    next_step: str | None = None
    queued: str | None = None
    database: str = field(default_factory=lambda: database.selected)

    def __str__(self) -> str:
        """Return the outcome; of a run without heartbeats with their age."""
        explained = (each for each in reversed(self.attempts) if self.run_id in (None, each.run_id))
        return next((str(each) for each in explained if each.outcome == self.outcome), self.outcome)

    def as_json(self) -> dict[str, Any]:
        """Return the object of ``housekeeping why --json``."""
        values = asdict(self)
        for attempt in (*values["attempts"], values["newer_run"] or {}):
            attempt.pop("label", None)
        return name_database(values, values.pop("database"))


def why(
    sweep: Sweep,
    tick: datetime | None,
    now: datetime,
    zone: tzinfo,
    was_sent: WasSent = lambda tick: None,
    processes: Processes = UNKNOWN,
) -> Explanation:
    """Explain a worker's tick.

    Parameters:
      tick: The nominal time, any moment of its minute. None for the latest tick, or the last run of a worker without a
        schedule.
      was_sent: Returns whether a scheduler sent the tick's message; called only for a tick without a ledger row.
    """
    name = sweep.name
    cron = Cron(sweep.schedule, zone) if sweep.schedule else None
    if tick is None:
        if cron is None or not sweep.enabled:
            return _last_run(sweep)
        tick = cron.latest(now)
    else:
        tick = tick.replace(second=0, microsecond=0)
    if attempts := [Attempt.of(each) for each in history.at_tick(name, tick)]:
        return Explanation(name, tick, attempts[-1].outcome, meaning_of(name, attempts[-1]), attempts)
    if cron is not None and cron.latest(tick) != tick:
        nearest = f"the ticks around it are {cron.latest(tick):%Y-%m-%d %H:%M} and {cron.next(tick):%Y-%m-%d %H:%M} UTC"
        return Explanation(name, tick, "not_a_tick", f"{sweep.schedule!r} does not fire at this minute; {nearest}", [])
    if (gap := _gap_around(name, tick, cron)) is not None:
        return Explanation(name, tick, "missed", REASONS["no_scheduler"], [gap])
    return Explanation(name, tick, *_without_a_row(sweep, tick, now, was_sent, processes), [])


def _without_a_row(
    sweep: Sweep, tick: datetime, now: datetime, was_sent: WasSent, processes: Processes
) -> tuple[str, str]:
    if not sweep.enabled:
        return "unknown", REASONS["disabled"]
    if (problem := sweep.lacks()) is not None:
        return "unknown", f"{REASONS['not_set_up']} ({problem.text})"
    if sweep.schedule is None:
        return "unknown", "this worker has no schedule: it runs when it is enqueued or run by hand"
    if tick > now:
        return "not_yet", "this tick is in the future"
    sent = was_sent(tick)
    no_worker, no_scheduler = no_living_worker(processes, sweep.queue), no_living_scheduler(processes)
    if sent:
        return "waiting", f"it was sent, {f'but {no_worker}' if no_worker else _NOT_TAKEN}"
    if no_scheduler:
        # Without Redis, a scheduler may have sent it before it died.
        return "unknown" if sent is None else "not_sent", f"{no_scheduler}. {_MADE_UP}"
    if now - tick < _SOON:
        return "waiting", "it is being sent, or its message waits in the queue; look again in a minute"
    if sent is not None:
        return "not_sent", f"no scheduler has sent it: is the process `housekeeping scheduler` alive? {_MADE_UP}"
    first = Run.select(fn.MIN(Run.started_at)).where(Run.worker == sweep.name).scalar()
    if first is not None and tick < first:
        return "unknown", "the ledger does not reach back so far: old runs are removed after 30 days"
    return "unknown", (
        "it was not recorded: no scheduler has sent it, or its message waits in the queue. "
        "Look at the queues in `housekeeping status`; are `housekeeping worker` and `housekeeping scheduler` alive?"
    )


def _last_run(sweep: Sweep) -> Explanation:
    idle = REASONS["disabled"] if not sweep.enabled else "this worker has no schedule"
    for last in map(Attempt.of, history.recent(sweep.name, 1)):
        meaning = f"{idle}; its last run: {meaning_of(sweep.name, last)}"
        return Explanation(sweep.name, None, last.outcome, meaning, [last])
    return Explanation(sweep.name, None, "unknown", f"{idle}, and it never ran", [])


def _gap_around(worker: str, tick: datetime, cron: Cron | None) -> Attempt | None:
    """Return the row of the recorded gap that includes this tick; None without one."""
    following = Run.select(fn.MIN(Run.tick)).where((Run.worker == worker) & (Run.tick > tick)).scalar()
    row = None if following is None else history.at_tick(worker, following)[0]
    if row is None or row.outcome != "missed":
        return None
    missed = row.counts.get("missed", 0)
    # Otherwise the gap begins after this tick.
    return Attempt.of(row) if cron is None or cron.count(tick, following, missed) < missed else None


def explain_run(record: RunRecord, sweep: Sweep | None, now: datetime, zone: tzinfo) -> Explanation:
    """Explain one run.

    Parameters:
      sweep: The run's worker; None if it is no longer declared.
    """
    attempts, explained = history.attempts_of(record), Attempt.of(record)
    override = None if sweep is None else override_of(record.worker)
    tick = None if sweep is None else next_tick(sweep, now, zone, override)
    steps = [_follow_up(record, attempts), None if tick is None else f"the next tick is {tick:%Y-%m-%d %H:%M} UTC"]
    if sweep is not None and not sweep.enabled:
        steps.append("the worker is disabled in HOUSEKEEPING_WORKERS")
    elif override is not None and override.state == "paused":
        steps.append(f"its runs are skipped ({describe_override(override)}): housekeeping resume {record.worker}")
    return Explanation(
        record.worker,
        record.tick,
        explained.outcome,
        meaning_of(record.worker, explained),
        [Attempt.of(each) for each in attempts],
        run_id=record.run_id,
        origin=_origin(record),
        next_step="; ".join(filter(None, steps)) or None,
    )


def with_newer_run(explanation: Explanation) -> Explanation:
    """Add the worker's latest run, if it belongs to no tick and began after the last attempt at this tick."""
    tick, attempts = explanation.tick, explanation.attempts
    for latest in history.recent(explanation.worker, 1):
        if latest.tick is None and tick is not None:
            newer = latest.run_id > attempts[-1].run_id if attempts else latest.started_at > tick
            return replace(explanation, newer_run=Attempt.of(latest)) if newer else explanation
    return explanation


def queued_messages(sweep: Sweep, messages: int, processes: Processes) -> str | None:
    """Return how many messages the worker's queue has and whether a process serves it; None for an empty queue."""
    if not messages:
        return None
    found = f"{counted(messages, 'message is', 'messages are')} in its queue {sweep.queue!r}"
    no_worker = no_living_worker(processes, sweep.queue)
    return f"{found}, waiting or running" if no_worker is None else f"{found}, but {no_worker}"


def _origin(record: RunRecord) -> str:
    origin = _ORIGINS.get(record.trigger, record.trigger)
    for command in (PURGE, RESTORE):
        if command in record.counts:
            origin = f"it was started by hand: housekeeping {command}"
    if record.tick is not None:
        origin += f" for the tick {record.tick:%Y-%m-%d %H:%M} UTC"
    if lost := history.took_over_from(record):
        origin += f"; it took over from lost {'run' if len(lost) == 1 else 'runs'} {', '.join(map(_label, lost))}"
    return origin


def _label(run_id: int) -> str:
    return run_label(run_id, database.selected)


def _follow_up(record: RunRecord, attempts: list[RunRecord]) -> str | None:
    """Return what happens to the work that this run left; None if it left none."""
    if record.outcome in ("done", "skipped", "missed") or (record.outcome is None and not record.lost):
        return None
    taker = history.taken_over_by(record)
    if taker is not None:
        return f"run {_label(taker)} took over"
    later = next((each.label for each in attempts if each.run_id > record.run_id), None)
    if later is not None:
        return f"the next attempt at its message is run {later}"
    if record.outcome is None and record.message_id is not None:
        return "its message is delivered again, and that attempt takes over"
    if record.outcome == "failed" and record.message_id is not None and record.reason != "breaker":
        return "its message is retried, and after the last retry it is in housekeeping deadletters list"
    return _continued_by_hand(record) or "the next run does the rest"


def _continued_by_hand(record: RunRecord) -> str | None:
    """Return how an operator continues a purge or a restore; None for a run of a worker."""
    if RESTORE in record.counts:
        restored = record.counts[RESTORE]
        same = "" if restored["where"] is None else ", with the same --where"
        return f"to continue: housekeeping restore {run_label(restored['run_id'], record.database)}{same}"
    if PURGE not in record.counts:
        return None
    if (later := resumed_by(record.run_id)) is not None:
        return f"run {_label(later)} resumed it"
    if record.reason == "limit":
        return "nothing: it has deleted as many rows as --max-rows allows"
    return f"to continue: housekeeping purge --resume {record.label}"
