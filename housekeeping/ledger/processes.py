"""Heartbeats of worker and scheduler processes, in Redis or PostgreSQL: which processes are alive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Protocol

import pydantic
from peewee import EXCLUDED, PeeweeException

from housekeeping.core.errors import DatabaseUnavailable, ServerUnavailable
from housekeeping.core.logs import counted, format_duration
from housekeeping.core.redis import (
    is_rejection,
    read_scripts,
    redis_client,
    shared_redis,
    translate_redis_errors,
    why_rejected,
)
from housekeeping.core.settings import MAIN, Settings
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.queries import why_read_only
from housekeeping.ledger.schema import NOW, HeldLeaseRow, ProcessRow, TickRow, seconds_since

if TYPE_CHECKING:
    import redis


#: Interval between the heartbeats of a process.
INTERVAL: Final = timedelta(seconds=10)
#: Three missed heartbeats: the process counts as dead.
SILENCE: Final = 3 * INTERVAL
#: Entries of processes that sent no heartbeat for so long are removed.
KEPT_FOR: Final = timedelta(days=1)
_LISTED: Final = 1000  # entries that one reading returns at most, the newest ones
_MAX_S: Final = 1e9  # seconds; about 30 years
_CLOCK_STEP_S: Final = 60  # a time further in the future is not the server's own
_DEAD_SHOWN: Final = 10  # dead processes that are listed; a process that is killed again and again leaves many

_WRITE: Final = read_scripts(__file__)["write"]

#: A thread that has been in the same message for so long is described in the heartbeat.
LONG_BUSY: Final = timedelta(minutes=1)
#: Such threads in one heartbeat.
MOST_THREADS: Final = 100
#: Characters of a text in a heartbeat.
LONGEST_TEXT: Final = 255

ProcessKind = Literal["worker", "scheduler"]
_Text = Annotated[str, pydantic.Field(min_length=1, max_length=LONGEST_TEXT)]
_Count = Annotated[int, pydantic.Field(ge=0, le=1_000_000)]
_Seconds = Annotated[float, pydantic.Field(ge=0, le=_MAX_S)]


class BusyThread(pydantic.BaseModel):
    """Thread that has been in the same message for over a minute.

    Attributes:
      worker: The message's actor.
      busy_s: Seconds since the message began.
      frame: Its innermost frame: file, line and function.
    """

    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="ignore")

    name: _Text
    worker: _Text
    message_id: _Text
    busy_s: _Seconds
    frame: _Text


class Heartbeat(pydantic.BaseModel):
    """Heartbeat of a process.

    Attributes:
      queues: The queues a worker consumes; a scheduler has none.
      busy: Threads that run a message.
      busy_threads: Those that have run the same one for over a minute.
      up_s: Seconds since its start.
      stopped: Whether this is its last heartbeat, sent on its shutdown.
    """

    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="ignore")

    kind: ProcessKind
    host: _Text
    pid: Annotated[int, pydantic.Field(ge=1, le=2**31 - 1)]
    queues: Annotated[list[_Text], pydantic.Field(max_length=1000)] = []
    threads: _Count = 0
    busy: _Count = 0
    busy_threads: Annotated[list[BusyThread], pydantic.Field(max_length=MOST_THREADS)] = []
    version: _Text
    up_s: _Seconds
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Process:
    """One worker or scheduler process.

    Attributes:
      heartbeat: Its last heartbeat.
      heartbeat_at: The time of its last heartbeat, by the clock of the server that has it.
      age_s: The age of that heartbeat in seconds.
    """

    heartbeat: Heartbeat
    heartbeat_at: datetime
    age_s: float

    @property
    def started_at(self) -> datetime:
        """Start of the process, by the clock of the server that has its heartbeat."""
        return self.heartbeat_at - timedelta(seconds=self.heartbeat.up_s)

    @property
    def alive(self) -> bool:
        """Whether it has not stopped, and has missed fewer than three heartbeats."""
        return not self.heartbeat.stopped and self.age_s <= SILENCE.total_seconds()

    @property
    def name(self) -> str:
        """Host and process id."""
        return f"{self.heartbeat.host}:{self.heartbeat.pid}"

    @property
    def state(self) -> str:
        """``idle``, ``busy``, or a text with the age of the last heartbeat of a dead process."""
        if not self.alive:
            return f"dead? no heartbeat for {format_duration(self.age_s)}"
        return "busy" if self.heartbeat.busy else "idle"

    def as_json(self) -> dict[str, Any]:
        """Return the process as JSON values."""
        shown = self.heartbeat.model_dump(include={"kind", "host", "pid", "queues", "threads", "busy", "version"})
        times = {"started_at": self.started_at, "heartbeat_at": self.heartbeat_at}
        return {**shown, **times, "heartbeat_age_s": self.age_s, "alive": self.alive}


@dataclass(frozen=True, slots=True)
class Processes:
    """All processes that sent a heartbeat within a day.

    Attributes:
      every: All of them, also stopped ones, the last heartbeat first.
      known: Whether the heartbeats could be read, and the server accepts new ones.
      rejected: Why the server rejects heartbeats; None if it accepts them, or did not answer.
      alone: Whether PostgreSQL is the only server, so that each process is worker and scheduler.
    """

    every: tuple[Process, ...] = ()
    known: bool = True
    rejected: ServerUnavailable | None = None
    alone: bool = False

    def command(self, kind: ProcessKind) -> str:
        """Return the command that starts a process of this kind."""
        return "housekeeping serve" if self.alone else f"housekeeping {kind}"

    @property
    def listed(self) -> list[Process]:
        """The processes that are alive, then the last ten that died without stopping."""
        alive = [each for each in self.every if each.alive]
        dead = [each for each in self.every if not each.alive and not each.heartbeat.stopped]
        return sorted(alive, key=lambda each: (each.heartbeat.kind, each.name)) + dead[:_DEAD_SHOWN]

    @property
    def summary(self) -> str:
        """Live and dead processes in one line."""
        if self.rejected is not None:
            return "unknown, because no heartbeat can be written"
        if not self.known:
            return "the heartbeats cannot be read"
        alive = [each.heartbeat for each in self.every if each.alive]
        workers = [each for each in alive if each.kind == "worker"]
        busy, threads = sum(each.busy for each in workers), sum(each.threads for each in workers)
        dead = sum(not each.alive and not each.heartbeat.stopped for each in self.every)
        return (
            f"{counted(len(workers), 'worker')} alive, {busy:,} of {counted(threads, 'thread')} busy; "
            f"{counted(len(alive) - len(workers), 'scheduler')} alive; {counted(dead, 'process', 'processes')} dead"
        )

    @property
    def busy_threads(self) -> Iterator[tuple[Process, BusyThread]]:
        """The threads of living processes that have been in the same message for over a minute."""
        return ((each, thread) for each in self.every if each.alive for thread in each.heartbeat.busy_threads)

    def dated(self, now: datetime) -> Processes:
        """Return them with the times of their heartbeats by another clock, which says `now`."""
        return replace(
            self, every=tuple(replace(each, heartbeat_at=now - timedelta(seconds=each.age_s)) for each in self.every)
        )

    @property
    def schedulers(self) -> list[Process]:
        """The schedulers, the last heartbeat first."""
        return [each for each in self.every if each.heartbeat.kind == "scheduler"]

    def serving(self, queue: str) -> list[Process]:
        """Return the worker processes of a queue, live or dead, the latest heartbeat first."""
        return [each for each in self.every if each.heartbeat.kind == "worker" and queue in each.heartbeat.queues]


#: Result if the heartbeats could not be read.
UNKNOWN: Final = Processes(known=False)


#: Process id -> the age of its last heartbeat in seconds, by the server's clock, and the heartbeat.
LastHeartbeats = dict[str, tuple[float, Heartbeat]]


class HeartbeatStore(Protocol):
    """Storage of the last heartbeats.

    Attributes:
      server: The server's name, for metrics.
    """

    server: ClassVar[str]

    def write(self, process_id: str, heartbeat: Heartbeat) -> None:
        """Write a process's heartbeat, and remove entries that are a day old."""

    def read(self) -> LastHeartbeats:
        """Return the newest heartbeats; invalid entries are skipped."""

    def why_rejected(self) -> ServerUnavailable | None:
        """Return why the server rejects writes although it answers; None if it accepts them, or is unavailable."""


