"""``housekeeping status``"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import click
from rich.table import Table

from housekeeping.cli.composition import workers_on_database
from housekeeping.cli.tables import counts, length, moment, out, table
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
    shown = table("WORKER", "STATE", "LAST RUN (UTC)", "OUTCOME", ">TOOK", "COUNTS", ">WAITING", "OLDEST", "NEXT TICK")
    for each in overviews:
        last = each.last_run
        started = moment(datetime.fromisoformat(last["started_at"]).astimezone(UTC)) if last else "never"
        outcome = "-" if last is None else last["outcome"] or "running"
        oldest = length((now - each.oldest).total_seconds()) if isinstance(each.oldest, datetime) else "-"
        shown.add_row(
            each.worker,
            each.state,
            started,
            f"{outcome}: {last['reason']}" if last and last["reason"] else outcome,
            length(last["duration_s"]) if last else "-",
            counts(last["counts"]) if last else "-",
            str(each.waiting),
            oldest if oldest == "-" else f"{oldest} due",
            "-" if each.next_tick is None else f"in {length((each.next_tick - now).total_seconds())}",
        )
    return shown


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
