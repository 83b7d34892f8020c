"""``pause``, ``narrow``, ``resume``, ``stop``, ``acknowledge``, ``actions``: what operators change, and its log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import click

from housekeeping.cli.ask import parse_run, run_with, using_database_of
from housekeeping.cli.main import load_settings, load_workers
from housekeeping.cli.output import (
    complete_worker,
    json_option,
    notify,
    page_options,
    print_as_json,
    print_page,
    progress,
    read_times,
    say,
    time_options,
    wants_json,
)
from housekeeping.cli.status import read_status
from housekeeping.core.errors import DatabaseUnavailable, WrongArgument
from housekeeping.core.logs import in_one_line
from housekeeping.core.settings import LARGEST_BATCH
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.database.queries import database_now
from housekeeping.engine.restore import warning_of_restored_rows
from housekeeping.insight.wording import find_worker, format_time, parse_future_time
from housekeeping.ledger import history, operators, schema
from housekeeping.ledger.alerts import acknowledge as acknowledge_alerts
from housekeeping.ledger.alerts import describe_acknowledged
from housekeeping.ledger.operators import (
    Override,
    SwitchState,
    command_line_user,
    describe_switch,
    logged_actions,
    record_action,
)
from housekeeping.ledger.runs import PURGE
from housekeeping.ledger.schema import ActionRow, name_database
from housekeeping.sweeps.declaration import Sweep


@click.command()
@click.argument("alert")
@click.argument("worker", required=False, shell_complete=complete_worker)
@json_option()
def acknowledge(alert: str, worker: str | None) -> None:
    """Acknowledge the active alerts named ALERT, of all workers or of WORKER.

    The alerts stay active. "housekeeping status" shows them with the operator's name, the dashboard below the others.
    An acknowledgment holds until the alert ends. It does not apply to an alert that begins later.

    \b
    housekeeping acknowledge overdue
    housekeeping acknowledge backlog ci.stuck_builds.drop_canceling
    """
    settings, sweeps = load_workers()
    if worker is not None:
        find_worker(sweeps, worker)
    with progress("reading"):
        active = read_status(settings, sweeps, worker).alerts
    found = [each for each in active if each.name == alert and worker in (None, each.worker)]
    if not found:
        known = ", ".join(sorted({each.name for each in active})) or "none"
        raise WrongArgument(f"no alert {alert!r} is active{f' of {worker}' if worker else ''}; active alerts: {known}")
    user = command_line_user()
    with record_action("acknowledge", alert, user) as outcome:
        done = acknowledge_alerts(found, user)
        outcome.result = describe_acknowledged(alert, done)
    if not print_as_json({"alert": alert, "workers": sorted({each.worker for each in done}), "user": user}):
        say(outcome.result)


_WIDTH: Final = 60  # characters of a user or a target; --json has the whole of it


@click.command()
@click.option("--target", help="Only actions on this worker, lease, key, message or alert.")
@click.option("--user", help="Only actions of this user.")
@time_options("began")
@page_options()
def actions(target: str | None, user: str | None, before: str | None, limit: int, **times: str | None) -> None:
    """List what operators have changed, newest first: time, user, action, target and result.

    The log has every pause, narrow, resume, purge, restore, acknowledgment, release of a lease or key, and requeue or
    deletion of a dead letter, from the dashboard and from the command line. It has the runs that were sent, and those
    with --force or --confirm; "housekeeping runs" lists every run. USER is user@machine on the command line. Entries
    are kept for a year, in the database "main".
    """
    schema.use_database(load_settings())
    schema.require()
    with translate_postgres_errors():
        since, until = read_times(times, database_now())
    chosen = {"target": target, "user": user, "since": since, "until": until}
    print_page("actions", logged_actions, _COLUMNS, _cells, before, limit, **chosen)


_COLUMNS: Final = ("TIME (UTC)", "USER", "ACTION", "TARGET", "RESULT")


def _cells(action: ActionRow) -> list[str]:
    user, target = (in_one_line(text, _WIDTH) for text in (action.user, action.target))
    return [format_time(action.at), user, action.action, target, action.result_in_words]


#: Beginning of the name of a purge, which is no worker and is known to the ledger only.
_PURGE: Final = f"{PURGE}:"
_UNTIL_HELP = (
    "End of the override: 2h, 30min, 03:00 or 2026-11-20T03:00 (UTC). By default it lasts until `housekeeping resume`."
)
_JSON_HELP = "Print a JSON object with the workers and their overrides."

#: A change as text and as JSON values.
_Change = tuple[str, dict[str, Any]]


@click.command()
@click.argument("name", required=False, shell_complete=complete_worker)
@click.option("--all", "every", is_flag=True, help="All workers.")
@click.option("--reason", help="Reason, shown by status, list and the dashboard.")
@click.option("--until", help=_UNTIL_HELP)
@json_option(_JSON_HELP)
def pause(name: str | None, every: bool, reason: str | None, until: str | None) -> None:
    """Pause worker NAME.

    Takes effect immediately. An active run stops after its current batch and keeps its progress. Further ticks and
    messages are recorded as skipped. `housekeeping run NAME --force` runs a paused worker. "purge:TABLE" is the name of
    each purge of a table.

    With --all, a worker that is paused for at least as long keeps its pause and reason.

    \b
    housekeeping pause ci.stuck_jobs --reason "migration of ci_builds" --until 2h
    """
    _override(name, every, "paused", reason=reason, until=until)


@click.command()
@click.argument("name", required=False, shell_complete=complete_worker)
@click.option("--all", "every", is_flag=True, help="All workers.")
@click.option("--batch-size", type=click.IntRange(1, LARGEST_BATCH), help="Maximum number of records per batch.")
@click.option("--max-runtime", type=click.FloatRange(0, min_open=True), help="Maximum number of seconds per run.")
@click.option("--rows-per-s", type=click.FloatRange(0, min_open=True), help="Maximum number of rows per second.")
@click.option("--reason", help="Reason, shown by status, list and the dashboard.")
@click.option("--until", help=_UNTIL_HELP)
@json_option(_JSON_HELP)
def narrow(
    name: str | None,
    every: bool,
    batch_size: int | None,
    max_runtime: float | None,
    rows_per_s: float | None,
    reason: str | None,
    until: str | None,
) -> None:
    """Temporarily lower the limits of worker NAME. Values above the worker's own limits have no effect.

    Takes effect at the next batch, also in an active run. `housekeeping resume NAME` restores the limits.

    \b
    housekeeping narrow ci.stuck_jobs --batch-size 10 --until 03:00
    """
    if (batch_size, max_runtime, rows_per_s) == (None, None, None):
        raise WrongArgument("nothing to narrow; give --batch-size, --max-runtime or --rows-per-s, or several of them")
    _override(
        name,
        every,
        "narrow",
        reason=reason,
        until=until,
        batch_size=batch_size,
        max_runtime_s=max_runtime,
        rows_per_s=rows_per_s,
    )


@click.command()
@click.argument("name", required=False, shell_complete=complete_worker)
@click.option("--all", "every", is_flag=True, help="All workers.")
@json_option(_JSON_HELP)
def resume(name: str | None, every: bool) -> None:
    """Resume worker NAME with its own limits; it runs at its next tick.

    Ticks and messages during the pause were skipped, not kept. The next run finds all rows that are stale by then, also
    those that "housekeeping restore" has brought back: a warning says how many.
    """
    _, sweeps = load_workers()

    def end(worker: str) -> _Change:
        user = command_line_user()
        with record_action("resume", worker, user) as outcome:
            warning = None if worker.startswith(_PURGE) else warning_of_restored_rows(worker)
            ended = operators.resume(worker)
            is_purge = worker.startswith(_PURGE)
            now = "can be continued: housekeeping purge --resume" if is_purge else "resumes at its next tick"
            outcome.result = f"{worker} {now if ended else 'was neither paused nor narrowed'}"
        if warning is not None:
            notify(f"warning: {worker}: {warning}")
        return outcome.result, {"worker": worker, "changed": ended, "override": None, "warning": warning}

    _for_each(_workers(sweeps, name, every), end)


@click.command()
@click.argument("run_id", metavar="RUN")
@json_option("Print a JSON object that says whether the run was asked to stop.")
def stop(run_id: str) -> None:
    """Stop the running run RUN after its current batch. Its worker stays active.

    The run ends as "partial" with the reason "stopped", and "housekeeping runs RUN" says who stopped it. Committed
    batches stay. A run between two batches notices within 20 seconds. The run's message or tick counts as done. The
    next tick starts a new run, which resumes where this one stopped: to prevent that, "housekeeping pause NAME".

    Also stops a purge, a restore and a run of another process. "housekeeping runs --outcome running" lists the runs.

    \b
    housekeeping stop 4711
    """
    load_workers()
    label, user = parse_run(run_id), command_line_user()
    with using_database_of(label), translate_postgres_errors():
        record = run_with(label)
        with record_action("stop", record.label, user) as outcome:
            changed, outcome.result = history.stop(record, user)
    stopped = {"run_id": record.run_id, "worker": record.worker, "changed": changed, "result": outcome.result}
    if not print_as_json(name_database(stopped, record.database)):
        say(outcome.result)


def _override(
    name: str | None,
    every: bool,
    state: SwitchState,
    *,
    reason: str | None,
    until: str | None,
    **limits: Any,
) -> None:
    _, sweeps = load_workers()

    def set_override(worker: str) -> _Change:
        ends = None if until is None else parse_future_time(until, database_now())
        user = command_line_user()
        override = Override(worker, state, reason, ends, said_by=user, **limits)
        with record_action("pause" if state == "paused" else "narrow", worker, user) as outcome:
            active = operators.switch(override, keep_pause=every)
            outcome.result = describe_switch(active, override)
        now, changed = operators.override_of(worker), active is override
        return outcome.result, {"worker": worker, "changed": changed, "override": now, "warning": None}

    _for_each(_workers(sweeps, name, every), set_override)


def _for_each(workers: Iterable[tuple[str, str]], change: Callable[[str], _Change]) -> None:
    """Make a change for each worker in its database, also if the database of another worker does not answer."""
    unavailable: list[DatabaseUnavailable] = []
    changes: list[dict[str, Any]] = []
    for worker, database_name in workers:
        try:
            with database.using(database_name), translate_postgres_errors():
                text, values = change(worker)
        except DatabaseUnavailable as error:
            unavailable.append(error)
            continue
        changes.append(name_database(values, database_name))
        if not wants_json():
            say(text)
    print_as_json({"workers": changes})
    if unavailable:
        raise unavailable[0]


def _workers(sweeps: dict[str, Sweep], name: str | None, every: bool) -> list[tuple[str, str]]:
    """Return the names of the chosen workers, each with its database; a purge may be in any database."""
    if every == (name is not None):
        raise WrongArgument("name one worker, or give --all")
    if name is not None and name.startswith(_PURGE):
        return [(name, each) for each in database.by_name()]
    chosen = sweeps.values() if name is None else [find_worker(sweeps, name)]
    return [(each.name, each.database) for each in chosen]
