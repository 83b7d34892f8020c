"""``housekeeping worker`` and ``housekeeping scheduler``: Dramatiq's and periodiq's own programs, rightly called."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Final

import click
import dramatiq.cli
import periodiq

from housekeeping.brokers.queues import reach_broker
from housekeeping.cli.context import load_workers
from housekeeping.cli.metrics_pages import serve_this_process, shared_by_processes
from housekeeping.core.errors import WrongArgument
from housekeeping.core.settings import Settings
from housekeeping.core.telemetry.error_reporting import require_sentry
from housekeeping.database.connection import database

_APPLICATION: Final = "housekeeping.app"
#: After the grace period, for what was interrupted then to be put back into its queue.
_PUT_BACK_S: Final = 10


def _ready(queues: tuple[str, ...] = ()) -> Settings:
    """Settings and schema looked at here, where an error is one line, and not in each process that follows."""
    settings, sweeps = load_workers()
    known = sorted({sweep.queue for sweep in sweeps.values()})
    for queue in queues:
        if queue not in known:
            raise WrongArgument(f"there is no queue {queue!r}; the queues are {', '.join(known)}")
    settings.require_redis_url()
    if settings.sentry_dsn is not None:
        require_sentry()
    # Not to be carried into those processes.
    database.close()
    return settings


@click.command(short_help="Run the workers: a dramatiq process.")
@click.option("--processes", "-p", type=click.IntRange(1, 64), default=1, show_default=True, help="Worker processes.")
@click.option("--threads", "-t", type=click.IntRange(1, 64), default=8, show_default=True, help="Threads in each.")
@click.option("--queues", "-Q", multiple=True, help="Only these queues; may be repeated.")
def worker(processes: int, threads: int, queues: tuple[str, ...]) -> None:
    """Run the workers: a dramatiq process that takes messages until it is told to stop.

    SIGTERM or Ctrl-C lets runs end after their batch. Each thread holds one database connection.
    The same as "dramatiq housekeeping.app", with the arguments that suit it.
    """
    settings = _ready(queues)
    reach_broker(settings)
    arguments = [_APPLICATION, "--skip-logging", "--processes", str(processes), "--threads", str(threads)]
    arguments += ["--worker-shutdown-timeout", str(int((settings.grace_s + _PUT_BACK_S) * 1000))]
    if queues:
        arguments += ["--queues", *queues]  # once: of several Dramatiq takes the last
    with shared_by_processes(settings):
        sys.exit(dramatiq.cli.main(dramatiq.cli.make_argument_parser().parse_args(arguments)))


@click.command(short_help="Run the schedule: a periodiq process.")
def scheduler() -> None:
    """Run the schedule: a periodiq process that sends each worker its message when it is time.

    Any number may run; each tick fires once. While Redis is away it says so and goes on. The same as
    "periodiq housekeeping.app".
    """
    serve_this_process(_ready())

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        sys.exit(periodiq.main(periodiq.make_argument_parser().parse_args([_APPLICATION])))
    except KeyboardInterrupt:
        sys.exit(0)
