"""``housekeeping worker``, ``scheduler``, ``serve`` (both without Redis) and ``web`` (the dashboard)."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import click
import dramatiq.cli
import periodiq

from housekeeping.brokers import reach_broker, reject_unusable_redis
from housekeeping.cli.main import load_workers
from housekeeping.cli.output import notify, options
from housekeeping.cli.run import Abandoned, end_process, in_foreground
from housekeeping.core.errors import DatabaseUnavailable, SettingsError, WrongArgument
from housekeeping.core.interrupts import exit_on
from housekeeping.core.logs import counted, how_to_install
from housekeeping.core.redis import shared_redis
from housekeeping.core.settings import PREFIX, Settings
from housekeeping.core.telemetry import report_to_sentry, require_sentry
from housekeeping.database.connection import close_databases
from housekeeping.ledger import schema
from housekeeping.middleware.observe import PageServer, Readiness, require_prometheus, with_health
from housekeeping.sweeps.declaration import Sweep

#: The options of the dashboard.
_address: Final = options(
    click.option("--host", default="127.0.0.1", show_default=True, help="Address of the dashboard."),
    click.option(
        "--port",
        default=9292,
        show_default=True,
        type=click.IntRange(0, 65535),
        help="Port of the dashboard; 0 for any free port.",
    ),
)


@click.command()
@_address
def web(host: str, port: int) -> None:
    """Serve the dashboard: workers, runs, plans, backlog, alerts, queues, leases, dead letters; pause and resume.

    The pages need a token: HOUSEKEEPING_WEB_TOKEN, or one that this command generates and prints.
    HOUSEKEEPING_WEB_READ_TOKEN allows only reading. With HOUSEKEEPING_WEB_OPEN_TO_READ=true, every user of this machine
    can read the pages of a dashboard at a loopback address. Behind a proxy that knows its users,
    HOUSEKEEPING_WEB_USER_HEADER names the header with the user, for the action log.

    Requires the extra "web".
    """
    require_web()
    settings, sweeps = load_workers(with_schema=False)
    try:
        schema.require_all()
    except DatabaseUnavailable as error:
        notify(f"warning: {error}; the pages show it until it answers")  # the pages are needed most during an outage
    reject_unusable_redis(settings)
    done = exit_on(signal.SIGTERM)
    try:
        with page_server(settings, sweeps, host, port) as pages:
            pages.run()
    finally:
        done()


def require_web() -> None:
    """Raise SettingsError unless the extra ``web`` is installed."""
    try:
        import housekeeping.web.application  # noqa: F401
    except ModuleNotFoundError as error:
        raise SettingsError(f"{error.name} is not installed: {how_to_install('web')}") from None


@contextmanager
def page_server(settings: Settings, sweeps: dict[str, Sweep], host: str, port: int) -> Iterator[Any]:
    """Yield the server of the dashboard. Print its address, and a generated token if none is set.

    Raises:
      SettingsError: The address cannot be opened, or it needs a token.
    """
    from housekeeping.web.application import create_app, server
    from housekeeping.web.security import is_loopback

    local = is_loopback(host)
    token = settings.web_token
    if token is None and not local:
        raise SettingsError(
            f"HOUSEKEEPING_WEB_TOKEN is not set, and other machines can reach {host}; "
            "set it to at least 32 random characters"
        )
    if token is None:
        token = secrets.token_urlsafe(32)
        click.echo(f"log in with this token (valid until the command ends): {token}", err=True)
    app = create_app(settings, sweeps, token, open_to_read=local and settings.web_open_to_read)
    refused = f"cannot listen on {host}, port {port}; choose others with --host, --port"
    with _listening(host, port, refused) as listener:
        port = listener.getsockname()[1]
        click.echo(f"http://{f'[{host}]' if ':' in host else host}:{port}/  (Ctrl-C to stop)", err=True)
        yield server(app, listener)


#: With the broker named, because a module of ``HOUSEKEEPING_SWEEPS`` may have imported the application before.
_APPLICATION: Final = "housekeeping.app:broker"
#: Seconds after the grace period in which interrupted messages return to their queues.
_REQUEUE_S: Final = 10
#: Seconds after the grace period in which `serve` interrupts its runs and stores their results.
_LATE_S: Final = 15


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


@click.command()
@click.option(
    "--threads",
    "-t",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Maximum number of simultaneous runs.",
)
@click.option("--web", "with_web", is_flag=True, help='Also serve the dashboard; requires the extra "web".')
@_address
def serve(threads: int, with_web: bool, host: str, port: int) -> None:
    """Run the schedule and all workers in one process, without Redis.

    Keeps ticks, leases and heartbeats in PostgreSQL. Several processes, also on several machines, share the work: one
    of them runs each tick, and another one resumes it if that process dies.

    Features that need messages are not available: "housekeeping enqueue", sweeps with a Send, the cleanup of git refs,
    pending uploads, and actors with this library's middleware. They need Redis, "housekeeping worker" and "housekeeping
    scheduler". "housekeeping list" shows such workers as not set up.

    On SIGTERM or Ctrl-C, each run ends after its current batch. Another process resumes its tick, or this one after a
    restart. A second signal ends the process at once.
    """
    if with_web:
        require_web()
    settings, sweeps = load_workers()
    if not shared_redis.is_replaced(settings):
        raise SettingsError(
            "housekeeping serve works without Redis, but HOUSEKEEPING_REDIS_URL or HOUSEKEEPING_BROKER_URL is set; "
            "unset it, or start housekeeping worker and housekeeping scheduler instead"
        )
    from housekeeping.serve import Service

    report_to_sentry(settings.sentry_dsn)
    serve_this_process(settings)
    service, asked = Service(settings, sweeps, threads), False

    def stop(number: int) -> None:
        nonlocal asked
        if asked:
            raise Abandoned(number)
        asked = True
        service.stop()
        # A database that hangs may keep the process from ending.
        late = threading.Timer(settings.grace_s + _LATE_S, os.kill, (os.getpid(), signal.SIGTERM))
        late.daemon = True
        late.start()
        notify("each run ends after its batch; a second Ctrl-C or SIGTERM ends this process at once")

    def run() -> None:
        # Printed only once signals are handled, because a supervisor may send one as soon as it reads the line.
        click.echo(f"serving {counted(len(service.workers), 'worker')} (Ctrl-C to stop)", err=True)
        service.run()

    with ExitStack() as stack:
        if with_web:
            pages = stack.enter_context(page_server(settings, sweeps, host, port))
            threading.Thread(target=pages.run, name="dashboard", daemon=True).start()
            stack.callback(pages.close)
        try:
            in_foreground(run, stop)
        except Abandoned as error:
            end_process(error.exit_code, "ended at once; other processes resume its runs after a minute")


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
    _check_port(settings, "METRICS_PORT")
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
    # Imported before the application, whose actors export first values as they are declared. With the variable, the
    # values would appear on the page of the worker processes.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    import prometheus_client

    page = with_health(prometheus_client.MetricsHandler, Readiness(settings, "scheduler"))
    _check_port(settings, "SCHEDULER_METRICS_PORT")
    server = PageServer(settings.metrics_host, settings.scheduler_metrics_port, page)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


def _listening(host: str, port: int, refused: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise SettingsError(f"{refused}: {error.strerror or error}") from None


def _check_port(settings: Settings, name: str) -> None:
    """Raise SettingsError unless the port is free. The process that opens it would fail unnoticed."""
    host, port = settings.metrics_host, getattr(settings, name.lower())
    _listening(host, port, f"{PREFIX}{name} is {port}, which cannot be opened on {host}").close()
