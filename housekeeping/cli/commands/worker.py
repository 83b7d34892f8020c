"""``housekeeping worker`` and ``scheduler``: start Dramatiq and periodiq with the right arguments."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click
import dramatiq.cli
import periodiq

from housekeeping.brokers.queues import reach_broker, reject_unusable_redis
from housekeeping.cli.context import load_workers
from housekeeping.core.errors import SettingsError, WrongArgument
from housekeeping.core.settings import PREFIX, Settings
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.error_reporting import require_sentry
from housekeeping.core.termination import exit_on
from housekeeping.database.connection import close_databases
from housekeeping.middleware.telemetry.health import PageServer, Readiness, with_health
from housekeeping.middleware.telemetry.metrics import require_prometheus

_APPLICATION: Final = "housekeeping.app"
#: Seconds after the grace period in which interrupted messages return to their queues.
_REQUEUE_S: Final = 10


def _check_settings(queues: tuple[str, ...] = ()) -> Settings:
    """Return the settings after checking them, the schema and the queue names.

    An error is one line here. In the child processes it would be one traceback each.
    """
    settings, sweeps = load_workers()
    known = sorted({sweep.queue for sweep in sweeps.values()})
    for queue in queues:
        if queue not in known:
            raise WrongArgument(f"there is no queue {queue!r}; the queues are {', '.join(known)}")
    settings.require_redis_url()
    if settings.sentry_dsn is not None:
        require_sentry()
    # Child processes must not inherit a connection.
    close_databases()
    return settings


@click.command()
@click.option(
    "--processes", "-p", type=click.IntRange(1, 64), default=1, show_default=True, help="Number of worker processes."
)
@click.option("--threads", "-t", type=click.IntRange(1, 64), default=8, show_default=True, help="Threads per process.")
@click.option("--queues", "-Q", multiple=True, help="Serve only this queue; may be repeated.")
def worker(processes: int, threads: int, queues: tuple[str, ...]) -> None:
    """Run the workers: a Dramatiq process that processes messages until SIGTERM or Ctrl-C.

    On a signal, active runs end after their batch. Each thread has one database connection. "dramatiq housekeeping.app"
    does the same; this command adds suitable arguments.
    """
    settings = _check_settings(queues)
    reach_broker(settings)
    arguments = [_APPLICATION, "--skip-logging", "--processes", str(processes), "--threads", str(threads)]
    arguments += ["--worker-shutdown-timeout", str(int((settings.grace_s + _REQUEUE_S) * 1000))]
    if queues:
        arguments += ["--queues", *queues]  # one option: Dramatiq uses only the last of several
    with shared_by_processes(settings):
        sys.exit(dramatiq.cli.main(dramatiq.cli.make_argument_parser().parse_args(arguments)))


@click.command()
def scheduler() -> None:
    """Run the schedule: a periodiq process that sends a message to each worker at its ticks.

    Several schedulers may run; each tick is sent once. Without Redis, the scheduler logs a warning and retries.
    "periodiq housekeeping.app" does the same.
    """
    settings = _check_settings()
    reject_unusable_redis(settings)
    serve_this_process(settings)

    done = exit_on(signal.SIGTERM, signal.SIGINT)
    try:
        sys.exit(periodiq.main(periodiq.make_argument_parser().parse_args([_APPLICATION])))
    finally:
        done()


#: Environment variable with the folder in which Dramatiq's worker processes share their metrics.
_FOLDER: Final = "dramatiq_prom_db"


@contextmanager
def shared_by_processes(settings: Settings) -> Iterator[None]:
    """Provide an empty metrics folder for the worker processes, and remove it afterward.

    Dramatiq's default is one folder for all workers of the machine, which is never emptied. A folder that the
    environment variable ``dramatiq_prom_db`` names is used instead.

    Raises:
      SettingsError: prometheus-client is not installed, or the port is in use.
    """
    if settings.metrics_port is None:
        yield
        return
    require_prometheus()
    with _listening(settings.metrics_host, settings.metrics_port, "METRICS_PORT"):
        pass  # the port is free; checked here because a child process would fail unnoticed
    if _FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="housekeeping-metrics-", ignore_cleanup_errors=True) as folder:
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[_FOLDER]


def serve_this_process(settings: Settings) -> None:
    """Serve metrics and health of this scheduler process in a thread, if the settings have a port for it.

    Raises:
      SettingsError: prometheus-client is not installed, or the port is in use.
    """
    if settings.scheduler_metrics_port is None:
        return
    require_prometheus()
    # With this variable, the values would appear on the page of the worker processes.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    import prometheus_client

    page = with_health(prometheus_client.MetricsHandler, Readiness(settings, "scheduler"))
    with _listening(settings.metrics_host, settings.scheduler_metrics_port, "SCHEDULER_METRICS_PORT"):
        pass
    server = PageServer(settings.metrics_host, settings.scheduler_metrics_port, page)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    metrics.export_pending()


def _listening(host: str, port: int, setting: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(f"{PREFIX}{setting} is {port}, which cannot be opened on {host}: {reason}") from None
