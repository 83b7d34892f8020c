"""``housekeeping status`` as text: tables of workers, runs, queues and processes, then alerts and rejections."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from housekeeping.brokers.queues import QueueLengths
from housekeeping.cli.commands.list import print_not_set_up
from housekeeping.cli.formatting import out, say
from housekeeping.cli.status_report import DatabaseReport, StatusReport
from housekeeping.cli.tables import print_table, table
from housekeeping.core.sanitize import in_one_line, printable, shortened
from housekeeping.core.wording import counted, format_duration
from housekeeping.presentation.formatting import (
    describe_override,
    format_age,
    format_backlog,
    format_run_counts,
    format_time,
)
from housekeeping.sweeps.engine.failures.rejection_store import Standing
from housekeeping.sweeps.insight.status import WorkerStatus, outcome_in_words
from housekeeping.sweeps.ledger.acknowledgments import Acknowledged
from housekeeping.sweeps.ledger.lease_admin import HeldLease
from housekeeping.sweeps.ledger.overrides import Override
from housekeeping.sweeps.processes.heartbeats import Processes

_REASON_WIDTH: Final = 200  # characters of a reason
_ALERT_WIDTH: Final = 2_000  # characters; only the error of another program is longer


def print_report(report: StatusReport) -> None:
    """Print the status for people."""
    now = report.now
    statuses = [each for each in report.statuses if each.problem is None]
    print_table(workers_table(statuses, now, with_database=report.has_several))
    print_not_set_up(report.problems)
    out.print()
    print_table(_last_runs_table(statuses, now))
    out.print()
    if report.unreachable:
        say(report.unreachable, style="yellow")
    else:
        print_table(_queues_table(report.queues))
    if report.processes.listed:
        out.print()
        print_table(_processes_table(report.processes, now))
    for lease in report.leases:
        say(in_one_line(_lease_line(lease), _REASON_WIDTH))
    for each in statuses:
        if each.switch is not None:
            say(_override_line(each.switch), style="yellow")
    _print_alerts(report, statuses)


def _print_alerts(report: StatusReport, statuses: list[WorkerStatus]) -> None:
    for found in report.databases:
        of_database = f"database {found.name}: " if report.has_several else ""
        if found.clock is not None and found.clock.exceeded:
            say(_alert_line(f"{of_database}{found.clock}", "clock"))
        if found.error is not None:
            say(_unavailable_line(found))
    for alert in report.alerts:
        say(_alert_line(str(alert), alert.name, report.acknowledged("", alert)))
    for each in statuses:
        for rejection in each.rejected:
            say(_rejection_line(each.worker, rejection, report.now))
        if each.rejected_more:
            more = f"{counted(each.rejected_more, 'more cause or argument', 'more causes or arguments')}"
            say(Text.assemble(("REJECTED", "yellow"), f" {each.worker}: {more}"))
    for each in statuses:
        for alert in each.alarms:
            say(_alert_line(f"{each.worker}: {alert}", alert.name, report.acknowledged(each.worker, alert)))


def _unavailable_line(found: DatabaseReport) -> Text:
    workers = ", ".join(each.name for each in found.workers)
    text = f"{found.error}; not shown: {workers}"
    return Text.assemble(("UNAVAILABLE", "bold red"), f" {in_one_line(text, _ALERT_WIDTH)}")


def _alert_line(text: str, name: str, known: Acknowledged | None = None) -> Text:
    # The commands to type are at the end.
    whole = shortened(printable(text).replace("\n", "\\n"), _ALERT_WIDTH)
    note = "" if known is None else f", acknowledged by {known.user}"
    return Text.assemble(("ALERT", "yellow" if known else "bold red"), f" {whole} ({name}{note})")


def workers_table(statuses: list[WorkerStatus], now: datetime, *, with_database: bool = False) -> Table:
    """Return a table of the workers with state, backlog, throughput and next tick."""
    named = ["DATABASE"] if with_database else []
    holds = [">HELD"] if any(each.held is not None for each in statuses) else []
    rows = table(
        "WORKER", *named, "STATE", ">BACKLOG", *holds, ">OLDEST ROW", ">ARRIVED/H", ">PROCESSED/H", ">NEXT TICK"
    )
    for each in statuses:
        rows.add_row(
            each.worker,
            *([each.database] if named else []),
            each.state,
            format_backlog(each, now),
            *(["-" if each.held is None else str(each.held)] if holds else []),
            _ago(each.oldest, now),
            "-" if each.rates is None else _rate(each.rates.arrived),
            "-" if each.rates is None else _rate(each.rates.drained),
            "-" if each.next_tick is None else f"in {format_duration((each.next_tick - now).total_seconds())}",
        )
    return rows


def _ago(value: Any, now: datetime) -> str:
    return format_age(value, now) if isinstance(value, datetime) else "-"


def _rate(per_hour: float | None) -> str:
    return "?" if per_hour is None else f"{max(0, per_hour):,.0f}"


def _lease_line(lease: HeldLease) -> str:
    since = "" if lease.held_for_s is None else f" for {format_duration(lease.held_for_s)}"
    free = (
        "Redis has lost it"
        if lease.remaining_s is None
        else f"free in {format_duration(lease.remaining_s)} unless renewed"
    )
    return f"lease {lease.key}: held by {lease.holder}{since}, {free}"


def _override_line(override: Override) -> str:
    by = f" ({override.said_by}, {format_time(override.since)} UTC)" if override.said_by else ""
    return f"{describe_override(override)}{by}"


def _rejection_line(worker: str, rejection: Standing, now: datetime) -> Text:
    subject = worker if rejection.argument is None else f"{worker} {rejection.argument}"
    rows = f"{counted(rejection.rows, 'row')}, since {_ago(rejection.since, now)}, last {_ago(rejection.last_at, now)}"
    if rejection.not_before is not None and rejection.not_before > now:
        rows += f", scheduled again in {format_duration((rejection.not_before - now).total_seconds())}"
    sample = json.dumps(rejection.sample.get("record"), ensure_ascii=False)
    text = in_one_line(f"{rejection.cause}; for example {sample}", 2 * _REASON_WIDTH)
    return Text.assemble(("REJECTED", "yellow"), f" {subject}: {rows}: {text}")


def _last_runs_table(statuses: list[WorkerStatus], now: datetime) -> Table:
    rows = table("LAST RUN OF", "OUTCOME", ">STARTED", ">DURATION", ">LAST SUCCESS", "COUNTS")
    for each in statuses:
        last = each.last_run
        if last is None:
            rows.add_row(each.worker, "never ran", "-", "-", "-", "-")
            continue
        ago = (now - datetime.fromisoformat(last["started_at"])).total_seconds()
        outcome = outcome_in_words(last["outcome"], last["heartbeat_age_s"])
        # The error of a failed run is an alert.
        reason = f": {in_one_line(last['reason'], _REASON_WIDTH)}" if last["reason"] and not last["error"] else ""
        rows.add_row(
            each.worker,
            f"{outcome}{reason}",
            f"{format_duration(ago)} ago",
            format_duration(last["duration_s"]),
            _ago(each.last_success, now),
            format_run_counts(last["outcome"], last["counts"]),
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
