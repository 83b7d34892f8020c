"""``housekeeping run``: run a worker once in the foreground."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import click

from housekeeping.cli.commands.plan import print_checks
from housekeeping.cli.completion import complete_worker
from housekeeping.cli.context import load_workers
from housekeeping.cli.foreground import count_for_dry_run, end_process, run_with_progress
from housekeeping.cli.formatting import ProgressLine, notify
from housekeeping.cli.tables import print_table, table
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.sanitize import error_line
from housekeeping.core.telemetry import error_reporting
from housekeeping.core.wording import format_duration
from housekeeping.presentation.formatting import format_counts, format_progress, format_run_counts
from housekeeping.presentation.workers import find_worker, missing_table_error, parse_argument
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.insight.plan import DryRun
from housekeeping.sweeps.insight.plan import dry_run as make_dry_run
from housekeeping.sweeps.insight.run_progress import count_left, progress_of
from housekeeping.sweeps.ledger.action_log import command_line_user, record_action
from housekeeping.sweeps.ledger.history import run_label
from housekeeping.sweeps.ledger.runs import Counts
from housekeeping.sweeps.limits.first_run import UNCONFIRMED, in_words
from housekeeping.sweeps.stages.stage import Backlog


@click.command()
@click.argument("name", shell_complete=complete_worker)
@click.argument("argument", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the result object, and nothing else, on stdout.")
@click.option("--dry-run", is_flag=True, help="Count what would be done, and change nothing.")
@click.option(
    "--force", is_flag=True, help="Run although the worker is paused or disabled, or this machine's clock is wrong."
)
@click.option("--confirm", is_flag=True, help="Let the run process any number of rows, whatever its breaker allows.")
@click.pass_context
def run(
    context: click.Context,
    name: str,
    argument: str | None,
    as_json: bool,
    dry_run: bool,
    force: bool,
    confirm: bool,
) -> None:
    """Run worker NAME once, in the foreground, with progress. A few workers take an ARGUMENT.

    On a terminal, a line shows the processed rows and their total, the rows per second and the time left.

    With --dry-run, outcome and reason are those that the run would have, as far as its checks decide them. The counts
    are those of a run that nothing stops or limits. "checks" in --json are those of "housekeeping plan".

    The run has the limits of a scheduled run and is recorded in the ledger. Logs go to stderr. "housekeeping list"
    shows the names.

    Ctrl-C or SIGTERM ends the run within a second, as partial with the reason "shutdown". An uncommitted batch is
    rolled back, and the next run resumes. A second signal ends the process at once.

    A run that finds far more stale rows than usual continues and raises an alert. Where the worker's breaker is set to
    limit or stop runs, it ends early with the reason "breaker". Look at "housekeeping plan NAME", and if that is what
    you want, run it with --confirm: this one run may then process any number of rows.

    The first run of a sweep of your own is skipped with the reason "unconfirmed" if it would process over 20 % of a
    table and at least 1,000 rows. --confirm runs it, and later runs need no confirmation.

    A run does not start if this machine's clock is over a minute from the database's. --force overrides that, too: the
    database's clock decides which rows are stale.

    Exit status: 0 if the outcome is done, partial or skipped, also after Ctrl-C; 1 if it failed, or would fail; 130
    after a second Ctrl-C (143 after a second SIGTERM), or if the run's end could not be recorded.
    """
    settings, sweeps = load_workers(with_schema=False)
    sweep = find_worker(sweeps, name)
    if settings.sentry_dsn is not None:
        error_reporting.report_to_sentry(settings.sentry_dsn)
    run_argument = parse_argument(sweep, argument)
    if dry_run:
        options = {"zone": settings.timezone, "force": force, "confirmed": confirm}
        result: RunResult = count_for_dry_run(name, make_dry_run, sweep, run_argument, **options)
        ended = True
    else:
        result, ended = _run(sweep, run_argument, force=force, confirmed=confirm)
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        print_result(result)
        if isinstance(result, DryRun) and result.forecast.notable:
            print_checks(result.forecast.notable)
    if result.reason == UNCONFIRMED and not result.dry_run:
        notify(in_words(result.counts[UNCONFIRMED]))
    if result.reason == "shutdown":
        report_interruption(result, "the next run resumes")
    if not ended:
        end_process(result.exit_code)
    if result.exit_code:
        if result.error is not None and context.find_root().params.get("debug"):
            raise result.error
        exit_with_error(result, sweep)


def _run(sweep: Sweep, argument: Any, *, force: bool, confirmed: bool) -> tuple[RunResult, bool]:
    """Run the sweep. A run that overrides a limit is an action of its operator."""
    if not (force or confirmed):
        return run_in_foreground(sweep, argument)
    with record_action("confirm" if confirmed else "run", sweep.name, command_line_user()) as outcome:
        result, ended = run_in_foreground(sweep, argument, force=force, confirmed=confirmed)
        outcome.result = describe_end(result, sweep.database)
    return result, ended


def describe_end(result: RunResult, database_name: str) -> str:
    """Return the run and its outcome in one line, for the log of actions."""
    label = "" if result.run_id is None else f"run {run_label(result.run_id, database_name)} "
    return f"{label}{result.outcome}{f': {result.reason}' if result.reason else ''}"


def run_in_foreground(
    sweep: Sweep, argument: Any = None, *, continued_by: str = "a run after a minute", **options: Any
) -> tuple[RunResult, bool]:
    """Run a sweep with progress; return the result, and whether the run's thread has ended.

    Parameters:
      continued_by: What continues the run if its end cannot be recorded.
      options: Further options of `run_sweep`.
    """
    meter = _Meter(sweep, argument)

    def work(line: ProgressLine, stopping: threading.Event, begun: Callable[[int], None]) -> RunResult:
        def begin(run_id: int) -> None:
            begun(run_id)
            if line.is_shown:
                line(f"{sweep.name}: counting")
                meter.begin()

        def show_progress(so_far: Counts) -> None:
            if line.is_shown:
                line(f"{sweep.name}: {meter.text(so_far)}")

        return run_sweep(sweep, argument, on_batch=show_progress, stopping=stopping, on_begin=begin, **options)

    return run_with_progress(sweep, work, continued_by=continued_by)


class _Meter:
    """Progress of a run in the foreground."""

    def __init__(self, sweep: Sweep, argument: Any) -> None:
        self._sweep = sweep
        self._argument = argument
        self._total: Backlog | None = None
        self._began = time.monotonic()

    def begin(self) -> None:
        """Count the stale rows. Called in the run's thread, before its first batch."""
        self._total = count_left(self._sweep, argument=self._argument)
        self._began = time.monotonic()

    def text(self, counts: Counts) -> str:
        """Return the progress of a run with these counts, in one line."""
        if not self._sweep.progress_counts:
            return format_counts(counts)
        now = progress_of(self._sweep, counts, self._total, time.monotonic() - self._began)
        failed = {name: counts[name] for name in ("failed",) if counts.get(name)}
        return ", ".join([format_progress(now), *([format_counts(failed)] if failed else [])])


