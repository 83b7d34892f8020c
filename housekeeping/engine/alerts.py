"""Alerts: conditions that need a person, the same in log, status, metrics and dashboard.

`worker_alerts` evaluates what is known of a worker, `process_alerts` the processes. `ledger.alerts` keeps their times.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta, tzinfo
from itertools import islice, takewhile
from typing import Any, Final, get_args

from housekeeping.core import telemetry
from housekeeping.core.clock import TOLERATED, Clock
from housekeeping.core.cron import Cron
from housekeeping.core.logs import counted, error_line, format_duration, shortened
from housekeeping.core.logs import logger as named_logger
from housekeeping.database.connection import database
from housekeeping.engine import CLOCK_SKEWS, RunResult
from housekeeping.engine.failures import Failing, failing
from housekeeping.engine.guard import AT_LEAST, UNCONFIRMED, in_numbers, in_words, is_exceeded, reads_time
from housekeeping.ledger import history
from housekeeping.ledger.alerts import Alert as Alert
from housekeeping.ledger.erasures import LateErasures
from housekeeping.ledger.history import RunRecord
from housekeeping.ledger.processes import LONG_BUSY, UNKNOWN, BusyThread, Process, Processes, ProcessKind
from housekeeping.ledger.runs import PURGE, RESTORE, SILENCE, Outcome
from housekeeping.ledger.schema import Run
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.keyset import ExceptHeld
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.stage import Backlog, Stage
from housekeeping.sweeps.table_stage import TableStage, backlog_of

logger = named_logger(__name__)

#: Backlog rows counted at most for a worker without an alert threshold for its backlog.
DEFAULT_COUNT_LIMIT: Final = 10_000
_FAILED: Final = ("failed", "lost", "lost_lease")
#: Throttled runs in a row that raise an alert; fewer may be a passing problem.
THROTTLED_RUNS: Final = 3
#: Arguments that an alert about failed runs names, and the characters of each one's cause.
_NAMED_ARGUMENTS: Final = 5
_LONGEST_CAUSE: Final = 120
#: Advice about an exceeded breaker, by its action.
_ADVICE: Final = {
    "alert": "the run continues; if these rows should stay: housekeeping pause NAME",
    "limit": "each run stops there; to process all at once: housekeeping plan NAME, then run --confirm",
    "stop": "runs stop; to continue: housekeeping plan NAME, then run --confirm",
}
MOST_RUNS: Final = 50  # older runs say little about the current rate
#: Time without a heartbeat by which another run has taken over: the run is dead after `SILENCE`, and Redis or RabbitMQ
#: delivers its message again within another one (`brokers.redis.HEARTBEAT_TIMEOUT_MS`).
TAKEOVER: Final = 2 * SILENCE
#: Reasons of skipped runs that were held back by an operator, or that have an alert of their own. They are not overdue.
HELD_BACK: Final = ("disabled", "paused", UNCONFIRMED)
NO_WORKER: Final = "no_worker"
NO_SCHEDULER: Final = "no_scheduler"
LATE: Final = "late"
UNAVAILABLE: Final = "unavailable"
NO_SPACE: Final = "no_space"
SATURATED: Final = "saturated"
DEAD_LETTERS: Final = "dead_letters"
ERASURE_LATE: Final = "erasure_late"
#: Minimum time without a scheduler before an alert; a restart takes less.
GRACE: Final = timedelta(minutes=2)
#: Beginning of the names of the workers of the library's own tables, which are always active.
_MAINTENANCE: Final = "housekeeping."
_PERIODS: Final = 2  # periods of the shortest schedule without a scheduler before an alert
#: Outcomes that a run can have as a metric.
OUTCOMES: tuple[str, ...] = tuple(outcome for outcome in get_args(Outcome) if outcome not in ("lost", "missed"))


#: A run that began and ended: its result, or its row in the ledger.
EndedRun = RunResult | RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is known of a worker when its alerts are evaluated. What is left out raises no alert.

    Attributes:
      ended: Its last runs that began and ended, the last one to end last.
      failing: Arguments whose last runs failed, and their number.
      waiting: Its backlog.
      uncounted: Why the backlog could not be counted.
      late: The alert about rows that are older than promised.
      open_runs: Its open runs, and the time at which they were read.
      unconfirmed: Counts of a skipped run that waits for a confirmation.
      attempted_at: When a run last began or was held back.
      period: Period of its schedule; None if no tick is due: it has none, or is paused or disabled.
      processes: Tells in which thread a run is.
    """

    now: datetime
    ended: Sequence[EndedRun] = ()
    failing: tuple[Sequence[Failing], int] = ((), 0)
    waiting: Backlog | None = None
    uncounted: str | None = None
    late: Alert | None = None
    open_runs: Sequence[RunRecord] = ()
    unconfirmed: Mapping[str, Any] = field(default_factory=dict)
    attempted_at: datetime | None = None
    period: timedelta | None = None
    processes: Processes = UNKNOWN


