"""``housekeeping runs`` and ``why``: list past runs, and explain the outcome of a tick or a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import datetime, tzinfo
from typing import Any, Final, get_args

import click
from rich.table import Table

from housekeeping.cli.main import load_workers
from housekeeping.cli.output import (
    complete_worker,
    fit_name,
    json_option,
    notify,
    out,
    page_options,
    print_as_json,
    print_list,
    print_table,
    progress,
    read_times,
    say,
    table,
    time_options,
)
from housekeeping.cli.run import print_checks
from housekeeping.core.errors import RedisUnavailable, WrongArgument
from housekeeping.core.logs import counted, format_duration, in_one_line
from housekeeping.core.redis import redis_client, shared_redis, translate_redis_errors
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.queries import database_now, read_database_clock
from housekeeping.engine import in_order
from housekeeping.engine.restore import MOST_ARCHIVED, Undo, undo_of
from housekeeping.insight.plan import forecast_now, notable
from housekeeping.insight.why import Explanation, UnrecordedReason, WasSent, explain_run, meaning_of, with_newer_run
from housekeeping.insight.why import why as explain_tick
from housekeeping.insight.wording import (
    as_json,
    find_worker,
    format_counts,
    format_in_zone,
    format_run_counts,
    format_time,
    format_value,
    outcome_in_words,
    parse_local_time,
)
from housekeeping.ledger import history, ticks
from housekeeping.ledger.history import (
    RUNNING,
    RunFailures,
    RunFilter,
    RunPage,
    RunPosition,
    RunRecord,
    failures_of,
    read_page,
)
from housekeeping.ledger.processes import Processes, heartbeat_store, read_processes
from housekeeping.ledger.runs import Outcome, Trigger
from housekeeping.ledger.schema import parse_run_label
from housekeeping.middleware.schedule import TickStore
from housekeeping.sweeps.declaration import Sweep

_REASON_WIDTH: Final = 60  # characters in the list; the details and --json have all of it
_ERROR_WIDTH: Final = 1_000


@click.command()
@click.argument("which", metavar="[NAME|ID]", required=False, shell_complete=complete_worker)
@time_options("started")
@click.option("--outcome", type=click.Choice([*get_args(Outcome), RUNNING]), help="Only runs with this outcome.")
@click.option("--trigger", type=click.Choice(get_args(Trigger)), help="Only runs with this trigger.")
@click.option("--database", "only", metavar="NAME", help="Only runs of this database.")
@page_options(limit=20, most=1000)
@click.option(
    "--skip", type=click.IntRange(0, MOST_ARCHIVED), default=0, help="With a single run: skip so many archived rows."
)
def runs(
    which: str | None,
    outcome: str | None,
    trigger: str | None,
    only: str | None,
    limit: int,
    before: str | None,
    skip: int,
    **times: str | None,
) -> None:
    """List the runs of all workers or of worker NAME, newest first, or show the run with this ID.

    A run is one attempt of any trigger: schedule, enqueue, cli or parent. AGE is the time since its start. The list
    includes skipped and missed ticks. "silent" is a run whose heartbeat is late. "lost?" is a run that has missed
    three; the next run takes over from it.

    A single run is shown with its process, the records that it rejected, the keys of the rows that it archived and the
    command that restores them, and, if an error ended it, the traceback.

    With several databases, the ID of a run is preceded by the name of its database, as in ci:4711, unless that is main.

    \b
    housekeeping runs user_status_cleanup.batch --since 2h
    housekeeping runs --outcome failed
    housekeeping runs --trigger cli --since 3d --until 2d
    housekeeping runs 4711
    """
    settings, sweeps = load_workers()
    filtered = any((*times.values(), outcome, trigger, only, before))
    with progress("reading the ledger"):
        if which is not None and (run := parse_run_label(which)) is not None:
            if filtered:
                raise WrongArgument(f"run {which} is a single run; the options --since to --before filter lists")
            with using_database_of(run), translate_postgres_errors():
                record = run_with(run)
                undo = undo_of(record, sweeps, skip=skip, limit=limit)
                _print_run(record, failures_of(run[1]), undo, sweeps, settings, database_now())
            return

        def wanted(now: datetime) -> RunFilter:
            return RunFilter(which, outcome, trigger, *read_times(times, now))

        names = _names(only, sweeps.get(which or ""))
        page = _read(names, wanted, limit, None if before is None else _position(before))
        # The ledger also has runs of workers that are no longer declared.
        if which is not None and not page.runs and not _read(names, lambda now: RunFilter(which), 1).runs:
            find_worker(sweeps, which)
    empty = "no runs match" if filtered else "no runs yet"
    print_list("runs", page.runs, _COLUMNS, lambda run: _cells(run, sweeps, page.now), empty, older=page.older)


def _names(only: str | None, sweep: Sweep | None) -> list[str]:
    """Return the databases to read."""
    if only is not None:
        return [known_database(only)]
    return list(database.by_name()) if sweep is None else [sweep.database]


def _position(label: str) -> RunPosition:
    run = parse_run(label)
    with using_database_of(run), translate_postgres_errors():
        return RunPosition.of(run_with(run))


def _read(
    names: list[str], wanted: Callable[[datetime], RunFilter], limit: int, before: RunPosition | None = None
) -> RunPage:
    """Return a page of runs. A database that does not answer gets a warning on stderr, unless all fail."""
    page = read_page(names, wanted, limit=limit, before=before)
    if len(page.unavailable) == len(names):
        raise page.unavailable[-1]
    for error in page.unavailable:
        notify(f"warning: {error}; its runs are not shown")
    return page


def parse_run(text: str) -> tuple[str, int]:
    """Return the database and the id of the run that the operator names, or raise WrongArgument."""
    run = parse_run_label(text)
    if run is None:
        raise WrongArgument(f"{text!r} is no ID of a run; housekeeping runs lists them")
    return run


def known_database(name: str) -> str:
    """Return the name if a database has it, or raise WrongArgument."""
    if name not in database.by_name():
        raise WrongArgument(f"there is no database {name!r}; the databases are {', '.join(database.by_name())}")
    return name


def using_database_of(run: tuple[str, int]) -> AbstractContextManager[None]:
    """Make the database of a run the current one, or raise WrongArgument if there is no such database."""
    return database.using(known_database(run[0]))


def run_with(run: tuple[str, int]) -> RunRecord:
    """Return the run with this id; its database must be the current one.

    Raises:
      WrongArgument: No run has the id.
    """
    name, run_id = run
    record = history.find(run_id)
    if record is None:
        place = f" in the database {name!r}" if database.several() else ""
        raise WrongArgument(f"there is no run {run_id}{place}; runs older than 30 days are removed: housekeeping runs")
    return record


_COLUMNS: Final = (">ID", "WORKER", ">AGE", ">DURATION", "OUTCOME AND COUNTS")


def _cells(run: RunRecord, sweeps: Mapping[str, Sweep], now: datetime) -> list[str]:
    main_counts = _main_counts(run, sweeps)
    return [
        run.label,
        fit_name(run.worker),
        format_duration((now - run.started_at).total_seconds()),
        format_duration(run.duration_s),
        f"{outcome_of(run)}{f', {main_counts}' if main_counts else ''}",
    ]


def outcome_of(record: RunRecord) -> str:
    """Return the run's outcome and reason, or its state if it has not ended."""
    if record.outcome is None:
        return outcome_in_words(record)
    reason = f": {in_one_line(record.reason, _REASON_WIDTH)}" if record.reason else ""
    return f"{record.outcome}{reason}"


