"""``housekeeping run``"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click
from rich.console import Console

from housekeeping.cli.composition import argument_of, chosen, workers_on_database
from housekeeping.cli.tables import counts, length, out, table
from housekeeping.foundation.db import one_line
from housekeeping.foundation.errors import DatabaseUnavailable
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import Counts
from housekeeping.sweeps.plan import dry_run as make_dry_run
from housekeeping.sweeps.results import RunResult
from housekeeping.sweeps.run import perform


@click.command()
@click.argument("name")
@click.argument("argument", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the result object, and nothing else, on stdout.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--force", is_flag=True, help="Run although the worker is paused or disabled.")
def run(name: str, argument: str | None, as_json: bool, dry_run: bool, force: bool) -> None:
    """Run worker NAME once, in the foreground, with progress.

    The run is the same as a scheduled one: same limits, same ledger. Ctrl-C ends it after the batch
    in hand; what was committed stays. Logs go to stderr.
    """
    _, sweeps = workers_on_database()
    sweep = chosen(sweeps, name)
    about = argument_of(sweep, argument)
    result = make_dry_run(sweep, about) if dry_run else _perform(sweep, about, force)
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        _show(result)
    if result.error is not None:
        click.echo(f"housekeeping: {name} {result.outcome}: {one_line(result.error)}", err=True)
        sys.exit(getattr(result.error, "exit_code", 1) if isinstance(result.error, DatabaseUnavailable) else 1)


def _perform(sweep: Sweep, argument: Any, force: bool) -> RunResult:
    with _stopping_at_signals() as stopping, _progress(sweep) as on_batch:
        return perform(sweep, argument, force=force, on_batch=on_batch, stopping=stopping)


@contextmanager
def _stopping_at_signals() -> Iterator[threading.Event]:
    """Set on the first Ctrl-C or SIGTERM; a second one ends the process as usual."""
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(sweep: Sweep) -> Iterator[Callable[[Counts], None] | None]:
    """A line on a terminal's stderr that says how far the run is; nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with console.status(f"{sweep.name}: looking") as line:
        yield lambda so_far: line.update(f"{sweep.name}: {counts(so_far)}")


def _show(result: RunResult) -> None:
    shown = table("WORKER", "OUTCOME", "TOOK", "COUNTS")
    outcome = result.outcome if result.reason is None else f"{result.outcome}: {result.reason}"
    shown.add_row(
        result.worker,
        f"{outcome} (dry run)" if result.dry_run else outcome,
        length(result.duration_s),
        counts(result.counts),
    )
    out.print(shown)
