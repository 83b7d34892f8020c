"""A schedule's world and what is in it, as the invariants look at it when it is over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.simulator.faults import ScriptedFaults
from tests.simulator.observed_store import ObservedStore
from tests.simulator.postgres import Postgres, Row
from tests.simulator.processes import Cast
from tests.simulator.world import World

Event = tuple[Any, ...]  # when, by which process, what, and its details


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
        """What happened of these kinds, in order."""
        return (event for event in self.world.history if event[2] in kinds)

    def of(self, kind: str) -> list[Event]:
        """What happened of one kind, in order; remembered, so only for a schedule that is over."""
        if not self._by_kind:
            for event in self.world.history:
                self._by_kind.setdefault(event[2], []).append(event)
        return self._by_kind.get(kind, [])

    @property
    def runs(self) -> dict[int, Row]:
        """The run ledger."""
        return self.postgres.committed.get("runs", {})

    def emptied_between(self, first: float, last: float) -> bool:
        """Whether Redis lost everything meanwhile."""
        return any(first <= moment <= last for moment in self.redis.emptied_at)

    def clock_stepped(self, kind: str) -> bool:
        """Whether the clock of a process of this kind stepped, ``worker`` or ``scheduler``."""
        return any(where.startswith(kind) and fault == "clock step" for _, where, _, fault, *_ in self.events("fault"))

    def struck(self, *kinds: str) -> bool:
        """Whether a fault of one of these kinds struck at all."""
        return any(self.faults.struck[kind] for kind in kinds)
