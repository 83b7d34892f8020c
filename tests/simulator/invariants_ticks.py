"""Invariants of schedules: at most one message per tick, and every tick accounted for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from tests.simulator.stage import Stage
from tests.simulator.workload import SCHEDULED
from tests.simulator.world import START


def a_tick_fires_once(stage: Stage) -> Iterator[str]:
    """S1: no two messages run for one tick, despite faults of Redis and clocks."""
    for actor in SCHEDULED:
        done: dict[datetime, str] = {}
        for run in stage.runs.values():
            if run["worker"] == actor and run["tick"] is not None and run["outcome"] == "done":
                first = done.setdefault(run["tick"], run["message_id"])
                if first != run["message_id"]:
                    yield f"tick {run['tick']} of {actor} was done by {first} and by {run['message_id']}"


def a_tick_is_sent_once(stage: Stage) -> Iterator[str]:
    """S1: one scheduler sends a tick once, unless the answer was lost or it was paused after its claim.

    Then the tick has two copies in the queue, of which one runs.
    """
    if stage.struck("pause before", "pause after", "pause in a transaction"):
        return
    if (
        stage.redis.emptied_at
        or stage.of("connection lost")
        or stage.of("killed")[:-2]
        or stage.clock_stepped("scheduler")
    ):
        return
    sent: set[str] = set()
    for when, where, _, _, message_id, *_ in stage.of("queued"):
        if where.startswith("scheduler"):
            if message_id in sent:
                yield f"{where} sent {message_id} once more at {when}"
            sent.add(message_id)


def each_tick_has_an_outcome(stage: Stage) -> Iterator[str]:
    """S5: each tick between the first scheduler's start and end has a row or is counted as missed."""
    if stage.redis.emptied_at or stage.clock_stepped("scheduler"):
        return
    until = next((event[0] for event in stage.of("schedulers end")), START)
    for actor in set(SCHEDULED) & set(stage.cast.names):
        rows = [run for run in stage.runs.values() if run["worker"] == actor and run["tick"] is not None]
        known = {run["tick"] for run in rows}
        for run in rows:
            if run["outcome"] == "missed":
                known |= {run["tick"] - timedelta(minutes=n) for n in range(run["counts"]["missed"])}
        first, last = math.ceil(START / 60) + 1, math.floor((until - 65) / 60)
        for minute in range(first, last + 1):
            tick = datetime.fromtimestamp(minute * 60, UTC)
            if tick not in known:
                yield f"tick {tick} of {actor} has no outcome"


TICKS = (a_tick_fires_once, a_tick_is_sent_once, each_tick_has_an_outcome)
