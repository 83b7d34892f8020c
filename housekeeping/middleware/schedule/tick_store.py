"""Ticks in Redis. A recorded tick was missed, or belongs to the one message that may run."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal
from uuid import uuid4

import redis

from housekeeping.core.redis.client import milliseconds, text
from housekeeping.middleware.schedule.tick_scripts import CLAIM, RECORD

#: Ticks remembered per actor: a day of minutes and an hour, for clocks that step.
_REMEMBERED: Final = 1500
#: How long an actor's ticks are remembered. Longer than the longest common period, a year, so that a missed tick is
#: recognized.
_FORGOTTEN_AFTER: Final = timedelta(days=400)
#: A claim expires when its message was neither confirmed nor started. Longer than an enqueue takes, shorter than a
#: minute, so that the next wake-up sends what a killed scheduler left.
CLAIMED_FOR: Final = timedelta(seconds=10)
#: The token that records a tick as sent by any of its messages.
ANY_TOKEN: Final = "*"
_MAX_NOTES: Final = 10_000  # kept for the ledger while the database does not answer; at most one per tick

#: How a tick is recorded. ``sent``: its message is in the queue, or was dropped on the way. ``begun``: a worker starts
#: it before the scheduler has recorded it. ``retried``: a worker starts a retry of it. ``missed``: it will not be sent.
Settling = Literal["sent", "begun", "retried", "missed"]


@dataclass(frozen=True, slots=True)
class TickState:
    """State of a tick.

    Attributes:
      recorded: Whether it was sent or missed.
      being_sent: Whether another process has claimed it.
      actor_known: Whether any tick of its actor is stored.
    """

    recorded: bool
    being_sent: bool
    actor_known: bool


@dataclass(frozen=True, slots=True)
class Note:
    """Pending entry for the run ledger, kept in Redis until it is written there.

    Attributes:
      kind: ``gap``: ticks up to this one were missed. ``fired``: a tick that was counted as missed has run. ``row``: a
        row to write.
      value: For a gap, the last recorded tick before it. For a row, the row as JSON.
      field: Field of the Redis hash that contains the note.
    """

    kind: str
    tick: datetime
    worker: str
    value: str
    field: str


class TickStore:
    """Store of the sent and missed ticks of every actor.

    A tick is claimed for some seconds while its message is enqueued. It is recorded when the message is in the queue or
    starts to run, whichever is first. If an answer of Redis was lost, the message may be enqueued twice, each copy with
    its own token. Only the copy whose token recorded the tick runs.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._prefix = f"{namespace}:ticks:"
        self._claims = f"{namespace}:tick_claim:"
        self._notes = f"{namespace}:tick_notes"
        self._claim: Any = client.register_script(CLAIM)
        self._record: Any = client.register_script(RECORD)
        #: The last token that this process claimed for each actor. It may send again at once what it failed to send.
        self._own: dict[str, str] = {}

    def state_of(self, actor: str, tick: datetime) -> TickState:
        """Return the state of a tick, in one round trip."""
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.zcount(self._prefix + actor, _seconds(tick), _seconds(tick))
            pipeline.get(self._claims + actor)
            pipeline.zcard(self._prefix + actor)
            recorded, held, known = pipeline.execute()
        of_tick, _, token = text(held or "").partition(":")
        being_sent = of_tick == str(_seconds(tick)) and token != self._own.get(actor)
        return TickState(bool(recorded), being_sent, bool(known))

    def remember(self, actor: str, tick: datetime) -> None:
        """Record the first tick of a new actor as missed."""
        self.record(actor, tick, "", "missed", last_missed=tick, noting=False)

    def claim(self, actor: str, tick: datetime, token: str, previous: datetime) -> bool:
        """Claim the tick for some seconds; return False if it is recorded or another process has claimed it."""
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
                    milliseconds(_FORGOTTEN_AFTER),
                    milliseconds(CLAIMED_FOR),
                ],
            )
        )

    def record(
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
        """Record the tick for this token; return whether the token has it, and whether a note was written.

        A repeated call with the same token changes nothing.

        Parameters:
          last_missed: The last missed tick if there is a gap before this one.
          noting: Whether to write notes of a gap and of the row.
        """
        ours, noted = self._record(
            keys=[self._prefix + actor, self._claims + actor, self._notes],
            args=[
                _seconds(tick),
                token,
                how,
                _seconds(last_missed),
                _REMEMBERED,
                milliseconds(_FORGOTTEN_AFTER),
                actor if noting else "",
                json.dumps(row) if row else "",
                _MAX_NOTES,
            ],
        )
        return bool(ours), bool(noted)

    def notes(self) -> list[Note]:
        """Return the notes, gaps first; skip fields in an unknown format."""
        found: Any = self._client.hgetall(self._notes)
        notes = []
        for field, value in found.items():
            with suppress(ValueError, OverflowError):
                kind, seconds, worker = text(field).split(":", 2)
                notes.append(Note(kind.partition(".")[0], from_seconds(seconds), worker, text(value), text(field)))
        return sorted(notes, key=lambda note: (note.kind != "gap", note.tick))

    def note(self, worker: str, tick: datetime, row: dict[str, Any]) -> None:
        """Write a note with a ledger row."""
        number: Any = self._client.hlen(self._notes)
        if number < _MAX_NOTES:
            self._write(f"row.{uuid4().hex}:{_seconds(tick)}:{worker}", json.dumps(row))

    def remove(self, note: Note) -> bool:
        """Remove a note; return whether it existed."""
        return bool(self._client.hdel(self._notes, note.field))

    def restore(self, note: Note) -> None:
        """Write a removed note again."""
        self._write(note.field, note.value)

    def _write(self, field: str, value: str) -> None:
        with self._client.pipeline() as pipeline:
            pipeline.hset(self._notes, field, value)
            pipeline.pexpire(self._notes, milliseconds(_FORGOTTEN_AFTER))
            pipeline.execute()


def from_seconds(seconds: str | int) -> datetime:
    """Return the time that is this many seconds after 1970."""
    return datetime.fromtimestamp(int(seconds), UTC)


def _seconds(at: datetime) -> int:
    return int(at.timestamp())
