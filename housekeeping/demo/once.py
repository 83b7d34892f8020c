"""``demo --once``: run every worker once in the worker process, and compare before and after."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from dramatiq import Actor, Message

from housekeeping.brokers import redis_broker
from housekeeping.brokers.queues import queue_lengths
from housekeeping.cli.formatting import out, print_table
from housekeeping.core.errors import HousekeepingError
from housekeeping.demo.runs import sums_table
from housekeeping.demo.scenes import compared, counted
from housekeeping.demo.stage import Stage
from housekeeping.installation import install
from housekeeping.sweeps.ledger.models import Run

_PATIENCE_S: Final = 120
_POLL_S: Final = 0.1


def run_each_once(stage: Stage, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Enqueue one message for each worker, wait for the runs, and show what changed.

    Raises:
      HousekeepingError: When a process ends, a run fails, or nothing is done for two minutes.
    """
    before = counted()
    actors = actors_without_argument(install(redis_broker(stage.settings), stage.settings))
    sent = [actor.send() for actor in actors.values()]
    # A duplicate's work is done by another message: that of a tick, which is awaited below, or the delayed message of a
    # build worker that its parent has enqueued.
    for message in [message for message in sent if "duplicate_of" not in message.options]:
        _wait(stage, processes, partial(_done, message))
    # Wait for messages that the runs and the scheduler have enqueued meanwhile, so that the numbers add up.
    _wait(stage, processes, partial(_queues_are_empty, stage))
    after = counted()

    print_table(
        sums_table(Run.select().order_by(Run.id), stage.sweeps, "\nruns of the worker process, from the ledger")
    )
    print_table(compared(before, after))
    out.print()
    for run in Run.select().where(Run.outcome.not_in(("done", "partial", "skipped"))):
        raise HousekeepingError(f"{run.worker} ended as {run.outcome}: {run.error or run.reason}")


def actors_without_argument(actors: dict[str, Actor[..., Any]]) -> dict[str, Actor[..., Any]]:
    """Return the actors without an argument; the others are enqueued by their parents."""
    return {name: actor for name, actor in actors.items() if actor.options["sweep"].argument_name is None}


def _done(message: Message[None]) -> bool:
    return bool(Run.select().where((Run.message_id == message.message_id) & Run.outcome.is_null(False)).exists())


def _queues_are_empty(stage: Stage) -> bool:
    names = sorted({sweep.queue for sweep in stage.sweeps.values()})
    return not any(lengths.waiting for lengths in queue_lengths(stage.settings, names).values())


def _wait(stage: Stage, processes: dict[str, subprocess.Popen[bytes]], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        stage.check(processes)
        if time.monotonic() > deadline:
            raise HousekeepingError(f"the workers did not finish within {_PATIENCE_S} s")
        time.sleep(_POLL_S)