def worker_alerts(sweep: Sweep, seen: Observation) -> list[Alert]:
    """Return a worker's alerts, each once. Skipped and missed ticks, and a run that has just begun, end none."""
    last = seen.ended[-1] if seen.ended else None
    alerts = [*_backlog(sweep, seen), *_late(sweep, seen), *_stuck(sweep, seen)]
    for run in seen.open_runs:
        alerts += _of_counts(sweep, (seen.now - run.started_at).total_seconds(), run.counts, open_run=run.run_id)
        alerts += breaker_alerts(sweep, run.counts)
    if last is not None:
        of_last = [*_of_counts(sweep, last.duration_s or 0.0, last.counts), *_last_run(seen.ended)]
        alerts += [replace(alert, since=alert.since or last.finished_at) for alert in of_last]
    alerts += _unconfirmed(seen.unconfirmed)
    alerts += _failed_runs(sweep, seen)
    alerts += breaker_alerts(sweep, next((run.counts for run in _that_looked(seen.ended)), {}))
    alerts += _throttled(seen.ended)
    alerts += _overdue(sweep, seen)
    # An open run and the last ended one may raise the same alert.
    once = {alert.name: alert for alert in reversed(alerts)}
    return [replace(alert, worker=sweep.name) for alert in reversed(list(once.values()))]


def _of_counts(
    sweep: Sweep, duration_s: float, counts: Mapping[str, Any], open_run: int | None = None
) -> Iterator[Alert]:
    """Yield the alerts of one run, ended or open."""
    longest = sweep.alerts.longest_run
    if longest is not None and duration_s > longest.total_seconds():
        most_s = longest.total_seconds()
        said = "the last run took" if open_run is None else f"run {open_run} has taken"
        yield Alert("longest_run", f"{said} {duration_s:.0f} s, over {most_s:.0f} s", most_s, duration_s)
    if failed := counts.get("failed"):
        yield Alert("failed_rows", f"{counted(failed, 'row')} could not be processed", 0, failed)
    skews = [(counts[name], server) for server, name in CLOCK_SKEWS.items() if name in counts]
    if skews:
        ahead_s, server = max(skews, key=lambda skew: abs(skew[0]))
        tolerated_s, side = TOLERATED.total_seconds(), "ahead of" if ahead_s > 0 else "behind"
        text = f"the clock of the last run's machine was {abs(ahead_s):,.1f} s {side} {server}'s; check NTP"
        yield Alert("clock", text, tolerated_s, abs(ahead_s))
    for name, most in sweep.alerts.most.items():
        if (number := counts.get(name, 0)) > most:
            yield Alert(f"most_{name}", f"the last run counted {number:,} {name}, over {most:,}", most, number)


def _backlog(sweep: Sweep, seen: Observation) -> Iterator[Alert]:
    most, wait = sweep.alerts.backlog, (f"{sweep.unit} waits", f"{sweep.unit}s wait")
    if most is not None and seen.waiting is not None and seen.waiting.exceeds(most):
        yield Alert("backlog", f"more than {counted(most, *wait)}", most, seen.waiting.rows)
    if seen.uncounted is not None:
        yield Alert("unseen", f"the backlog cannot be counted: {seen.uncounted}")


def _late(sweep: Sweep, seen: Observation) -> Iterator[Alert]:
    if seen.late is not None:
        yield seen.late
    elif seen.uncounted is not None and sweep.alerts.late is not None:
        yield unknown_age(sweep, seen.uncounted)


