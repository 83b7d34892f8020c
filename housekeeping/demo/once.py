"""``demo --once``: run every worker once, compare before and after; also tables of runs from the ledger."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from dramatiq import Actor, Message
from rich.table import Table

from housekeeping.brokers import redis_broker
from housekeeping.brokers.queues import queue_lengths
from housekeeping.cli.formatting import out
from housekeeping.cli.tables import print_table, table
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.wording import format_duration
from housekeeping.demo.scenes import compared, counted
from housekeeping.demo.stage import Stage
from housekeeping.installation import install
from housekeeping.presentation.formatting import format_counts
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.counts import in_order
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


_SENT_BY: Final = {"enqueue": "demo"}  # the ledger records the demo's messages as enqueued by the application


def runs_table(runs: Iterable[Run], sweeps: dict[str, Sweep], *, wide: bool) -> Table:
    """Return a table with one row per run; `wide` adds its trigger and start."""
    further = ("SENT BY", "STARTED (UTC)") if wide else ()
    shown = table("LAST RUNS OF", *further, "OUTCOME", ">TOOK", "DID")
    for run in runs:
        origin = (_SENT_BY.get(run.trigger, run.trigger), run.started_at.strftime("%H:%M:%S")) if wide else ()
        shown.add_row(
            run.worker,
            *origin,
            run.outcome or "running",
            format_duration(_seconds(run)) if run.finished_at else "-",
            _did(run.counts, run.reason, sweeps.get(run.worker)) if run.outcome or any(run.counts.values()) else "-",
        )
    return shown


def sums_table(runs: Iterable[Run], sweeps: dict[str, Sweep], title: str) -> Table:
    """Return a table with one row for all runs with the same worker, trigger, outcome and reason."""
    alike: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.worker, run.trigger, run.outcome, run.reason), []).append(run)
    shown = table("WORKER", "SENT BY", ">RUNS", "OUTCOME", ">TOOK", "DID", title=title)
    for (worker, trigger, outcome, reason), same in alike.items():
        total: Counter[str] = Counter()
        for run in same:
            # Flags such as out_of_time are no numbers, and details such as throttled have no sum.
            total.update({name: value for name, value in run.counts.items() if type(value) is int})
        took = format_duration(sum(map(_seconds, same)))
        did = _did(dict(total), reason, sweeps.get(worker))
        shown.add_row(worker, _SENT_BY.get(trigger, trigger), str(len(same)), outcome, took, did)
    return shown


def _seconds(run: Run) -> float:
    seconds: float = (run.finished_at - run.started_at).total_seconds()
    return seconds


def _did(did: dict[str, Any], reason: str | None, sweep: Sweep | None) -> str:
    if reason and not any(did.values()):
        return reason
    # A purge that someone runs on the demo's database is in the ledger, too, and has no declared sweep.
    return format_counts(did if sweep is None else in_order(sweep, did))
