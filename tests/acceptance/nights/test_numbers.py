"""The questions of a night, answered with 20,000 dead letters, and with 60 workers of which one fails."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import redis
from dramatiq import Message

from tests.acceptance.nights.questions import (
    AT,
    ROW,
    SAFE,
    STUCK,
    TREND,
    Answer,
    State,
    each_answer_of,
)
from tests.acceptance.nights.shop import CALLS, ORDERS, Browser, Night
from tests.acceptance.test_dashboard import serving

LETTERS: Final = 20_000
#: The one of many workers whose runs fail.
FAILING: Final = "shop.w17"
_MANY: Final = """
from housekeeping import BaseModel, Delete, Rows, Sweep, UtcDateTimeField


class Thing(BaseModel):
    expires_at = UtcDateTimeField()

    class Meta:
        table_name = "things"


def rows():
    return Rows(Thing, stale=lambda row, now: row.expires_at <= now, order="expires_at", action=Delete())


globals().update({f"w{n:02}": Sweep(f"shop.w{n:02}", rows(), schedule="0 4 * * *") for n in range(57)})
"""


def _many_dead_letters(shop: Night) -> None:
    shop.start_idle()
    died_ms, key = datetime.now(UTC).timestamp() * 1000 - 3_600_000, f"{shop.settings.namespace}:broker:cronjob.XQ"
    with redis.Redis.from_url(shop.servers.redis_url) as client, client.pipeline(transaction=False) as pipeline:
        for number in range(LETTERS):
            options = {"traceback": f"ConnectionError: carrier {number} is closed", "retries": 25}
            message: Message[Any] = Message("cronjob", CALLS, (), {}, options)
            pipeline.zadd(key, {message.message_id: died_ms + number})
            pipeline.hset(f"{key}.msgs", message.message_id, message.encode())
        pipeline.execute()
    shop.status_says("dead letters in queue")


def _many_workers(shop: Night) -> None:
    (shop.folder / "night_more.py").write_text(_MANY)
    shop.environment["HOUSEKEEPING_SWEEPS"] += ",night_more"
    ended = "trigger, started_at, heartbeat_at, finished_at, outcome"
    shop.sql(
        "CREATE TABLE things (id serial PRIMARY KEY, expires_at timestamptz NOT NULL)",
        f"INSERT INTO {shop.ledger}.runs (worker, {ended}) SELECT 'shop.w' || lpad(n::text, 2, '0'), 'schedule', "
        "at, at, at, 'done' FROM generate_series(0, 56) AS n, (SELECT now() - interval '2 hours') AS run (at)",
        f"INSERT INTO {shop.ledger}.runs (worker, {ended}, reason, error) SELECT '{FAILING}', 'schedule', "
        "at, at, at, 'failed', 'database: division by zero', 'division by zero' FROM generate_series(1, 3) AS n, "
        "LATERAL (SELECT now() - (100 - n) * interval '1 minute') AS run (at)",
    )
    shop.start_idle()
    shop.browser = Browser(shop.stack.enter_context(serving(shop.environment, folder=shop.folder)))


STATES: Final = (
    State(
        "20,000 dead letters",
        _many_dead_letters,
        {
            STUCK: Answer(
                (
                    rf"^Dead letters: cronjob, since {AT}, .* Read their errors: housekeeping deadletters list",
                    r"20,000 dead letters in queue 'cronjob'; the newest are of shop.calls",
                ),
                (rf"Dead letters: cronjob, since {AT}, ", "20,000 dead letters in queue 'cronjob'"),
                ("All right",),
            ),
            SAFE: Answer(("a run now would start", "1 of 1 thread is free"), ("would start", "1 of 1 thread is free")),
            ROW: Answer(
                (rf"[\d,]+ +.* {CALLS} +ConnectionError: carrier \d+ is closed", "the carrier has lost it"),
                (r"ConnectionError: carrier \d+ is closed", "the carrier has lost it"),
                type=("errors",),
                look=("/", "/errors"),
            ),
        },
    ),
    State(
        "60 workers",
        _many_workers,
        {
            STUCK: Answer(
                (rf"^Failed run: {FAILING}, since {AT}", r"\d\d workers without a problem", "division by zero"),
                (rf"Failed run: {FAILING}, since {AT}", r"\d\d workers without a problem", "division by zero"),
                ("All right",),
            ),
            SAFE: Answer(("a run now would start", "1 of 1 thread is free"), ("would start", "1 of 1 thread is free")),
            TREND: Answer(
                (rf"{ORDERS} +\w+ !? +\d+ +(-|\S+ \w+ ago) +[\d,]+ +[\d,]+",),
                (r"Rows per hour [\d,]+ processed, [\d,]+ arrived",),
                type=(f"status {ORDERS}",),
            ),
        },
    ),
)

test_answer_is_right_in_three_steps = each_answer_of(*STATES)
