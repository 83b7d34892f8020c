"""``housekeeping pause``, ``narrow`` and ``resume``: set and remove overrides of workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import click

from housekeeping.cli.completion import complete_worker
from housekeeping.cli.context import load_workers
from housekeeping.cli.formatting import say
from housekeeping.core.errors import DatabaseUnavailable, WrongArgument
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.presentation.formatting import describe_override
from housekeeping.presentation.time_parsing import parse_future_time
from housekeeping.presentation.workers import find_worker
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import overrides
from housekeeping.sweeps.ledger.action_log import command_line_user, record_action
from housekeeping.sweeps.ledger.history import name_database
from housekeeping.sweeps.ledger.overrides import Override, SwitchState
from housekeeping.sweeps.ledger.runs import PURGE

#: Beginning of the name of a purge, which is no worker and is known to the ledger only.
_PURGE: Final = f"{PURGE}:"
_UNTIL_HELP = (
    "End of the override: 2h, 30min, 03:00 or 2026-11-20T03:00 (UTC). By default it lasts until `housekeeping resume`."
)
_JSON_HELP = "Print a JSON list of the workers and their state."

#: A change as text and as JSON values.
_Change = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Purge:
    """A purge by its name, in one of the databases."""

    name: str
    database: str


@click.command()
@click.argument("name", required=False, shell_complete=complete_worker)
@click.option("--all", "every", is_flag=True, help="All workers.")
@click.option("--reason", help="Reason, shown by status, list and the dashboard.")
@click.option("--until", help=_UNTIL_HELP)
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def pause(name: str | None, every: bool, reason: str | None, until: str | None, as_json: bool) -> None:
    """Pause worker NAME.

    Takes effect immediately. An active run stops after its current batch and keeps its progress. Further ticks and
    messages are recorded as skipped. `housekeeping run NAME --force` runs a paused worker. "purge:TABLE" is the name of
    each purge of a table.

    \b
    housekeeping pause ci.stuck_jobs --reason "migration of ci_builds" --until 2h
    """
    _override(name, every, "paused", as_json, reason=reason, until=until)


@click.command()
@click.argument("name", required=False, shell_complete=complete_worker)
@click.option("--all", "every", is_flag=True, help="All workers.")
@click.option("--batch-size", type=click.IntRange(1, 10_000), help="Maximum number of records per batch.")
@click.option("--max-runtime", type=click.FloatRange(0, min_open=True), help="Maximum number of seconds per run.")
@click.option("--reason", help="Reason, shown by status, list and the dashboard.")
@click.option("--until", help=_UNTIL_HELP)
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def narrow(
    name: str | None,
    every: bool,
    batch_size: int | None,
    max_runtime: float | None,
    reason: str | None,
    until: str | None,
    as_json: bool,
) -> None:
    """Temporarily lower the limits of worker NAME. Values above the worker's own limits have no effect.

    Takes effect at the next batch, also in an active run. `housekeeping resume NAME` restores the limits.

    \b
    housekeeping narrow ci.stuck_jobs --batch-size 10 --until 03:00
    """
    if batch_size is None and max_runtime is None:
        raise WrongArgument("nothing to narrow; give --batch-size, --max-runtime, or both")
    _override(
        name,
        every,
        "narrow",
        as_json,
        reason=reason,
        until=until,
        batch_size=batch_size,
        max_runtime=None if max_runtime is None else timedelta(seconds=max_runtime),
    )


@click.command()
@click.argument("name", required=False, shell_complete=complete_worker)
@click.option("--all", "every", is_flag=True, help="All workers.")
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def resume(name: str | None, every: bool, as_json: bool) -> None:
    """Resume worker NAME with its own limits; it runs at its next tick.

    Ticks and messages during the pause were skipped, not kept. The next run finds all rows that are stale by then.
    """
    _, sweeps = load_workers()

    def end(sweep: Sweep | _Purge) -> _Change:
        user = command_line_user()
        with record_action("resume", sweep.name, user) as outcome:
            ended = overrides.resume(sweep.name, user)
            now = (
                "can be continued: housekeeping purge --resume"
                if sweep.name.startswith(_PURGE)
                else "resumes at its next tick"
            )
            outcome.result = f"{sweep.name} {now if ended else 'was neither paused nor narrowed'}"
        return outcome.result, {"worker": sweep.name, "state": "on", "changed": ended}

    _for_each(_workers(sweeps, name, every), end, as_json)


def _override(
    name: str | None,
    every: bool,
    state: SwitchState,
    as_json: bool,
    *,
    reason: str | None,
    until: str | None,
    batch_size: int | None = None,
    max_runtime: timedelta | None = None,
) -> None:
    _, sweeps = load_workers()

    def set_override(sweep: Sweep | _Purge) -> _Change:
        ends = None if until is None else parse_future_time(until, database_now())
        user = command_line_user()
        override = Override(
            sweep.name, state, reason, ends, said_by=user, batch_size=batch_size, max_runtime=max_runtime
        )
        with record_action("pause" if state == "paused" else "narrow", sweep.name, user) as outcome:
            overrides.switch(override)
            outcome.result = describe_override(override)
        return outcome.result, {"worker": sweep.name, **override.as_json(), "changed": True}

    _for_each(_workers(sweeps, name, every), set_override, as_json)


def _for_each(sweeps: Iterable[Sweep | _Purge], change: Callable[[Sweep | _Purge], _Change], as_json: bool) -> None:
    """Make a change for each worker in its database, also if the database of another worker does not answer."""
    unavailable: list[DatabaseUnavailable] = []
    changes: list[dict[str, Any]] = []
    for sweep in sweeps:
        try:
            with database.using(sweep.database), translate_postgres_errors():
                text, values = change(sweep)
        except DatabaseUnavailable as error:
            unavailable.append(error)
            continue
        changes.append(name_database(values, sweep.database))
        if not as_json:
            say(text)
    if as_json:
        click.echo(json.dumps(changes))
    if unavailable:
        raise unavailable[0]


def _workers(sweeps: dict[str, Sweep], name: str | None, every: bool) -> Sequence[Sweep | _Purge]:
    if every == (name is not None):
        raise WrongArgument("name one worker, or give --all")
    if name is not None and name.startswith(_PURGE):
        return [_Purge(name, each) for each in database.by_name()]
    return list(sweeps.values()) if name is None else [find_worker(sweeps, name)]
