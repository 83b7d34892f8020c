"""Data of the pages, shared by all readers: the latest snapshot and other values, at most two seconds old.

A page calls `SnapshotCache.current`. `insight.status.SnapshotReader` reads the servers in another thread. If that takes
longer than a page waits, it shows the last snapshot.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from dramatiq import Broker
from flask import abort

from housekeeping.app import broker_without_database
from housekeeping.brokers import dead_letters_of
from housekeeping.brokers.dead_letters import DeadLetterStore
from housekeeping.core.clock import SYSTEM_CLOCK, Clock, impatient
from housekeeping.core.errors import DatabaseUnavailable
from housekeeping.core.settings import Settings
from housekeeping.database.connection import (
    LOCK_TIME,
    STATEMENT_TIME,
    close_databases,
    database,
    time_limit,
    translate_postgres_errors,
)
from housekeeping.insight.status import Snapshot, SnapshotReader, database_server
from housekeeping.sweeps.declaration import Sweep

_FRESH_S: Final = 2.0  # age at which a snapshot is read again; counting backlogs is expensive
_USABLE_S: Final = 10.0  # age up to which a page shows a snapshot without waiting for the next one
_PATIENCE_S: Final = 1.0  # maximum wait for a reading before a page shows the last snapshot
_FIRST_PATIENCE_S: Final = 5.0  # the same while there is no snapshot to show
_LATE_S: Final = 10.0  # age at which a page says that its snapshot is old


_MAX_KEPT: Final = 100  # values; the key that was added first is removed


T = TypeVar("T")


@dataclass(slots=True)
class _Kept:
    value: Any = None
    until: float = -math.inf
    lock: threading.Lock = field(default_factory=threading.Lock)


class Cache:
    """Cache of values that all readers share, each read at most once per period. Thread-safe."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # never held while something is read
        self._kept: dict[Hashable, _Kept] = {}

    def get(self, key: Hashable, seconds: float, read: Callable[[], T], keeps: Callable[[T], object] = bool) -> T:
        """Return the value of a key. Read it if the last one is older than `seconds`.

        Parameters:
          keeps: Returns whether a value is kept.
        """
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
            while len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        with kept.lock:
            if self._clock.monotonic() < kept.until:
                value: T = kept.value
                return value
            value = read()
            if keeps(value):
                kept.value, kept.until = value, self._clock.monotonic() + seconds
            return value


class SnapshotCache:
    """Cache of the latest snapshot. Thread-safe."""

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep]) -> None:
        self.settings = settings
        self.sweeps = sweeps
        self._reader = SnapshotReader(settings, sweeps)
        self._lock = threading.Lock()  # never held while something is read
        self._reading: Future[None] | None = None
        self._last: tuple[Snapshot, float, float] | None = None  # with the times when its read began and ended
        self._changed_at = 0.0
        self._shown = Cache()
        self._broker: Broker | None = None

    def sweep(self, name: str) -> Sweep:
        """Return the worker, or abort the request with status 404."""
        return self.sweeps.get(name) or abort(404, "no worker has this name")

    def current(self) -> Snapshot:
        """Return the last snapshot, and have it read again if it is older than two seconds.

        It is read in a thread of its own, so that slow servers keep no request waiting. Only if the last one is older
        than ten seconds or than a change, a page waits up to a second for the next one. Unavailable servers are listed
        in its `unavailable`.
        """
        until = time.monotonic() + (_FIRST_PATIENCE_S if self._last is None else _PATIENCE_S)
        while True:
            with self._lock:
                last = self._last
                if last is None or not self._is_newer(last, _FRESH_S):
                    if self._reading is None or self._reading.done():
                        self._reading = self._begin()
                    reading = self._reading
                if last is not None and self._is_newer(last, _USABLE_S):
                    return last[0]
            wait([reading], timeout=max(0.0, until - time.monotonic()))
            if reading.done():
                reading.result()  # raises what the reading has raised
            if time.monotonic() >= until:
                return self._late()

    def _begin(self) -> Future[None]:
        """Read a snapshot in another thread."""
        reading: Future[None] = Future()

        def read() -> None:
            began = time.monotonic()
            try:
                try:
                    with impatient():
                        snapshot = self._read(None if self._last is None else self._last[0])
                finally:
                    close_databases()
                self._last = snapshot, began, time.monotonic()
                reading.set_result(None)
            except BaseException as error:
                reading.set_exception(error)

        threading.Thread(target=read, name="housekeeping-snapshot", daemon=True).start()
        return reading

    def _read(self, before: Snapshot | None) -> Snapshot:
        return self._reader.read(before)

    def _late(self) -> Snapshot:
        if self._last is None:
            return Snapshot(SYSTEM_CLOCK.now(), late_s=_FIRST_PATIENCE_S)
        snapshot, _, ended = self._last
        age_s = time.monotonic() - ended
        return replace(snapshot, late_s=age_s) if age_s > _LATE_S else snapshot

    def _is_newer(self, last: tuple[Snapshot, float, float], age_s: float) -> bool:
        """Return whether a snapshot is newer than this age, and was begun after the last change."""
        _, began, ended = last
        return began > self._changed_at and time.monotonic() - ended < age_s

    def invalidate(self) -> None:
        """Make the next call of `current` read again. Does not wait for a read in progress."""
        self._changed_at = time.monotonic()

    def shared(self, key: Hashable, read: Callable[[], T]) -> T:
        """Return a value that all readers share. Read it if it is older than two seconds, or than the last change."""
        return self._shown.get((self._changed_at, key), _FRESH_S, read, lambda value: True)

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Use the ledger of a database in the block, with short time limits for its statements.

        Raises:
          DatabaseUnavailable: The database does not answer, a table is locked, or a statement takes too long. If the
            current snapshot says so, this is raised at once.
        """
        current = self.current()
        known = current.unavailable.get(database_server(name))
        if known is not None and name not in current.clocks:
            raise DatabaseUnavailable(str(known))
        with database.using(name), translate_postgres_errors(), time_limit(STATEMENT_TIME, LOCK_TIME):
            yield

    def broker(self) -> Broker:
        """Return the broker of the ready-made application, which knows the actors and their options.

        It connects with its first command.
        """
        with self._lock:
            if self._broker is None:
                self._broker = broker_without_database(self.settings, self.sweeps)
            return self._broker

    def dead_letters(self) -> DeadLetterStore:
        """Return the broker's dead letters."""
        return dead_letters_of(self.broker())
