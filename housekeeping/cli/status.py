"""``housekeeping status``"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import click
from rich.table import Table

from housekeeping.cli.composition import workers_on_database
from housekeeping.cli.tables import counts, length, out, table
from housekeeping.foundation.db import reaching_postgres
from housekeeping.foundation.errors import RedisUnavailable
from housekeeping.foundation.settings import Settings
from housekeeping.queues import QueueLengths, held_leases, queue_lengths
from housekeeping.sweeps.overview import Overview, overview


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(as_json: bool) -> None:
    """Show how each worker stands: last run, oldest stale row, backlog, queues, leases, alarms."""
    settings, sweeps = workers_on_database()
    now = datetime.now(UTC)
    with reaching_postgres():
        overviews = [overview(sweep, now, settings.timezone) for sweep in sweeps.values()]
    queues, leases, unreachable = _redis(settings, sorted({sweep.queue for sweep in sweeps.values()}))
    if as_json:
        facts = {
            "now": now.isoformat(),
            "workers": [each.as_json() for each in overviews],
            "queues": {name: lengths.as_json() for name, lengths in queues.items()},
            "leases": leases,
            "redis": unreachable or "ok",
        }
        click.echo(json.dumps(facts))
        return
    out.print(workers_table(overviews, now))
    if unreachable:
        out.print(f"\n[yellow]{unreachable}[/yellow]")
    else:
        out.print(_queues_table(queues))
    for each in leases:
        out.print(f"lease {each['key']}: free in {length(each['remaining_s'])} unless renewed")
    for each_overview in overviews:
        for alarm in each_overview.alarms:
            out.print(f"[red]ALARM[/red] {each_overview.worker}: {alarm}")


def workers_table(overviews: list[Overview], now: datetime) -> Table:
    """A line a worker."""
    shown = table("WORKER", "STATE", "LAST RUN", "DID", ">WAITING", ">OLDEST", ">NEXT TICK")
    for each in overviews:
        oldest = (now - each.oldest).total_seconds() if isinstance(each.oldest, datetime) else None
        shown.add_row(
            each.worker,
            each.state,
            _last_run(each, now),
            counts(each.last_run["counts"]) if each.last_run else "-",
            str(each.waiting),
            "-" if oldest is None else f"{length(max(0, oldest))} ago",
            "-" if each.next_tick is None else f"in {length((each.next_tick - now).total_seconds())}",
        )
    return shown


def _last_run(each: Overview, now: datetime) -> str:
    """How it ended and when: ``done, 12.0 s ago, took 3 ms``."""
    last = each.last_run
    if last is None:
        return "never"
    outcome = last["outcome"] or "running"
    if last["reason"]:
        outcome += f" ({last['reason']})"
    ago = (now - datetime.fromisoformat(last["started_at"])).total_seconds()
    took = f", took {length(last['duration_s'])}" if last["duration_s"] is not None else ""
    return f"{outcome}, {length(max(0, ago))} ago{took}"


def _queues_table(queues: dict[str, QueueLengths]) -> Table:
    shown = table("\nQUEUE", ">WAITING", ">DELAYED", ">DEAD")
    for name, lengths in queues.items():
        shown.add_row(name, f"{lengths.waiting:,}", f"{lengths.delayed:,}", f"{lengths.dead:,}")
    return shown


def _redis(settings: Settings, names: list[str]) -> tuple[dict[str, QueueLengths], list[dict[str, Any]], str | None]:
    """What Redis says; nothing, and why, when it does not answer or is not set."""
    if settings.redis_url is None:
        return {}, [], "HOUSEKEEPING_REDIS_URL is not set: queues and leases are not shown"
    try:
        return queue_lengths(settings, names), held_leases(settings), None
    except RedisUnavailable as error:
        return {}, [], str(error)
