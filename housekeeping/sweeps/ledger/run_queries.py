"""Queries about runs in the ledger, and about arguments whose next run is deferred."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from peewee import SQL, Expression, Value, fn

from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.models import NOW, Lease, Rejection, Run
from housekeeping.sweeps.ledger.runs import PREDICATE, PURGE

#: Not `clock_timestamp()`, which no index can be asked about.
_NOW: Final = SQL("now()")


def completed(message_id: str) -> bool:
    """Return whether a run of the message has completed."""
    return bool(Run.select(Run.id).where((Run.message_id == message_id) & _ended_well()).exists())


def has_worked(worker: str) -> bool:
    """Return whether the ledger has a run of the worker that completed or was confirmed."""
    confirmed = Run.counts.contains({"confirmed": True})
    return bool(Run.select(Run.id).where((Run.worker == worker) & (_ended_well() | confirmed)).exists())


def last_predicate(worker: str) -> tuple[str, bool] | None:
    """Return the fingerprint of the worker's last run that has one, and whether that run began in the last day."""
    found = fn.JSONB_EXTRACT_PATH_TEXT(Run.counts, PREDICATE)
    rows: Any = Run.select(found, Run.started_at > NOW - timedelta(days=1)).where(
        (Run.worker == worker) & found.is_null(False)
    )
    for text, is_fresh in rows.order_by(Run.id.desc()).limit(1).tuples():
        return text, is_fresh
    return None


def remember_predicate(run_id: int, fingerprint: str) -> None:
    """Write the fingerprint of a completed run's predicate into its row."""
    Run.update(counts=Run.counts.concat({PREDICATE: fingerprint})).where(Run.id == run_id).execute()


def resumed_by(run_id: int) -> int | None:
    """Return the run that has resumed this purge; None if there is none. A run that was skipped has changed nothing."""
    resumed = Run.counts.contains({PURGE: {"resumes": run_id}})
    began = Run.outcome.is_null() | (Run.outcome != "skipped")
    found: int | None = Run.select(Run.id).where((Run.id > run_id) & resumed & began).order_by(Run.id).limit(1).scalar()
    return found


def any_by_a_worker_process() -> bool:
    """Return whether the ledger has a run that a worker process carried out, not the command ``run``."""
    return bool(Run.select(Run.id).where(Run.trigger != "cli").exists())


def _ended_well() -> Expression:
    done: Expression = (Run.outcome == "done") | ((Run.outcome == "partial") & (Run.reason != "shutdown"))
    return done


def holder_is_gone(worker: str, key: str, token: str) -> bool:
    """Return whether the run that holds the lease with this token has ended, or missed its heartbeats for `SILENCE`.

    False for a token that belongs to no run of this worker: application code may hold the same key.
    """
    lease = Lease.select(Lease.epoch).where((Lease.key == key) & (Lease.holder == token)).tuples().first()
    if lease is None:
        return False
    alive = Run.outcome.is_null() & (Run.heartbeat_at >= NOW - runs.SILENCE)
    return not Run.select(Run.id).where((Run.worker == worker) & (Run.epoch == lease[0]) & alive).exists()


def at_work(worker: str) -> frozenset[int]:
    """Return the ids of the worker's open runs; `begin` has closed those that were dead."""
    found: Any = Run.select(Run.id).where((Run.worker == worker) & Run.outcome.is_null()).tuples()
    return frozenset(run_id for (run_id,) in found)


def is_at_work(worker: str) -> bool:
    """Return whether a run of the worker is open and has sent a heartbeat within `SILENCE`."""
    alive = Run.outcome.is_null() & (Run.heartbeat_at >= NOW - runs.SILENCE)
    return bool(Run.select(Run.id).where((Run.worker == worker) & alive).exists())


def is_unfinished(message_id: str) -> bool:
    """Return whether an attempt at this message is open: running, or dead."""
    return bool(Run.select(Run.id).where((Run.message_id == message_id) & Run.outcome.is_null()).exists())


def deferred(worker: str, arguments: Iterable[Any] | None = None) -> Any:
    """Return a query of the worker's arguments whose delay has not passed, for the sweep that enqueues its runs.

    Its columns are `subject`, the argument as text, and `position`, where the last run ended. An argument may come
    several times, once for each cause.

    Parameters:
      arguments: Only these; None for all.
    """
    waiting = (Rejection.worker == worker) & (Rejection.not_before > _NOW)
    if arguments is not None:
        # One array: a placeholder for each of a thousand arguments takes longer than the query.
        waiting &= Rejection.subject == fn.ANY(Value([str(each) for each in arguments], converter=False, unpack=False))
    return Rejection.select(Rejection.subject, Rejection.position).where(waiting)
