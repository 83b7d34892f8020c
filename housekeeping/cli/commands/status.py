"""``housekeeping status``"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Final

import click
from rich.table import Table
from rich.text import Text

from housekeeping.brokers.queues import QueueLengths, queue_lengths
from housekeeping.cli.commands.list import print_not_set_up
from housekeeping.cli.context import load_workers
from housekeeping.cli.formatting import out, print_table, progress, table
from housekeeping.core.errors import BrokerUnavailable, RedisUnavailable
from housekeeping.core.plural import counted
from housekeeping.core.redis_client import redis_client
from housekeeping.core.sanitize import in_one_line
from housekeeping.core.settings import Settings
from housekeeping.database.clock_skew import ClockSkew, read_database_clock
from housekeeping.database.connection import translate_postgres_errors
from housekeeping.presentation.descriptions import describe_override
from housekeeping.presentation.formatting import format_counts, format_duration, format_time
from housekeeping.sweeps.engine.rejection_store import Standing
from housekeeping.sweeps.insight.alerts import Alert
from housekeeping.sweeps.insight.run_state import outcome_in_words
from housekeeping.sweeps.insight.status import WorkerStatus, worker_status
from housekeeping.sweeps.ledger.lease_admin import HeldLease, held_leases
from housekeeping.sweeps.ledger.overrides import Override
from housekeeping.sweeps.processes.alerts import process_alerts
from housekeeping.sweeps.processes.liveness import Processes, read_processes

_WIDTH: Final = 200  # characters of a reason


@click.command(short_help="Show how each worker stands.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def status(as_json: bool) -> None:
    """Show how each worker stands: last run, oldest stale row, backlog, queues, processes, leases, rejections, alarms.

    WAITING is how many rows are stale, counted up to a limit. ARRIVED and SETTLED are rows an hour, over the last
    runs; LAST SUCCESS is the last run that did its work. An alarm's name stands at its end: docs/howto/alarms.md says
    what to do about it. Long reasons are cut; --json has the whole of them.

    The processes are the workers and schedulers that are alive, and those that died within a day without being
    stopped.

    Without Redis or RabbitMQ it shows the rest, and says so ("redis" in --json is "ok" or the reason).

    Exit status: 0 when the workers could be seen, whatever rings; 1 when PostgreSQL does not answer; 2 wrong settings,
    or no schema.
    """
    settings, sweeps = load_workers()
    with progress("looking"):
        with translate_postgres_errors():
            clock = read_database_clock()
            now = clock.server_at
            overviews = [worker_status(sweep, now, settings.timezone) for sweep in sweeps.values()]
            problems = {each.worker: each.problem for each in overviews if each.problem is not None}
        queues, leases, unreachable = _redis(settings, sorted({sweep.queue for sweep in sweeps.values()}))
        client = None if settings.redis_url is None else redis_client(settings.redis_url)
        processes = read_processes(client, settings.namespace, now)
    alarms = process_alerts(
        [sweep for sweep in sweeps.values() if sweep.name not in problems],
        processes,
        {name: lengths.waiting for name, lengths in queues.items()},
        now,
        settings.timezone,
        ever_ran=any(each.last_run for each in overviews),
    )
    if as_json:
        facts = {
            "now": now.isoformat(),
            "clock_skew_s": clock.seconds,
            "workers": [each.as_json() for each in overviews],
            "queues": {name: lengths.as_json() for name, lengths in queues.items()},
            "leases": [each.as_json() for each in leases],
            "redis": unreachable or "ok",
            "processes": [each.as_json() for each in processes.listed],
            "alarms": [each.as_json() for each in alarms],
        }
        click.echo(json.dumps(facts))
        return
    overviews = [each for each in overviews if each.problem is None]
    print_table(workers_table(overviews, now))
    print_not_set_up(problems)
    out.print()
    print_table(_last_runs_table(overviews, now))
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
    for each_overview in overviews:
        if each_overview.switch is not None:
            out.print(_switch_line(each_overview.switch), style="yellow", soft_wrap=True)
    if clock.exceeded:
        out.print(clock_line(clock), soft_wrap=True)
    for alarm in alarms:
        out.print(alarm_line(alarm), soft_wrap=True)
    for each_overview in overviews:
        for standing in each_overview.rejected:
            out.print(_rejected_line(each_overview.worker, standing, now), soft_wrap=True)
        if each_overview.rejected_more:
            more = f"{counted(each_overview.rejected_more, 'more cause or argument', 'more causes or arguments')}"
            out.print(Text.assemble(("REJECTED", "yellow"), f" {each_overview.worker}: {more}"), soft_wrap=True)
    for each_overview in overviews:
        for alarm in each_overview.alarms:
            text = f" {each_overview.worker}: {in_one_line(str(alarm), _WIDTH)} ({alarm.name})"
            out.print(Text.assemble(("ALARM", "bold red"), text), soft_wrap=True)


def clock_line(clock: ClockSkew) -> Text:
    """Return the alert that this machine's clock is far from the database's."""
    return Text.assemble(("ALARM", "bold red"), f" {clock} (clock)")


def alarm_line(alarm: Alert) -> Text:
    """Return an alert of the whole installation as a line."""
    return Text.assemble(("ALARM", "bold red"), f" {in_one_line(str(alarm), 2 * _WIDTH)} ({alarm.name})")


def workers_table(overviews: list[WorkerStatus], now: datetime) -> Table:
    """A line a worker: whether it runs, what waits, when it comes next."""
    shown = table("WORKER", "STATE", ">WAITING", ">OLDEST", ">ARRIVED/H", ">SETTLED/H", ">NEXT TICK")
    for each in overviews:
        shown.add_row(
            each.worker,
            each.state,
            "?" if each.waiting is None else str(each.waiting),
            _ago(each.oldest, now),
            "-" if each.rates is None else _rate(each.rates.arrived),
            "-" if each.rates is None else _rate(each.rates.drained),
            "-" if each.next_tick is None else f"in {format_duration((each.next_tick - now).total_seconds())}",
        )
    return shown


def _ago(value: Any, now: datetime) -> str:
    return f"{format_duration((now - value).total_seconds())} ago" if isinstance(value, datetime) else "-"


def _rate(an_hour: float | None) -> str:
    return "?" if an_hour is None else f"{max(0, an_hour):,.0f}"


def _lease_line(lease: HeldLease) -> str:
    since = "" if lease.held_for_s is None else f" for {format_duration(lease.held_for_s)}"
    free = (
        "Redis has lost it"
        if lease.remaining_s is None
        else f"free in {format_duration(lease.remaining_s)} unless renewed"
    )
    return f"lease {lease.key}: held by {lease.holder}{since}, {free}"


def _switch_line(switch: Override) -> str:
    by = f" ({switch.said_by}, {format_time(switch.since)} UTC)" if switch.said_by else ""
    return f"{describe_override(switch)}{by}"


def _rejected_line(worker: str, standing: Standing, now: datetime) -> Text:
    of = worker if standing.argument is None else f"{worker} {standing.argument}"
    seen = f"{counted(standing.rows, 'row')}, since {_ago(standing.since, now)}, last {_ago(standing.last_at, now)}"
    if standing.not_before is not None and standing.not_before > now:
        seen += f", scheduled again in {format_duration((standing.not_before - now).total_seconds())}"
    sample = json.dumps(standing.sample.get("record"), ensure_ascii=False)
    text = in_one_line(f"{standing.cause}; for example {sample}", 2 * _WIDTH)
    return Text.assemble(("REJECTED", "yellow"), f" {of}: {seen}: {text}")


def _last_runs_table(overviews: list[WorkerStatus], now: datetime) -> Table:
    shown = table("LAST RUN OF", "OUTCOME", ">STARTED", ">TOOK", ">LAST SUCCESS", "COUNTS")
    for each in overviews:
        last = each.last_run
        if last is None:
            shown.add_row(each.worker, "never ran", "-", "-", "-", "-")
            continue
        ago = (now - datetime.fromisoformat(last["started_at"])).total_seconds()
        outcome = outcome_in_words(last["outcome"], last["heartbeat_age_s"])
        # What a failure says is long, and an alarm.
        reason = f": {in_one_line(last['reason'], _WIDTH)}" if last["reason"] and not last["error"] else ""
        shown.add_row(
            each.worker,
            f"{outcome}{reason}",
            f"{format_duration(ago)} ago",
            format_duration(last["duration_s"]),
            _ago(each.last_success, now),
            format_counts(last["counts"]),
        )
    return shown


def _queues_table(queues: dict[str, QueueLengths]) -> Table:
    shown = table("QUEUE", ">WAITING", ">DELAYED", ">DEAD")
    for name, lengths in queues.items():
        shown.add_row(name, f"{lengths.waiting:,}", f"{lengths.delayed:,}", f"{lengths.dead:,}")
    return shown


def _processes_table(processes: Processes, now: datetime) -> Table:
    shown = table("PROCESS", "KIND", "STATE", ">BUSY", "VERSION", ">STARTED", ">HEARTBEAT", "QUEUES")
    for each in processes.listed:
        shown.add_row(
            each.name,
            each.said.kind,
            each.state,
            f"{each.said.busy}/{each.said.threads}" if each.said.threads else "-",
            each.said.version,
            _ago(each.started_at, now),
            _ago(each.heartbeat_at, now),
            ", ".join(each.said.queues) or "-",
        )
    return shown


def _redis(settings: Settings, names: list[str]) -> tuple[dict[str, QueueLengths], list[HeldLease], str | None]:
    """What Redis says; nothing, and why, when it does not answer or is not set."""
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
