"""How a worker stands: when it last ran and with what outcome, what waits, when it runs next, what rings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from peewee import ProgrammingError

from housekeeping.foundation.cron import Cron
from housekeeping.foundation.db import one_line
from housekeeping.foundation.errors import DatabaseUnavailable, HousekeepingError
from housekeeping.sweeps.backlog import Backlog, backlog, oldest
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.own_tables import Run
from housekeeping.sweeps.passes import as_cursor
from housekeeping.sweeps.switches import Switched, switch_of
from housekeeping.sweeps.walk import in_order

State = Literal["on", "paused", "narrow", "disabled"]

#: Counted for a worker that sets no alarm on its backlog.
_LOOK_AT: Final = 10_000


@dataclass(frozen=True, slots=True)
class Overview:
    """A worker at one moment.

    Attributes:
      switch: What an operator said of it: paused or narrowed, until when and why; null: nothing.
      next_tick: UTC; null when it has no schedule, or is disabled.
      last_run: Its newest row in the ledger, as a dictionary; null when it never ran.
      waiting: The stale rows; null when they could not be seen (`alarms` says why).
      oldest: The first order column of the stale row that is first in order; null when none is stale.
      alarms: What rings, in words.
    """

    worker: str
    state: State
    switch: Switched | None
    schedule: str | None
    next_tick: datetime | None
    last_run: dict[str, Any] | None
    waiting: Backlog | None
    oldest: Any
    alarms: list[str]

    def as_json(self) -> dict[str, Any]:
        """One element of ``workers`` in ``housekeeping status --json``."""
        first = as_cursor((self.oldest,)) or [None]
        return {
            "worker": self.worker,
            "state": self.state,
            "switch": self.switch.as_json() if self.switch else None,
            "schedule": self.schedule,
            "next_tick": self.next_tick.isoformat() if self.next_tick else None,
            "last_run": self.last_run,
            "backlog": self.waiting.rows if self.waiting else None,
            "backlog_exact": self.waiting.exact if self.waiting else None,
            "oldest": first[0],
            "alarms": self.alarms,
        }


def state_of(sweep: Sweep, switch: Switched | None) -> State:
    """Whether the worker runs when its time comes, and whether in its own steps."""
    return "disabled" if not sweep.enabled else switch.state if switch is not None else "on"


def next_tick(sweep: Sweep, now: datetime, zone: Any) -> datetime | None:
    """When the schedule fires next, in UTC; None without one."""
    return Cron(sweep.schedule, zone).next(now) if sweep.schedule and sweep.enabled else None


def overview(sweep: Sweep, now: datetime, zone: Any) -> Overview:
    """Look at a worker: three index probes and a bounded count.

    A table that is missing or must not be read, or another store that does not answer, is an alarm of this
    worker, and hides no other.
    """
    last = last_run(sweep)
    try:
        waiting = backlog(sweep, now, sweep.alarms.backlog or _LOOK_AT)
        first = oldest(sweep, now)
        rings = _alarms(sweep, last, waiting)
    except (ProgrammingError, HousekeepingError) as error:
        if isinstance(error, DatabaseUnavailable):
            raise
        waiting, first, rings = None, None, [f"what waits cannot be seen: {one_line(error)}"]
    switch = switch_of(sweep.name)
    return Overview(
        sweep.name,
        state_of(sweep, switch),
        switch,
        sweep.schedule,
        next_tick(sweep, now, zone),
        last,
        waiting,
        first,
        rings,
    )


def last_run(sweep: Sweep) -> dict[str, Any] | None:
    """The worker's newest row in the ledger; `outcome` is null while it runs."""
    run = Run.select().where(Run.worker == sweep.name).order_by(Run.id.desc()).limit(1).first()
    if run is None:
        return None
    ended = run.finished_at
    return {
        "run_id": run.id,
        "outcome": run.outcome,
        "reason": run.reason,
        "trigger": run.trigger,
        "tick": run.tick.isoformat() if run.tick else None,
        "started_at": run.started_at.isoformat(),
        "duration_s": round((ended - run.started_at).total_seconds(), 3) if ended else None,
        "counts": in_order(sweep, run.counts),
        "error": run.error,
    }


def _alarms(sweep: Sweep, last: dict[str, Any] | None, waiting: Backlog) -> list[str]:
    rings = []
    if sweep.alarms.backlog is not None and not waiting.exact:
        rings.append(f"more than {sweep.alarms.backlog:,} rows wait")
    if last is None:
        return rings
    longest = sweep.alarms.longest_run
    if longest is not None and (last["duration_s"] or 0) > longest.total_seconds():
        rings.append(f"the last run took {last['duration_s']:.0f} s, over {longest.total_seconds():.0f} s")
    if last["outcome"] in ("failed", "lost_lease", "lost"):
        rings.append(f"the last run ended as {last['outcome']}: {last['error'] or last['reason']}")
    for name, most in sweep.alarms.most.items():
        if last["counts"].get(name, 0) > most:
            rings.append(f"the last run counted {last['counts'][name]:,} {name}, over {most:,}")
    if last["counts"].get("failed"):
        rings.append(f"{last['counts']['failed']:,} rows could not be settled")
    return rings
