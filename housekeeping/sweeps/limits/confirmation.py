"""Plan ids: what `housekeeping plan` hands out, and `housekeeping run --confirm` takes as a person's word."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from base64 import b32decode, b32encode
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from housekeeping.core.errors import PlanRefused
from housekeeping.sweeps.stages.stage import Backlog

VALID: Final = timedelta(hours=1)  # what was planned earlier is no longer what would be done
_AHEAD: Final = timedelta(minutes=5)  # another server's clock may be, before a failover
#: A confirmed run may meet so many times the records of its plan: more than that nobody has seen.
MARGIN: Final = 1.1
#: When it was made (s), how many records, whether they are all, whose it is, a checksum: 15 bytes, 24 letters.
_FORM: Final = struct.Struct(">IIB4s2s")
_MOST: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What a person has confirmed.

    Attributes:
      rows: How many records the plan counted.
      exact: Whether these were all; if not, how many more there are was left open, and is confirmed as well.
    """

    plan_id: str
    rows: int
    exact: bool

    @property
    def most(self) -> int | None:
        """How many records the run may meet; null: any number."""
        return math.floor(MARGIN * self.rows) if self.exact else None


def plan_id(worker: str, argument: Any, stale: Backlog, at: datetime) -> str:
    """The id of a plan: what it was about, when, and how many records it found; nothing is kept for it."""
    exact = stale.exact and stale.rows <= _MOST
    body = _FORM.pack(int(at.timestamp()), min(stale.rows, _MOST), exact, _subject(worker, argument), b"")
    return b32encode(body[:-2] + _checksum(body[:-2])).decode().lower()


def confirmed(given: str, worker: str, argument: Any, now: datetime) -> Confirmation:
    """Read a plan id that was given for a run of this worker with this argument.

    Raises:
      PlanRefused: When it is no plan id, another worker's or argument's, or older than an hour.
    """
    again = f"make one by: housekeeping plan {named(worker, argument)}"
    try:
        body = b32decode(given.strip().upper())
        seconds, rows, exact, subject, checksum = _FORM.unpack(body)
    except (ValueError, struct.error):
        raise PlanRefused(f"{given!r} is no plan id; {again}") from None
    if checksum != _checksum(body[:-2]):
        raise PlanRefused(f"{given!r} is no plan id, or was mistyped; {again}")
    if subject != _subject(worker, argument):
        raise PlanRefused(f"plan {given} is not of {named(worker, argument)}; {again}")
    age = now - datetime.fromtimestamp(seconds, UTC)
    if age > VALID:
        raise PlanRefused(f"plan {given} is over an hour old ({age.total_seconds() / 60:.0f} min); {again}")
    if age < -_AHEAD:
        raise PlanRefused(f"plan {given} was made in the future, by the database's clock; {again}")
    return Confirmation(given.strip().lower(), rows, bool(exact))


def named(worker: str, argument: Any) -> str:
    """The worker and its argument as the command line takes them."""
    return worker if argument is None else f"{worker} {argument}"


def _subject(worker: str, argument: Any) -> bytes:
    return hashlib.sha256(json.dumps([worker, argument], default=str).encode()).digest()[:4]


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"plan" + body).digest()[:2]
