"""``housekeeping run`` and ``plan``: run a worker once in the foreground, and show what a run would do now."""

from __future__ import annotations

import contextvars
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import click
from rich.text import Text

from housekeeping.cli.main import load_workers
from housekeeping.cli.output import (
    ProgressLine,
    complete_worker,
    json_option,
    notify,
    out,
    print_as_json,
    print_table,
    progress,
    say,
    table,
)
from housekeeping.cli.status import read_status
from housekeeping.core import telemetry
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.logs import error_line, format_duration, in_one_line, printable
from housekeeping.engine import RunResult
from housekeeping.engine.gates import Check, Effect
from housekeeping.engine.guard import UNCONFIRMED, in_words
from housekeeping.engine.run import run_sweep
from housekeeping.insight.plan import DryRun, Plan, notable, with_alerts
from housekeeping.insight.plan import dry_run as make_dry_run
from housekeeping.insight.plan import plan as make_plan
from housekeeping.insight.trends import count_left, format_progress, progress_of
from housekeeping.insight.wording import (
    find_worker,
    format_age,
    format_counts,
    format_run_counts,
    missing_table_error,
    parse_argument,
    translate_table_errors,
)
from housekeeping.ledger.operators import command_line_user, record_action
from housekeeping.ledger.runs import Counts
from housekeeping.ledger.schema import run_label
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stage import Backlog

_SAMPLE_WIDTH: Final = 100  # characters of a value; --json has all of it
_STYLES: Final[dict[Effect, str]] = {
    "none": "dim",
    "alerts": "yellow",
    "slows": "yellow",
    "waits": "yellow",
    "ends_early": "yellow",
    "skips": "yellow",
    "fails": "bold red",
    "unknown": "yellow",
}


@click.command()
@click.argument("name", shell_complete=complete_worker)
@click.argument("argument", required=False)
@json_option()
def plan(name: str, argument: str | None) -> None:
    """Show what a run of worker NAME would do now. Changes nothing, records no run, acquires no lease.

    The counts come from the run's own query, in one read-only snapshot. DURATION is an estimate from the worker's last
    runs, summed over all runs that the work needs; it is unknown without a history. HELD is the number of stale rows
    that stay because the worker's hold applies to them; only workers with a hold have the column.

    Below, the plan shows whether a run that is sent now would start, and what the checks before the first batch would
    do to it: a pause or lower limits (override), the queue with its workers, a lease that another run holds, locked
    tables, the clocks, a first run without a confirmation, the breaker, the throttle, and when the schedule starts the
    next run. Checks that cannot be made, for example while Redis is stopped, are unknown.

    Works before "housekeeping init", too. "housekeeping list" shows the names; a few workers take an ARGUMENT.
    """
    settings, sweeps = load_workers(with_schema=False)
    sweep = find_worker(sweeps, name)
    run_argument = parse_argument(sweep, argument)
    with translate_table_errors(sweep), progress(f"{name}: counting"):
        planned = make_plan(sweep, run_argument, settings=settings, declared=sweeps.values())
        if planned.backlog_forecast is not None:
            planned = with_alerts(planned, sweep, read_status(settings, sweeps, name, stores=False).alerts)
    if print_as_json(planned):
        return
    print_plan(planned)
    out.print()
    out.print(planned.in_words, style="bold")
    print_checks(planned.checks)
    if planned.backlog_forecast is not None:
        say(f"backlog: {planned.backlog_forecast.text}")


def print_plan(planned: Plan) -> None:
    """Print the stages of a plan with their first rows, its warnings, its foreign keys and its triggers."""
    holds = [">HELD"] if planned.held is not None else []
    stages = table(
        planned.worker, f">STALE {planned.unit.upper()}S", *holds, ">BATCHES", ">DURATION", ">OLDEST", ">NEWEST"
    )
    for each, batches in planned.stages:
        oldest, newest = (_age(value, planned.now) for value in (each.oldest, each.newest))
        held = ["-" if each.held is None else str(each.held)] if holds else []
        number, duration = str(batches), _duration(planned, each.stale)
        if each.stale.is_unknown:
            number = duration = "unknown"
        stages.add_row(each.name, str(each.stale), *held, number, duration, oldest, newest)
    print_table(stages)
    for each, batches in planned.stages:
        if batches.most_rows > batches.rows:
            of = "" if len(planned.stages) == 1 else f"{each.name}: "
            say(printable(f"{of}batches of {batches.rows:,} rows, up to {batches.most_rows:,} while they are quick"))
    for each, _ in planned.stages:
        if each.samples:
            of = "" if each.name in ("rows", "partitions") else f" of {each.name}"
            # As a title of the table it would be wrapped to the table's width.
            say(Text.assemble("\n", (f"{each.title}{of}", "bold")))
            samples = table(*each.samples[0])
            for row in each.samples:
                samples.add_row(
                    *(in_one_line("-" if value is None else str(value), _SAMPLE_WIDTH) for value in row.values())
                )
            print_table(samples)
    for warning in planned.warnings:
        say(printable(f"\nwarning: {warning}"))
    _print_dependents(planned)
    for trigger in planned.triggers:
        say(printable(f"\n{trigger.text}"))


