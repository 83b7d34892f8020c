"""Worker and scheduler processes: which of them are alive, by their heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import redis
from peewee import PeeweeException

from housekeeping.core.errors import HousekeepingError
from housekeeping.core.redis_client import translate_redis_errors
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.sweeps.processes import heartbeats
from housekeeping.sweeps.processes.heartbeats import Heartbeat, LastHeartbeat, RedisHeartbeats

_DEAD_SHOWN: Final = 10  # dead processes that are listed; a process that is killed again and again leaves many


@dataclass(frozen=True, slots=True)
class Process:
    """One worker or scheduler process.

    Attributes:
      said: Its last heartbeat.
      started_at: Its start, by the server's clock.
      heartbeat_at: The time of its last heartbeat, by the server's clock.
      age_s: The age of that heartbeat in seconds.
    """

    said: Heartbeat
    started_at: datetime
    heartbeat_at: datetime
    age_s: float

    @property
    def alive(self) -> bool:
        """Whether it has not stopped, and has missed fewer than three heartbeats."""
        return not self.said.stopped and self.age_s <= heartbeats.SILENCE.total_seconds()

    @property
    def name(self) -> str:
        """Host and process id."""
        return f"{self.said.host}:{self.said.pid}"

    @property
    def state(self) -> str:
        """``idle``, ``busy``, or a text with the age of the last heartbeat of a dead process."""
        if not self.alive:
            return f"dead? no heartbeat for {self.age_s:,.0f} s"
        return "busy" if self.said.busy else "idle"

    def as_json(self) -> dict[str, Any]:
        """Return the process as JSON values."""
        said = self.said.model_dump(include={"kind", "host", "pid", "queues", "threads", "busy", "version"})
        times = {"started_at": self.started_at.isoformat(), "heartbeat_at": self.heartbeat_at.isoformat()}
        return {**said, **times, "heartbeat_age_s": round(self.age_s, 3), "alive": self.alive}


@dataclass(frozen=True, slots=True)
class Processes:
    """All processes that sent a heartbeat within a day.

    Attributes:
      every: All of them, also stopped ones, the last heartbeat first.
      known: Whether Redis or the database could be read.
    """

    every: tuple[Process, ...] = ()
    known: bool = True

    @property
    def listed(self) -> list[Process]:
        """The processes that are alive, then the last ten that died without stopping."""
        alive = [each for each in self.every if each.alive]
        dead = [each for each in self.every if not each.alive and not each.said.stopped]
        return sorted(alive, key=lambda each: (each.said.kind, each.name)) + dead[:_DEAD_SHOWN]

    @property
    def schedulers(self) -> list[Process]:
        """The schedulers, the last heartbeat first."""
        return [each for each in self.every if each.said.kind == "scheduler"]

    def serving(self, queue: str) -> list[Process]:
        """Return the workers that serve a queue, or did, the last heartbeat first."""
        return [each for each in self.every if each.said.kind == "worker" and queue in each.said.queues]


#: Neither Redis nor the database was read.
UNKNOWN: Final = Processes(known=False)


def read_processes(client: redis.Redis | None, namespace: str, now: datetime) -> Processes:
    """Read the heartbeats in Redis and in the database, of each process the newer one. Never raises.

    Parameters:
      client: None: Redis is not read.
      now: The current time.
    """
    found: dict[str, LastHeartbeat] = {}
    answers = [
        None if client is None else _read_or_none(lambda: RedisHeartbeats(client, namespace).read()),
        None if database.obj is None else _read_or_none(heartbeats.read_rows),
    ]
    for reading in (each for answer in answers for each in answer or ()):
        known = found.get(reading.process_id)
        if known is None or reading.age_s < known.age_s:
            found[reading.process_id] = reading
    return _processes(found.values(), now, known=any(answer is not None for answer in answers))


def _read_or_none(read: Callable[[], list[LastHeartbeat]]) -> list[LastHeartbeat] | None:
    try:
        with translate_redis_errors(), translate_postgres_errors():
            return read()
    except (HousekeepingError, PeeweeException):
        return None  # the caller reads more of that server and reports it as away


def _processes(read: Iterable[LastHeartbeat], now: datetime, *, known: bool) -> Processes:
    every = []
    for each in sorted(read, key=lambda reading: reading.age_s):
        heartbeat_at = now - timedelta(seconds=each.age_s)
        started_at = heartbeat_at - timedelta(seconds=each.heartbeat.up_s)
        every.append(Process(each.heartbeat, started_at, heartbeat_at, each.age_s))
    return Processes(tuple(every), known)
