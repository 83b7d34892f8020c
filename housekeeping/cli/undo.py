"""``housekeeping purge`` and ``restore``: delete rows of a table once, and restore what was moved to an archive."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, get_args

import click
from rich.text import Text

from housekeeping.cli.ask import known_database, parse_run, run_with, using_database_of
from housekeeping.cli.main import load_workers
from housekeeping.cli.output import (
    ProgressLine,
    confirm,
    json_option,
    notify,
    out,
    print_as_json,
    progress,
    say,
    wants_json,
)
from housekeeping.cli.run import (
    count_for_dry_run,
    describe_end,
    exit_with_error,
    print_checks,
    print_plan,
    print_result,
    report_interruption,
    run_in_foreground,
    run_with_progress,
)
from housekeeping.core import telemetry
from housekeeping.core.errors import WrongArgument
from housekeeping.core.logs import counted, printable
from housekeeping.core.settings import LARGEST_BATCH, MAIN
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.engine import RunResult
from housekeeping.engine.purge import BATCH_SIZE, PurgeRequest, PurgeSweep, request_of, sweep_of
from housekeeping.engine.restore import Restoration, restoration_of, sweep_of_run, sweeps_of_archived_run
from housekeeping.insight.plan import PurgePlan, notable, plan_purge
from housekeeping.insight.wording import format_counts
from housekeeping.ledger import schema
from housekeeping.ledger.operators import command_line_user, record_action
from housekeeping.ledger.runs import Counts
from housekeeping.ledger.schema import run_label
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.values import Decision

#: Options that a resumed purge may change; all others are those of the run that it continues.
_CHANGEABLE: Final = ("batch_size", "max_runtime_s", "max_rows_per_s")


@click.command()
@click.argument("table", required=False)
@click.option("--where", metavar="SQL", help="Condition of the rows to delete.")
@click.option("--order-by", metavar="COLS", help="Columns that order the rows. Default: the primary key.")
@click.option(
    "--batch-size", type=click.IntRange(1, LARGEST_BATCH), help=f"Rows of the first batch. Default: {BATCH_SIZE:,}."
)
@click.option("--max-rows", type=click.IntRange(1), help="Delete at most this many rows.")
@click.option(
    "--max-runtime",
    "max_runtime_s",
    type=click.FloatRange(0, 30_000_000, min_open=True),
    help="Begin no batch after this many seconds.",
)
@click.option(
    "--max-rows-per-s", type=click.FloatRange(0, min_open=True), help="Delete at most this many rows per second."
)
@click.option(
    "--archive-to",
    metavar="TABLE",
    help="Copy the rows to this table before they are deleted; with --cascade, to the tables of this schema.",
)
@click.option(
    "--ignore-holds", is_flag=True, default=None, help="Delete the rows that a declared sweep of this table holds, too."
)
@click.option("--cascade", is_flag=True, help="First delete the rows that depend on them, in separate batches.")
@click.option(
    "--decide",
    "decisions",
    multiple=True,
    metavar="LINK=DECISION",
    help="For --cascade: delete, clear or keep the rows of a TABLE or TABLE.COLUMN. Repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan, and delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for a confirmation.")
@click.option(
    "--force", is_flag=True, help="Sort a large table without an index, and run although this machine's clock is wrong."
)
@click.option("--resume", "resumed", metavar="RUN_ID", help="Continue a purge that was interrupted.")
@click.option(
    "--database", "database_name", help=f"Database of the table, by its name in the settings. Default: {MAIN}."
)
@json_option("Print the result object, and nothing else, on stdout.")
def purge(
    table: str | None,
    dry_run: bool,
    yes: bool,
    force: bool,
    resumed: str | None,
    cascade: bool,
    decisions: tuple[str, ...],
    **options: Any,
) -> None:
    """Delete the rows of TABLE that match --where, in small batches. Needs no worker.

    Shows how many rows would be deleted, the oldest and newest of them, the index, and the statement of a batch. Then
    it asks for a confirmation. Each batch commits together with the run's row in the ledger. Quick batches grow, up to
    20 times and 10,000 rows; slow ones shrink. The run is named "purge:TABLE". Rows that begin to match during the run
    are deleted, too.

    The condition is one SQL expression. It may have subqueries, which can name the table: "sessions.id". The table
    needs a primary key. The rows are read in its order, or in that of --order-by.

    Rows that a declared sweep of the same table holds, such as by a legal hold, stay. --ignore-holds deletes them, too.

    With --cascade, dependents of the deleted rows are processed first, at any depth. The foreign keys decide which of
    them are deleted, and which only lose their reference; --decide adds decisions and overrides those. A row with a
    dependent that is kept stays.

    Ctrl-C ends the run after its current batch, a second Ctrl-C at once; committed batches stay. --resume continues the
    purge without a plan or a confirmation, also one that a crash, --max-runtime or an error ended.

    \b
    housekeeping purge sessions --where "expires_at < now() - interval '90 days'"
    housekeeping purge --resume 4711

    Exit status: 0 if the outcome is done or partial, also after Ctrl-C; 1 if it failed or was not confirmed; 2 if the
    purge was rejected.
    """
    settings, declared = load_workers(with_schema=False)
    telemetry.report_to_sentry(settings.sentry_dsn)
    options["cascade"] = _decisions(decisions) if cascade or decisions else None
    if resumed is not None:
        request = _resumed(table, resumed, options)
    else:
        request = _requested(table, options)
    with database.using(request.database), translate_postgres_errors():
        sweep = sweep_of(request, declared.values())
        if dry_run:
            _show(_planned(request, sweep, force))
            return
        schema.require()
        if request.resumes is None:
            if wants_json() and not yes:
                raise WrongArgument("--json does not ask for a confirmation; add --yes, or --dry-run")
            planned = _planned(request, sweep, force)
            if not wants_json():
                _print(planned)
            if not yes:
                _confirm(planned)
    _run(request, sweep, force=force)


def _decisions(given: Iterable[str]) -> dict[str, str]:
    """Return link -> decision.

    Raises:
      WrongArgument: An option has another form.
    """
    found = {}
    for each in given:
        link, _, decision = each.rpartition("=")
        if not link or decision not in get_args(Decision):
            raise WrongArgument(f"--decide is {each!r}; write LINK={' or LINK='.join(get_args(Decision))}")
        found[link] = decision
    return found


def _requested(table: str | None, options: dict[str, Any]) -> PurgeRequest:
    if table is None:
        raise WrongArgument("name the table to purge, or a run to continue: --resume RUN_ID")
    given = {name: value for name, value in options.items() if value is not None}
    if "where" not in given:
        raise WrongArgument('--where is missing; write the condition of the rows to delete: "expires_at < now()"')
    order_by = tuple(name.strip() for name in given.pop("order_by", "").split(",") if name.strip())
    name = known_database(given.pop("database_name", MAIN))
    return PurgeRequest(table=table, order_by=order_by, database=name, **given)


def _resumed(table: str | None, resumed: str, options: dict[str, Any]) -> PurgeRequest:
    given = {name: value for name, value in options.items() if value is not None}
    fixed = [name for name in given if name not in _CHANGEABLE]
    if table is not None or fixed:
        what = "the table" if table is not None else "--" + fixed[0].removesuffix("_name").replace("_", "-")
        raise WrongArgument(f"--resume takes {what} from the run that it continues; leave it out")
    run = parse_run(resumed)
    with using_database_of(run), translate_postgres_errors():
        schema.require()
        return replace(request_of(run[1]), **given)


def _planned(request: PurgeRequest, sweep: PurgeSweep, force: bool) -> PurgePlan:
    with progress(f"{request.worker}: counting"):
        return plan_purge(request, sweep, force=force)


def _show(planned: PurgePlan) -> None:
    result = {
        "worker": planned.request.worker,
        "outcome": planned.plan.outcome,
        "reason": planned.plan.reason or (None if planned.rows.exact else "counted_up_to_limit"),
        "run_id": None,
        "started_at": planned.plan.now,
        "duration_s": 0.0,
        "counts": {"deleted_rows": planned.rows.rows, "batches": planned.plan.batches, "out_of_time": False},
        "dry_run": True,
        "plan": planned,
    }
    if not print_as_json(result):
        _print(planned)


def _print(planned: PurgePlan) -> None:
    print_plan(planned.plan)
    out.print()
    if checks := notable(planned.plan.checks):
        print_checks(checks)
        out.print()
    for label, text in (("index", planned.index_in_words), ("statement", planned.statement)):
        say(Text.assemble((f"{label}: ", "bold"), printable(text)))
    if planned.held_by:
        say(f"rows on hold by {', '.join(planned.held_by)} stay; --ignore-holds deletes them, too")
    if planned.request.max_rows is not None:
        say(f"at most {planned.request.max_rows:,} of these rows are deleted")


def _confirm(planned: PurgePlan) -> None:
    rows = counted(planned.rows.rows, "row") if planned.rows.exact else f"{planned.rows} rows"
    confirm(f"Delete {rows} of {planned.request.table}?", "nothing was deleted")


def _run(request: PurgeRequest, sweep: Sweep, *, force: bool) -> None:
    with record_action("purge", request.worker, command_line_user()) as outcome:
        result = run_in_foreground(
            sweep,
            force=force,
            confirmed=True,
            max_rows=request.max_rows,
            resumes=request.resumes,
            noted=request.as_count(),
            continued_by="housekeeping purge --resume (its ID: housekeeping runs)",
        )
        outcome.result = describe_end(result, request.database)
    if not print_as_json(result):
        print_result(result)
    how = None if result.run_id is None else f"housekeeping purge --resume {run_label(result.run_id, request.database)}"
    if result.reason == "shutdown" and how is not None:
        report_interruption(result, f"to continue: {how}")
    elif how is not None and result.outcome != "done" and result.reason not in ("limit", "paused"):
        notify(f"to continue: {how}")
    if result.exit_code:
        exit_with_error(result, sweep)


@click.command()
@click.argument("run_id")
@click.option("--where", metavar="SQL", help="Restore only rows that meet this condition on the archive's columns.")
@click.option("--dry-run", is_flag=True, help="Count what would be restored, and change nothing.")
@click.option("--no-pause", is_flag=True, help="Do not pause the sweep. Its next run may delete the rows again.")
@json_option("Print the result object, and nothing else, on stdout.")
def restore(run_id: str, where: str | None, dry_run: bool, no_pause: bool) -> None:
    """Restore the rows that the run with RUN_ID has moved to an archive, batch by batch.

    "housekeeping runs NAME" lists the runs of a sweep. One statement inserts a batch into the table and deletes it from
    the archive. Rows whose key exists in the table again stay in the archive; they count as "conflicts". An interrupted
    restore is continued by the same command. No row is restored twice.

    The restore is a run in the ledger, named restore:NAME, with the lease of the sweep. The sweep is paused before the
    first batch and stays paused, so that it does not delete the rows again. "housekeeping resume NAME" ends the pause.
    A purge with --archive-to is restored in the same way; its NAME is purge:TABLE.

    \b
    housekeeping restore 4711 --dry-run
    housekeeping restore 4711 --where "user_id = 7"
    """
    _, sweeps = load_workers()
    label = parse_run(run_id)
    with using_database_of(label), translate_postgres_errors():
        restoration = restoration_of(_sweep_of(label, sweeps), label[1], where)
        for each in restoration.tables:
            if each.lost_columns:
                lost = f"table {quoted_name(each.source)} has no column {', '.join(each.lost_columns)}"
                notify(f"warning: {lost}; these archived values are not restored")
        if dry_run:
            result = count_for_dry_run(restoration.restoring.name, restoration.dry_run)
        else:
            user = command_line_user()
            with record_action("restore", restoration.sweep.name, user) as outcome:
                result = _restore(restoration, user, pause=not no_pause)
                outcome.result = f"{describe_end(result, restoration.sweep.database)} (restore of run {run_id})"
    _report(restoration, result, is_paused=not (dry_run or no_pause))
    if result.exit_code:
        exit_with_error(result, restoration.restoring)


def _sweep_of(label: tuple[str, int], sweeps: Mapping[str, Sweep]) -> Sweep:
    """Return the sweep of a run, from the ledger or, when its row was removed, from the archives.

    Raises:
      WrongArgument: There is no such run, or the sweep is no longer declared.
    """
    try:
        record = run_with(label)
    except WrongArgument:
        found = sweeps_of_archived_run(sweeps.values(), label)
        if not found:
            raise
        if len(found) > 1:
            names = ", ".join(sweep.name for sweep in found)
            raise WrongArgument(f"run {label[1]} is no longer in the ledger, and may be one of: {names}") from None
        return found[0]
    return sweep_of_run(record, sweeps)


def _restore(restoration: Restoration, user: str, *, pause: bool) -> RunResult:
    name = restoration.restoring.name

    def work(line: ProgressLine, stopping: threading.Event) -> RunResult:
        def show_progress(so_far: Counts) -> None:
            line(f"{name}: {format_counts(so_far)}")

        return restoration.carry_out(pause=pause, said_by=user, on_batch=show_progress, stopping=stopping)

    return run_with_progress(name, work, continued_by="the same command")


def _report(restoration: Restoration, result: RunResult, *, is_paused: bool) -> None:
    if not print_as_json(result):
        print_result(result)
    name = restoration.sweep.name
    if result.reason == "shutdown":
        report_interruption(result, "the same command continues")
    if result.reason == "lease_held":
        notify(f"a run of {name} holds the lease; try again when it has ended")
    if is_paused:
        notify(f"{name} is paused, because it would delete the rows again; housekeeping resume {name}")
