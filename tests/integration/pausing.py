"""A change by another session between the snapshot of a batch's statement and its locks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import psycopg2
from peewee import fn
from psycopg2.extensions import connection as Connection

from housekeeping import Sweep
from tests.internals.sweeps import Stage, TableStage

_LOCK: Final = 4711
_WAITING: Final = f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = {_LOCK} AND NOT granted"
#: Waits for the lock at one row. The high cost makes PostgreSQL evaluate it last.
_CREATE: Final = f"""
CREATE FUNCTION pause_at(id bigint, here bigint) RETURNS boolean LANGUAGE plpgsql COST 1000000 AS $$
BEGIN
    IF id = here THEN PERFORM pg_advisory_xact_lock_shared({_LOCK}); END IF;
    RETURN true;
END $$
"""


def pausing(sweep: Sweep, column: Any, at: int) -> Sweep:
    """Return the sweep with a predicate that pauses while it reads the row with this id of the column's table."""

    def stages(of: Sweep) -> list[Stage]:
        declared = dataclasses.replace(sweep, limits=of.limits, options=of.options).declared_stages()
        return [_pausing(each, column, at) for each in declared]

    return dataclasses.replace(sweep, stages=stages)


def _pausing(stage: Stage, column: Any, at: int) -> Stage:
    assert isinstance(stage, TableStage)
    if stage.model is not column.model:
        return stage
    return dataclasses.replace(stage, stale=_paused(stage.stale, column, at))


def _paused(stale: Any, column: Any, at: int) -> Any:
    return lambda now: stale(now) & fn.pause_at(column, at)


@contextmanager
def acting_in_the_gap(admin: Connection, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in another thread once a statement of the block waits in ``pause_at``, then let it continue."""
    with admin.cursor() as cursor:
        cursor.execute(_CREATE)
        cursor.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))

    def wait_and_act() -> None:
        other = psycopg2.connect(admin.dsn)
        other.autocommit = True
        try:
            with other.cursor() as looking:
                _until(lambda: _count(looking) > 0)
            act()
        finally:
            other.close()
            with admin.cursor() as release:
                release.execute("SELECT pg_advisory_unlock(%s)", (_LOCK,))

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(wait_and_act)
        try:
            yield
        finally:
            done.result(20)


@contextmanager
def changed_in_the_gap(admin: Connection, change: str, *further: str) -> Iterator[None]:
    """Carry out these statements once a statement of the block waits at its row, then let it continue.

    Parameters:
      change: Each statement commits by itself.
    """
    with admin.cursor() as cursor:
        cursor.execute("SELECT current_setting('search_path')")
        (path,) = cursor.fetchone() or ("",)
    other = psycopg2.connect(admin.dsn)
    other.autocommit = True

    def act() -> None:
        with other.cursor() as cursor:
            cursor.execute(f"SET search_path TO {path}")
            for statement in (change, *further):
                cursor.execute(statement)

    try:
        with acting_in_the_gap(admin, act):
            yield
    finally:
        other.close()


def _count(cursor: Any) -> int:
    cursor.execute(_WAITING)
    number: int = cursor.fetchone()[0]
    return number


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < deadline, "no statement waits at its row"
        time.sleep(0.01)
