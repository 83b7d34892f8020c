"""``housekeeping purge``: delete rows of a table once, without a declaration."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

import click
from rich.text import Text

from housekeeping.cli.commands.plan import print_checks, print_plan
from housekeeping.cli.commands.run import (
    describe_end,
    exit_with_error,
    print_result,
    report_interruption,
    run_in_foreground,
)
from housekeeping.cli.commands.runs import using_database_of
from housekeeping.cli.confirmation import confirm
from housekeeping.cli.context import load_workers
from housekeeping.cli.foreground import end_process
from housekeeping.cli.formatting import notify, out, progress, say
from housekeeping.core.errors import WrongArgument
from housekeeping.core.sanitize import printable
from housekeeping.core.settings import MAIN
from housekeeping.core.telemetry import error_reporting
from housekeeping.core.wording import counted
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.purge.plan import PurgePlan, plan_purge
from housekeeping.purge.request import BATCH_SIZE, PurgeRequest, request_of
from housekeeping.purge.sweep import PurgeSweep, sweep_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import schema
from housekeeping.sweeps.ledger.action_log import command_line_user, record_action
from housekeeping.sweeps.ledger.history import parse_run_label, run_label

#: Options that a resumed purge may change; all others are those of the run that it continues.
_CHANGEABLE: Final = ("batch_size", "max_runtime_s", "max_rows_per_s")


@click.command()
@click.argument("table", required=False)
@click.option("--where", metavar="SQL", help="Condition of the rows to delete.")
@click.option("--order-by", metavar="COLS", help="Columns that order the rows. Default: the primary key.")
@click.option("--batch-size", type=click.IntRange(1, 100_000), help=f"Rows per batch. Default: {BATCH_SIZE:,}.")
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
@click.option("--archive-to", metavar="TABLE", help="Copy the rows to this table before they are deleted.")
@click.option(
    "--ignore-holds", is_flag=True, default=None, help="Delete the rows that a declared sweep of this table holds, too."
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
@click.option("--json", "as_json", is_flag=True, help="Print the result object, and nothing else, on stdout.")
def purge(
    table: str | None, dry_run: bool, yes: bool, force: bool, resumed: str | None, as_json: bool, **options: Any
) -> None:
    """Delete the rows of TABLE that match --where, in small batches. Needs no worker.

    Shows how many rows would be deleted, the oldest and newest of them, the index, and the statement of a batch. Then
    it asks for a confirmation. Each batch commits together with the run's row in the ledger. The run is
    named "purge:TABLE". Rows that begin to match during the run are deleted, too.

    The condition is one SQL expression. It may have subqueries, which can name the table: "sessions.id". The table
    needs a primary key. The rows are read in its order, or in that of --order-by.

    Rows that a declared sweep of the same table holds, such as by a legal hold, stay. --ignore-holds deletes them, too.

    Ctrl-C ends the run within a second; its committed batches stay. --resume continues it without a plan or a
    confirmation. It also continues a run that a crash, --max-runtime or an error ended.

    \b
    housekeeping purge sessions --where "expires_at < now() - interval '90 days'"
    housekeeping purge --resume 4711

    Exit status: 0 if the outcome is done or partial, also after Ctrl-C; 1 if it failed or was not confirmed; 2 if the
    purge was rejected.
    """
    settings, declared = load_workers(with_schema=False)
    if settings.sentry_dsn is not None:
        error_reporting.report_to_sentry(settings.sentry_dsn)
    if resumed is not None:
        request = _resumed(table, resumed, options)
    else:
        request = _requested(table, options)
    with database.using(request.database), translate_postgres_errors():
        sweep = sweep_of(request, declared.values())
        if dry_run:
            _show(_planned(request, sweep, force), as_json)
            return
        schema.require()
        if request.resumes is None:
            if as_json and not yes:
                raise WrongArgument("--json does not ask for a confirmation; add --yes, or --dry-run")
            planned = _planned(request, sweep, force)
            if not as_json:
                _print(planned)
            if not yes:
                _confirm(planned)
    _run(request, sweep, force=force, as_json=as_json)


def _requested(table: str | None, options: dict[str, Any]) -> PurgeRequest:
    if table is None:
        raise WrongArgument("name the table to purge, or a run to continue: --resume RUN_ID")
    given = {name: value for name, value in options.items() if value is not None}
    if "where" not in given:
        raise WrongArgument('--where is missing; write the condition of the rows to delete: "expires_at < now()"')
    order_by = tuple(name.strip() for name in given.pop("order_by", "").split(",") if name.strip())
    name = _known(given.pop("database_name", MAIN))
    return PurgeRequest(table=table, order_by=order_by, database=name, **given)


def _known(name: str) -> str:
    with using_database_of((name, 0)):
        return name


def _resumed(table: str | None, resumed: str, options: dict[str, Any]) -> PurgeRequest:
    given = {name: value for name, value in options.items() if value is not None}
    fixed = [name for name in given if name not in _CHANGEABLE]
    if table is not None or fixed:
        what = "the table" if table is not None else "--" + fixed[0].removesuffix("_name").replace("_", "-")
        raise WrongArgument(f"--resume takes {what} from the run that it continues; leave it out")
    run = parse_run_label(resumed)
    if run is None:
        raise WrongArgument(f"--resume is {resumed!r}; it should be the ID of a run")
    with using_database_of(run), translate_postgres_errors():
        schema.require()
        return replace(request_of(run[1]), **given)


def _planned(request: PurgeRequest, sweep: PurgeSweep, force: bool) -> PurgePlan:
    with progress(f"{request.worker}: counting"):
        return plan_purge(request, sweep, force=force)


def _show(planned: PurgePlan, as_json: bool) -> None:
    if not as_json:
        _print(planned)
        return
    result = {
        "worker": planned.request.worker,
        "outcome": planned.plan.forecast.outcome,
        "reason": planned.plan.forecast.reason or (None if planned.plan.stale.exact else "counted_up_to_limit"),
        "run_id": None,
        "started_at": planned.plan.now.isoformat(),
        "duration_s": 0.0,
        "counts": {"deleted_rows": planned.rows, "batches": planned.plan.batches, "out_of_time": False},
        "dry_run": True,
        "plan": planned.as_json(),
    }
    click.echo(json.dumps(result))


def _print(planned: PurgePlan) -> None:
    print_plan(planned.plan)
    out.print()
    if planned.plan.forecast.notable:
        print_checks(planned.plan.forecast.notable)
        out.print()
    for label, text in (("index", planned.index_in_words), ("statement", planned.statement)):
        say(Text.assemble((f"{label}: ", "bold"), printable(text)))
    if planned.held_by:
        say(f"rows on hold by {', '.join(planned.held_by)} stay; --ignore-holds deletes them, too")
    if planned.request.max_rows is not None:
        say(f"at most {planned.request.max_rows:,} of these rows are deleted")


def _confirm(planned: PurgePlan) -> None:
    exact = planned.plan.stale.exact or planned.request.max_rows is not None
    rows = counted(planned.rows, "row") if exact else f"{planned.plan.stale} rows"
    confirm(f"Delete {rows} of {planned.request.table}?", "nothing was deleted")


def _run(request: PurgeRequest, sweep: Sweep, *, force: bool, as_json: bool) -> None:
    with record_action("purge", request.worker, command_line_user()) as outcome:
        result, ended = run_in_foreground(
            sweep,
            force=force,
            confirmed=True,
            max_rows=request.max_rows,
            resumes=request.resumes,
            noted=request.as_count(),
            continued_by="purge --resume, after a minute,",
        )
        outcome.result = describe_end(result, request.database)
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        print_result(result)
    how = None if result.run_id is None else f"housekeeping purge --resume {run_label(result.run_id, request.database)}"
    if result.reason == "shutdown" and how is not None:
        report_interruption(result, f"to continue: {how}")
    elif how is not None and result.outcome != "done" and result.reason not in ("limit", "paused"):
        notify(f"to continue: {how}")
    if not ended:
        end_process(result.exit_code)
    if result.exit_code:
        exit_with_error(result, sweep)