class RedisHeartbeats:
    """Heartbeats in Redis, below the namespace. A write takes one round trip, a reading two."""

    server: ClassVar[str] = "Redis"

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._keys = [f"{namespace}:process_heartbeats", f"{namespace}:processes"]
        self._write: Any = client.register_script(_WRITE)

    def write(self, process_id: str, heartbeat: Heartbeat) -> None:
        kept_s = int(KEPT_FOR.total_seconds())
        self._write(keys=self._keys, args=[process_id, heartbeat.model_dump_json(), kept_s])

    def read(self) -> LastHeartbeats:
        with translate_redis_errors(), self._client.pipeline() as pipeline:
            pipeline.time()
            pipeline.zrevrange(self._keys[0], 0, _LISTED - 1, withscores=True)
            (seconds, microseconds), times = pipeline.execute()
            values: Any = self._client.hmget(self._keys[1], [member for member, _ in times]) if times else []
        now = seconds + microseconds / 1_000_000
        found: LastHeartbeats = {}
        for (member, at), value in zip(times, values, strict=True):
            if value is not None and -_CLOCK_STEP_S < now - at < _MAX_S:
                process_id = member.decode(errors="backslashreplace") if isinstance(member, bytes) else member
                with suppress(pydantic.ValidationError):
                    found[process_id] = max(0.0, now - at), Heartbeat.model_validate_json(value)
        return found

    def why_rejected(self) -> ServerUnavailable | None:
        return why_rejected(self._client, self._namespace)


