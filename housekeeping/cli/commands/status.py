"""``housekeeping status``: show the status of every worker, queue, process and lease."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import click
from rich.table import Table
from rich.text import Text

from housekeeping.brokers.queues import QueueLengths, queue_lengths
from housekeeping.cli.commands.list import print_not_set_up
from housekeeping.cli.context import load_workers
from housekeeping.cli.formatting import out, print_table, progress, table
from housekeeping.core.errors import BrokerUnavailable, DatabaseUnavailable, RedisUnavailable
from housekeeping.core.redis.client import redis_client
from housekeeping.core.sanitize import in_one_line, printable, shortened
from housekeeping.core.settings import Settings
from housekeeping.core.wording import counted, format_duration
from housekeeping.database.clock_skew import ClockSkew, read_database_clock
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.presentation.formatting import (
    describe_override,
    format_age,
    format_backlog,
    format_run_counts,
    format_time,
)
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.failures.rejection_store import Standing
from housekeeping.sweeps.insight.status import WorkerStatus, outcome_in_words
from housekeeping.sweeps.insight.statuses import worker_statuses
from housekeeping.sweeps.ledger import run_queries
from housekeeping.sweeps.ledger.lease_admin import HeldLease, held_leases
from housekeeping.sweeps.ledger.overrides import Override
from housekeeping.sweeps.processes.alerts import never_ran_alerts, process_alerts
from housekeeping.sweeps.processes.heartbeats import Processes, read_processes
from housekeeping.sweeps.registry import by_database

_WIDTH: Final = 200  # characters of a reason
_ALERT_WIDTH: Final = 2_000  # characters; only the error of another program is longer


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(as_json: bool) -> None:
    """Show the status of every worker: last run, backlog, oldest stale row, queues, processes, leases and alerts.

    BACKLOG is the number of stale rows, counted up to a limit. HELD is the number of stale rows that stay because
    they are on hold; they are not part of the backlog, and the column is shown if a worker has a hold. ARRIVED/H and
    PROCESSED/H are rows per hour over the last runs. LAST SUCCESS is the last run that ended as done or partial. Each
    alert ends with its name; docs/howto/alerts.md says what to do about it. Long reasons of runs are cut; --json has
    all of them.

    Processes are the live workers and schedulers, and those that died within a day without being stopped.

    Without Redis or RabbitMQ, the command shows the rest and a warning ("redis" in --json is "ok" or the reason).

    With several databases, a line names each one that does not answer, and the rest is shown.

    Exit status: 0 if PostgreSQL answered, with or without alerts; 1 if it did not, or the database main did not; 2
    wrong settings or no schema.
    """
    settings, sweeps = load_workers()
    with progress("reading"):
        databases = [_read(name, workers, settings) for name, workers in by_database(sweeps.values()).items()]
        main = databases[0]
        answered = [each for each in databases if each.error is None]
        if main.error is not None and not answered:
            raise main.error
        clock = answered[0].clock
        assert clock is not None
        now, ever_ran = clock.server_at, any(each.ever_ran for each in databases)
        found = {each.worker: each for database in answered for each in database.statuses}
        statuses = [found[name] for name in sweeps if name in found]
        problems = {each.worker: each.problem for each in statuses if each.problem is not None}
        queues, leases, unreachable = _redis(settings, sorted({sweep.queue for sweep in sweeps.values()}))
        client = None if settings.redis_url is None else redis_client(settings.redis_url)
        processes = read_processes(client, settings.namespace, now)
    alerts = process_alerts(
        [sweep for sweep in sweeps.values() if sweep.name not in problems],
        processes,
        {name: lengths.waiting for name, lengths in queues.items()},
        now,
        settings.timezone,
        ever_ran=ever_ran,
    )
    for one in statuses:
        if one.problem is None:
            one.alarms.extend(never_ran_alerts(sweeps[one.worker], one, processes, now, settings.timezone))
    if as_json:
        document: dict[str, Any] = {
            "now": now.isoformat(),
            "clock_skew_s": None if main.clock is None else main.clock.seconds,
            "workers": [each.as_json() for each in statuses],
            "queues": {name: lengths.as_json() for name, lengths in queues.items()},
            "leases": [each.as_json() for each in leases],
            "redis": unreachable or "ok",
            "processes": [each.as_json() for each in processes.listed],
            "alarms": [each.as_json() for each in alerts],
        }
        if settings.databases:
            document["databases"] = {each.name: "ok" if each.error is None else str(each.error) for each in databases}
        click.echo(json.dumps(document))
        _exit(main)
        return
    statuses = [each for each in statuses if each.problem is None]
    print_table(workers_table(statuses, now, with_database=bool(settings.databases)))
    print_not_set_up(problems)
    out.print()
    print_table(_last_runs_table(statuses, now))
    out.print()
    if unreachable:
        out.print(unreachable, style="yellow", soft_wrap=True)
    else:
        print_table(_queues_table(queues))
    if processes.listed:
        out.print()
        print_table(_processes_table(processes, now))
    for each in leases:
        out.print(in_one_line(_lease_line(each), _WIDTH), soft_wrap=True)
    for each_status in statuses:
        if each_status.switch is not None:
            out.print(_override_line(each_status.switch), style="yellow", soft_wrap=True)
    for each_database in databases:
        of_database = f"database {each_database.name}: " if settings.databases else ""
        if each_database.clock is not None and each_database.clock.exceeded:
            out.print(clock_line(each_database.clock, of_database), soft_wrap=True)
        if each_database.error is not None:
            out.print(_unavailable_line(each_database), soft_wrap=True)
    for alert in alerts:
        out.print(_alert_line(str(alert), alert.name), soft_wrap=True)
    for each_status in statuses:
        for rejection in each_status.rejected:
            out.print(_rejection_line(each_status.worker, rejection, now), soft_wrap=True)
        if each_status.rejected_more:
            more = f"{counted(each_status.rejected_more, 'more cause or argument', 'more causes or arguments')}"
            out.print(Text.assemble(("REJECTED", "yellow"), f" {each_status.worker}: {more}"), soft_wrap=True)
    for each_status in statuses:
        for alert in each_status.alarms:
            out.print(_alert_line(f"{each_status.worker}: {alert}", alert.name), soft_wrap=True)
    _exit(main)


@dataclass(slots=True)
class _Database:
    """One database with the status of its workers, or why it could not be read.

    Attributes:
      ever_ran: Whether a worker process has carried out a run; assumed if it could not be read.
    """

    name: str
    workers: list[Sweep]
    clock: ClockSkew | None = None
    statuses: list[WorkerStatus] = field(default_factory=list)
    ever_ran: bool = True
    error: Exception | None = None


def _read(name: str, workers: list[Sweep], settings: Settings) -> _Database:
    found = _Database(name, workers)
    try:
        with database.using(name), translate_postgres_errors():
            clock = read_database_clock()
            found.statuses = worker_statuses(workers, clock.server_at, settings.timezone)
            found.ever_ran = run_queries.any_by_a_worker_process()
            found.clock = clock
    except DatabaseUnavailable as error:
        found.error = error
    return found


def _exit(main: _Database) -> None:
    if main.error is not None:
        sys.exit(1)


def _unavailable_line(found: _Database) -> Text:
    workers = ", ".join(each.name for each in found.workers)
    text = f"{found.error}; not shown: {workers}"
    return Text.assemble(("UNAVAILABLE", "bold red"), f" {in_one_line(text, _ALERT_WIDTH)}")


def clock_line(clock: ClockSkew, of_database: str = "") -> Text:
    """Return the alert about the difference between this machine's clock and the database's."""
    return _alert_line(f"{of_database}{clock}", "clock")


def _alert_line(text: str, name: str) -> Text:
    # The commands to type are at the end.
    whole = shortened(printable(text).replace("\n", "\\n"), _ALERT_WIDTH)
    return Text.assemble(("ALERT", "bold red"), f" {whole} ({name})")


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
    text = in_one_line(f"{rejection.cause}; for example {sample}", 2 * _WIDTH)
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
        reason = f": {in_one_line(last['reason'], _WIDTH)}" if last["reason"] and not last["error"] else ""
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


def _redis(settings: Settings, names: list[str]) -> tuple[dict[str, QueueLengths], list[HeldLease], str | None]:
    """Return the queues, the leases, and why one of them is missing."""
    if settings.redis_url is None:
        return {}, [], "HOUSEKEEPING_REDIS_URL is not set: queues and leases are not shown"
    try:
        leases = held_leases(redis_client(settings.redis_url), settings.namespace)
    except RedisUnavailable as error:
        return {}, [], str(error)
    try:
        return queue_lengths(settings, names), leases, None
    except (BrokerUnavailable, RedisUnavailable) as error:
        return {}, leases, str(error)