def _main_counts(record: RunRecord, sweeps: Mapping[str, Sweep]) -> str:
    sweep = sweeps.get(record.worker)
    given = record.counts if sweep is None else in_order(sweep, record.counts)
    # The number of batches tells an operator little.
    main = {name: value for name, value in given.items() if name != "batches" and value}
    return format_counts(main) if main else ""


def _print_run(
    record: RunRecord,
    failures: RunFailures,
    undo: Undo | None,
    sweeps: Mapping[str, Sweep],
    settings: Settings,
    now: datetime,
) -> None:
    sweep = sweeps.get(record.worker)
    answer = explain_run(record, sweep, now, settings.timezone)
    explained: dict[str, Any] = {"origin": answer.origin, "meaning": answer.meaning, "next_step": answer.next_step}
    explained |= {"attempts": answer.attempts, "undo": undo}
    if print_as_json({**as_json(record), **as_json(failures), **explained}):
        return
    say(f"run {record.label} of {record.worker}: {outcome_of(record)}", style="bold")
    for label, text in (("started", answer.origin), ("result", answer.meaning), ("next", answer.next_step)):
        if text:
            say(f"{label}: {text}")
    if undo is not None:
        say(f"undo: {undo.text}{f': {undo.command}' if undo.command else ''}")
    out.print()
    print_table(_details(record, sweep, now))
    if len(answer.attempts) > 1:
        out.print()
        print_table(attempts_table(answer.attempts, sweep))
    for each in failures.rejected:
        say(f"\nrejected: {counted(each.rows, 'record')}: {in_one_line(each.error, _ERROR_WIDTH)}")
        for sample in each.records:
            say(f"  {in_one_line(json.dumps(sample, ensure_ascii=False), _ERROR_WIDTH)}")
    for archived in undo.archived if undo is not None else ():
        say(f"\narchived rows of {archived.table}, by key:")
        for key in archived.keys:
            say(f"  {in_one_line(json.dumps(key, ensure_ascii=False), _ERROR_WIDTH)}")
    if undo is not None and undo.next_skip is not None:
        say(f"further ones: add --skip {undo.next_skip}")
    if failures.traceback:
        out.print(f"\n{failures.traceback.rstrip()}", soft_wrap=True)


