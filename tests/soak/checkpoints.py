"""Checkpoints of a soak test."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from tests.soak.measured import Keys, Measured


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Measurements after a part of the messages.

    Attributes:
      asked: Messages that were asked for so far, those that were dropped as duplicates among them.
      enqueued: Those that went into a queue, by actor.
      ended: How many of its messages each actor brought to their end.
      seconds: Since the start; pauses for measuring are not counted.
      live: Messages that were live when the keys under load were counted.
      loaded: The library's keys at that time.
      drained: The library's keys when nothing was live.
      dead: Dead letters by queue; `dead_ticks` those of the scheduled actor.
      connections: Connections to Redis of all processes.
    """

    asked: int
    enqueued: dict[str, int]
    ended: dict[str, int]
    seconds: float
    live: int
    loaded: Keys
    drained: Keys
    dead: int
    dead_ticks: int
    connections: int
    sender: Measured
    worker: Measured

    def to_line(self) -> str:
        """Return the checkpoint as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Checkpoint:
        """Return the checkpoint that `to_line` wrote."""
        values: dict[str, Any] = json.loads(line)
        for name in ("loaded", "drained"):
            values[name] = Keys(**values[name])
        for name in ("sender", "worker"):
            values[name] = Measured(**values[name])
        return cls(**values)