class PostgresHeartbeats:
    """Heartbeats in the database ``main``.

    A heartbeat also keeps the ticks of its process from becoming due for others; the last one releases them.
    """

    server: ClassVar[str] = "PostgreSQL"

    def write(self, process_id: str, heartbeat: Heartbeat) -> None:
        given = {"heartbeat": heartbeat.model_dump(mode="json"), "at": NOW}
        with database.using(MAIN), database.atomic():
            ProcessRow.insert(id=process_id, **given).on_conflict(
                conflict_target=[ProcessRow.id],
                update={ProcessRow.heartbeat: EXCLUDED.heartbeat, ProcessRow.at: EXCLUDED.at},
            ).execute()
            kept = {"holder": None, "due_at": NOW} if heartbeat.stopped else {"due_at": NOW + SILENCE}
            TickRow.update(**kept).where(TickRow.holder == process_id).execute()
            ProcessRow.delete().where(ProcessRow.at < NOW - KEPT_FOR).execute()
            # Leases of dead holders that no other holder has acquired.
            HeldLeaseRow.delete().where(HeldLeaseRow.expires_at < NOW - KEPT_FOR).execute()

    def read(self) -> LastHeartbeats:
        with database.using(MAIN), translate_postgres_errors():
            rows: Any = ProcessRow.select(ProcessRow.id, seconds_since(ProcessRow.at), ProcessRow.heartbeat)
            found: LastHeartbeats = {}
            for process_id, age_s, heartbeat in rows.order_by(ProcessRow.at.desc()).limit(_LISTED).tuples():
                with suppress(pydantic.ValidationError):
                    found[process_id] = max(0.0, float(age_s)), Heartbeat.model_validate(heartbeat)
            return found

    def why_rejected(self) -> ServerUnavailable | None:
        with suppress(PeeweeException, DatabaseUnavailable), database.using(MAIN):
            why = why_read_only()
            return None if why is None else DatabaseUnavailable(f"PostgreSQL rejects writes: {why}")
        return None  # full databases are detected elsewhere


def heartbeat_store(settings: Settings) -> HeartbeatStore | None:
    """Return the store of an installation's heartbeats; None if neither Redis nor PostgreSQL alone is configured."""
    if shared_redis.is_replaced(settings):
        return PostgresHeartbeats()
    client = None if settings.redis_url is None else redis_client(settings.redis_url)
    return None if client is None else RedisHeartbeats(client, settings.namespace)


def read_processes(store: HeartbeatStore | None, now: datetime) -> Processes:
    """Read the heartbeats. Never raises.

    Parameters:
      store: None if none is configured; the processes are then unknown.
    """
    if store is None:
        return UNKNOWN
    if (rejected := store.why_rejected()) is not None:
        return replace(UNKNOWN, rejected=rejected)  # all of them would look dead
    try:
        last = store.read()
    except (ServerUnavailable, PeeweeException) as error:
        # Other reads of the caller report a server that does not answer.
        return replace(
            UNKNOWN, rejected=error if isinstance(error, ServerUnavailable) and is_rejection(error) else None
        )
    every = [Process(heartbeat, now - timedelta(seconds=age_s), age_s) for age_s, heartbeat in last.values()]
    alone = isinstance(store, PostgresHeartbeats)
    return Processes(tuple(sorted(every, key=lambda each: each.age_s)), alone=alone)
