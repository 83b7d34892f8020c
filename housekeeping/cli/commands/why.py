"""``housekeeping why``: explain the outcome of a tick or a run."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

import click

from housekeeping.brokers.queues import queue_lengths
from housekeeping.cli.commands.runs import attempts_table, print_explanation, run_with, using_database_of
from housekeeping.cli.completion import complete_worker
from housekeeping.cli.context import load_workers
from housekeeping.cli.formatting import out, progress, say
from housekeeping.cli.tables import print_table
from housekeeping.core.errors import HousekeepingError, RedisUnavailable, WrongArgument
from housekeeping.core.redis.client import redis_client, translate_redis_errors
from housekeeping.core.settings import MAIN, Settings
from housekeeping.core.wording import format_duration
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.middleware.schedule.tick_store import TickStore
from housekeeping.presentation.formatting import format_time
from housekeeping.presentation.time_parsing import parse_past_time
from housekeeping.presentation.workers import find_worker
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.attempts import Attempt, meaning_of
from housekeeping.sweeps.insight.explain import Explanation, WasSent, explain_run, queued_messages, with_newer_run
from housekeeping.sweeps.insight.explain import why as explain_tick
from housekeeping.sweeps.ledger.history import RunRecord, parse_run_label, run_label
from housekeeping.sweeps.processes.heartbeats import read_processes

#: Redis keeps 1500 ticks per worker. A worker that runs every minute has a little over a day.
_REMEMBERED: Final = timedelta(hours=24)


@click.command()
@click.argument("name", metavar="NAME|RUN_ID", shell_complete=complete_worker)
@click.argument("tick", metavar="[TICK|RUN_ID]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def why(name: str, tick: str | None, as_json: bool) -> None:
    """Explain the outcome of a TICK of worker NAME, by default of its latest tick.

    TICK is a time such as 2026-11-20T03:00 (UTC unless it names another zone), or 03:00 for the latest such time. For a
    worker without a schedule, the last run is explained. A later run that the schedule did not start is named as well.

    A number is a run's id and needs no NAME. With several databases, the id of a run outside of main is preceded by
    the name of its database. The answer says what started the run, whether it took over from a lost
    run, how it ended and what follows.

    \b
    housekeeping why user_status_cleanup.batch
    housekeeping why bulk_imports.stale_import 2026-11-20T04:00
    housekeeping why 4711
    housekeeping why ci:4711
    """
    settings, sweeps = load_workers()
    run_alone = parse_run_label(name) if tick is None else None
    sweep = None if run_alone is not None else find_worker(sweeps, name)
    run = run_alone or _run_named(sweep, tick)
    place = using_database_of(run) if run is not None else database.using(sweep.database if sweep else MAIN)
    with progress("reading the ledger"), place, translate_postgres_errors():
        now = database_now()
        if run is not None:
            record = run_with(run) if sweep is None else _run_of(name, run)
            sweep = sweeps.get(record.worker)  # the ledger also has runs of workers that are no longer declared
            answer = explain_run(record, sweep, now, settings.timezone)
        else:
            assert sweep is not None
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


def _run_named(sweep: Sweep | None, text: str | None) -> tuple[str, int] | None:
    """Return the run of a worker that the text names, in the worker's database unless it names another."""
    if sweep is None or text is None:
        return None
    return (sweep.database, int(text)) if text.isdecimal() else parse_run_label(text)


def _run_of(worker: str, run: tuple[str, int]) -> RunRecord:
    record = run_with(run)
    if record.worker != worker:
        label = record.label
        raise WrongArgument(f"run {label} belongs to {record.worker}: housekeeping why {record.worker} {label}")
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
    subject = subject if answer.run_id is None else f", run {run_label(answer.run_id, answer.database)}"
    say(f"{answer.worker}{subject}: {answer}", style="bold")
    if answer.run_id is None:
        say(answer.meaning)
    else:
        print_explanation(answer)
    if answer.newer_run is not None:
        say(_describe_newer_run(answer.worker, answer.newer_run, now))
    if answer.queued is not None:
        say(answer.queued)
    if answer.attempts:
        out.print()
        print_table(attempts_table(answer, sweep))


def _describe_newer_run(worker: str, newer: Attempt, now: datetime) -> str:
    ago = format_duration((now - newer.started_at).total_seconds())
    meaning = meaning_of(worker, newer)
    started = f"since then: run {newer.label}, {ago} ago, trigger {newer.trigger}"
    return f"{started}: {newer}; {meaning} (housekeeping runs {newer.label})"