def _details(record: RunRecord, sweep: Sweep | None, now: datetime) -> Table:
    def ago(at: datetime) -> str:
        return f"{format_time(at)} UTC, {format_duration((now - at).total_seconds())} ago"

    backlog = None if record.backlog is None else f"{record.backlog:,}"
    given = record.counts if sweep is None else in_order(sweep, record.counts)
    fields = table("FIELD", "VALUE")
    for name, value in {
        "trigger": record.trigger,
        "tick": None if record.tick is None else f"{format_time(record.tick)} UTC",
        "process": record.process,
        "message id": record.message_id,
        "lease epoch": record.epoch,
        "started": ago(record.started_at),
        "heartbeat": ago(record.heartbeat_at),
        "finished": None if record.finished_at is None else ago(record.finished_at),
        "duration": format_duration(record.duration_s),
        "counts": ", ".join(f"{name} {format_value(value)}" for name, value in given.items()) or None,
        "cursor": _cursor(record.cursor),
        "backlog at the end": backlog if record.backlog_exact or backlog is None else f"at least {backlog}",
        "error": record.error,
    }.items():
        fields.add_row(name, "-" if value is None else str(value))
    return fields


def _cursor(cursor: dict[str, Any] | None) -> str | None:
    if cursor is None:
        return None
    after = cursor.get("after")
    position = "at the start" if after is None else f"after {', '.join(map(str, after))}"
    return f"in {cursor.get('pass')}, {position}"


def attempts_table(runs: Sequence[RunRecord], sweep: Sweep | None) -> Table:
    """Return the attempts of a tick or a message, oldest first."""
    attempts = table("RUN", "OUTCOME", "STARTED (UTC)", ">DURATION", "COUNTS")
    for each in runs:
        reason = f": {each.reason}" if each.reason and not each.error else ""
        attempts.add_row(
            each.label,
            f"{outcome_in_words(each)}{reason}",
            format_time(each.started_at),
            format_duration(each.duration_s),
            format_run_counts(each.outcome, each.counts if sweep is None else in_order(sweep, each.counts)),
        )
    return attempts


