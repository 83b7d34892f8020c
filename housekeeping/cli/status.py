"""``housekeeping status``: show the status of every worker, queue, process and lease."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

import click
from peewee import PeeweeException
from rich.table import Table
from rich.text import Text

from housekeeping.brokers import QueueLengths
from housekeeping.cli.main import load_workers
from housekeeping.cli.output import (
    WIDE,
    complete_worker,
    json_option,
    out,
    print_as_json,
    print_not_set_up,
    print_table,
    progress,
    say,
    table,
    wants_json,
)
from housekeeping.core.clock import impatient
from housekeeping.core.errors import DatabaseUnavailable, HousekeepingError
from housekeeping.core.logs import counted, error_line, format_duration, format_size, in_one_line, printable, shortened
from housekeeping.core.settings import MAIN, Settings
from housekeeping.database.connection import database
from housekeeping.engine.failures import Standing
from housekeeping.erasures import subjects_of
from housekeeping.insight.alerts import describe_caused
from housekeeping.insight.coverage import Coverage, read_coverage
from housekeeping.insight.status import Snapshot, SnapshotReader, WorkerStatus, by_trouble, format_backlog
from housekeeping.insight.wording import (
    find_worker,
    format_age,
    format_run_counts,
    format_time,
    lost_holder,
    outcome_in_words,
)
from housekeeping.ledger.alerts import Alert
from housekeeping.ledger.history import RunRecord
from housekeeping.ledger.leases import HeldLease
from housekeeping.ledger.operators import describe_override
from housekeeping.ledger.processes import Processes
from housekeeping.sweeps.declaration import Sweep
from housekeeping.workers import kept_tables


def read_status(
    settings: Settings, sweeps: dict[str, Sweep], name: str | None = None, *, stores: bool = True
) -> Snapshot:
    """Return the status of all workers, or of the worker with this name.

    Parameters:
      stores: Whether to store which alerts have begun and ended.

    Raises:
      DatabaseUnavailable: No database answers.
    """
    found = SnapshotReader(settings, sweeps, only=name, with_progress=False, stores=stores).read()
    if not found.clocks:
        raise DatabaseUnavailable(next(each.error for each in found.unavailable.values() if each.database))
    known = found.leases if found.leases_complete else ()
    found.leases = [each for each in known if name in (None, each.worker)]
    if name is not None:
        other = found.queues.keys() - {sweeps[name].queue}
        found.queues = {queue: lengths for queue, lengths in found.queues.items() if queue not in other}
        found.alerts = [alert for alert in found.alerts if alert.subject not in other]
    return found


_REASON_WIDTH: Final = 200  # characters of a reason
_ALERT_WIDTH: Final = 2_000  # characters; only the error of another program is longer


def print_report(found: Snapshot, sweeps: Iterable[Sweep], *, problems: bool = False) -> None:
    """Print the status for people.

    Parameters:
      problems: Whether to list only workers with a problem.
    """
    now = found.at
    statuses = [each for each in found.statuses.values() if each.problem is None]
    say(in_one_line(found.headline.as_text(now), _ALERT_WIDTH), style="bold red" if found.has_alerts else "bold green")
    out.print()
    listed, folded = by_trouble(statuses, fold=True if problems else None)
    # On a wide terminal, the last runs are a column of the workers' table instead of a table of their own.
    is_wide = out.width >= WIDE
    if listed:
        print_table(workers_table(listed, now, with_database=database.several(), with_last_run=is_wide))
    if folded:
        names = "" if problems else f": {', '.join(each.worker for each in folded)}"
        say(f"{counted(len(folded), 'worker')} without a problem{names}", style="green")
    print_not_set_up(found.problems)
    out.print()
    if not is_wide and (ran := [each for each in listed if each.last_run is not None]):
        print_table(_last_runs_table(ran, now))
        out.print()
    if used := {name: each for name, each in found.queues.items() if not each.is_empty}:
        print_table(_queues_table(used))
    if empty := [name for name in found.queues if name not in used]:
        say(f"empty {'queue' if len(empty) == 1 else 'queues'}: {', '.join(empty)}")
    if found.processes.listed:
        out.print()
        print_table(_processes_table(found.processes, now))
    elif found.processes.rejected is not None:
        say(f"processes: {found.processes.summary}", style="yellow")
    for each in statuses:
        if each.forecast is not None and each.forecast.is_notable:
            say(in_one_line(f"backlog of {each.worker}: {each.forecast.text}", _REASON_WIDTH))
    for lease in found.leases:
        say(in_one_line(_lease_line(lease), _REASON_WIDTH))
    for each in statuses:
        if (override := each.switch) is not None:
            by = f" ({override.said_by}, {format_time(override.since)} UTC)" if override.said_by else ""
            say(f"{describe_override(override)}{by}", style="yellow")
    for away in found.unavailable.values():
        missing = [each.name for each in sweeps if each.database == away.database and away.database not in found.clocks]
        if away.database is None:
            parts = {"queues": found.queues, "processes": found.processes.known, "leases": found.leases_complete}
            missing = [name for name, is_read in parts.items() if not is_read]
        text = in_one_line(f"{away.error}{'; not shown: ' if missing else ''}{', '.join(missing)}", _ALERT_WIDTH)
        say(Text.assemble(("UNAVAILABLE", "bold red"), f" {text}"))
    _print_alerts(found, statuses)


def _print_alerts(found: Snapshot, statuses: list[WorkerStatus]) -> None:
    for name, clock in found.wrong_clocks.items():
        say(_alert_line(Alert("clock", f"database {name}: {clock}" if database.several() else str(clock))))
    for each in statuses:
        for rejection in each.rejected:
            say(_rejection_line(each.worker, rejection, found.at))
        if each.rejected_more:
            more = f"{counted(each.rejected_more, 'more cause or argument', 'more causes or arguments')}"
            say(Text.assemble(("REJECTED", "yellow"), f" {each.worker}: {more}"))
    for alert in found.alerts:
        if alert.cause is not None:
            continue
        if alert.subject not in found.unavailable:  # their lines are above
            say(_alert_line(alert))
        if caused := describe_caused(found.alerts, alert):
            say(f"      explains {caused}; --json has all of them", style="dim")


def _alert_line(alert: Alert) -> Text:
    known, text = alert.acknowledged, f"{alert.worker}: {alert}" if alert.worker else str(alert)
    # The commands to type are at the end.
    whole = shortened(printable(text).replace("\n", "\\n"), _ALERT_WIDTH)
    note = "" if known is None else f", acknowledged by {known.user}"
    return Text.assemble(("ALERT", "yellow" if known else "bold red"), f" {whole} ({alert.name}{note})")


def workers_table(
    statuses: list[WorkerStatus], now: datetime, *, with_database: bool = False, with_last_run: bool = False
) -> Table:
    """Return a table of the workers with state, backlog, throughput and next tick, and the last run where it fits."""
    named = ["DATABASE"] if with_database else []
    holds = [">HELD"] if any(each.held is not None for each in statuses) else []
    rows = table(
        *("WORKER", *named, "STATE", ">BACKLOG", *holds, ">OLDEST ROW", ">ARRIVED/H", ">PROCESSED/H", ">NEXT TICK"),
        *(["LAST RUN"] if with_last_run else []),
    )
    for each in statuses:
        rows.add_row(
            each.worker,
            *([each.database] if named else []),
            Text(f"{each.state} !", "bold red") if each.trouble > 1 else each.state,
            format_backlog(each, now),
            *(["-" if each.held is None else str(each.held)] if holds else []),
            _ago(each.oldest, now),
            "-" if each.rates is None else _rate(each.rates.arrived),
            "-" if each.rates is None else _rate(each.rates.drained),
            "-" if each.next_tick is None else f"in {format_duration((each.next_tick - now).total_seconds())}",
            *([_last_run(each, now)] if with_last_run else []),
        )
    return rows


def _last_run(status: WorkerStatus, now: datetime) -> str:
    """Return the last run in one line: outcome, age, duration, counts, and the last success if it was another one."""
    last = status.last_run
    if last is None:
        return "never ran"
    parts = [
        f"{_outcome(last)}, {format_age(last.started_at, now)}",
        *([f"took {format_duration(last.duration_s)}"] if last.finished_at else []),
        *([counts] if (counts := format_run_counts(last.outcome, last.counts)) not in ("", "-") else []),
    ]
    if last.finished_at != status.last_success and status.last_success is not None:
        parts.append(f"last success {format_age(status.last_success, now)}")
    return "; ".join(parts)


def _outcome(run: RunRecord) -> str:
    # The error of a failed run is an alert.
    reason = f": {in_one_line(run.reason, _REASON_WIDTH)}" if run.reason and not run.error else ""
    return f"{outcome_in_words(run)}{reason}"


def _ago(value: Any, now: datetime) -> str:
    return format_age(value, now) if isinstance(value, datetime) else "-"


def _rate(per_hour: float | None) -> str:
    return "?" if per_hour is None else f"{max(0, per_hour):,.0f}"


def _lease_line(lease: HeldLease) -> str:
    since = "" if lease.held_for_s is None else f" for {format_duration(lease.held_for_s)}"
    free = lost_holder(lease)
    if free is None:
        left_s = lease.remaining_s
        free = "no longer stored" if left_s is None else f"free in {format_duration(left_s)} unless renewed"
    return f"lease {lease.key}: held by {lease.holder}{since}, {free}"


def _rejection_line(worker: str, rejection: Standing, now: datetime) -> Text:
    subject = worker if rejection.argument is None else f"{worker} {rejection.argument}"
    what = counted(rejection.rows, "row") if rejection.rows else "the run failed"
    rows = f"{what}, since {_ago(rejection.since, now)}, last {_ago(rejection.last_at, now)}"
    if rejection.not_before is not None and rejection.not_before > now:
        rows += f", scheduled again in {format_duration((rejection.not_before - now).total_seconds())}"
    sample = json.dumps(rejection.sample.get("record"), ensure_ascii=False)
    example = f"; for example {sample}" if rejection.rows else ""
    text = in_one_line(f"{rejection.cause}{example}", 2 * _REASON_WIDTH)
    return Text.assemble(("REJECTED", "yellow"), f" {subject}: {rows}: {text}")


def _last_runs_table(statuses: list[WorkerStatus], now: datetime) -> Table:
    rows = table("LAST RUN OF", "OUTCOME", ">STARTED", ">DURATION", ">LAST SUCCESS", "COUNTS")
    for each in statuses:
        if (last := each.last_run) is not None:
            rows.add_row(
                each.worker,
                _outcome(last),
                format_age(last.started_at, now),
                format_duration(last.duration_s),
                _ago(each.last_success, now),
                format_run_counts(last.outcome, last.counts),
            )
    return rows


def _queues_table(queues: dict[str, QueueLengths]) -> Table:
    rows = table("QUEUE", ">WAITING OR RUNNING", ">DELAYED", ">DEAD")
    for name, lengths in queues.items():
        rows.add_row(name, f"{lengths.waiting:,}", f"{lengths.delayed:,}", f"{lengths.dead:,}")
    return rows


def _processes_table(processes: Processes, now: datetime) -> Table:
    rows = table("PROCESS", "KIND", "STATE", ">BUSY", "VERSION", ">STARTED", ">HEARTBEAT", "QUEUES")
    for each in processes.listed:
        rows.add_row(
            each.name,
            each.heartbeat.kind,
            each.state,
            f"{each.heartbeat.busy}/{each.heartbeat.threads}" if each.heartbeat.threads else "-",
            each.heartbeat.version,
            _ago(each.started_at, now),
            _ago(each.heartbeat_at, now),
            ", ".join(each.heartbeat.queues) or "-",
        )
    return rows


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
@click.option("--problems", is_flag=True, help="List only workers with a problem.")
@click.option("--fail-on-alert", is_flag=True, help="Exit with status 1 if there is an alert.")
@json_option("Print JSON; with --watch an object per line.")
def status(name: str | None, watch: bool, interval: float, problems: bool, fail_on_alert: bool) -> None:
    """Show the status of every worker, or of worker NAME: last run, backlog, oldest stale row, queues, processes,
    leases and alerts.

    Workers are listed in order of trouble. "!" in STATE, such as "on !", marks those with an alert or a failed run. If
    some have a problem, more than ten without one are only named.

    BACKLOG is the number of stale rows, counted up to a limit. HELD is the number of stale rows that stay because
    they are on hold; they are not part of the backlog, and the column is shown if a worker has a hold. ARRIVED/H and
    PROCESSED/H are rows per hour over the last runs. Below 120 columns, the last runs have a table of their own; LAST
    SUCCESS is the last one that ended as done or partial. Each
    alert ends with its name; docs/howto/alerts.md says what to do about it. Long reasons are cut off; --json has
    all of them.

    Processes are the live workers and schedulers, and those that died within a day without being stopped.

    A line UNAVAILABLE names each server that does not answer and what is not shown; the rest is shown. In --json,
    "redis" is "ok" or the reason.

    With --watch, a server that does not answer is shown as a line, and the command continues.

    --fail-on-alert is for scripts and monitoring. A server that does not answer counts as an alert. Rejected
    rows and acknowledged alerts do not count. With --watch, the command ends at the first alert.

    Exit status: 0 if the database main answered; 1 if it did not, or if there is an alert and --fail-on-alert is
    given; 2 if settings are wrong or the schema is missing; 130 after Ctrl-C.
    """
    settings, sweeps = load_workers()
    if name is not None:
        find_worker(sweeps, name)
    if watch:
        _watch(settings, sweeps, name, interval, problems=problems, fail_on_alert=fail_on_alert)
        return
    with progress("reading"):
        found = read_status(settings, sweeps, name)
    _show(found, sweeps, problems=problems)
    if MAIN not in found.clocks or (fail_on_alert and found.has_alerts):
        sys.exit(1)


def _show(found: Snapshot, sweeps: dict[str, Sweep], *, problems: bool) -> None:
    if not print_as_json(_document(found, problems=problems)):
        print_report(found, sweeps.values(), problems=problems)


def _document(found: Snapshot, *, problems: bool) -> dict[str, Any]:
    workers = [each for each in found.statuses.values() if each.trouble or each.problem or not problems]
    clock = found.clocks.get(MAIN)
    document: dict[str, Any] = {
        "at": found.at,
        "clock_skew_s": None if clock is None else clock.seconds,
        "workers": workers,
        "queues": found.queues,
        "leases": found.leases,
        "redis": next((each.error for each in found.unavailable.values() if each.database is None), "ok"),
        "processes": found.processes.listed,
        "headline": found.headline.as_text(found.at),
        "alerts": found.alerts,
    }
    if database.several():
        errors = {each.database: each.error for each in found.unavailable.values()}
        document["databases"] = {name: errors.get(name, "ok") for name in database.by_name()}
    return document


def _watch(
    settings: Settings,
    sweeps: dict[str, Sweep],
    name: str | None,
    interval_s: float,
    *,
    problems: bool,
    fail_on_alert: bool,
) -> None:
    """Show the status until Ctrl-C, or until there is an alert."""
    while True:
        found: Snapshot | str
        with impatient():
            try:
                found = read_status(settings, sweeps, name)
            except (HousekeepingError, PeeweeException) as error:
                found = error_line(error)
        if not wants_json():
            if out.is_terminal:
                out.clear()
            say(f"{format_time(datetime.now(UTC))} UTC, every {interval_s:g} s; Ctrl-C ends", style="dim")
        if isinstance(found, Snapshot):
            _show(found, sweeps, problems=problems)
        elif not print_as_json({"error": found}):
            say(found, style="bold red")
        if fail_on_alert and (not isinstance(found, Snapshot) or found.has_alerts):
            sys.exit(1)
        time.sleep(interval_s)


@click.command()
@click.option("--fail-on-undecided", is_flag=True, help="Exit with status 1 if a table is undecided.")
@json_option()
def coverage(fail_on_undecided: bool) -> None:
    """List every table of every database with what keeps it clean, the fastest growing first.

    A table is "swept" by the sweeps in BY, or along with the rows of another table; "kept" for the reason that
    Kept("table", "reason") beside the sweeps or HOUSEKEEPING_KEPT gives; or "undecided". "archive" and "own" are
    archives of sweeps and the library's own tables. A sweep that is disabled or not set up does not count.

    ROWS are estimates. SIZE includes indexes and partitions. GROWTH/DAY is measured between two
    nights by the worker housekeeping.old_runs. OLDEST is the oldest stale row at the end of a sweep's last run. Only
    the catalog and the ledger are read, never the rows of a table. The ledger need not exist yet.

    Exit status: 0; 1 if a table is undecided and --fail-on-undecided is given; 2 if a database cannot be read, or
    settings are wrong.
    """
    settings, sweeps = load_workers(with_schema=False)
    with progress("reading the catalog"):
        found = read_coverage(sweeps.values(), kept_tables(settings), subjects_of(settings).values())
    if not print_as_json(found):
        _print_coverage(found)
    if found.unavailable:
        sys.exit(2)
    if fail_on_undecided and found.undecided:
        sys.exit(1)


def _print_coverage(found: Coverage) -> None:
    named = ["DATABASE"] if database.several() else []
    shown = table("TABLE", *named, "STATE", ">ROWS", ">SIZE", ">GROWTH/DAY", ">OLDEST", "BY")
    for each in found.tables:
        shown.add_row(
            each.table,
            *([each.database] if named else []),
            Text(each.state, style="bold red" if each.state == "undecided" else ""),
            "?" if each.rows is None else f"{each.rows:,}",
            format_size(each.bytes),
            format_size(each.growth_bytes_per_day),
            "-" if each.oldest_at is None else format_age(each.oldest_at, found.at),
            "; ".join(filter(None, (", ".join(each.by), each.reason))) or "-",
        )
    print_table(shown, empty="no tables")
    for name, error in found.unavailable.items():
        say(f"UNAVAILABLE database {name}: {error}; its tables are not shown", style="bold red")
    for name in found.unfit:
        say(f"no table is called {name}, which is declared as kept", style="bold yellow")
    if undecided := found.undecided:
        tables = counted(len(undecided), "table is", "tables are")
        say(f'{tables} undecided. Write a sweep, or: Kept({json.dumps(undecided[0].table)}, "why it may grow")')
