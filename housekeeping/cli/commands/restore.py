"""``housekeeping restore``: restore what a run has moved to an archive."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping

import click

from housekeeping.cli.commands.run import describe_end, exit_with_error, print_result, report_interruption
from housekeeping.cli.commands.runs import run_with, using_database_of
from housekeeping.cli.context import load_workers
from housekeeping.cli.foreground import count_for_dry_run, end_process, run_with_progress
from housekeeping.cli.formatting import ProgressLine, notify
from housekeeping.core.errors import WrongArgument
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import translate_postgres_errors
from housekeeping.presentation.formatting import format_counts
from housekeeping.purge.request import recorded_request
from housekeeping.purge.sweep import sweep_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.ledger.action_log import command_line_user, record_action
from housekeeping.sweeps.ledger.history import parse_run_label
from housekeeping.sweeps.ledger.runs import PURGE, Counts
from housekeeping.sweeps.restore import PREFIX, Restoration, restoration_of, sweeps_of_archived_run


@click.command()
@click.argument("run_id")
@click.option("--where", metavar="SQL", help="Restore only rows that meet this condition on the archive's columns.")
@click.option("--dry-run", is_flag=True, help="Count what would be restored, and change nothing.")
@click.option("--no-pause", is_flag=True, help="Do not pause the sweep. Its next run may delete the rows again.")
@click.option("--json", "as_json", is_flag=True, help="Print the result object, and nothing else, on stdout.")
def restore(run_id: str, where: str | None, dry_run: bool, no_pause: bool, as_json: bool) -> None:
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
    label = parse_run_label(run_id)
    if label is None:
        raise WrongArgument(f"{run_id!r} is no ID of a run; housekeeping runs lists them")
    with using_database_of(label), translate_postgres_errors():
        restoration = restoration_of(_sweep_of(label, sweeps), label[1], where)
        for each in restoration.tables:
            if each.lost_columns:
                lost = f"table {quoted_name(each.source)} has no column {', '.join(each.lost_columns)}"
                notify(f"warning: {lost}; these archived values are not restored")
        if dry_run:
            result, ended = count_for_dry_run(restoration.restoring.name, restoration.dry_run), True
        else:
            user = command_line_user()
            with record_action("restore", restoration.sweep.name, user) as outcome:
                result, ended = _restore(restoration, user, pause=not no_pause)
                outcome.result = f"{describe_end(result, restoration.sweep.database)} (restore of run {run_id})"
    _report(restoration, result, as_json, is_paused=not (dry_run or no_pause))
    if not ended:
        end_process(result.exit_code)
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
    worker = record.worker
    if PURGE in record.counts:
        return sweep_of(recorded_request(record))
    if worker.startswith(PREFIX):
        raise WrongArgument(f"run {label[1]} has restored rows; give the run that archived them")
    if worker not in sweeps:
        raise WrongArgument(f"run {label[1]} is one of {worker}, which is not declared here (HOUSEKEEPING_SWEEPS)")
    if sweeps[worker].database != label[0]:
        now = sweeps[worker].database
        raise WrongArgument(f"run {label[1]} was in the database {label[0]!r}, but {worker} is in {now!r} now")
    return sweeps[worker]


def _restore(restoration: Restoration, user: str, *, pause: bool) -> tuple[RunResult, bool]:
    """Return the result, and whether the run's thread has ended."""
    name = restoration.restoring.name

    def work(line: ProgressLine, stopping: threading.Event, begun: Callable[[int], None]) -> RunResult:
        def show_progress(so_far: Counts) -> None:
            line(f"{name}: {format_counts(so_far)}")

        return restoration.carry_out(
            pause=pause, said_by=user, on_batch=show_progress, stopping=stopping, on_begin=begun
        )

    return run_with_progress(restoration.restoring, work, continued_by="the same command")


def _report(restoration: Restoration, result: RunResult, as_json: bool, *, is_paused: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.as_json()))
    else:
        print_result(result)
    name = restoration.sweep.name
    if result.reason == "shutdown":
        report_interruption(result, "the same command continues")
    if result.reason == "lease_held":
        notify(f"a run of {name} holds the lease; try again when it has ended")
    if is_paused:
        notify(f"{name} is paused, because it would delete the rows again; housekeeping resume {name}")
