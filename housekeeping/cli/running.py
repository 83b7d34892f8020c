"""``housekeeping run``"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from housekeeping.cli.composition import argument_of, chosen, missing_table, workers_on_database
from housekeeping.cli.tables import counts, length, progress, show, table
from housekeeping.foundation import reports
from housekeeping.foundation.clock_skew import database_now
from housekeeping.foundation.db import one_line, reaching_postgres
from housekeeping.foundation.errors import HousekeepingError
from housekeeping.foundation.printable import printable
from housekeeping.sweeps.confirmation import Confirmation, confirmed
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import Counts
from housekeeping.sweeps.plan import dry_run as make_dry_run
from housekeeping.sweeps.results import RunResult
from housekeeping.sweeps.run import perform


@click.command(short_help="Run a worker once, in the foreground.")
@click.argument("name")
@click.argument("argument", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the result object, and nothing else, on stdout.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option(
    "--force", is_flag=True, help="Run although the worker is paused or disabled, or this machine's clock is wrong."
)
@click.option("--confirm", "plan_id", help="Let the run exceed the breaker's limit: the id of a plan.")
@click.pass_context
def run(
    context: click.Context,
    name: str,
    argument: str | None,
    as_json: bool,
    dry_run: bool,
    force: bool,
    plan_id: str | None,
) -> None:
    """Run worker NAME once, in the foreground, with progress. A few workers take an ARGUMENT.

    The run is the same as a scheduled one: same limits, same ledger. Ctrl-C ends it after the batch
    in hand; what was committed stays. Logs go to stderr. The names are those of "housekeeping list".

    A run that finds far more stale rows than usual goes on and alerts. Where the worker's breaker is set to limit or
    stop runs, it ends early with the reason "breaker". Look at "housekeeping plan NAME", and if that is what you want,
    run it with --confirm and the plan's id: it is good for an hour, for this worker and argument, and for a tenth more
    rows than the plan counted.

    A run does not start where this machine's clock is over a minute from the database's; --force overrides that, too:
    what is stale is decided by the database's clock anyway.

    Exit status: 0 when the outcome is done, partial or skipped; 1 when it failed.
    """
    settings, sweeps = workers_on_database(with_schema=False)
    sweep = chosen(sweeps, name)
    if settings.sentry_dsn is not None:
        reports.report_to_sentry(settings.sentry_dsn)
    about = argument_of(sweep, argument)
    confirmation = None if plan_id is None else _confirmed(plan_id, sweep, about)
    result = _dry_run(sweep, about) if dry_run else _perform(sweep, about, force, confirmation)
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        _show(result)
    if result.exit_code:
        if result.error is not None and context.find_root().params.get("debug"):
            raise result.error
        _explain(result, sweep)


def _confirmed(plan_id: str, sweep: Sweep, argument: Any) -> Confirmation:
    with reaching_postgres():
        return confirmed(plan_id, sweep.name, argument, database_now())


def _perform(sweep: Sweep, argument: Any, force: bool, confirmation: Confirmation | None) -> RunResult:
    def tell(so_far: Counts) -> None:
        say(f"{sweep.name}: {counts(so_far)}")

    with _stopping_at_signals() as stopping, progress(f"{sweep.name}: looking") as say:
        return perform(sweep, argument, force=force, on_batch=tell, stopping=stopping, confirmation=confirmation)


def _dry_run(sweep: Sweep, argument: Any) -> RunResult:
    with progress(f"{sweep.name}: counting"):
        return make_dry_run(sweep, argument)


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


def _show(result: RunResult) -> None:
    shown = table("WORKER", "OUTCOME", ">TOOK", "COUNTS")
    # The reason of a failure has a line of its own.
    outcome = result.outcome if result.reason is None or result.exit_code else f"{result.outcome}: {result.reason}"
    shown.add_row(
        result.worker,
        f"{outcome} (dry run)" if result.dry_run else outcome,
        length(result.duration_s),
        "-" if result.exit_code and not any(result.counts.values()) else counts(result.counts),
    )
    show(shown)


def _explain(result: RunResult, sweep: Sweep) -> None:
    """Say why the run failed, and end with the status that goes with it."""
    error = missing_table(sweep, result.error) or result.error
    line = result.reason if error is None else one_line(error)
    click.echo(f"housekeeping: {result.worker} {result.outcome}: {printable(line or '')}", err=True)
    sys.exit(error.exit_code if isinstance(error, HousekeepingError) else result.exit_code)
