"""Explanations, from the ledger: what became of a tick, why a run began, how it ended and what comes next."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, tzinfo
from typing import Any, Final

from dramatiq import Broker, Message
from dramatiq.errors import BrokerConnectionError
from peewee import fn

from housekeeping.brokers.dramatiq_internals import StoreUnavailable
from housekeeping.core.cron import Cron
from housekeeping.core.errors import BrokerUnavailable, DatabaseUnavailable, RedisUnavailable
from housekeeping.core.logs import counted, error_line, format_duration
from housekeeping.core.redis import translate_redis_errors
from housekeeping.database.connection import database
from housekeeping.engine.alerts import no_living_scheduler, no_living_worker
from housekeeping.engine.gates import describe_with_user
from housekeeping.engine.guard import UNCONFIRMED, in_words
from housekeeping.insight.plan import Forecast
from housekeeping.insight.wording import format_in_zone, next_tick, outcome_in_words
from housekeeping.ledger import history
from housekeeping.ledger.history import RunRecord
from housekeeping.ledger.operators import describe_override, logged_actions, override_of
from housekeeping.ledger.processes import UNKNOWN, Processes
from housekeeping.ledger.runs import PURGE, RESTORE, SILENCE, resumed_by
from housekeeping.ledger.schema import Run, name_database, run_label
from housekeeping.sweeps.declaration import Sweep

#: Meaning of a recorded reason, with what to do about it.
REASONS: Final = {
    "lease_held": "another run held the lease and did the work; nothing to do unless that run hangs: "
    "housekeeping leases list",
    "paused": "the worker is paused: housekeeping resume NAME",
    "disabled": "the worker is disabled in HOUSEKEEPING_WORKERS",
    "not_set_up": "the worker's tables or stores are not set up here, so it is not scheduled; housekeeping list says "
    "what is missing. To get an alert instead, name its family in HOUSEKEEPING_BUILT_IN",
    "deduplicated": "another message for the same work was waiting or running, so this one was dropped",
    "already_done": "the message was completed earlier and delivered again",
    "tick_already_sent": "another scheduler had sent this tick",
    "no_scheduler": "no scheduler ran: is the process `housekeeping scheduler` alive?",
    "servers_unavailable": "a scheduler ran, but a server that it needs did not answer. The latest missed tick was "
    "sent when it did, unless HOUSEKEEPING_CATCH_UP is none",
    "out_of_time": "it reached its time limit; the next run continues",
    "limit": "it reached its limit of records; the next run continues",
    "stopped": "USER stopped it after its batch; the next run resumes where it stopped",
    "shutdown": "its process was stopped; its message went back to the queue, and the next attempt resumes",
    "taken_over": "it sent no heartbeat, and another attempt took over; see the next attempt",
    "lease_lost": "another run had taken its lease; its uncommitted batch was rolled back",
    "gate": "the database stayed overloaded, or a throttle of your own asked to wait; see the log line `Still "
    "throttled, ending the run`. The run continued slowly until then, and the next run resumes",
    "breaker": "far more rows were stale than usual. It processed as many as its breaker allows, and the next run "
    "resumes there. To process all at once: housekeeping plan NAME, then run --confirm",
    UNCONFIRMED: "no run of this worker has completed yet, or its predicate has changed, and it would process a large "
    "part of a table",
    "clock": "this machine's clock differed from the database's by more than a minute; check NTP on both. The message "
    "is retried; to run now: housekeeping run NAME --force",
    "retry_waits": "a retry of this worker was already waiting and does the same work",
}

#: End of a meaning that says what continues the work.
_CONTINUED: Final = re.compile(r"[;,] (?:and )?the next (?:run|attempt) [^.]+$")


def meaning_of(run: RunRecord) -> str:
    """Return what a run's outcome and reason mean, with what to do."""
    text = _meaning(run)
    # No schedule follows a purge or a restore: its operator continues it.
    return text if {PURGE, RESTORE}.isdisjoint(run.counts) else _CONTINUED.sub("", text)


def _outcome(run: RunRecord) -> str:
    """Return the outcome; ``running`` while it is open, ``silent`` without heartbeats."""
    return run.outcome or ("silent" if run.is_silent else "running")