def _print_dependents(planned: Plan) -> None:
    """Print the tree of dependents and the remedies."""
    if planned.dependents:
        tree = table("DEPENDENTS", "DECISION", ">ROWS", ">BATCHES", "INDEX")
        # Each link is below its parent.
        for each in sorted(planned.dependents, key=lambda each: [each.stage.name, *(link.name for link in each.path)]):
            name = f"{'  ' * (len(each.path) - 1)}{each.link.name}"
            tree.add_row(
                name, each.link.decision or "none", each.rows_in_words, each.batches_in_words, each.index_in_words
            )
        out.print()
        print_table(tree)
    for each in planned.dependents:
        if each.way_out is not None or each.is_new:
            say(printable(f"\n{each.level}: {each.text}"))
        if each.way_out is not None:
            say(printable(f"do: {each.way_out}"))


def print_checks(checks: Sequence[Check]) -> None:
    """Print what each check would do to the run."""
    # Lines instead of a table, because their texts contain commands to type.
    names = max(len(each.name) for each in checks) + 2
    effects = max(len(each.effect) for each in checks) + 2
    for each in checks:
        effect = f"{each.effect.replace('_', ' '):<{effects}}", _STYLES[each.effect]
        say(Text.assemble(f"{each.name:<{names}}", effect, printable(each.text)), indent=names + effects)


def _duration(planned: Plan, stale: Backlog) -> str:
    expected_s = planned.expected_s(stale)
    if expected_s is None:
        return "unknown"
    return f"{'' if stale.exact else 'over '}{format_duration(expected_s)}" if stale.rows else "-"


def _age(value: Any, now: datetime) -> str:
    if not isinstance(value, datetime):
        return "-" if value is None else in_one_line(str(value), _SAMPLE_WIDTH)
    return format_age(value, now)


T = TypeVar("T")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
#: Seconds between looks at signals that did not end the wait.
_SIGNAL_CHECK_S: Final = 0.1


