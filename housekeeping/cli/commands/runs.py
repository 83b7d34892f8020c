"""``housekeeping runs``: list past runs, or show one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, Final, get_args

import click
from rich.table import Table

from housekeeping.cli.completion import complete_worker
from housekeeping.cli.context import load_workers
from housekeeping.cli.formatting import fit_name, notify, out, progress, say
from housekeeping.cli.tables import print_table, table
from housekeeping.core.errors import WrongArgument
from housekeeping.core.sanitize import in_one_line
from housekeeping.core.settings import Settings
from housekeeping.core.wording import counted, format_duration
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.presentation.formatting import format_counts, format_run_counts, format_time, format_value
from housekeeping.presentation.time_parsing import parse_since
from housekeeping.presentation.workers import find_worker
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.counts import in_order
from housekeeping.sweeps.insight.explain import Explanation, explain_run
from housekeeping.sweeps.insight.status import outcome_in_words
from housekeeping.sweeps.ledger import history
from housekeeping.sweeps.ledger.history import RunFailures, RunRecord, failures_of, parse_run_label
from housekeeping.sweeps.ledger.run_list import RUNNING, Position, RunFilter, RunPage, read_page
from housekeeping.sweeps.ledger.runs import Outcome, Trigger

_REASON_WIDTH: Final = 60  # characters in the list; the details and --json have all of it
_ERROR_WIDTH: Final = 1_000


@click.command()
@click.argument("which", metavar="[NAME|ID]", required=False, shell_complete=complete_worker)
@click.option(
    "--since", metavar="TIME", help="Only runs that started since this time: 2h, 3d, 03:00 or 2026-11-20T03:00 (UTC)."
)
@click.option("--until", metavar="TIME", help="Only runs that started before this time.")
@click.option("--outcome", type=click.Choice([*get_args(Outcome), RUNNING]), help="Only runs with this outcome.")
@click.option("--trigger", type=click.Choice(get_args(Trigger)), help="Only runs with this trigger.")
@click.option("--database", "only", metavar="NAME", help="Only runs of this database.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Maximum number of runs.")
@click.option("--before", metavar="ID", help="Continue the list after this run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def runs(
    which: str | None,
    since: str | None,
    until: str | None,
    outcome: str | None,
    trigger: str | None,
    only: str | None,
    limit: int,
    before: str | None,
    as_json: bool,
) -> None:
    """List the runs of all workers or of worker NAME, newest first, or show the run with this ID.

    A run is one attempt of any trigger: schedule, enqueue, cli or parent. AGE is the time since its start. The list
    includes skipped and missed ticks. "lost?" is a run without a recent heartbeat; the next run takes over from it.

    A single run is shown with its process, the records that it rejected and, if an error ended it, the traceback.

    With several databases, the ID of a run is preceded by the name of its database, as in ci:4711, unless that is main.

    \b
    housekeeping runs user_status_cleanup.batch --since 2h
    housekeeping runs --outcome failed
    housekeeping runs --trigger cli --since 3d --until 2d
    housekeeping runs 4711
    """
    settings, sweeps = load_workers()
    filtered = any((since, until, outcome, trigger, only, before))
    with progress("reading the ledger"):
        if which is not None and (run := parse_run_label(which)) is not None:
            if filtered:
                raise WrongArgument(f"run {which} is a single run; the options --since to --before filter lists")
            with using_database_of(run), translate_postgres_errors():
                _print_run(run_with(run), failures_of(run[1]), sweeps, settings, database_now(), as_json)
            return

        def wanted(now: datetime) -> RunFilter:
            after, end = (None if text is None else parse_since(text, now) for text in (since, until))
            return RunFilter(which, outcome, trigger, after, end)

        names = _names(only, sweeps.get(which or ""))
        page = _read(names, wanted, limit, None if before is None else _position(before))
        # The ledger also has runs of workers that are no longer declared.
        if which is not None and not page.runs and not _read(names, lambda now: RunFilter(which), 1).runs:
            find_worker(sweeps, which)
    if as_json:
        click.echo(json.dumps({"runs": [each.as_json() for each in page.runs], "more": page.more}))
    elif not page.runs:
        say("no runs match" if filtered else "no runs yet")
    else:
        _print_list(page.runs, sweeps, page.now)
        if page.more:
            say(f"\nolder runs: add --before {page.runs[-1].label}; one run: housekeeping runs ID")


def _names(only: str | None, sweep: Sweep | None) -> list[str]:
    """Return the databases to read."""
    if only is not None and only not in database.by_name():
        raise _no_database(only)
    return [only] if only is not None else list(database.by_name()) if sweep is None else [sweep.database]


def _position(label: str) -> Position:
    run = parse_run_label(label)
    if run is None:
        raise WrongArgument(f"--before is {label!r}; it should be the ID of a run")
    with using_database_of(run), translate_postgres_errors():
        return Position.of(run_with(run))


def _read(
    names: list[str], wanted: Callable[[datetime], RunFilter], limit: int, before: Position | None = None
) -> RunPage:
    """Return a page of runs. A database that does not answer gets a warning on stderr, unless all fail."""
    page = read_page(names, wanted, limit=limit, before=before)
    if len(page.unavailable) == len(names):
        raise page.unavailable[-1]
    for error in page.unavailable:
        notify(f"warning: {error}; its runs are not shown")
    return page


def using_database_of(run: tuple[str, int]) -> AbstractContextManager[None]:
    """Make the database of a run the current one.

    Raises:
      WrongArgument: There is no such database.
    """
    if run[0] not in database.by_name():
        raise _no_database(run[0])
    return database.using(run[0])


def _no_database(name: str) -> WrongArgument:
    return WrongArgument(f"there is no database {name!r}; the databases are {', '.join(database.by_name())}")


def run_with(run: tuple[str, int]) -> RunRecord:
    """Return the run with this id; its database must be the current one.

    Raises:
      WrongArgument: No run has the id.
    """
    name, run_id = run
    record = history.find(run_id) if run_id < 2**63 else None
    if record is None:
        place = f" in the database {name!r}" if database.several() else ""
        raise WrongArgument(f"there is no run {run_id}{place}; runs older than 30 days are removed: housekeeping runs")
    return record


def _print_list(found: Sequence[RunRecord], sweeps: Mapping[str, Sweep], now: datetime) -> None:
    listed = table(">ID", "WORKER", ">AGE", ">DURATION", "OUTCOME AND COUNTS")
    for each in found:
        main_counts = _main_counts(each, sweeps)
        listed.add_row(
            each.label,
            fit_name(each.worker),
            format_duration((now - each.started_at).total_seconds()),
            format_duration(each.duration_s),
            f"{outcome_of(each)}{f', {main_counts}' if main_counts else ''}",
        )
    print_table(listed)


def outcome_of(record: RunRecord) -> str:
    """Return the run's outcome and reason, or its state if it has not ended."""
    if record.outcome is None:
        return outcome_in_words(None, record.silent_s)
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
    sweeps: Mapping[str, Sweep],
    settings: Settings,
    now: datetime,
    as_json: bool,
) -> None:
    sweep = sweeps.get(record.worker)
    answer = explain_run(record, sweep, now, settings.timezone)
    if as_json:
        explained = {"origin": answer.origin, "meaning": answer.meaning, "next_step": answer.next_step}
        attempts = [each.run_id for each in answer.attempts]
        click.echo(json.dumps({**record.as_json(), **failures.as_json(), **explained, "attempts": attempts}))
        return
    say(f"run {record.label} of {record.worker}: {outcome_of(record)}", style="bold")
    print_explanation(answer)
    out.print()
    print_table(_details(record, sweep, now))
    if len(answer.attempts) > 1:
        out.print()
        print_table(attempts_table(answer, sweep))
    for each in failures.rejected:
        say(f"\nrejected: {counted(each.rows, 'record')}: {in_one_line(each.error, _ERROR_WIDTH)}")
        for sample in each.records:
            say(f"  {in_one_line(json.dumps(sample, ensure_ascii=False), _ERROR_WIDTH)}")
    if failures.traceback:
        out.print(f"\n{failures.traceback.rstrip()}", soft_wrap=True)


def print_explanation(answer: Explanation) -> None:
    """Print what started a run, how it ended and what follows."""
    for label, text in (("started", answer.origin), ("result", answer.meaning), ("next", answer.next_step)):
        if text:
            say(f"{label}: {text}")


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


def attempts_table(answer: Explanation, sweep: Sweep | None) -> Table:
    """Return the attempts of a tick or a message, oldest first."""
    attempts = table("RUN", "OUTCOME", "STARTED (UTC)", ">DURATION", "COUNTS")
    for each in answer.attempts:
        duration_s = None if each.finished_at is None else (each.finished_at - each.started_at).total_seconds()
        reason = f": {each.reason}" if each.reason and not each.error else ""
        attempts.add_row(
            each.label,
            f"{each}{reason}",
            format_time(each.started_at),
            format_duration(duration_s),
            format_run_counts(each.outcome, each.counts if sweep is None else in_order(sweep, each.counts)),
        )
    return attempts
