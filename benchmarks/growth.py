"""Command ``python -m benchmarks.growth``: the cost of a row, sweep, message or read as their number grows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import click
import redis
from dramatiq import Worker

import housekeeping
from benchmarks import messages, pages, report, tables
from benchmarks.comparison import OURS, Place
from benchmarks.rounds import compare
from benchmarks.servers import Servers, Stage, started
from housekeeping import run_sweep
from housekeeping.core import logs
from housekeeping.core.settings import Settings
from housekeeping.database.connection import connect_to, database
from housekeeping.insight.status import SnapshotReader
from housekeeping.ledger import runs
from housekeeping.web.application import create_app

_LOOKS: Final = 9
_LOOKS_S: Final = 5  # no further read begins after this time
_PROCESSED: Final = 2_000  # messages, of those that are queued
_RUNS_OF_EACH: Final = 100  # in the ledger, by worker
_TOLERATED: Final = 1.25
#: Reads of every worker, and reads of one worker that do not grow with the number of runs.
_OF_ALL: Final = ("status", "first page", "page of a worker")
_OF_ONE: Final = ("run of a sweep, idle", "begin of a run")
_HEADS: Final = ("of", "size", "cost", "microseconds", "ratio to the smallest", "")


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one unit at one size: a row, a sweep, a message, or a read of the ledger."""

    kind: str
    size: int
    name: str
    seconds: float


def _rows(stage: Stage, size: int) -> Iterator[Cost]:
    outcome = compare(stage, tables.growth(size), None, 2, [OURS])
    yield Cost("rows", size, "a stale row", 1 / outcome.middle(OURS, lambda turn: turn.rate))
    yield Cost("rows", size, "CPU of a stale row", outcome.middle(OURS, lambda turn: turn.worked / turn.done))


def _sweeps(stage: Stage, size: int) -> Iterator[Cost]:
    for name, seconds in _looks(stage, workers=size, ledger=size * _RUNS_OF_EACH).items():
        if name in _OF_ALL:
            yield Cost("sweeps", size, f"{name}, of each sweep", seconds / size)
        elif name in _OF_ONE:
            yield Cost("sweeps", size, name, seconds)


def _ledger(stage: Stage, size: int) -> Iterator[Cost]:
    for name, seconds in _looks(stage, workers=60, ledger=size).items():
        yield Cost("ledger", size, name, seconds)


def _looks(stage: Stage, *, workers: int, ledger: int) -> dict[str, float]:
    """Return the duration in seconds of the status, of pages, and of the begin of a run, by name."""
    template = stage.template(f"growth_{workers}_{ledger}", [pages.Old], lambda made: pages.fill(made, ledger, workers))
    with stage.copy_of(template) as name:
        settings = Settings(database_url=stage.servers.database_url(name), redis_url=stage.servers.redis_url)
        logs.configure("ERROR", "json")
        database.initialize(connect_to(settings.require_database_url()))
        database.connect()  # as in a worker process; otherwise each run would connect by itself
        declared = pages.sweeps(workers)
        worker = next(iter(declared))
        client = create_app(settings, declared, uuid4().hex, open_to_read=True).test_client()
        reader = SnapshotReader(settings, declared)

        def get(page: str) -> None:
            assert client.get(page).status_code == 200

        def begin() -> None:
            runs.begin(worker, message_id=uuid4().hex, tick=None, trigger="schedule", lease=None)

        found = {
            # First: the dashboard reads its snapshot in a thread of this process.
            "run of a sweep, idle": _fastest(lambda: run_sweep(declared[worker])),
            "begin of a run": _fastest(begin),
            "status": _fastest(reader.read),
            "first page": _fastest(lambda: get("/")),
            "page of a worker": _fastest(lambda: get(f"/workers/{worker}")),
            "page of runs": _fastest(lambda: get("/runs")),
            "page of failed runs": _fastest(lambda: get(f"/runs?worker={worker}&outcome=failed")),
            "charts of a day": _fastest(lambda: get("/charts")),
        }
        database.close()
    return found