class Abandoned(Exception):
    """Raised while the work still runs in its thread and the process has to end.

    Attributes:
      exit_code: Exit status of a program that a signal ended, by shell convention.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def in_foreground(work: Callable[[], T], on_signal: Callable[[int], None]) -> T:
    """Return the result of work in a thread, or raise its error; meanwhile call `on_signal` for Ctrl-C and SIGTERM.

    Python runs signal handlers only in the main thread, and not during a call into C such as an SQL statement. So the
    main thread only waits for the work and for signals.
    """
    # The numbers of signals, then None. A handler that set an event could deadlock with the thread that it interrupts.
    received: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    ended: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:
            ended.set_exception(error)
        finally:
            received.put(None)

    handlers = {number: signal.signal(number, lambda number, frame: received.put(number)) for number in _SIGNALS}
    try:
        threading.Thread(target=context.run, args=(run,), name="foreground", daemon=True).start()
        while not ended.done():
            # The kernel may give the signal to a thread of a library. It ends no wait then, and its handler runs when
            # the main thread is back in Python.
            with suppress(queue.Empty):
                number = received.get(timeout=_SIGNAL_CHECK_S)
                if number is not None:
                    on_signal(number)
    except Abandoned:
        handlers = dict.fromkeys(_SIGNALS, signal.SIG_IGN)  # the process is ending
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ended.result()


def count_for_dry_run(name: str, count: Callable[[], T]) -> T:
    """Count what a run would do, with a progress line. Ctrl-C ends the process with 130."""

    def stop(number: int) -> None:
        raise Abandoned(number)

    try:
        with progress(f"{name}: counting"):
            return in_foreground(count, stop)
    except Abandoned:
        end_process(130, "interrupted")


def run_with_progress(name: str, work: Callable[[ProgressLine, threading.Event], T], *, continued_by: str) -> T:
    """Do work with a progress line. The first Ctrl-C or SIGTERM ends it after its batch, the second one at once.

    Parameters:
      work: Called with the line and an event. When the event is set, the run ends after its current batch.
      continued_by: What continues a run that ended at once, such as ``a run after a minute``.
    """
    stopping = threading.Event()

    def stop(number: int) -> None:
        if stopping.is_set():
            raise Abandoned(number)
        stopping.set()
        notify("the run ends after its batch; a second Ctrl-C ends it at once")

    try:
        with progress(f"{name}: starting") as line:
            return in_foreground(lambda: work(line, stopping), stop)
    except Abandoned as error:
        end_process(error.exit_code, f"ended at once; committed batches stay, and {continued_by} continues")


def end_process(exit_code: int, line: str) -> NoReturn:
    """Exit at once after printing a line. Hanging threads would delay a normal exit."""
    notify(line)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)


@click.command()
@click.argument("name", shell_complete=complete_worker)
@click.argument("argument", required=False)
@json_option("Print the result object, and nothing else, on stdout.")
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

    Ctrl-C or SIGTERM ends the run after its current batch, as partial with the reason "shutdown", and the next run
    resumes. A second signal ends the process at once: the uncommitted batch is rolled back, and a run after a minute
    takes over.

    A run that finds far more stale rows than usual continues and raises an alert. Where the worker's breaker is set to
    limit or stop runs, it ends early with the reason "breaker". Look at "housekeeping plan NAME", and if that is what
    you want, run it with --confirm: this one run may then process any number of rows.

    The first run of a sweep of your own is skipped with the reason "unconfirmed" if it would process over 20 % of a
    table and at least 1,000 rows. --confirm runs it, and later runs need no confirmation.

    A run does not start if this machine's clock is over a minute from the database's. --force overrides that, too: the
    database's clock decides which rows are stale.

    Exit status: 0 if the outcome is done, partial or skipped, also after Ctrl-C; 1 if it failed, or would fail; 2 if
    its declaration is refused; 130 after a second Ctrl-C (143 after a second SIGTERM).
    """
    settings, sweeps = load_workers(with_schema=False)
    sweep = find_worker(sweeps, name)
    telemetry.report_to_sentry(settings.sentry_dsn)
    run_argument = parse_argument(sweep, argument)
    if dry_run:
        count = partial(make_dry_run, sweep, run_argument, settings=settings, force=force, confirmed=confirm)
        result: RunResult = count_for_dry_run(name, count)
    else:
        result = _run(sweep, run_argument, force=force, confirmed=confirm)
    if not print_as_json(result):
        print_result(result)
        if isinstance(result, DryRun) and (checks := notable(result.checks)):
            print_checks(checks)
    if result.reason == UNCONFIRMED and not result.dry_run:
        notify(in_words(result.counts[UNCONFIRMED]))
    if result.reason == "shutdown":
        report_interruption(result, "the next run resumes")
    if result.reason == "stopped":
        notify(f"{name} was stopped by an operator (housekeeping actions); the next run resumes")
    if result.exit_code:
        if result.error is not None and context.find_root().params.get("debug"):
            raise result.error
        exit_with_error(result, sweep)


def _run(sweep: Sweep, argument: Any, *, force: bool, confirmed: bool) -> RunResult:
    """Run the sweep. A run that overrides a limit is an action of its operator."""
    if not (force or confirmed):
        return run_in_foreground(sweep, argument)
    with record_action("confirm" if confirmed else "run", sweep.name, command_line_user()) as outcome:
        result = run_in_foreground(sweep, argument, force=force, confirmed=confirmed)
        outcome.result = describe_end(result, sweep.database)
    return result


def describe_end(result: RunResult, database_name: str) -> str:
    """Return the run and its outcome in one line, for the action log."""
    label = "" if result.run_id is None else f"run {run_label(result.run_id, database_name)} "
    return f"{label}{result.outcome}{f': {result.reason}' if result.reason else ''}"


def run_in_foreground(
    sweep: Sweep, argument: Any = None, *, continued_by: str = "a run after a minute", **options: Any
) -> RunResult:
    """Run a sweep with progress.

    Parameters:
      continued_by: What continues the run if a second signal ends it at once.
      options: Further options of `run_sweep`.
    """

    def work(line: ProgressLine, stopping: threading.Event) -> RunResult:
        total: Backlog | None = None
        began = time.monotonic()

        def begin(run_id: int) -> None:
            nonlocal total, began
            if line.is_shown:
                line(f"{sweep.name}: counting")
                total, began = count_left(sweep, argument=argument), time.monotonic()

        def show_progress(so_far: Counts) -> None:
            if not sweep.progress_counts:
                line(f"{sweep.name}: {format_counts(so_far)}")
                return
            failed = f", failed {so_far['failed']:,}" if so_far.get("failed") else ""
            progressed = progress_of(sweep, so_far, total, time.monotonic() - began)
            line(f"{sweep.name}: {format_progress(progressed)}{failed}")

        return run_sweep(sweep, argument, on_batch=show_progress, stopping=stopping, on_begin=begin, **options)

    return run_with_progress(sweep.name, work, continued_by=continued_by)


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