def _meaning(run: RunRecord) -> str:
    if run.outcome is None:
        if run.lost:
            return "its process was killed or hangs; the next attempt takes over"
        if run.is_silent:
            return (
                "it has sent no heartbeat since: its process is dead, or a statement takes long; after "
                f"{format_duration(SILENCE.total_seconds())} the next attempt takes over"
            )
        return "it is running" if run.stopped_by is None else f"{run.stopped_by} stops it: it ends after its batch"
    if run.outcome == "done":
        failed = run.counts.get("failed")
        rows = f"; {counted(failed, 'row')} failed, housekeeping status shows why (REJECTED)" if failed else ""
        return f"it completed{rows}"
    if (run.trigger, run.reason) == ("cli", "shutdown"):
        return "it was interrupted, by Ctrl-C or SIGTERM; the next run resumes where it stopped"
    if run.reason == UNCONFIRMED and UNCONFIRMED in run.counts:
        return in_words(run.counts[UNCONFIRMED])
    if run.error:
        return f"it failed: {run.error}"
    text = REASONS.get(run.reason or "", run.reason or run.outcome).replace("NAME", run.worker)
    return text.replace("USER", run.stopped_by or "an operator")


@dataclass(frozen=True, slots=True)
class SentRun:
    """A run that was sent.

    Attributes:
      duplicate_of: The live message for the same work, if this one was dropped as a duplicate.
    """

    worker: str
    queue: str
    message_id: str
    duplicate_of: str | None

    def __str__(self) -> str:
        if self.duplicate_of is None:
            return f"enqueued: message {self.message_id} in queue {self.queue}"
        return f"dropped as a duplicate: message {self.duplicate_of} does the same work and has not ended"


def send_run(broker: Broker, sweep: Sweep, argument: Any = None) -> SentRun:
    """Send a run of the worker as the application does: with the options of its actor, deduplicated.

    Raises:
      RedisUnavailable, BrokerUnavailable: The server does not answer. Nothing was enqueued, or its answer was lost.
    """
    message: Message[Any] = broker.get_actor(sweep.name).message(*([] if sweep.argument is None else [argument]))
    try:
        with translate_redis_errors():
            sent = broker.enqueue(message)
    except StoreUnavailable as error:
        raise RedisUnavailable(str(error)) from error
    except BrokerConnectionError as error:
        raise BrokerUnavailable(f"nothing was enqueued: {error_line(error)}") from error
    return SentRun(sweep.name, sweep.queue, sent.message_id, sent.options.get("duplicate_of"))