def late_limit(sweep: Sweep) -> timedelta | None:
    """Return the age from which a row is late; None if the sweep promises no age."""
    promised = sweep.alerts.late
    return None if promised is None else promised + (sweep.stale_after or timedelta())


def late_alert(sweep: Sweep, now: datetime) -> Alert | None:
    """Return the alert about stale rows older than promised, without those on hold; None if there are none.

    Raises:
      peewee.PeeweeException, Exception: The rows cannot be read, or a predicate fails.
    """
    promised, limit = sweep.alerts.late, late_limit(sweep)
    if promised is None or limit is None:
        return None
    late, times = False, list[datetime]()
    for stage in sweep.stages_for_run():
        if not stage.backlog(now - promised, 1).rows:
            continue
        since, is_late = _as_time(stage.oldest(now - promised)), _reads_time(stage)
        if since is None and not is_late:
            return unknown_age(sweep, f"stage {stage.name} is not ordered by a time, and `stale` does not use its time")
        # If `stale` does not use the time, the age is that of the order column.
        if is_late or (since is not None and since <= now - promised):
            late = True
            times += [] if since is None else [since]
    if not late:
        return None
    text, value = f"rows stay stale for over {format_duration(promised.total_seconds())}", None
    if times:
        age_s = (now - min(times)).total_seconds()
        text += f"; the oldest one is from {min(times):%Y-%m-%d %H:%M:%S} UTC, {format_duration(age_s)} ago"
        value = age_s if age_s > limit.total_seconds() else None
    return Alert(LATE, text, limit.total_seconds(), value)


def unknown_age(sweep: Sweep, why: str) -> Alert:
    """Return the alert of a sweep whose oldest stale row has an unknown age."""
    limit = late_limit(sweep) or timedelta()
    return Alert(LATE, f"the age of the oldest stale row cannot be read: {why}", limit.total_seconds())


def _reads_time(stage: Stage) -> bool:
    """Return whether the stale condition of a stage depends on the time."""
    if not isinstance(stage, TableStage):
        return isinstance(stage, PartitionStage)
    return reads_time(stage.stale.stale if isinstance(stage.stale, ExceptHeld) else stage.stale)


def _as_time(value: Any) -> datetime | None:
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    return datetime.combine(value, datetime.min.time(), UTC) if isinstance(value, date) else None


def failing_arguments(sweeps: Iterable[Sweep]) -> Mapping[str, tuple[Sequence[Failing], int]]:
    """Return, by worker, the arguments whose last runs failed too often, longest failing first, and their number."""
    most = {each.name: each.alerts.failed_runs or 0 for each in sweeps if each.argument is not None}
    return failing({name: runs for name, runs in most.items() if runs}, _NAMED_ARGUMENTS)


def _failed_runs(sweep: Sweep, seen: Observation) -> Iterator[Alert]:
    """Yield an alert if too many runs in a row failed, of a worker with an argument too many with the same argument."""
    most, (found, number) = sweep.alerts.failed_runs, seen.failing
    if most is None:
        return
    last = [run.outcome for run in islice(reversed(seen.ended), most)]
    if found:
        yield Alert("failed_runs", _in_words(sweep, found, number), most, found[0].runs, found[0].since)
    elif len(last) == most and all(map(is_failed, last)):
        why = shortened(_error_of(seen.ended[-1]), _LONGEST_CAUSE)
        text = f"{counted(most, 'run')} in a row failed, the last one with: {why}"
        yield Alert("failed_runs", text, most, most, _failing_since(seen.ended))


def _in_words(sweep: Sweep, found: Sequence[Failing], number: int) -> str:
    """Return the text about arguments whose last runs failed, the longest failing ones by name."""
    named = [
        f"{each.argument} ({counted(each.runs, 'run')} in a row since {each.since:%Y-%m-%d %H:%M} UTC: "
        f"{shortened(each.cause, _LONGEST_CAUSE)})"
        for each in found
    ]
    more = [f"and {number - len(found):,} more"] if number > len(found) else []
    label = "argument" if sweep.argument is None else sweep.argument.label
    return f"{label} {', '.join([*named, *more])}: failed, or rejected every row"


def is_failed(outcome: str | None) -> bool:
    """Return whether a run with this outcome has failed."""
    return outcome in _FAILED


