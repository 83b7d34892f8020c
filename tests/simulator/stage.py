"""World of a finished schedule, as the invariants see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.simulator.faults import ScriptedFaults
from tests.simulator.observed_store import ObservedStore
from tests.simulator.postgres import Postgres, Row
from tests.simulator.processes import Cast
from tests.simulator.world import World

Event = tuple[Any, ...]  # time, process, kind, details


@dataclass
class Stage:
    """One schedule."""

    world: World
    faults: ScriptedFaults
    redis: ObservedStore
    postgres: Postgres
    cast: Cast
    _by_kind: dict[str, list[Event]] = field(default_factory=dict)

    def events(self, *kinds: str) -> Iterator[Event]:
        """Yield the events of these kinds in order."""
        return (event for event in self.world.history if event[2] in kinds)

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind in order. They are cached, so use this only after the schedule."""
        if not self._by_kind:
            for event in self.world.history:
                self._by_kind.setdefault(event[2], []).append(event)
        return self._by_kind.get(kind, [])

    @property
    def runs(self) -> dict[int, Row]:
        """Return the run ledger."""
        return self.postgres.committed.get("runs", {})

    def emptied_between(self, first: float, last: float) -> bool:
        """Return whether Redis lost its data in this time."""
        return any(first <= moment <= last for moment in self.redis.emptied_at)

    def clock_stepped(self, kind: str) -> bool:
        """Return whether the clock of a ``worker`` or ``scheduler`` stepped."""
        return any(where.startswith(kind) and fault == "clock step" for _, where, _, fault, *_ in self.events("fault"))

    def struck(self, *kinds: str) -> bool:
        """Return whether a fault of one of these kinds happened."""
        return any(self.faults.struck[kind] for kind in kinds)
