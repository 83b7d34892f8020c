"""``demo --once``: every worker run once by the worker process, before and after compared."""

from __future__ import annotations

import subprocess
import time
from typing import Any, Final

from dramatiq import Actor, Message

from housekeeping.brokers import redis_broker
from housekeeping.cli.demo.runs import runs_table
from housekeeping.cli.demo.scenes import compared, counted
from housekeeping.cli.demo.stage import Stage
from housekeeping.cli.tables import out
from housekeeping.foundation.errors import HousekeepingError
from housekeeping.installation import install
from housekeeping.queues import queue_lengths
from housekeeping.sweeps.ledger import Run

_PATIENCE_S: Final = 120
_POLL_S: Final = 0.1
_SHOWN: Final = 40  # runs in the table at the end


def run_each_once(stage: Stage, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Send each worker one message from here, wait for its run, and show what changed.

    Raises:
      HousekeepingError: When a process ends, a run fails, or nothing happens for two minutes.
    """
    before = counted()
    sent = {
        name: actor.send() for name, actor in to_be_sent(install(redis_broker(stage.settings), stage.settings)).items()
    }
    runs = {name: _ended(stage, processes, message) for name, message in sent.items()}
    _wait_for_children(stage, processes)
    after = counted()

    out.print(runs_table(stage.sweeps, _SHOWN))
    out.print(compared(before, after))
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


def to_be_sent(actors: dict[str, Actor[..., Any]]) -> dict[str, Actor[..., Any]]:
    """The actors that are sent from here: those that take no argument, which their parents send by themselves."""
    return {name: actor for name, actor in actors.items() if actor.options["sweep"].takes_argument is None}


def _wait_for_children(stage: Stage, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Wait until what the runs sent on to other workers is done, too."""
    deadline = time.monotonic() + _PATIENCE_S
    names = sorted({sweep.queue for sweep in stage.sweeps.values()})
    while any(lengths.waiting for lengths in queue_lengths(stage.settings, names).values()):
        for name, process in processes.items():
            stage.check(name, process)
        if time.monotonic() > deadline:
            raise HousekeepingError(f"the queues are not empty after {_PATIENCE_S} s")
        time.sleep(_POLL_S)