def _last_run(ended: Sequence[EndedRun]) -> Iterator[Alert]:
    last = ended[-1]
    if is_failed(last.outcome):
        text = f"the last run ended as {last.outcome}: {_error_of(last)}"
        yield Alert("last_run", text, since=_failing_since(ended))


def _error_of(run: EndedRun) -> str:
    why = error_line(run.error) if isinstance(run.error, BaseException) else run.error
    return str(why or run.reason)


def _failing_since(ended: Sequence[EndedRun]) -> datetime | None:
    """Return when the first of the last runs ended that all failed."""
    return list(takewhile(lambda run: is_failed(run.outcome), reversed(ended)))[-1].finished_at


def breaker_alerts(sweep: Sweep, counts: Mapping[str, Any]) -> Iterator[Alert]:
    """Yield an alert if a run exceeded its breaker, with the numbers and what to do."""
    if not is_exceeded(counts):
        return
    count = counts["breaker"]
    stale, allowed = count["stale"], count["allowed"]
    found = None if stale is None else stale + (not count["exact"])
    text = f"{in_numbers(count)}; {_ADVICE[count['action']]}".replace("NAME", sweep.name)
    yield Alert("breaker", text, allowed, found)


def _unconfirmed(counts: Mapping[str, Any]) -> Iterator[Alert]:
    """Yield an alert if the worker's runs wait for a confirmation, with the commands to type."""
    if (count := counts.get(UNCONFIRMED)) is not None:
        yield Alert(UNCONFIRMED, in_words(count), count.get("limit", AT_LEAST), count["stale"])


def _that_looked(ended: Sequence[EndedRun]) -> Iterator[EndedRun]:
    """Yield the runs that have looked at the rows, newest first. A wrong clock ends a run before that."""
    return (run for run in reversed(ended) if run.reason != "clock")


def _throttled(ended: Sequence[EndedRun]) -> Iterator[Alert]:
    """Yield an alert if the last runs all ended early because they were throttled."""
    last = list(islice(_that_looked(ended), THROTTLED_RUNS))
    if len(last) < THROTTLED_RUNS or any(run.reason != "gate" for run in last) or "throttled" not in last[0].counts:
        return
    gate, value, limit = (last[0].counts["throttled"][name] for name in ("gate", "value", "limit"))
    by_number = limit is not None
    found = f"{gate} {value:g} > {limit:g}" if by_number else f"{gate} ({value})"
    yield Alert(
        "throttled",
        f"{found} slowed the last {THROTTLED_RUNS} runs and ended them early; "
        f"each processed a few rows. Fix the cause, or set another limit: gates.{gate}",
        limit,
        value if by_number else None,
    )


def _overdue(sweep: Sweep, seen: Observation) -> Iterator[Alert]:
    """Yield an alert if a scheduled worker has not run for too many periods; missed ticks are not runs."""
    most = sweep.alerts.overdue
    if seen.period is None or most is None or not all(run.lost for run in seen.open_runs):
        return
    limit_s = most * seen.period.total_seconds()
    if seen.attempted_at is not None:
        silent_s = (seen.now - seen.attempted_at).total_seconds()
        text = f"it has not run for {format_duration(silent_s)}, over {most} of its periods; is the scheduler alive?"
    else:
        # Without a living scheduler, the installation has an alert instead.
        alive = [each for each in seen.processes.schedulers if each.alive]
        if not alive:
            return
        oldest = max(alive, key=lambda each: each.heartbeat.up_s)
        silent_s = oldest.heartbeat.up_s + oldest.age_s
        text = f"it has never run, although the scheduler {oldest.name} has been alive for over {most} of its periods"
    if silent_s > limit_s:
        yield Alert("overdue", text, limit_s, silent_s, seen.now - timedelta(seconds=silent_s - limit_s))


def stuck_after(sweep: Sweep) -> timedelta:
    """Return the time after which an open run is stuck, whether or not it sends heartbeats.

    A run begins no batch after its `runtime`, and a batch without a heartbeat for longer than `SILENCE` is dead.
    """
    return sweep.limits.runtime + SILENCE


