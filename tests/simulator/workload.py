"""Actors and sweeps of the simulated application."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any, Final

import dramatiq
from dramatiq import Actor, Broker

from housekeeping import Lease, Limits, Sweep
from tests.internals.database import database
from tests.internals.engine import register
from tests.internals.sweeps import Backlog, Batch, BatchResult, StagePlan
from tests.simulator.postgres import Postgres, Row
from tests.simulator.world import World

BATCH: Final = 3
SWEEP_LEASE: Final = timedelta(seconds=30)
PLAIN_LEASE: Final = timedelta(seconds=12)
KEY_TTL: Final = timedelta(seconds=20)

#: Options by actor. Each takes one number except for the scheduled one.
ACTORS: Final[dict[str, dict[str, Any]]] = {
    "executed": {"idempotent": True, "deduplicate": "until_executed", "deduplication": {"ttl": KEY_TTL}},
    "again": {
        "idempotent": True,
        "deduplicate": "until_executed",
        "deduplication": {"ttl": KEY_TTL, "if_deduplicated": "reschedule_once"},
    },
    "executing": {"idempotent": True},
    "failing": {
        "idempotent": True,
        "deduplicate": "until_executed",
        "deduplication": {"ttl": KEY_TTL},
        "max_retries": 2,
    },
    "leased": {
        "idempotent": True,
        "deduplicate": None,
        "exclusive_lease": {"key": "leased", "ttl": PLAIN_LEASE, "if_held": "retry"},
    },
    "exclusive": {"exclusive_lease": {"key": "exclusive", "ttl": PLAIN_LEASE}},
    "ticking": {"idempotent": True, "schedule": "* * * * *"},
}
SWEEPS: Final = ("swept", "shared")
SCHEDULED: Final = ("swept", "ticking")
#: Actors with a lease of their own name.
LEASES: Final = ("leased", "exclusive", "swept")


@dataclass(frozen=True)
class RowsPass:
    """Stage that processes stale rows after an outside effect for each."""

    world: World
    table: str
    name: str = "rows"
    batch_size: int = BATCH
    counts: tuple[str, ...] = ("settled", "batches", "out_of_time")
    progress_counts: tuple[str, ...] = ("settled",)

    def prepare(self, batch: Batch) -> list[Any]:
        postgres: Postgres = self.world.shared["postgres"]
        with database.atomic():
            transaction = postgres.statement("SELECT rows")
            stale = sorted(
                key
                for key, row in postgres.rows(self.table, transaction)
                if _is_stale(row, batch) and (batch.after is None or key > batch.after[0])
            )[: self.batch_size]
        prepared: list[Any] = []
        for key in stale:
            if batch.time_is_up():
                break
            self.world.sleep(self.world.rng.choice((0.0, 0.01, 0.3, 4.0)))
            self.world.io("outside", f"DELETE {self.table}/{key}", partial(self._delete, key))
            prepared.append(key)
        self.world.note("took", self.table, batch.run_id, tuple(prepared))
        return [prepared, len(stale) < self.batch_size and len(prepared) == len(stale)]

    def apply(self, batch: Batch, prepared: Any) -> BatchResult:
        postgres: Postgres = self.world.shared["postgres"]
        keys, exhausted = prepared
        transaction = postgres.statement("UPDATE rows")
        result = []
        for key in keys:
            if not postgres.try_lock(transaction, (self.table, key)):
                transaction.notes.append(("passed over", self.table, key, batch.run_id))
                continue
            row = postgres.row(self.table, key, transaction)
            if row is not None and _is_stale(row, batch):
                postgres.update(
                    transaction,
                    self.table,
                    key,
                    lambda _: True,
                    lambda now: {"settled": now["settled"] + 1, "by": batch.run_id},
                )
                result.append(key)
        transaction.notes.append(("settled", self.table, batch.run_id, tuple(result)))
        position = (keys[-1],) if keys else batch.after
        return BatchResult({"settled": len(result)}, position, exhausted, rows=[{"key": key} for key in result])

    def after_commit(self, batch: Batch, result: BatchResult) -> None:
        """Nothing to say."""

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        return Backlog(0)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        return None

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        return StagePlan(self.name, Backlog(0), {})

    def _delete(self, key: Any) -> None:
        self.world.shared["deleted"].add((self.table, key))


def _is_stale(row: Row, batch: Batch) -> bool:
    return bool(row["settled"] == 0 and row["stale_at"] <= batch.now.timestamp())


def declare(world: World, broker: Broker, names: list[str]) -> dict[str, Actor[..., Any]]:
    """Declare the application's actors on its broker."""
    return {name: _sweep(world, broker, name) if name in SWEEPS else _plain(world, broker, name) for name in names}


def _sweep(world: World, broker: Broker, name: str) -> Actor[..., Any]:
    sweep = Sweep(
        name,
        lambda _: [RowsPass(world, name)],
        limits=Limits(runtime=timedelta(seconds=20)),
        actor={"queue_name": "default"},
    )
    if name == "swept":
        sweep = dataclasses.replace(sweep, lease=Lease("swept", SWEEP_LEASE), schedule="* * * * *")
    return register(broker, sweep)


def _plain(world: World, broker: Broker, name: str) -> Actor[..., Any]:
    def work(number: int = 0) -> None:
        """Read, take some time for outside effects, and end."""
        rng = world.rng
        world.note("reads", name, number, _message_id(world))
        for _ in range(rng.choice((1, 2, 3))):
            world.sleep(rng.choice((0.01, 0.5, 3.0, 9.0)))
            world.io("outside", f"{name} {number}", lambda: world.note("effect", name, number, _message_id(world)))
        if name == "failing" and rng.random() < 0.6:
            world.note("fails", name, number, _message_id(world))
            raise RuntimeError("it was drawn so")
        world.note("returns", name, number, _message_id(world))

    def scheduled() -> None:
        work()

    function: Callable[..., None] = scheduled if "schedule" in ACTORS[name] else work
    actor: Actor[..., Any] = dramatiq.actor(broker=broker, actor_name=name, **ACTORS[name])(function)
    return actor


def _message_id(world: World) -> str | None:
    return world.current.message_id if world.current is not None else None


def rows(rng: Random, start: float) -> dict[int, Row]:
    """Return some rows, most of them stale from the start."""
    number = rng.choice((0, 4, 9))
    return {
        key: {"stale_at": start + rng.choice((-600.0, -600.0, -60.0, 40.0)), "settled": 0, "by": None}
        for key in range(number)
    }


def utc(moment: float) -> datetime:
    """Return a virtual time as a datetime."""
    return datetime.fromtimestamp(moment, UTC)