def _fastest(look: Callable[[], object]) -> float:
    """Return the fastest of several reads in seconds, which other programs have disturbed least."""
    seconds = list[float]()
    while len(seconds) < 2 or (len(seconds) < _LOOKS and sum(seconds) < _LOOKS_S):
        began = time.perf_counter()
        look()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _messages(stage: Stage, size: int) -> Iterator[Cost]:
    url = stage.servers.redis_url
    client: Any = redis.Redis.from_url(url)
    client.flushall()  # temporary server
    broker, enough, left = messages.whole(Place("", url, size, Path())), threading.Event(), iter(range(_PROCESSED - 1))

    def empty(number: int) -> None:
        if next(left, None) is None:
            enough.set()

    def worked() -> float:
        """Return the processor time that this process and Redis have used so far."""
        cpu = client.info("cpu")
        return time.process_time() + float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])

    actor = messages.actor(broker, empty, idempotent=True)
    before = worked()
    housekeeping.enqueue_many(actor, range(size))
    yield Cost("messages", size, "CPU of enqueue_many, deduplicated", (worked() - before) / size)
    broker.emit_after("process_boot")
    worker = Worker(broker)
    before = worked()
    worker.start()
    if size < _PROCESSED:
        broker.join(actor.queue_name)
    elif not enough.wait(600):
        raise RuntimeError(f"no {_PROCESSED} messages were processed within ten minutes")
    yield Cost("messages", size, "CPU of a processed message", (worked() - before) / min(size, _PROCESSED))
    worker.stop()
    client.flushall()
    client.close()


_KINDS: Final[dict[str, tuple[Callable[[Stage, int], Iterator[Cost]], tuple[int, ...]]]] = {
    "rows": (_rows, (10_000, 100_000, 1_000_000, 10_000_000)),
    "sweeps": (_sweeps, (1, 10, 100, 1_000)),
    "messages": (_messages, (2_000, 10_000, 100_000, 1_000_000)),
    "ledger": (_ledger, (100_000, 1_000_000, 10_000_000)),
}


@click.command()
@click.option("--of", "kinds", multiple=True, type=click.Choice(list(_KINDS)), help="What grows; by default all.")
@click.option("--largest", type=click.IntRange(1), default=1_000_000, show_default=True, help="Largest size.")
@click.option("--write-page", is_flag=True, help="Write the figures into the documentation.")
def main(kinds: tuple[str, ...], largest: int, write_page: bool) -> None:
    """Measure the cost of one row, sweep, message or read of the ledger as their number grows."""
    with started(durable=False) as servers:
        conditions = report.machine(servers)
        costs = list(_costs(servers, kinds or tuple(_KINDS), largest))
    report.show_table(conditions, _HEADS, list(_lines(costs)))
    if write_page:
        report.write_part("growth", conditions, [(_HEADS, list(_lines(costs)))])


def _costs(servers: Servers, kinds: tuple[str, ...], largest: int) -> Iterator[Cost]:
    for kind in kinds:
        measure, sizes = _KINDS[kind]
        for size in sizes:
            if size <= largest:
                click.echo(f"{kind}: {size:,} ...", err=True)
                yield from measure(Stage(servers), size)


def _lines(costs: list[Cost]) -> Iterator[list[str]]:
    smallest: dict[tuple[str, str], float] = {}
    for cost in sorted(costs, key=lambda each: (each.kind, each.name, each.size)):
        ratio = cost.seconds / smallest.setdefault((cost.kind, cost.name), cost.seconds)
        verdict = "" if ratio <= _TOLERATED else f"above {_TOLERATED}"
        yield [cost.kind, f"{cost.size:,}", cost.name, f"{cost.seconds * 1e6:,.1f}", f"{ratio:.2f}", verdict]


if __name__ == "__main__":
    main()