def _stuck(sweep: Sweep, seen: Observation) -> Iterator[Alert]:
    """Yield an alert if runs exceed their time, or are silent and no other run has taken over; the oldest one first."""
    now, stuck = seen.now, list[tuple[datetime, timedelta, str, str, str | None]]()
    threads = [(process, each) for process, each in seen.processes.busy_threads if each.worker == sweep.name]
    for run in seen.open_runs:
        if (run.silent_s or 0.0) > TAKEOVER.total_seconds():
            since, limit, what = run.heartbeat_at + TAKEOVER, TAKEOVER, "sent no heartbeat"
        # A purge or a restoration takes the time that it needs.
        elif now > (late_at := run.started_at + stuck_after(sweep)) and not run.counts.keys() & {PURGE, RESTORE}:
            since, limit, what = late_at, stuck_after(sweep), "not ended"
        else:
            continue
        place = next((_place(*each) for each in threads if each[1].message_id == run.message_id), run.process)
        do = f"Look: housekeeping runs {run.label}; then restart its process{f', {place}' if place else ''}"
        lasting = f"run {run.label} has {what} since {_lasting(since - limit, limit, now)}"
        stuck.append((since, limit, lasting, do, run.label))
    open_messages = {run.message_id for run in seen.open_runs}
    for process, thread in threads:
        began, limit = now - timedelta(seconds=thread.busy_s + process.age_s), stuck_after(sweep)
        if now - began > limit and thread.message_id not in open_messages:
            what = f"a thread has not left its run since {_lasting(began, limit, now)}; the run was taken over or ended"
            stuck.append((began + limit, limit, what, f"Restart its process, {_place(process, thread)}", None))
    if stuck:
        since, limit, what, do, label = min(stuck, key=lambda each: each[0])
        more = f"; {counted(len(stuck) - 1, 'more run is', 'more runs are')} stuck" if len(stuck) > 1 else ""
        lasts_s = (now - since + limit).total_seconds()
        yield Alert("stuck", f"{what}{more}. {do}", limit.total_seconds(), lasts_s, since, run=label)


def _lasting(began: datetime, limit: timedelta, now: datetime) -> str:
    lasts, most = (format_duration(each.total_seconds()) for each in (now - began, limit))
    return f"{began:%Y-%m-%d %H:%M:%S} UTC, for {lasts}, over {most}"


def _place(process: Process, thread: BusyThread) -> str:
    return f"{process.name}: its thread {thread.name} is at {thread.frame}"


def process_alerts(
    sweeps: Iterable[Sweep],
    processes: Processes,
    waiting: Mapping[str, int],
    now: datetime,
    zone: tzinfo,
    *,
    ever_ran: bool,
) -> list[Alert]:
    """Return the alerts of the whole installation; none when the heartbeats could not be read.

    An installation that has only the maintenance of the library's own tables needs no process before it has had one:
    it may only use `housekeeping purge`, or only the middleware.

    Parameters:
      sweeps: The workers that are set up.
      waiting: Waiting messages by queue; empty when unknown.
      ever_ran: Whether the ledger has a run that a worker process executed.
    """
    if not processes.known:
        return []
    in_use = ever_ran or bool(processes.schedulers)
    scheduled = [
        sweep
        for sweep in sweeps
        if sweep.enabled and sweep.schedule and (in_use or not sweep.name.startswith(_MAINTENANCE))
    ]
    needed = {sweep.queue for sweep in scheduled} | {queue for queue, messages in waiting.items() if messages}
    if not needed:
        return []
    if not processes.every:
        kinds: list[tuple[str, ProcessKind]] = [(NO_WORKER, "worker"), (NO_SCHEDULER, "scheduler")]
        since = "for a day" if ever_ran else "yet"
        return [
            Alert(
                name,
                f"no {kind} has sent a heartbeat {since}: start `{processes.command(kind)}`",
                never_seen=not ever_ran,
            )
            for name, kind in (kinds if scheduled else kinds[:1])
        ]
    alerts = [alert for queue in sorted(needed) for alert in _no_worker(processes, queue, waiting.get(queue, 0))]
    for queue, messages in sorted(waiting.items()):
        of_queue = [sweep for sweep in scheduled if sweep.queue == queue]
        period = _shortest_period(of_queue, now, zone) if of_queue else GRACE
        alerts += _saturated(processes, queue, messages, max(period, LONG_BUSY), now)
    if scheduled:
        alerts += _no_scheduler(processes, _shortest_period(scheduled, now, zone))
    return alerts


