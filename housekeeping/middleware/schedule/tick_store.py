"""Which ticks are settled, in Redis: by the one message that may run for each, or as missed."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal
from uuid import uuid4

import redis

#: Ticks remembered for each actor: a day of minutes and an hour, for clocks that step.
_REMEMBERED: Final = 1500
#: Longer than the longest common period, a year, so that a missed tick is known to have been missed.
_FORGOTTEN_AFTER: Final = timedelta(days=400)
#: A claim whose message was neither confirmed nor begun is free again: longer than a healthy enqueue takes, shorter
#: than a minute, so that the next wake-up takes up what a killed scheduler left.
CLAIMED_FOR: Final = timedelta(seconds=10)
#: Settles a tick for whichever of its messages is in the queue.
ANY_TOKEN: Final = "*"
_MOST_NOTES: Final = 10_000  # kept for the ledger while the database is away; one a tick at the most

#: A settled tick is a member "tick:token:before", scored by the tick: before is the settled tick it came after when
#: it was settled, or empty. Ticks between the two have been counted as missed. Older releases wrote "tick:token".
_PARTS: Final = """
local function parts(member)
    local _, _, tick, token, before = string.find(member, "^(%d+):([^:]*):?(%d*)$")
    return tonumber(tick), token, tonumber(before)
end
"""

#: KEYS: the actor's settled ticks, its claim. ARGV: the tick, a token, the last token of this very process, the tick
#: before in the schedule, how many to remember, their ttl and the claim's in ms. Returns whether the tick is ours to
#: send. A tick older than all that are remembered is not: nobody knows. A memory begins with the tick before, so
#: that this one counts as missed should it not be sent. Repeating it with the same token changes nothing.
_CLAIM: Final = """
local claim = ARGV[1] .. ":" .. ARGV[2]
if redis.call("zcount", KEYS[1], ARGV[1], ARGV[1]) > 0 then return 0 end
local held = redis.call("get", KEYS[2])
if held and held ~= claim and held ~= ARGV[1] .. ":" .. ARGV[3]
    and string.find(held, ARGV[1] .. ":", 1, true) == 1 then return 0 end
local known = redis.call("zcard", KEYS[1])
if known >= tonumber(ARGV[5]) and redis.call("zcount", KEYS[1], "-inf", ARGV[1]) == 0 then return 0 end
if known == 0 then
    redis.call("zadd", KEYS[1], ARGV[4], ARGV[4] .. "::")
    redis.call("pexpire", KEYS[1], ARGV[6])
end
redis.call("set", KEYS[2], claim, "px", ARGV[7])
return 1
"""

#: KEYS: the actor's settled ticks, its claim, the notes. ARGV: the tick, the token, how (see `Settling`), the last
#: tick that is missed if there is a gap before, how many to remember, their ttl in ms, the actor ("": no notes), a row
#: for the ledger ("": none), the most notes. Returns whether the tick is this token's, and whether a note was made.
#:
#: What must reach the ledger is noted in the same step: a process that dies, or a database that is away, loses none.
_SETTLE: Final = (
    _PARTS
    + """
local tick, token, how = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local there = redis.call("zrangebyscore", KEYS[1], tick, tick)[1]
if there then
    local _, whose = parts(there)
    return {(whose == token or whose == "*") and 1 or 0, 0}
end
local known = redis.call("zcard", KEYS[1])
if known == 0 and how == "retried" then return {1, 0} end
local before = redis.call("zrevrangebyscore", KEYS[1], "(" .. ARGV[1], "-inf", "limit", 0, 1)[1]
if not before and known >= tonumber(ARGV[5]) then
    return {(how == "begun" or how == "retried") and 1 or 0, 0}
end
local later, passed = redis.call("zrangebyscore", KEYS[1], "(" .. ARGV[1], "+inf", "limit", 0, 1)[1], false
if later then
    local _, _, since = parts(later)
    passed = since ~= nil and since < tick
end
local claimed = redis.call("get", KEYS[2]) == ARGV[1] .. ":" .. token
if passed and how ~= "missed" and not claimed then return {0, 0} end
before = before and parts(before)
redis.call("zadd", KEYS[1], tick, ARGV[1] .. ":" .. token .. ":" .. (before and string.format("%d", before) or ""))
redis.call("zremrangebyrank", KEYS[1], 0, -tonumber(ARGV[5]) - 1)
redis.call("pexpire", KEYS[1], ARGV[6])
if claimed then redis.call("del", KEYS[2]) end
if ARGV[7] == "" or redis.call("hlen", KEYS[3]) >= tonumber(ARGV[9]) then return {1, 0} end
local noted = 0
local function note(kind, at, value)
    redis.call("hset", KEYS[3], kind .. ":" .. at .. ":" .. ARGV[7], value)
    noted = 1
end
if passed and how ~= "missed" then
    note("fired", ARGV[1], "1")
elseif before and before < tonumber(ARGV[4]) and not passed then
    note("gap", ARGV[4], string.format("%d", before))
end
if ARGV[8] ~= "" then note("row." .. token, ARGV[1], ARGV[8]) end
if noted == 1 then redis.call("pexpire", KEYS[3], ARGV[6]) end
return {1, noted}
"""
)

#: How a tick is settled: its message is in the queue (or was dropped on the way); a worker begins with it, before
#: anybody said that it was there; a worker begins with a retry of it; it is not to be sent.
Settling = Literal["sent", "begun", "retried", "missed"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a tick.

    Attributes:
      settled: Whether its message was sent, or it is not to be sent.
      being_sent: Whether another process has claimed it just now.
      any: Whether anything is known of its actor.
    """

    settled: bool
    being_sent: bool
    any: bool


