"""Alerts about processes: no worker serves a queue, no scheduler is alive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta, tzinfo
from typing import Final

from housekeeping.core.cron import Cron
from housekeeping.core.wording import counted, format_duration
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.alerts import Alert
from housekeeping.sweeps.insight.status import WorkerStatus
from housekeeping.sweeps.processes.heartbeats import Process, Processes

NO_WORKER: Final = "no_worker"
NO_SCHEDULER: Final = "no_scheduler"
#: Minimum time without a scheduler before an alert; a restart takes less.
GRACE: Final = timedelta(minutes=2)
_PERIODS: Final = 2  # periods of the shortest schedule without a scheduler before an alert


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

    Parameters:
      sweeps: The workers that are set up.
      waiting: Waiting messages by queue; empty when unknown.
      ever_ran: Whether the ledger has a run that a worker process executed.
    """
    if not processes.known:
        return []
    scheduled = [sweep for sweep in sweeps if sweep.enabled and sweep.schedule]
    needed = {sweep.queue for sweep in scheduled} | {queue for queue, messages in waiting.items() if messages}
    if not needed:
        return []
    if not processes.every:
        since = "for a day" if ever_ran else "yet"
        found = [Alert(NO_WORKER, f"no worker has sent a heartbeat {since}: start `housekeeping worker`")]
        if scheduled:
            text = f"no scheduler has sent a heartbeat {since}: start `housekeeping scheduler`"
            found.append(Alert(NO_SCHEDULER, text))
        return found
    alerts = [alert for queue in sorted(needed) for alert in _no_worker(processes, queue, waiting.get(queue, 0))]
    if scheduled:
        alerts += _no_scheduler(processes, _shortest_period(scheduled, now, zone))
    return alerts


def never_ran_alerts(
    sweep: Sweep, status: WorkerStatus, processes: Processes, now: datetime, zone: tzinfo
) -> Iterator[Alert]:
    """Yield an alert if a scheduled worker has no row in the ledger, and a scheduler has been alive for many periods.

    Without a living scheduler, the installation has an alert instead.
    """
    most = sweep.alerts.overdue
    alive = [each for each in processes.schedulers if each.alive]
    if status.last_run is not None or status.state not in ("on", "narrow") or most is None or not alive:
        return
    oldest = min(alive, key=lambda each: each.started_at)
    up_s = (now - oldest.started_at).total_seconds()
    limit_s = most * _shortest_period([sweep], now, zone).total_seconds() if sweep.schedule else up_s
    if up_s > limit_s:
        text = f"it has never run, although the scheduler {oldest.name} has been alive for over {most} of its periods"
        yield Alert("overdue", text, limit_s, up_s, oldest.started_at + timedelta(seconds=limit_s))


def no_living_scheduler(processes: Processes) -> str | None:
    """Return since when no scheduler is alive and what to do; None if one is alive or this is unknown."""
    seen = processes.schedulers
    if not processes.known or any(each.alive for each in seen):
        return None
    text = f"no scheduler is alive {_since(seen[0])}" if seen else "no scheduler has run yet, or none for a day"
    return f"{text}: start `housekeeping scheduler`"


def no_living_worker(processes: Processes, queue: str) -> str | None:
    """Return since when no worker serves the queue and what to do; None if one does or this is unknown."""
    seen = processes.serving(queue)
    if not processes.known or any(each.alive for each in seen):
        return None
    since = f" {_since(seen[0])}" if seen else ""
    others = any(each.alive and each.heartbeat.kind == "worker" for each in processes.every)
    do = f"start `housekeeping worker --queues {queue}`" if others else "start `housekeeping worker`"
    return f"no worker serves the queue {queue!r}{since}: {do}"


def _since(last: Process) -> str:
    ago = f"{format_duration(last.age_s)} ago"
    how = f"{last.name} stopped {ago}" if last.heartbeat.stopped else f"last heartbeat of {last.name}, {ago}"
    return f"since {last.heartbeat_at:%Y-%m-%d %H:%M:%S} UTC ({how})"


def _no_worker(processes: Processes, queue: str, waiting: int) -> Iterator[Alert]:
    text = no_living_worker(processes, queue)
    if text is not None:
        messages = f"; {counted(waiting, 'message waits', 'messages wait')}" if waiting else ""
        seen = processes.serving(queue)
        yield Alert(NO_WORKER, f"{text}{messages}", 0, waiting, seen[0].heartbeat_at if seen else None)


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