def no_living_scheduler(processes: Processes) -> str | None:
    """Return since when no scheduler is alive and what to do; None if one is alive or this is unknown."""
    seen = processes.schedulers
    if not processes.known or any(each.alive for each in seen):
        return None
    text = f"no scheduler is alive {_silent_since(seen[0])}" if seen else "no scheduler has run yet, or none for a day"
    return f"{text}: start `{processes.command('scheduler')}`"


def no_living_worker(processes: Processes, queue: str) -> str | None:
    """Return since when no worker serves the queue and what to do; None if one does or this is unknown."""
    seen = processes.serving(queue)
    if not processes.known or any(each.alive for each in seen):
        return None
    since = f" {_silent_since(seen[0])}" if seen else ""
    others = any(each.alive and each.heartbeat.kind == "worker" for each in processes.every)
    of_queue = f" --queues {queue}" if others and not processes.alone else ""
    do = f"start `{processes.command('worker')}{of_queue}`"
    return f"no worker serves the queue {queue!r}{since}: {do}"


def _silent_since(last: Process) -> str:
    ago = f"{format_duration(last.age_s)} ago"
    how = f"{last.name} stopped {ago}" if last.heartbeat.stopped else f"last heartbeat of {last.name}, {ago}"
    return f"since {last.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC ({how})"


def _no_worker(processes: Processes, queue: str, waiting: int) -> Iterator[Alert]:
    text = no_living_worker(processes, queue)
    if text is not None:
        messages = f"; {counted(waiting, 'message waits', 'messages wait')}" if waiting else ""
        seen = processes.serving(queue)
        since = seen[0].heartbeat_at if seen else None
        yield Alert(NO_WORKER, f"{text}{messages}", 0, waiting, since, subject=queue)


def _saturated(processes: Processes, queue: str, messages: int, limit: timedelta, now: datetime) -> Iterator[Alert]:
    """Yield an alert if all threads of a queue have been busy for too long, and more messages than those wait."""
    alive = [each for each in processes.serving(queue) if each.alive]
    busy = [(each.busy_s + process.age_s, each.worker) for process in alive for each in process.heartbeat.busy_threads]
    threads = sum(process.heartbeat.threads for process in alive)
    waiting = messages - sum(process.heartbeat.busy for process in alive)  # a broker may count those at work
    shortest_s = min((busy_s for busy_s, _ in busy), default=0.0)
    if not threads or len(busy) < threads or waiting <= 0 or shortest_s <= limit.total_seconds():
        return
    at_work = ", ".join(f"{worker} ({number:,})" for worker, number in Counter(name for _, name in busy).most_common(5))
    text = (
        f"all {counted(threads, 'thread')} of the queue {queue!r} have been busy for {format_duration(shortest_s)}, "
        f"and {counted(waiting, 'message waits', 'messages wait')}; at work: {at_work}. "
        f"Start another `{processes.command('worker')}`"
    )
    since = now - timedelta(seconds=shortest_s) + limit
    yield Alert(SATURATED, text, limit.total_seconds(), shortest_s, since, subject=queue)


def _no_scheduler(processes: Processes, period: timedelta) -> Iterator[Alert]:
    text = no_living_scheduler(processes)
    limit_s = max(_PERIODS * period, GRACE).total_seconds()
    seen = processes.schedulers
    # Without any scheduler so far, the time counts from the start of the first process.
    silent_s = seen[0].age_s if seen else max(each.heartbeat.up_s + each.age_s for each in processes.every)
    if text is not None and silent_s > limit_s:
        yield Alert(NO_SCHEDULER, text, limit_s, silent_s, seen[0].heartbeat_at if seen else None)


def _shortest_period(scheduled: Iterable[Sweep], now: datetime, zone: tzinfo) -> timedelta:
    return min(Cron(sweep.schedule, zone).period(now) for sweep in scheduled if sweep.schedule)


