"""The questions of a night, answered while Redis, the scheduler or the workers do nothing."""

from __future__ import annotations

from typing import Final

from tests.acceptance.nights.questions import (
    LEASE,
    SAFE,
    SCHEDULE,
    STUCK,
    TICK,
    WORKER,
    Answer,
    State,
    each_answer_of,
)
from tests.acceptance.nights.shop import CALLS, ORDERS, Night


def _all_threads_stuck(shop: Night) -> None:
    worker = shop.start("worker", "-t", "1")
    shop.start("scheduler")
    shop.put(CALLS)
    shop.status_says("tell_the_service (stuck)", worker)
    shop.status_says("scheduler idle", worker)
    shop.put(ORDERS, times=3)
    shop.add_orders(300)


def _redis_stopped(shop: Night) -> None:
    shop.start_idle()
    shop.servers.stop("redis")
    shop.stack.callback(shop.servers.start, "redis")
    shop.add_orders(300)
    # As if it had been stopped before the last tick.
    shop.sql(f"DELETE FROM {shop.ledger}.runs WHERE worker = '{ORDERS}' AND tick = date_trunc('minute', now())")


def _dead_scheduler(shop: Night) -> None:
    _, scheduler = shop.start_idle()
    scheduler.kill()
    shop.status_says("no scheduler is alive since")
    shop.add_orders(300)


STATES: Final = (
    State(
        "all threads stuck",
        _all_threads_stuck,
        {
            STUCK: Answer(
                (
                    rf"^Stuck run: {CALLS}, since",
                    r"run \d+ has not ended .* thread \S+ is at \S*night_shop.py:\d+ tell_the_service",
                ),
                (rf"Stuck run: {CALLS}", r"run \d+ has not ended .* is at \S*night_shop.py:\d+ tell_the_service"),
                ("All right",),
            ),
            SAFE: Answer(
                ("a run now would wait", "0 of 1 thread is free"),
                ("would wait", "0 of 1 thread is free"),
                ("would start",),
            ),
            LEASE: Answer((rf"{CALLS} +{CALLS} on \S+:\d+",), (rf"Leases.* {CALLS} on \S+:\d+",), ("no leases",)),
        },
    ),
    State(
        "Redis stopped",
        _redis_stopped,
        {
            STUCK: Answer(("^Unavailable: Redis",), ("Unavailable: Redis",), ("All right",)),
            SAFE: Answer(
                ("a run now would wait", "Redis did not answer", "whether a scheduler is alive is unknown"),
                ("would wait", "Redis did not answer"),
                ("would start", r"\.\."),
            ),
            LEASE: Answer(
                ("Redis did not answer", "the leases that the database knows"),
                ("Redis is unavailable; these are the leases of open runs in the database",),
                ("no leases are held",),
            ),
            TICK: Answer(
                ("whether it was sent is unknown", "Redis did not answer", "No run can be sent or received"),
                ("No run can be sent or received",),
                ("it is being sent", "it is not stored"),
                type=(f"why {ORDERS}",),
                look=("/", WORKER, f"{WORKER}/plan"),
            ),
            SCHEDULE: Answer(
                ("not shown: queues, processes, leases",),
                ("the heartbeats cannot be read",),
                ("no scheduler", r"scheduler +idle"),
            ),
        },
    ),
    State(
        "dead scheduler",
        _dead_scheduler,
        {
            STUCK: Answer(
                ("^No scheduler", r"no scheduler is alive since .* start `housekeeping scheduler`"),
                ("No scheduler", "start `?housekeeping scheduler"),
                ("All right", r"\(stuck\)"),
            ),
            SAFE: Answer(
                ("a run now would start", "no scheduler is alive since"),
                ("would start", "no scheduler is alive since"),
            ),
            SCHEDULE: Answer(("no scheduler is alive since", r"scheduler +dead\?"), ("dead",), (r"scheduler +idle",)),
        },
    ),
)

test_answer_is_right_in_three_steps = each_answer_of(*STATES)