def report_interruption(result: RunResult, next_step: str) -> None:
    """Print on stderr what an interrupted run has committed, and what continues it."""
    committed = format_run_counts(None, result.counts)
    notify(f"{result.worker} was interrupted; committed: {'nothing' if committed == '-' else committed}; {next_step}")


def print_result(result: RunResult) -> None:
    """Print the result of a run as a table."""
    rows = table("WORKER", "OUTCOME", ">DURATION", "COUNTS")
    # A failure's reason is printed on stderr.
    outcome = result.outcome if result.reason is None or result.exit_code else f"{result.outcome}: {result.reason}"
    rows.add_row(
        result.worker,
        f"{outcome} (dry run)" if result.dry_run else outcome,
        format_duration(result.duration_s),
        format_run_counts(result.outcome, result.counts),
    )
    print_table(rows)


def exit_with_error(result: RunResult, sweep: Sweep) -> NoReturn:
    """Print the error of a failed run in one line, and exit with its status."""
    error = missing_table_error(sweep, result.error) or result.error
    line = result.reason if error is None else error_line(error)
    text = (line or "").removeprefix(f"{result.worker}: ")
    notify(f"{result.worker} {result.outcome}: {text}")
    sys.exit(error.exit_code if isinstance(error, HousekeepingError) else result.exit_code)