def erasure_alerts(late: LateErasures, limit: timedelta, now: datetime) -> Iterator[Alert]:
    """Yield an alert if erasures that were requested longer ago than the limit are not done."""
    if late.oldest_id is None or late.oldest_at is None:
        return
    ago_s = (now - late.oldest_at).total_seconds()
    text = (
        f"{counted(late.number, 'erasure')} {'is' if late.number == 1 else 'are'} not done after "
        f"{format_duration(limit.total_seconds())}; erasure {late.oldest_id} was requested {format_duration(ago_s)} "
        f"ago and is {late.oldest_state}: housekeeping erasures"
    )
    yield Alert(ERASURE_LATE, text, limit.total_seconds(), ago_s, late.oldest_at + limit)


def send_alerts(sweep: Sweep, result: RunResult, clock: Clock) -> None:
    """Log the alerts of a run that ended, set their metrics, and record the backlog in its row; never raises."""
    seen = Observation(now=clock.now(), ended=[result])
    if result.reason == UNCONFIRMED:
        seen = Observation(now=clock.now(), unconfirmed=result.counts)
    elif result.outcome == "skipped":
        return
    elif result.run_id is not None:
        seen = _observe_end(sweep, result, clock)
    alerts = worker_alerts(sweep, seen)
    active = {alert.name for alert in alerts}
    # Without the database the other alerts are unknown.
    others = _limits_of(sweep) if result.run_id is not None and result.reason != UNCONFIRMED else ()
    for name in {*others, *active}:
        telemetry.ALARM.set(name in active, sweep.name, name)
    # The line of the run's end has its failure, which may be why the backlog cannot be counted.
    said = {"last_run", *(("unseen", LATE) if seen.uncounted and seen.uncounted in str(result.reason) else ())}
    for alert in alerts:
        # Runs with one argument fail while those with others succeed.
        if alert.name not in said and (alert.name != "failed_runs" or result.exit_code):
            logger.warning("Alert", alarm=alert.name, text=alert.text, limit=alert.limit, value=alert.value)


def _observe_end(sweep: Sweep, result: RunResult, clock: Clock) -> Observation:
    """Return what is known at the end of a run. Its open siblings and its schedule are not its business."""
    seen = Observation(now=clock.now(), ended=[result])
    try:
        if result.exit_code or result.reason == "gate":
            with database.atomic():
                before = [run for run in last_ended(sweep) if run.run_id != result.run_id]
            seen = replace(seen, ended=[*before, result])
        if sweep.argument is not None:
            with database.atomic():
                seen = replace(seen, failing=failing_arguments([sweep]).get(sweep.name, seen.failing))
    except Exception as error:
        logger.warning("Could not read the ledger", error=error_line(error))
    if result.nothing_left:
        record_backlog(sweep, Backlog(0), None, clock.now())
        return replace(seen, waiting=Backlog(0))
    if sweep.records_backlog:
        try:
            with database.atomic():
                waiting = _record_backlog(sweep, result.run_id, clock)
                late = late_alert(sweep, clock.now()) if waiting.rows else None
                seen = replace(seen, waiting=waiting, late=late)
        except Exception as error:  # a predicate may raise anything
            seen = replace(seen, uncounted=error_line(error))
    return seen


def _record_backlog(sweep: Sweep, run_id: int | None, clock: Clock) -> Backlog:
    waiting = backlog(sweep, clock.now(), sweep.alerts.backlog or DEFAULT_COUNT_LIMIT)
    first = oldest(sweep, clock.now()) if waiting.rows else None
    at = first if isinstance(first, datetime) else None
    Run.update(backlog=waiting.rows, backlog_exact=waiting.exact, oldest_at=at).where(Run.id == run_id).execute()
    record_backlog(sweep, waiting, first, clock.now())
    return waiting


def backlog(sweep: Sweep, now: datetime, limit: int) -> Backlog:
    """Return the stale rows of all stages, counted up to `limit`. If there are more: `limit`, and not exact."""
    return up_to(limit, backlog_of(sweep.stages_for_run(), now, limit))


def up_to(limit: int, waiting: Backlog) -> Backlog:
    """Return the backlog, cut off at the limit: then it is not exact."""
    return waiting if waiting.rows <= limit else Backlog(limit, exact=False)


def total_held(counts: Iterable[Backlog | None]) -> Backlog | None:
    """Return the sum of the stages' rows on hold; None if no stage has a hold."""
    found = [each for each in counts if each is not None]
    return sum(found, Backlog(0)) if found else None


