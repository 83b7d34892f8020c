"""``housekeeping list``: list the workers with schedule, next tick, limits and state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import click
from peewee import PeeweeException

from housekeeping.cli.context import load_settings
from housekeeping.cli.formatting import progress, say
from housekeeping.cli.tables import print_table, table
from housekeeping.core.wording import format_duration
from housekeeping.database.connection import database
from housekeeping.database.errors import is_unavailable
from housekeeping.database.time_limit import LOCK_TIME, STATEMENT_TIME, time_limit
from housekeeping.presentation.formatting import format_time
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.family_setup import by_problem
from housekeeping.sweeps.insight.state import next_tick, state_of
from housekeeping.sweeps.ledger.history import name_database
from housekeeping.sweeps.ledger.overrides import Override, overrides
from housekeeping.sweeps.ledger.schema import use_database
from housekeeping.sweeps.registry import by_database
from housekeeping.sweeps.setup_problem import SetupProblem
from housekeeping.workers import configured_sweeps


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_workers(as_json: bool) -> None:
    """List the workers: schedule, next tick, limits, state.

    Works without a database; the state is then "unknown". Schedules are in HOUSEKEEPING_TIMEZONE (UTC by default),
    times are shown in UTC.
    """
    settings = load_settings()
    sweeps = configured_sweeps(settings)
    current_overrides: dict[str, Override] = {}
    problems: dict[str, SetupProblem] = {}
    known: set[str] = set()
    if settings.database_url is not None:
        use_database(settings)
        for database_name, workers in by_database(sweeps.values()).items():
            with progress("reading overrides"), suppress(PeeweeException), database.using(database_name):
                examined = _add_problems(workers, problems)
                with time_limit(STATEMENT_TIME, LOCK_TIME):
                    current_overrides |= overrides()
                known |= examined
    now = datetime.now(UTC)
    rows: list[dict[str, Any]] = []
    for name, sweep in sweeps.items():
        problem = problems.get(name)
        override = current_overrides.get(name)
        state = state_of(sweep, override, problem)
        rows.append(
            name_database(
                {
                    "worker": name,
                    "schedule": sweep.schedule,
                    "next_tick": None if problem else next_tick(sweep, now, settings.timezone, override),
                    "batch_size": sweep.batch_size,
                    "max_runtime_s": sweep.max_runtime.total_seconds(),
                    "max_rows_per_s": sweep.max_rows_per_s,
                    "rest": sweep.rest,
                    "state": "unknown" if name not in known and state == "on" else state,
                    "not_set_up": problem.text if problem else None,
                },
                sweep.database,
            )
        )
    if as_json:
        click.echo(json.dumps(rows, default=lambda value: value.isoformat()))
        return
    named = ["DATABASE"] if settings.databases else []
    paced = ["PACE"] if any(_pace(sweep) for sweep in sweeps.values()) else []
    listed = table("WORKER", *named, "SCHEDULE", "NEXT TICK (UTC)", ">BATCH", ">MAX RUNTIME", *paced, "STATE")
    for row, sweep in zip(rows, sweeps.values(), strict=True):
        if row["not_set_up"]:
            continue
        listed.add_row(
            row["worker"],
            *([sweep.database] if named else []),
            row["schedule"] or "-",
            format_time(row["next_tick"], "%Y-%m-%d %H:%M"),
            str(row["batch_size"]),
            format_duration(sweep.max_runtime.total_seconds()),
            *([_pace(sweep) or "-"] if paced else []),
            row["state"],
        )
    print_table(listed)
    print_not_set_up(problems)


def _add_problems(workers: list[Sweep], problems: dict[str, SetupProblem]) -> set[str]:
    """Add why workers are not set up. Return the names of those that could be examined; one that fails hides no other.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    examined = set()
    for sweep in workers:
        try:
            with time_limit(STATEMENT_TIME, LOCK_TIME):
                problem = sweep.lacks()
        except PeeweeException as error:
            if is_unavailable(error):
                raise
            continue
        examined.add(sweep.name)
        if problem is not None:
            problems[sweep.name] = problem
    return examined


def _pace(sweep: Sweep) -> str:
    rate = [] if sweep.max_rows_per_s is None else [f"{sweep.max_rows_per_s:,g} rows/s"]
    return ", ".join([*rate, *([f"rest {sweep.rest:g}"] if sweep.rest else [])])


def print_not_set_up(problems: Mapping[str, SetupProblem]) -> None:
    """Print a line for each family that is not set up, with its workers and the reason."""
    for problem, workers in by_problem(problems).items():
        say(f"not set up: {problem.family} ({', '.join(workers)}): {problem.text}", style="dim")