def reason_to_skip(sweep: Sweep) -> str | None:
    """Return why a run that is sent now will be skipped, with the remedy; None if it will run.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    if not sweep.enabled:
        return f"{sweep.name} is disabled in HOUSEKEEPING_WORKERS: its run will be skipped"
    problem = sweep.lacks()
    if problem is not None:
        return f"{sweep.name} is not set up ({problem.text}): its run will be skipped"
    override = override_of(sweep.name)
    if override is not None and override.state == "paused":
        return f"{describe_override(override)}: its run will be skipped (housekeeping resume {sweep.name})"
    return None


#: Normal delay of a tick: it is sent within its minute, and a worker receives it at once.
_SOON: Final = timedelta(minutes=2)

_MADE_UP: Final = (
    "The next scheduler that starts catches up the latest tick (HOUSEKEEPING_CATCH_UP) and records the others as missed"
)
_NOT_TAKEN: Final = (
    "and no run of it has begun: its message waits in the queue, or for a retry after a server did not answer, or is a "
    "dead letter. Look at the queues in `housekeeping status`"
)

#: What started a run, by its trigger.
_ORIGINS: Final = {
    "schedule": "the schedule sent it",
    "enqueue": "it was enqueued, by the application or by housekeeping enqueue",
    "cli": "it was started by hand: housekeeping run",
    "parent": "another worker's run enqueued it",
}

#: Returns whether a scheduler has sent a tick, by the stored ticks; None if that is unknown.
WasSent = Callable[[datetime], bool | None]

#: Returns outcome and reason of a tick that the ledger could not store yet; None without one.
UnrecordedReason = Callable[[datetime], tuple[str, str] | None]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of one tick, or of the last run of a worker without a schedule.

    Attributes:
      tick: In UTC; None when the worker has no schedule.
      outcome: The outcome of the last attempt, or ``missed``, ``not_a_tick``, ``not_yet``, ``waiting``, ``not_sent``,
        ``unknown``.
      meaning: The reason as text, with what to do.
      attempts: The runs for this tick, oldest first; a hundred at most.
      newer_run: The worker's latest run, if it belongs to no tick and began later.
      note: How the operator's time was understood, if the zone's clocks skipped or repeated it.
      now: What would become of a run that is sent now; None if this was not asked.
    """

    worker: str
    tick: datetime | None
    outcome: str
    meaning: str
    attempts: list[RunRecord]
    newer_run: RunRecord | None = None
    note: str | None = None
    now: Forecast | None = None
    database: str = field(default_factory=lambda: database.selected)

    def __str__(self) -> str:
        """Return the outcome; of a run without heartbeats with their age."""
        return outcome_in_words(self.attempts[-1]) if self.attempts else self.outcome

    def as_json(self) -> dict[str, Any]:
        """Return the object of ``housekeeping why --json``."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "database"}
        return name_database(values, self.database)


def why(
    sweep: Sweep,
    tick: datetime | None,
    now: datetime,
    zone: tzinfo,
    was_sent: WasSent = lambda tick: None,
    processes: Processes = UNKNOWN,
    unrecorded: UnrecordedReason = lambda tick: None,
) -> Explanation:
    """Explain a worker's tick.

    Parameters:
      tick: The nominal time, any moment of its minute. None for the latest tick, or the last run of a worker without a
        schedule.
      was_sent: Returns whether a scheduler sent the tick's message; called only for a tick without a ledger row, as
        `unrecorded`.
    """
    name = sweep.name
    cron = Cron(sweep.schedule, zone) if sweep.schedule else None
    if tick is None:
        if cron is None or not sweep.enabled:
            return _last_run(sweep)
        tick = cron.latest(now)
    else:
        tick = tick.replace(second=0, microsecond=0)
    if attempts := history.at_tick(name, tick):
        meaning = _pause_of(attempts[-1]) or meaning_of(attempts[-1])
        return Explanation(name, tick, _outcome(attempts[-1]), meaning, attempts)
    if cron is not None and cron.latest(tick) != tick:
        around = [format_in_zone(each, zone) for each in (cron.latest(tick), cron.next(tick))]
        nearest = f"the ticks around it are {' and '.join(around)}"
        return Explanation(name, tick, "not_a_tick", f"{sweep.schedule!r} does not fire at this minute; {nearest}", [])
    if (gap := _gap_around(name, tick, cron)) is not None:
        return Explanation(name, tick, "missed", meaning_of(gap), [gap])
    return Explanation(name, tick, *_without_a_row(sweep, tick, now, was_sent, processes, unrecorded), [])


#: Newest actions on a worker, among which the pause of a run is looked up.
_ACTIONS: Final = 50


def _pause_of(run: RunRecord) -> str | None:
    """Return who paused the worker of a run, and why, even after the pause has ended; None if unknown."""
    if run.reason != "paused":
        return None
    override = override_of(run.worker)
    if override is not None and override.state == "paused" and override.since and override.since <= run.started_at:
        return f"{describe_with_user(override)}: housekeeping resume {run.worker}"
    with suppress(DatabaseUnavailable):
        for action in logged_actions(_ACTIONS, target=run.worker, until=run.finished_at):
            if action.action == "pause":
                return f"{action.user} had paused it at {action.at:%Y-%m-%d %H:%M:%S} UTC ({action.result_in_words})"
    return None


def _without_a_row(
    sweep: Sweep, tick: datetime, now: datetime, was_sent: WasSent, processes: Processes, unrecorded: UnrecordedReason
) -> tuple[str, str]:
    if not sweep.enabled:
        return "unknown", REASONS["disabled"]
    if (problem := sweep.lacks()) is not None:
        return "unknown", f"{REASONS['not_set_up']} ({problem.text})"
    if sweep.schedule is None:
        return "unknown", "this worker has no schedule: it runs when it is enqueued or run by hand"
    if tick > now:
        return "not_yet", "this tick is in the future"
    if (row := unrecorded(tick)) is not None:
        outcome, reason = row
        return outcome, f"{reason}. The ledger has no row of it yet, because the database did not accept it"
    sent = was_sent(tick)
    no_worker, no_scheduler = no_living_worker(processes, sweep.queue), no_living_scheduler(processes)
    if sent:
        return "waiting", f"it was sent, {f'but {no_worker}' if no_worker else _NOT_TAKEN}"
    if now - tick < _SOON and processes.known and no_scheduler is None:
        return "waiting", "it is being sent, or its message waits in the queue; look again in a minute"
    no_record = ": it is not stored" if processes.known else ""
    known = "no scheduler has sent it" if sent is False else f"whether it was sent is unknown{no_record}"
    made_up = f" {_MADE_UP}" if sent is False or no_scheduler else ""
    found = f"{known}. {_scheduler_then(processes, tick)}. {_ledger_then(sweep.name, tick)}.{made_up}"
    return "unknown" if sent is None else "not_sent", found


def _scheduler_then(processes: Processes, tick: datetime) -> str:
    """Return whether a scheduler was alive at a tick, as far as the heartbeats tell."""
    if not processes.known:
        return "The heartbeats could not be read, so it is unknown whether a scheduler was alive"
    for each in processes.schedulers:
        if each.started_at <= tick and (each.alive or tick <= each.heartbeat_at):
            last = "and is alive" if each.alive else f"its last heartbeat was {each.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC"
            return f"The scheduler {each.name} was running then: since {each.started_at:%Y-%m-%d %H:%M:%S} UTC, {last}"
    if (dead := no_living_scheduler(processes)) is not None:
        return f"{dead[0].upper()}{dead[1:]}"
    started_at = min(each.started_at for each in processes.schedulers if each.alive)
    return f"No scheduler is known from then: the one that is alive began at {started_at:%Y-%m-%d %H:%M:%S} UTC"


def _ledger_then(worker: str, tick: datetime) -> str:
    """Return how far back the ledger has runs of the worker."""
    first = Run.select(fn.MIN(Run.started_at)).where(Run.worker == worker).scalar()
    if first is None:
        return "The ledger has no run of this worker"
    began = f"{first:%Y-%m-%d %H:%M:%S} UTC"
    if tick < first:
        return f"The ledger's first run of this worker is later, {began}; runs are kept for 30 days"
    return f"The ledger, which goes back to {began}, has no run of it"


def _last_run(sweep: Sweep) -> Explanation:
    idle = REASONS["disabled"] if not sweep.enabled else "this worker has no schedule"
    for last in history.recent(sweep.name, 1):
        return Explanation(sweep.name, None, _outcome(last), f"{idle}; its last run: {meaning_of(last)}", [last])
    return Explanation(sweep.name, None, "unknown", f"{idle}, and it never ran", [])


def _gap_around(worker: str, tick: datetime, cron: Cron | None) -> RunRecord | None:
    """Return the row of the recorded gap that includes this tick; None without one."""
    following = Run.select(fn.MIN(Run.tick)).where((Run.worker == worker) & (Run.tick > tick)).scalar()
    row = None if following is None else history.at_tick(worker, following)[0]
    if row is None or row.outcome != "missed":
        return None
    missed = row.counts.get("missed", 0)
    # Otherwise the gap begins after this tick.
    return row if cron is None or cron.count(tick, following, missed) < missed else None


@dataclass(frozen=True, slots=True)
class RunExplanation:
    """Explanation of one run.

    Attributes:
      origin: What started it, and the lost run it took over from.
      meaning: Its outcome and reason as text, with what to do.
      next_step: What happens after it; None for nothing.
      attempts: The runs for its message, oldest first; a hundred at most.
    """

    origin: str
    meaning: str
    next_step: str | None
    attempts: list[RunRecord]


def explain_run(record: RunRecord, sweep: Sweep | None, now: datetime, zone: tzinfo) -> RunExplanation:
    """Explain one run.

    Parameters:
      sweep: The run's worker; None if it is no longer declared.
    """
    attempts = history.attempts_of(record)
    override = None if sweep is None else override_of(record.worker)
    tick = None if sweep is None else next_tick(sweep, now, zone, override)
    steps = [_follow_up(record, attempts), None if tick is None else f"the next tick is {tick:%Y-%m-%d %H:%M} UTC"]
    if sweep is not None and not sweep.enabled:
        steps.append("the worker is disabled in HOUSEKEEPING_WORKERS")
    elif override is not None and override.state == "paused":
        steps.append(f"its runs are skipped ({describe_with_user(override)}): housekeeping resume {record.worker}")
    meaning = _pause_of(record) or meaning_of(record)
    if (restarted_at := history.restarted_during(record)) is not None:
        meaning = f"PostgreSQL was restarted at {restarted_at:%Y-%m-%d %H:%M:%S} UTC, which ended its connection"
    return RunExplanation(_origin(record), meaning, "; ".join(filter(None, steps)) or None, attempts)


def with_newer_run(explanation: Explanation) -> Explanation:
    """Add the worker's latest run, if it belongs to no tick and began after the last attempt at this tick."""
    tick, attempts = explanation.tick, explanation.attempts
    for latest in history.recent(explanation.worker, 1):
        if latest.tick is None and tick is not None:
            newer = latest.run_id > attempts[-1].run_id if attempts else latest.started_at > tick
            return replace(explanation, newer_run=latest) if newer else explanation
    return explanation


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