def oldest(sweep: Sweep, now: datetime) -> Any:
    """Return the oldest stale row's first order column, usually its time; None without stale rows."""
    return first_of(each.oldest(now) for each in sweep.stages_for_run())


def first_of(values: Iterable[Any], least: Callable[[list[Any]], Any] = min) -> Any:
    """Return the least of the stages' values without None; None if there is none.

    Stages may be ordered by different types, such as times and ids. Then the type of the first value is compared.
    """
    present = [value for value in values if value is not None]
    return least([value for value in present if type(value) is type(present[0])]) if present else None


def last_ended(sweep: Sweep) -> list[RunRecord]:
    """Return the worker's last runs that began and ended, oldest first."""
    return history.last_ended(sweep.name, runs_looked_at(sweep))


def runs_looked_at(sweep: Sweep) -> int:
    """Return the number of past runs that the alerts of the worker are evaluated from."""
    return max(MOST_RUNS, sweep.alerts.failed_runs or 0)


def declare_metrics(sweep: Sweep, cron: Cron | None) -> None:
    """Export a worker's metrics as 0 before its first run, so that ``increase()`` counts even the first error.

    Parameters:
      cron: Its schedule; None if it has none.
    """
    telemetry.WAITING_SINCE.set(time.time(), sweep.name)
    if database.several():
        telemetry.WORKER_DATABASE.set(1, sweep.name, sweep.database)
    for outcome in OUTCOMES:
        telemetry.RUNS.add(sweep.name, outcome, number=0)
    for name in counted_by(sweep):
        telemetry.ROWS.add(sweep.name, name, number=0)
    for alert, limit in _limits_of(sweep).items():
        telemetry.ALARM.set(0, sweep.name, alert)
        if limit is not None:
            telemetry.ALARM_LIMIT.set(limit, sweep.name, alert)
    telemetry.ALARM_LIMIT.set(stuck_after(sweep).total_seconds(), sweep.name, "stuck")
    telemetry.OPEN_RUN.set(0, sweep.name)
    if sweep.alerts.overdue is not None and cron is not None:
        period_s = cron.period(datetime.now(UTC)).total_seconds()
        telemetry.ALARM_LIMIT.set(sweep.alerts.overdue * period_s, sweep.name, "overdue")


def record_backlog(sweep: Sweep, waiting: Backlog, oldest: Any, now: datetime) -> None:
    """Record the backlog after a run.

    Parameters:
      oldest: The oldest stale row's first order column; recorded if it is a time.
    """
    # A count that stopped at its limit means at least one row more.
    telemetry.BACKLOG.set(waiting.rows + (not waiting.exact), sweep.name)
    if not waiting.rows:
        telemetry.OLDEST.set(0, sweep.name)
    elif isinstance(oldest, datetime):
        since = oldest if oldest.tzinfo else oldest.replace(tzinfo=UTC)
        telemetry.OLDEST.set((now - since).total_seconds(), sweep.name)


def counted_by(sweep: Sweep) -> Iterator[str]:
    """Yield the counts that are numbers, with ``failed``, which every worker has."""
    numbers = (name for name in sweep.counts if name not in ("out_of_time", "execution_timeout"))
    yield from dict.fromkeys((*numbers, "failed"))


def _limits_of(sweep: Sweep) -> dict[str, float | None]:
    """Return the alerts that the end of a run raises or clears, with their limits; None where it is not a number."""
    thresholds = sweep.alerts
    found: dict[str, float | None] = {"failed_rows": 0, "clock": TOLERATED.total_seconds()}
    found |= dict.fromkeys(("last_run", "breaker", "throttled"))
    found |= {f"most_{name}": most for name, most in thresholds.most.items()}
    if sweep.guard.first_run:
        found[UNCONFIRMED] = None
    if thresholds.longest_run is not None:
        found["longest_run"] = thresholds.longest_run.total_seconds()
    if thresholds.failed_runs is not None:
        found["failed_runs"] = thresholds.failed_runs
    if sweep.argument is None:
        found |= {"unseen": None} if thresholds.backlog is None else {"unseen": None, "backlog": thresholds.backlog}
        if (limit := late_limit(sweep)) is not None:
            found[LATE] = limit.total_seconds()
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
