"""``housekeeping status``: show the status of every worker, queue, process and lease."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime

import click
from peewee import PeeweeException

from housekeeping.cli.completion import complete_worker
from housekeeping.cli.context import load_workers
from housekeeping.cli.formatting import out, progress, say
from housekeeping.cli.status_output import print_report
from housekeeping.cli.status_report import StatusReport, read_status
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.presentation.formatting import format_time
from housekeeping.presentation.workers import find_worker
from housekeeping.sweeps.declaration import Sweep


@click.command()
@click.argument("name", required=False, shell_complete=complete_worker)
@click.option("--watch", is_flag=True, help="Show it repeatedly, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two readings with --watch.",
)
@click.option("--fail-on-alert", is_flag=True, help="Exit with status 1 if there is an alert.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch an object per line.")
def status(name: str | None, watch: bool, interval: float, fail_on_alert: bool, as_json: bool) -> None:
    """Show the status of every worker, or of worker NAME: last run, backlog, oldest stale row, queues, processes,
    leases and alerts.

    BACKLOG is the number of stale rows, counted up to a limit. HELD is the number of stale rows that stay because
    they are on hold; they are not part of the backlog, and the column is shown if a worker has a hold. ARRIVED/H and
    PROCESSED/H are rows per hour over the last runs. LAST SUCCESS is the last run that ended as done or partial. Each
    alert ends with its name; docs/howto/alerts.md says what to do about it. Long reasons are cut off; --json has
    all of them.

    Processes are the live workers and schedulers, and those that died within a day without being stopped.

    Without Redis or RabbitMQ, the command shows the rest and a warning ("redis" in --json is "ok" or the reason).

    With several databases, a line names each one that does not answer, and the rest is shown.

    With --watch, a server that does not answer is shown as a line, and the command continues.

    --fail-on-alert is for scripts and monitoring. A database that does not answer counts as an alert. Rejected
    rows and acknowledged alerts do not count. With --watch, the command ends at the first alert.

    Exit status: 0 if the database main answered; 1 if it did not, or if there is an alert and --fail-on-alert is
    given; 2 if settings are wrong or the schema is missing; 130 after Ctrl-C.
    """
    settings, sweeps = load_workers()
    if name is not None:
        find_worker(sweeps, name)
    if watch:
        _watch(settings, sweeps, name, interval, fail_on_alert=fail_on_alert, as_json=as_json)
        return
    with progress("reading"):
        report = read_status(settings, sweeps, name)
    _show(report, as_json=as_json)
    if not report.is_complete or (fail_on_alert and report.has_alerts):
        sys.exit(1)


def _show(report: StatusReport, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        print_report(report)


def _watch(
    settings: Settings,
    sweeps: dict[str, Sweep],
    name: str | None,
    interval_s: float,
    *,
    fail_on_alert: bool,
    as_json: bool,
) -> None:
    """Show the status until Ctrl-C, or until there is an alert."""
    while True:
        found = _read(settings, sweeps, name)
        if not as_json:
            if out.is_terminal:
                out.clear()
            say(f"{format_time(datetime.now(UTC))} UTC, every {interval_s:g} s; Ctrl-C ends", style="dim")
        if isinstance(found, StatusReport):
            _show(found, as_json=as_json)
        elif as_json:
            click.echo(json.dumps({"error": found}))
        else:
            say(found, style="bold red")
        if fail_on_alert and (not isinstance(found, StatusReport) or found.has_alerts):
            sys.exit(1)
        time.sleep(interval_s)


def _read(settings: Settings, sweeps: dict[str, Sweep], name: str | None) -> StatusReport | str:
    """Return the status, or why it cannot be read now."""
    try:
        return read_status(settings, sweeps, name)
    except (HousekeepingError, PeeweeException) as error:
        return error_line(error)