@dataclass(frozen=True, slots=True)
class Note:
    """What the ledger is yet to be told.

    Attributes:
      kind: ``gap``: ticks up to this one were missed; ``fired``: it was counted in a gap and fired after all;
        ``row``: an outcome to be recorded.
      value: The settled tick before the gap, or the row as JSON.
      field: Where it stands in Redis.
    """

    kind: str
    tick: datetime
    worker: str
    value: str
    field: str


class TickStore:
    """The settled ticks of every actor.

    A tick is claimed for some seconds when its message is about to be enqueued, and settled when that is in the
    queue or begins to run, whichever is first. Where a lost answer put it there twice, with a token each, one of
    them has settled it; the other does not run.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._prefix = f"{namespace}:ticks:"
        self._claims = f"{namespace}:tick_claim:"
        self._notes = f"{namespace}:tick_notes"
        self._claim: Any = client.register_script(_CLAIM)
        self._settle: Any = client.register_script(_SETTLE)
        #: The last token this process claimed for each actor: what it failed to send, it may send again at once.
        self._own: dict[str, str] = {}

    def look(self, actor: str, tick: datetime) -> Seen:
        """What is known of a tick; one round trip."""
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.zcount(self._prefix + actor, _seconds(tick), _seconds(tick))
            pipeline.get(self._claims + actor)
            pipeline.zcard(self._prefix + actor)
            settled, held, known = pipeline.execute()
        of_tick, _, token = _text(held or "").partition(":")
        being_sent = of_tick == str(_seconds(tick)) and token != self._own.get(actor)
        return Seen(bool(settled), being_sent, bool(known))

    def remember(self, actor: str, tick: datetime) -> None:
        """Begin the memory of an actor of which nothing is known with a tick that is settled."""
        self.settle(actor, tick, "", "missed", last_missed=tick, noting=False)

    def claim(self, actor: str, tick: datetime, token: str, previous: datetime) -> bool:
        """Take the tick for some seconds, to send it; False when it is settled or another process sends it."""
        own, self._own[actor] = self._own.get(actor, ""), token
        return bool(
            self._claim(
                keys=[self._prefix + actor, self._claims + actor],
                args=[
                    _seconds(tick),
                    token,
                    own,
                    _seconds(previous),
                    _REMEMBERED,
                    _ms(_FORGOTTEN_AFTER),
                    _ms(CLAIMED_FOR),
                ],
            )
        )

    def settle(
        self,
        actor: str,
        tick: datetime,
        token: str,
        how: Settling,
        *,
        last_missed: datetime,
        noting: bool,
        row: dict[str, Any] | None = None,
    ) -> tuple[bool, bool]:
        """Decide what becomes of the tick, for all time; whether it is this token's, and whether there is news.

        May be repeated: with the same token it changes nothing.

        Parameters:
          last_missed: The last of the ticks that are missed when there is a gap before.
          noting: Whether a gap, and the row, are noted for the ledger.
        """
        ours, noted = self._settle(
            keys=[self._prefix + actor, self._claims + actor, self._notes],
            args=[
                _seconds(tick),
                token,
                how,
                _seconds(last_missed),
                _REMEMBERED,
                _ms(_FORGOTTEN_AFTER),
                actor if noting else "",
                json.dumps(row) if row else "",
                _MOST_NOTES,
            ],
        )
        return bool(ours), bool(noted)

    def notes(self) -> list[Note]:
        """What the ledger is yet to be told, gaps first; what is no note of ours is passed over."""
        found: Any = self._client.hgetall(self._notes)
        notes = []
        for field, value in found.items():
            with suppress(ValueError, OverflowError):
                kind, seconds, worker = _text(field).split(":", 2)
                notes.append(Note(kind.partition(".")[0], moment(seconds), worker, _text(value), _text(field)))
        return sorted(notes, key=lambda note: (note.kind != "gap", note.tick))

    def note(self, worker: str, tick: datetime, row: dict[str, Any]) -> None:
        """Note a row for the ledger, which cannot be reached now."""
        number: Any = self._client.hlen(self._notes)
        if number < _MOST_NOTES:
            self._put_back(f"row.{uuid4().hex}:{_seconds(tick)}:{worker}", json.dumps(row))

    def strike(self, note: Note) -> bool:
        """Remove a note; whether it was there."""
        return bool(self._client.hdel(self._notes, note.field))

    def put_back(self, note: Note) -> None:
        """Note it again."""
        self._put_back(note.field, note.value)

    def _put_back(self, field: str, value: str) -> None:
        with self._client.pipeline() as pipeline:
            pipeline.hset(self._notes, field, value)
            pipeline.pexpire(self._notes, _ms(_FORGOTTEN_AFTER))
            pipeline.execute()


def moment(seconds: str | int) -> datetime:
    """The time of these epoch seconds."""
    return datetime.fromtimestamp(int(seconds), UTC)


def _seconds(at: datetime) -> int:
    return int(at.timestamp())


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _ms(length: timedelta) -> int:
    return int(length.total_seconds() * 1000)
