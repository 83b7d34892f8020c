"""Heartbeats of worker and scheduler processes, as they are written to Redis and to the table `processes`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Final, Literal

import pydantic
import redis
from peewee import SQL, NodeList, fn

from housekeeping.database.connection import database
from housekeeping.sweeps.ledger.models import NOW, ProcessRow

#: Interval between the heartbeats of a process.
INTERVAL: Final = timedelta(seconds=10)
#: Three missed heartbeats: the process counts as dead.
SILENCE: Final = 3 * INTERVAL
#: Entries of processes that sent no heartbeat for so long are removed.
KEPT_FOR: Final = timedelta(days=1)
_LISTED: Final = 1000  # entries that one reading returns at most, the newest ones
_MAX_S: Final = 1e9  # seconds; about 30 years
_CLOCK_STEP_S: Final = 60  # a time further in the future is not the server's own

#: KEYS: sorted set of the times of the last heartbeats, hash of the heartbeats. ARGV: process id, heartbeat,
#: seconds for which entries are kept. The times are the server's.
_WRITE: Final = """
local time = redis.call("time")
local now = time[1] + time[2] / 1000000
redis.call("zadd", KEYS[1], string.format("%.3f", now), ARGV[1])
redis.call("hset", KEYS[2], ARGV[1], ARGV[2])
for _, id in ipairs(redis.call("zrangebyscore", KEYS[1], "-inf", now - ARGV[3], "limit", 0, 1000)) do
    redis.call("zrem", KEYS[1], id)
    redis.call("hdel", KEYS[2], id)
end
redis.call("expire", KEYS[1], ARGV[3])
redis.call("expire", KEYS[2], ARGV[3])
"""

Kind = Literal["worker", "scheduler"]
_Text = Annotated[str, pydantic.Field(min_length=1, max_length=255)]
_Count = Annotated[int, pydantic.Field(ge=0, le=1_000_000)]


class Heartbeat(pydantic.BaseModel):
    """Heartbeat of a process.

    Attributes:
      queues: The queues a worker consumes; a scheduler has none.
      busy: Threads that run a message.
      up_s: Seconds since its start.
      stopped: Whether this is its last heartbeat, sent on its shutdown.
    """

    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="ignore")

    kind: Kind
    host: _Text
    pid: Annotated[int, pydantic.Field(ge=1, le=2**31 - 1)]
    queues: Annotated[list[_Text], pydantic.Field(max_length=1000)] = []
    threads: _Count = 0
    busy: _Count = 0
    version: _Text
    up_s: Annotated[float, pydantic.Field(ge=0, le=_MAX_S)]
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class LastHeartbeat:
    """The last heartbeat of a process, and its age in seconds by the clock of the server that has it."""

    process_id: str
    heartbeat: Heartbeat
    age_s: float


class RedisHeartbeats:
    """Heartbeats in Redis, below the namespace."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._keys = [f"{namespace}:process_heartbeats", f"{namespace}:processes"]
        self._write: Any = client.register_script(_WRITE)

    def write(self, process_id: str, heartbeat: Heartbeat) -> None:
        """Write a process's heartbeat, and remove entries that are a day old; one round trip."""
        kept_s = int(KEPT_FOR.total_seconds())
        self._write(keys=self._keys, args=[process_id, heartbeat.model_dump_json(), kept_s])

    def read(self) -> list[LastHeartbeat]:
        """Return the newest heartbeats; invalid entries are passed over. Two round trips."""
        with self._client.pipeline() as pipeline:
            pipeline.time()
            pipeline.zrevrange(self._keys[0], 0, _LISTED - 1, withscores=True)
            (seconds, microseconds), times = pipeline.execute()
        if not times:
            return []
        values: Any = self._client.hmget(self._keys[1], [member for member, _ in times])
        now = seconds + microseconds / 1_000_000
        read = (_reading(member, value, now - at) for (member, at), value in zip(times, values, strict=True))
        return [each for each in read if each is not None]


def write_row(process_id: str, heartbeat: Heartbeat) -> None:
    """Write a process's heartbeat to the database, and close the connection."""
    row = heartbeat.model_dump(exclude={"up_s"})
    started_at = NOW - timedelta(seconds=heartbeat.up_s)
    try:
        ProcessRow.insert(id=process_id, started_at=started_at, heartbeat_at=NOW, **row).on_conflict(
            conflict_target=[ProcessRow.id],
            update={
                ProcessRow.heartbeat_at: NOW,
                ProcessRow.queues: heartbeat.queues,
                ProcessRow.busy: heartbeat.busy,
                ProcessRow.stopped: heartbeat.stopped,
            },
        ).execute()
    finally:
        if not database.is_closed():
            database.close()


def read_rows() -> list[LastHeartbeat]:
    """Return the newest heartbeats in the database."""
    return list(_rows())


def _rows() -> Iterator[LastHeartbeat]:
    age_s = seconds_since(ProcessRow.heartbeat_at)
    up_s = fn.EXTRACT(NodeList((SQL("EPOCH FROM"), ProcessRow.heartbeat_at - ProcessRow.started_at)))
    rows: Any = ProcessRow.select(ProcessRow, age_s.alias("age_s"), up_s.alias("up_s"))
    for row in rows.order_by(ProcessRow.heartbeat_at.desc()).limit(_LISTED):
        said = {name: getattr(row, name) for name in Heartbeat.model_fields if name != "up_s"}
        try:
            heartbeat = Heartbeat(**said, up_s=max(0.0, float(row.up_s)))
        except pydantic.ValidationError:
            continue
        yield LastHeartbeat(row.id, heartbeat, max(0.0, float(row.age_s)))


def seconds_since(column: Any) -> Any:
    """Return the SQL for the seconds that have passed since a column's time, by the database's clock."""
    return fn.EXTRACT(NodeList((SQL("EPOCH FROM"), NOW - column)))


def _reading(member: bytes | str, value: bytes | str | None, age_s: float) -> LastHeartbeat | None:
    process_id = member.decode(errors="backslashreplace") if isinstance(member, bytes) else member
    if value is None or not -_CLOCK_STEP_S < age_s < _MAX_S:
        return None
    try:
        return LastHeartbeat(process_id, Heartbeat.model_validate_json(value), max(0.0, age_s))
    except pydantic.ValidationError:
        return None
