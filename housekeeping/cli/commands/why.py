"""``housekeeping why``: explain the outcome of a tick or a run."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

import click

from housekeeping.brokers.queues import queue_lengths
from housekeeping.cli.commands.runs import attempts_table, print_explanation, run_with
from housekeeping.cli.context import load_workers
from housekeeping.cli.formatting import out, print_table, progress
from housekeeping.core.errors import HousekeepingError, RedisUnavailable, WrongArgument
from housekeeping.core.redis_client import redis_client, translate_redis_errors
from housekeeping.core.settings import Settings
from housekeeping.core.wording import format_duration
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import translate_postgres_errors
from housekeeping.middleware.schedule.tick_store import TickStore
from housekeeping.presentation.formatting import format_time
from housekeeping.presentation.time_parsing import parse_past_time
from housekeeping.presentation.workers import find_worker
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.attempts import Attempt, meaning_of
from housekeeping.sweeps.insight.explain import Explanation, WasSent, explain_run, queued_messages, with_newer_run
from housekeeping.sweeps.insight.explain import why as explain_tick
from housekeeping.sweeps.ledger.history import RunRecord
from housekeeping.sweeps.processes.heartbeats import read_processes

#: Redis keeps 1500 ticks per worker. A worker that runs every minute has a little over a day.
_REMEMBERED: Final = timedelta(hours=24)


@click.command()
@click.argument("name", metavar="NAME|RUN_ID")
@click.argument("tick", metavar="[TICK|RUN_ID]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def why(name: str, tick: str | None, as_json: bool) -> None:
    """Explain the outcome of a TICK of worker NAME, by default of its latest tick.

    TICK is a time such as 2026-11-20T03:00 (UTC unless it names another zone), or 03:00 for the latest such time. For a
    worker without a schedule, the last run is explained. A later run that the schedule did not start is named as well.

    A number is a run's id and needs no NAME. The answer says what started the run, whether it took over from a lost
    run, how it ended and what follows.

    \b
    housekeeping why user_status_cleanup.batch
    housekeeping why bulk_imports.stale_import 2026-11-20T04:00
    housekeeping why 4711
    """
    settings, sweeps = load_workers()
    is_run_alone = name.isdecimal() and tick is None
    sweep = None if is_run_alone else find_worker(sweeps, name)
    with progress("reading the ledger"), translate_postgres_errors():
        now = database_now()
        if sweep is None:
            record = run_with(int(name))
            sweep = sweeps.get(record.worker)  # the ledger also has runs of workers that are no longer declared
            answer = explain_run(record, sweep, now, settings.timezone)
        elif tick is not None and tick.isdecimal():
            answer = explain_run(_run_of(name, int(tick)), sweep, now, settings.timezone)
        else:
            time = None if tick is None else parse_past_time(tick, now)
            client = None if settings.redis_url is None else redis_client(settings.redis_url)
            processes = read_processes(client, settings.namespace, now)
            answer = explain_tick(sweep, time, now, settings.timezone, _was_sent(settings, name, now), processes)
            if tick is None:
                queued = queued_messages(sweep, _messages(settings, sweep.queue), processes)
                answer = replace(with_newer_run(answer), queued=queued)
    if as_json:
        click.echo(json.dumps(answer.as_json(), default=lambda value: value.isoformat()))
        return
    _print(answer, sweep, now)


def _run_of(worker: str, run_id: int) -> RunRecord:
    record = run_with(run_id)
    if record.worker != worker:
        raise WrongArgument(f"run {run_id} belongs to {record.worker}: housekeeping why {record.worker} {run_id}")
    return record


def _was_sent(settings: Settings, name: str, now: datetime) -> WasSent:
    """Return a function that looks up in Redis whether the scheduler sent a tick."""

    def was_sent(tick: datetime) -> bool | None:
        if settings.redis_url is None or now - tick > _REMEMBERED:
            return None
        try:
            with translate_redis_errors():
                state = TickStore(redis_client(settings.redis_url), settings.namespace).state_of(name, tick)
        except RedisUnavailable:
            return None
        return state.recorded or state.being_sent

    return was_sent


def _messages(settings: Settings, queue: str) -> int:
    """Return the number of messages in a queue, waiting or running; 0 if the broker cannot be asked."""
    if settings.redis_url is None:
        return 0
    try:
        return queue_lengths(settings, [queue])[queue].waiting
    except HousekeepingError:
        return 0


def _print(answer: Explanation, sweep: Sweep | None, now: datetime) -> None:
    subject = "" if answer.tick is None else f", tick {format_time(answer.tick, '%Y-%m-%d %H:%M')} UTC"
    subject = subject if answer.run_id is None else f", run {answer.run_id}"
    out.print(f"{answer.worker}{subject}: {answer.outcome}", soft_wrap=True, style="bold")
    if answer.run_id is None:
        out.print(answer.meaning, soft_wrap=True)
    else:
        print_explanation(answer)
    if answer.newer_run is not None:
        out.print(_describe_newer_run(answer.worker, answer.newer_run, now), soft_wrap=True)
    if answer.queued is not None:
        out.print(answer.queued, soft_wrap=True)
    if answer.attempts:
        out.print()
        print_table(attempts_table(answer, sweep))


def _describe_newer_run(worker: str, newer: Attempt, now: datetime) -> str:
    ago = format_duration((now - newer.started_at).total_seconds())
    meaning = meaning_of(worker, newer)
    started = f"since then: run {newer.run_id}, {ago} ago, trigger {newer.trigger}"
    return f"{started}: {newer.outcome}; {meaning} (housekeeping runs {newer.run_id})"
