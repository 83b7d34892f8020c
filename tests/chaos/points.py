"""Points of a run at which a process can be held, from inside the process.

A test arms a point by a file, ``WORKER.POINT.armed`` with the number of the time it is to be reached. The thread that
gets there turns it into ``WORKER.POINT.held`` and waits for the file ``go``, or for the end of its process.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog
from dramatiq import Broker, MessageProxy, Middleware

from housekeeping import ExclusiveLease
from tests.internals.database import Database
from tests.internals.engine import Commit
from tests.internals.ledger import runs, ticks
from tests.internals.sweeps import CascadeStage, PartitionStage, TableStage
from tests.internals.workers import GitCli, PendingDeletions, PendingProjects, PendingUploadsStage, StoreDeletion

FOLDER: Final = "CHAOS_FOLDER"
GO: Final = "go"

_PASSES: Final = (TableStage, CascadeStage, PendingUploadsStage, PendingDeletions, PendingProjects)


class Points:
    """Points at which a test can hold this process.

    Parameters:
      folder: Where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._times: Counter[tuple[str, int]] = Counter()

    def reached(self, point: str, worker: str | None = None) -> None:
        """Wait here if the point is armed for this pass."""
        worker = worker or structlog.contextvars.get_contextvars().get("worker")
        armed = self._folder / f"{worker}.{point}.armed"
        try:
            wanted, which = int(armed.read_text()), armed.stat().st_mtime_ns
        except FileNotFoundError:
            return
        with self._lock:
            self._times[armed.name, which] += 1
            if self._times[armed.name, which] != wanted:
                return
        try:
            armed.rename(armed.with_suffix(".held"))
        except FileNotFoundError:
            return  # another process was first
        while not (self._folder / GO).exists():
            time.sleep(0.02)


class Acknowledgements(Middleware):
    """Points around the acknowledgement of a message."""

    def __init__(self, points: Points) -> None:
        self._points = points

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:
        self._points.reached("before_ack", message.actor_name)

    def after_ack(self, broker: Broker, message: MessageProxy) -> None:
        self._points.reached("after_ack", message.actor_name)


def install(broker: Broker | None = None) -> None:
    """Patch the library so that every point can be armed; without a broker, also those of ticks."""
    points = Points(Path(os.environ[FOLDER]))
    reached = points.reached
    written = threading.local()

    def cursor() -> None:
        written.cursor = True
        reached("cursor")

    def commit() -> None:
        if getattr(written, "cursor", False):
            written.cursor = False
            reached("commit")

    def update() -> None:
        written.cursor = False
        reached("update")

    _after(ExclusiveLease, "try_obtain", lambda: reached("acquire"), given=True)
    _after(ExclusiveLease, "cancel", lambda: reached("release"), given=True)
    _after(runs, "begin", lambda: reached("begin"), given=True)
    for name in ("advance", "finish"):
        _after(runs, name, cursor)
    _after(Database, "commit", commit)
    _around_one_round_trip(reached)
    _after(PartitionStage, "detach_first", lambda: reached("detach"))
    for owner in (StoreDeletion, GitCli):
        _after(owner, "delete", lambda: reached("external"))
    for made in _PASSES:
        if "prepare" in vars(made):
            _after(made, "prepare", lambda: reached("select"))
        if "apply" in vars(made):
            _after(made, "apply", update)
    if broker is not None:
        broker.add_middleware(Acknowledgements(points))
        return
    take, end = ticks.take, ticks.end

    def taken(*args: Any) -> Any:
        found = take(*args)
        for each in found:
            reached("taken", each.worker)
        return found

    def ended(holder: str, tick: Any, *args: Any, **kwargs: Any) -> None:
        reached("before_end", tick.worker)
        end(holder, tick, *args, **kwargs)

    for name, wrapped in (("take", taken), ("end", ended)):
        setattr(ticks, name, wrapped)


def _around_one_round_trip(reached: Callable[[str], None]) -> None:
    """Hold a batch that is one message before it is sent, instead of between its parts, and after its commit."""
    for name in ("in_one_statement", "as_expected"):
        setattr(Commit, name, _held(getattr(Commit, name), reached))


def _held(original: Callable[..., Any], reached: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        reached("update")
        reached("cursor")
        committed = original(*args, **kwargs)
        reached("commit")
        return committed

    return wrapped


def _after(owner: Any, name: str, then: Callable[[], None], given: bool = False) -> None:
    """Call `then` after each return of a function; with `given`, only after a truthy result."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result or not given:
            then()
        return result

    setattr(owner, name, wrapped)
