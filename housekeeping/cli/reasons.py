"""``housekeeping why``"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Final

import click

from housekeeping.cli.composition import chosen, workers_on_database
from housekeeping.cli.moments import past_moment
from housekeeping.cli.tables import counts, length, moment, out, progress, show, table
from housekeeping.foundation.clock_skew import database_now
from housekeeping.foundation.db import reaching_postgres
from housekeeping.foundation.errors import RedisUnavailable
from housekeeping.foundation.redis_client import reaching_redis, redis_client
from housekeeping.foundation.settings import Settings
from housekeeping.middleware.tick_memory import TickMemory
from housekeeping.sweeps.counting import in_order
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.processes import read_processes
from housekeeping.sweeps.why import Answer, WasSent
from housekeeping.sweeps.why import why as ask

#: Redis remembers 1500 ticks of each worker: of one that comes every minute, a little over a day.
_REMEMBERED: Final = timedelta(hours=24)


@click.command(short_help="Say what became of a tick, and the reason.")
@click.argument("name")
@click.argument("tick", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def why(name: str, tick: str | None, as_json: bool) -> None:
    """Say what became of a TICK of worker NAME, and the reason; of its latest tick unless said.

    TICK is a time such as 2026-11-20T03:00 (UTC unless it names another zone) or 03:00, which is the last time
    it was that late. A worker without a schedule answers for its last run.

    \b
    housekeeping why user_status_cleanup.batch
    housekeeping why bulk_imports.stale_import 2026-11-20T04:00
    """
    settings, sweeps = workers_on_database()
    sweep = chosen(sweeps, name)
    with progress("looking"), reaching_postgres():
        now = database_now()
        asked = None if tick is None else past_moment(tick, now)
        client = None if settings.redis_url is None else redis_client(settings.redis_url)
        processes = read_processes(client, settings.namespace, now)
        answer = ask(sweep, asked, now, settings.timezone, _was_sent(settings, name, now), processes)
    if as_json:
        click.echo(json.dumps(answer.as_json(), default=lambda value: value.isoformat()))
        return
    _show(answer, sweep)


def _was_sent(settings: Settings, name: str, now: datetime) -> WasSent:
    """By what Redis remembers, which the scheduler claims and settles each tick in."""

    def asked(tick: datetime) -> bool | None:
        if settings.redis_url is None or now - tick > _REMEMBERED:
            return None
        try:
            with reaching_redis():
                seen = TickMemory(redis_client(settings.redis_url), settings.namespace).look(name, tick)
        except RedisUnavailable:
            return None
        return seen.settled or seen.being_sent

    return asked


def _show(answer: Answer, sweep: Sweep) -> None:
    of = "" if answer.tick is None else f", tick {moment(answer.tick, '%Y-%m-%d %H:%M')} UTC"
    out.print(f"{answer.worker}{of}: {answer.outcome}", soft_wrap=True, style="bold")
    out.print(answer.meaning, soft_wrap=True)
    if not answer.attempts:
        return
    out.print()
    shown = table("RUN", "OUTCOME", "STARTED (UTC)", ">TOOK", "COUNTS")
    for each in answer.attempts:
        took = None if each.finished_at is None else (each.finished_at - each.started_at).total_seconds()
        reason = f": {each.reason}" if each.reason and not each.error else ""
        shown.add_row(
            str(each.run_id),
            f"{each}{reason}",
            moment(each.started_at),
            length(took),
            counts(in_order(sweep, each.counts)),
        )
    show(shown)
