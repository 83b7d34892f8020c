"""``housekeeping status``"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from housekeeping.cli.composition import workers_on_database
from housekeeping.cli.switching import in_words
from housekeeping.cli.tables import counts, length, moment, out, progress, show, table
from housekeeping.foundation.db import reaching_postgres
from housekeeping.foundation.errors import BrokerUnavailable, RedisUnavailable
from housekeeping.foundation.settings import Settings
from housekeeping.queues import QueueLengths, held_leases, queue_lengths
from housekeeping.sweeps.overview import Overview, overview
from housekeeping.sweeps.switches import Switched


@click.command(short_help="Show how each worker stands.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def status(as_json: bool) -> None:
    """Show how each worker stands: last run, oldest stale row, backlog, queues, leases, alarms.

    WAITING is how many rows are stale, counted up to a limit. Without Redis it shows the rest.
    """
    settings, sweeps = workers_on_database()
    now = datetime.now(UTC)
    with progress("looking"):
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
    show(workers_table(overviews, now))
    out.print()
    show(_last_runs_table(overviews, now))
    out.print()
    if unreachable:
        out.print(unreachable, style="yellow", soft_wrap=True)
    else:
        show(_queues_table(queues))
    for each in leases:
        out.print(f"lease {each['key']}: free in {length(each['remaining_s'])} unless renewed")
    for each_overview in overviews:
        if each_overview.switch is not None:
            out.print(_switch_line(each_overview.switch), style="yellow", soft_wrap=True)
    for each_overview in overviews:
        for alarm in each_overview.alarms:
            out.print(Text.assemble(("ALARM", "bold red"), f" {each_overview.worker}: {alarm}"), soft_wrap=True)


def workers_table(overviews: list[Overview], now: datetime) -> Table:
    """A line a worker: whether it runs, what waits, when it comes next."""
    shown = table("WORKER", "STATE", ">WAITING", ">OLDEST", ">NEXT TICK")
    for each in overviews:
        oldest = (now - each.oldest).total_seconds() if isinstance(each.oldest, datetime) else None
        shown.add_row(
            each.worker,
            each.state,
            "?" if each.waiting is None else str(each.waiting),
            "-" if oldest is None else f"{length(oldest)} ago",
            "-" if each.next_tick is None else f"in {length((each.next_tick - now).total_seconds())}",
        )
    return shown


def _switch_line(switch: Switched) -> str:
    by = f" ({switch.said_by}, {moment(switch.since)} UTC)" if switch.said_by else ""
    return f"{in_words(switch)}{by}"


def _last_runs_table(overviews: list[Overview], now: datetime) -> Table:
    shown = table("LAST RUN OF", "OUTCOME", ">STARTED", ">TOOK", "COUNTS")
    for each in overviews:
        last = each.last_run
        if last is None:
            shown.add_row(each.worker, "never ran", "-", "-", "-")
            continue
        ago = (now - datetime.fromisoformat(last["started_at"])).total_seconds()
        outcome = last["outcome"] or "running"
        # What a failure says is long, and an alarm.
        reason = f": {last['reason']}" if last["reason"] and not last["error"] else ""
        shown.add_row(
            each.worker, f"{outcome}{reason}", f"{length(ago)} ago", length(last["duration_s"]), counts(last["counts"])
        )
    return shown


def _queues_table(queues: dict[str, QueueLengths]) -> Table:
    shown = table("QUEUE", ">WAITING", ">DELAYED", ">DEAD")
    for name, lengths in queues.items():
        shown.add_row(name, f"{lengths.waiting:,}", f"{lengths.delayed:,}", f"{lengths.dead:,}")
    return shown


def _redis(settings: Settings, names: list[str]) -> tuple[dict[str, QueueLengths], list[dict[str, Any]], str | None]:
    """What Redis says; nothing, and why, when it does not answer or is not set."""
    if settings.redis_url is None:
        return {}, [], "HOUSEKEEPING_REDIS_URL is not set: queues and leases are not shown"
    try:
        return queue_lengths(settings, names), held_leases(settings), None
    except (BrokerUnavailable, RedisUnavailable) as error:
        return {}, [], str(error)
