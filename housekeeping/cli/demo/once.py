"""``demo --once``: every worker run once by the worker process, before and after compared."""

from __future__ import annotations

import subprocess
import time
from typing import Final

from dramatiq import Message

from housekeeping.brokers import redis_broker
from housekeeping.cli.demo import statuses
from housekeeping.cli.demo.stage import Stage
from housekeeping.cli.tables import counts, length, out, table
from housekeeping.foundation.errors import HousekeepingError
from housekeeping.installation import install
from housekeeping.sweeps.ledger import Run

_PATIENCE_S: Final = 120
_POLL_S: Final = 0.1


def run_each_once(stage: Stage, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Send each worker one message from here, wait for its run, and show what changed.

    Raises:
      HousekeepingError: When a process ends, a run fails, or nothing happens for two minutes.
    """
    before = statuses.counted()
    actors = install(redis_broker(stage.settings), stage.settings)
    runs = {name: _ended(stage, processes, actor.send()) for name, actor in actors.items()}
    after = statuses.counted()

    ran = table("WORKER", "OUTCOME", ">TOOK", "COUNTS", title="\nruns of the worker process, from the ledger")
    for name, run in runs.items():
        took = (run.finished_at - run.started_at).total_seconds()
        ran.add_row(name, run.outcome, length(took), counts(run.counts))
    out.print(ran)
    changed = table("USER STATUSES", ">BEFORE", ">AFTER", title="\nwhat changed")
    for kind in before:
        note = f" ({statuses.LOCKED} locked by another session)" if kind == "due" else ""
        changed.add_row(f"{kind}{note}", f"{before[kind]:,}", f"{after[kind]:,}")
    out.print(changed)
    out.print()
    for name, run in runs.items():
        if run.outcome not in ("done", "partial"):
            raise HousekeepingError(f"{name} ended as {run.outcome}: {run.error or run.reason}")


def _ended(stage: Stage, processes: dict[str, subprocess.Popen[bytes]], message: Message[None]) -> Run:
    """The finished run that did the message's work (a tick of the schedule may have been there first)."""
    wanted = message.options.get("duplicate_of") or message.message_id
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        for name, process in processes.items():
            stage.check(name, process)
        run = Run.select().where((Run.message_id == wanted) & Run.outcome.is_null(False)).first()
        if isinstance(run, Run):
            return run
        time.sleep(_POLL_S)
    raise HousekeepingError(f"{message.actor_name} did not run within {_PATIENCE_S} s")