@click.command()
@click.argument("name", shell_complete=complete_worker)
@click.argument("tick", required=False)
@json_option()
def why(name: str, tick: str | None) -> None:
    """Explain the outcome of a TICK of worker NAME, by default of its latest tick.

    TICK is a time such as 2026-11-20T03:00, or 03:00 for the latest such time, in the zone of HOUSEKEEPING_TIMEZONE (by
    default UTC) unless it names another one. A time that the zone's clocks skipped or repeated is explained. For a
    worker without a schedule, the last run is explained. A later run that the schedule did not start is named as well.
    "housekeeping runs ID" explains a single run.

    Without a TICK, it also says whether a run that is sent now would start, with all checks of "housekeeping plan" that
    are not in order: a pause, the queue and its workers, the lease's holder, a locked table, the scheduler.

    \b
    housekeeping why user_status_cleanup.batch
    housekeeping why bulk_imports.stale_import 2026-11-20T04:00
    """
    settings, sweeps = load_workers()
    sweep = find_worker(sweeps, name)
    with progress("reading the ledger"), database.using(sweep.database), translate_postgres_errors():
        clock, zone = read_database_clock(), settings.timezone
        now = clock.server_at
        time, note = (None, None) if tick is None else parse_local_time(tick, now, zone)
        processes = read_processes(heartbeat_store(settings), now)
        was_sent, unrecorded = _was_sent(settings, name, processes), _unrecorded(settings, name, processes)
        answer = replace(explain_tick(sweep, time, now, zone, was_sent, processes, unrecorded), note=note)
        if tick is None:
            answer = replace(with_newer_run(answer), now=forecast_now(sweep, clock, settings))
    if not print_as_json(answer):
        _print(answer, sweep, now, zone)


def _was_sent(settings: Settings, name: str, processes: Processes) -> WasSent:
    """Return a function that returns whether the scheduler has sent a tick; None if that is unknown."""

    def was_sent(tick: datetime) -> bool | None:
        if shared_redis.is_replaced(settings):
            return ticks.was_sent(name, tick)
        if settings.redis_url is None or not processes.known:  # wait only once for a Redis that hangs
            return None
        try:
            with translate_redis_errors():
                return TickStore(redis_client(settings.redis_url), settings.namespace).was_sent(name, tick)
        except RedisUnavailable:
            return None

    return was_sent


def _unrecorded(settings: Settings, name: str, processes: Processes) -> UnrecordedReason:
    """Return a function that returns the outcome of a tick that waits in Redis for the ledger."""

    def unrecorded(tick: datetime) -> tuple[str, str] | None:
        if shared_redis.is_replaced(settings) or settings.redis_url is None or not processes.known:
            return None
        with suppress(RedisUnavailable, ValueError, LookupError, TypeError), translate_redis_errors():
            for each in TickStore(redis_client(settings.redis_url), settings.namespace).notes():
                if (each.kind, each.worker, each.tick) == ("row", name, tick):
                    row = json.loads(each.value)
                    return str(row["outcome"]), in_one_line(str(row["reason"]), _ERROR_WIDTH)
        return None

    return unrecorded


def _print(answer: Explanation, sweep: Sweep, now: datetime, zone: tzinfo) -> None:
    subject = "" if answer.tick is None else f", tick {format_in_zone(answer.tick, zone)}"
    say(f"{answer.worker}{subject}: {answer}", style="bold")
    for line in (answer.note, answer.meaning):
        if line is not None:
            say(line)
    if answer.newer_run is not None:
        say(_describe_newer_run(answer.newer_run, now))
    if answer.attempts:
        out.print()
        print_table(attempts_table(answer.attempts, sweep))
    if answer.now is not None:
        say(f"\n{answer.now.in_words}", style="bold")
        if checks := notable(answer.now.checks):
            print_checks(checks)


def _describe_newer_run(newer: RunRecord, now: datetime) -> str:
    ago = format_duration((now - newer.started_at).total_seconds())
    meaning = meaning_of(newer)
    started = f"since then: run {newer.label}, {ago} ago, trigger {newer.trigger}"
    return f"{started}: {outcome_in_words(newer)}; {meaning} (housekeeping runs {newer.label})"
