"""Senders and workers of the queues that ``queues.py`` compares: one worker process, and messages that do nothing.

The module imports queues only in functions, because each interpreter has only some of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from benchmarks.turn import measured

_THREADS: Final = 8  # Dramatiq's default
_PIPE: Final = "BENCHMARK_PIPE"
_DEDUPLICATED_FOR_S: Final = 600

#: Function that sends so many different messages, and function that processes messages until the process is killed.
Program = tuple[Callable[[int], object], Callable[[], object]]


@cache
def _pipe() -> int:
    return os.open(os.environ[_PIPE], os.O_WRONLY)


def empty(number: int) -> None:
    """Report a processed message by writing a byte to the pipe."""
    os.write(_pipe(), b".")


async def _empty(number: int) -> None:
    empty(number)


async def _empty_of_arq(context: Any, number: int) -> None:
    empty(number)


def _each(send: Callable[[int], object]) -> Callable[[int], object]:
    def send_all(rows: int) -> None:
        for number in range(rows):
            send(number)

    return send_all


def _dramatiq(url: str, *, whole: bool, **options: Any) -> Program:
    import dramatiq

    from benchmarks import messages
    from benchmarks.comparison import Place

    broker = (messages.whole if whole else messages.bare)(Place("", url, 0, Path()))
    actor = dramatiq.actor(broker=broker, actor_name="empty", **options)(empty)
    broker.client.ping()  # type: ignore[attr-defined]

    def work() -> None:
        broker.emit_after("process_boot")
        dramatiq.Worker(broker, worker_threads=_THREADS).start()
        signal.pause()

    return _each(actor.send), work


def _leased(url: str) -> Program:
    from benchmarks.messages import LEASE

    return _dramatiq(url, whole=True, exclusive_lease=LEASE)


def _celery(url: str, *, once: bool) -> Program:
    from celery import Celery

    url = url.replace("unix://", "redis+socket://")  # Celery's name for the scheme
    app = Celery(broker=url)
    app.conf.update(task_acks_late=True, task_ignore_result=True, broker_connection_retry_on_startup=True)
    options: dict[str, Any] = {"name": "empty"}
    if once:
        from celery_once import QueueOnce

        settings = {"url": url, "default_timeout": _DEDUPLICATED_FOR_S}
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
        options |= {"base": QueueOnce, "once": {"graceful": True}}
    task = app.task(**options)(empty)
    quiet = ("--loglevel=ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat")
    return _each(task.delay), lambda: app.worker_main(["worker", "-P", "threads", "-c", str(_THREADS), *quiet])


def _rq(url: str, *, forks: bool = False, unique: bool = False) -> Program:
    import rq
    from redis import Redis

    client: Any = Redis.from_url(url)
    queue = rq.Queue(connection=client)

    def send(number: int) -> None:
        named = {"job_id": f"empty-{number}", "unique": True} if unique else {}
        queue.enqueue(empty, number, result_ttl=0, **named)

    worker = rq.Worker if forks else rq.SimpleWorker
    return _each(send), lambda: worker([queue], connection=client).work(logging_level="ERROR")


def _arq(url: str, *, named: bool) -> Program:
    from arq import create_pool
    from arq.connections import RedisSettings
    from arq.worker import Worker, func

    settings = RedisSettings.from_dsn(url)

    async def send_all(rows: int) -> None:
        pool = await create_pool(settings)
        for number in range(rows):
            await pool.enqueue_job("empty", number, _job_id=f"empty-{number}" if named else None)
        await pool.aclose()

    def work() -> None:
        functions = [func(_empty_of_arq, name="empty")]
        asyncio.set_event_loop(asyncio.new_event_loop())
        Worker(functions, redis_settings=settings, keep_result=0, log_results=False).run()

    return lambda rows: asyncio.run(send_all(rows)), work


def _taskiq(url: str) -> Program:
    from taskiq.api import run_receiver_task
    from taskiq_redis import RedisStreamBroker

    broker = RedisStreamBroker(url)
    task = broker.task(task_name="empty")(_empty)

    async def send_all(rows: int) -> None:
        await broker.startup()
        for number in range(rows):
            await task.kiq(number)
        await broker.shutdown()

    return lambda rows: asyncio.run(send_all(rows)), lambda: asyncio.run(run_receiver_task(broker, run_startup=True))


def _huey(url: str, *, locked: bool) -> Program:
    from huey import RedisHuey

    huey = RedisHuey(url=url, results=False)

    def under_a_lock(number: int) -> None:
        with huey.lock_task(f"empty-{number}"):
            empty(number)

    task = huey.task(name="empty")(under_a_lock if locked else empty)
    return _each(task), lambda: huey.create_consumer(workers=_THREADS, worker_type="thread").run()


#: Contestants by name: the package that each needs besides its own dependencies, and its program.
PROGRAMS: Final[dict[str, tuple[str, Callable[[str], Program]]]] = {
    "bare dramatiq": ("dramatiq", partial(_dramatiq, whole=False)),
    "housekeeping": ("dramatiq", partial(_dramatiq, whole=True)),
    "housekeeping, deduplicated": ("dramatiq", partial(_dramatiq, whole=True, idempotent=True)),
    "housekeeping, under a lease": ("dramatiq", _leased),
    "celery": ("celery", partial(_celery, once=False)),
    "celery, celery-once": ("celery-once", partial(_celery, once=True)),
    "rq": ("rq", _rq),
    "rq, unique job ids": ("rq", partial(_rq, unique=True)),
    "rq, a process for each job": ("rq", partial(_rq, forks=True)),
    "arq": ("arq", partial(_arq, named=False)),
    "arq, job ids of the sender": ("arq", partial(_arq, named=True)),
    "taskiq": ("taskiq-redis", _taskiq),
    "huey": ("huey", partial(_huey, locked=False)),
    "huey, lock_task": ("huey", partial(_huey, locked=True)),
}


def main() -> None:
    """Read the contestant and its role from stdin; send and measure, or work."""
    told = json.loads(sys.stdin.readline())
    os.environ[_PIPE] = told["pipe"]
    send, work = PROGRAMS[told["contestant"]][1](told["redis_url"])
    if told["sends"]:
        measured(lambda: send(told["rows"]))
    else:
        work()
