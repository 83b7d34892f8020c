"""``housekeeping plan``: show what a run would do now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import click
from rich.text import Text

from housekeeping.cli.completion import complete_worker
from housekeeping.cli.context import load_workers
from housekeeping.cli.formatting import out, progress, say
from housekeeping.cli.tables import print_table, table
from housekeeping.core.sanitize import in_one_line, printable
from housekeeping.core.wording import format_duration
from housekeeping.presentation.formatting import format_age
from housekeeping.presentation.workers import find_worker, parse_argument, translate_table_errors
from housekeeping.sweeps.insight.forecast import Check, Effect
from housekeeping.sweeps.insight.plan import Plan
from housekeeping.sweeps.insight.plan import plan as make_plan
from housekeeping.sweeps.stages.stage import Backlog

_SAMPLE_WIDTH: Final = 100  # characters of a value; --json has all of it
_STYLES: Final[dict[Effect, str]] = {
    "none": "dim",
    "alerts": "yellow",
    "slows": "yellow",
    "ends_early": "yellow",
    "skips": "yellow",
    "fails": "bold red",
    "unknown": "yellow",
}


@click.command()
@click.argument("name", shell_complete=complete_worker)
@click.argument("argument", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(name: str, argument: str | None, as_json: bool) -> None:
    """Show what a run of worker NAME would do now. Changes nothing, records no run, acquires no lease.

    The counts come from the run's own query, in one read-only snapshot. DURATION is an estimate from the worker's last
    runs, summed over all runs that the work needs; it is unknown without a history. HELD is the number of stale rows
    that stay because the worker's hold applies to them; only workers with a hold have the column.

    Below, the plan shows what the checks before the first batch would do to the run: a pause or lower limits
    (override), a lease that another run holds, the clocks, a first run without a confirmation, the breaker, the
    throttle, and when the schedule starts the next run.

    Works before "housekeeping init", too. "housekeeping list" shows the names; a few workers take an ARGUMENT.
    """
    settings, sweeps = load_workers(with_schema=False)
    sweep = find_worker(sweeps, name)
    run_argument = parse_argument(sweep, argument)
    with translate_table_errors(sweep), progress(f"{name}: counting"):
        planned = make_plan(sweep, run_argument, zone=settings.timezone)
    if as_json:
        click.echo(json.dumps(planned.as_json()))
        return
    print_plan(planned)
    out.print()
    out.print(planned.forecast.in_words, style="bold")
    print_checks(planned.forecast.checks)


def print_plan(planned: Plan) -> None:
    """Print the stages of a plan with their first rows, its warnings and its foreign keys."""
    holds = [">HELD"] if planned.held is not None else []
    stages = table(planned.worker, ">STALE ROWS", *holds, ">BATCHES", ">DURATION", ">OLDEST", ">NEWEST")
    for each, batches in planned.stages:
        oldest, newest = (_age(value, planned.now) for value in (each.oldest, each.newest))
        held = ["-" if each.held is None else str(each.held)] if holds else []
        duration = _duration(planned, each.stale)
        stages.add_row(each.name, str(each.stale), *held, f"{batches:,}", duration, oldest, newest)
    print_table(stages)
    for each, _ in planned.stages:
        if each.samples:
            of = "" if each.name in ("rows", "partitions") else f" of {each.name}"
            # As a title of the table it would be wrapped to the table's width.
            say(Text.assemble("\n", (f"{each.title}{of}", "bold")))
            samples = table(*each.samples[0])
            for row in each.samples:
                samples.add_row(
                    *(in_one_line("-" if value is None else str(value), _SAMPLE_WIDTH) for value in row.values())
                )
            print_table(samples)
    for warning in planned.warnings:
        say(printable(f"\nwarning: {warning}"))
    for reference in planned.references:
        say(printable(f"\n{reference.level}: {reference.text}"))
        if reference.way_out is not None:
            say(printable(f"do: {reference.way_out}"))


def print_checks(checks: Sequence[Check]) -> None:
    """Print what each check would do to the run."""
    # Lines instead of a table, because their texts contain commands to type.
    names = max(len(each.name) for each in checks) + 2
    effects = max(len(each.effect) for each in checks) + 2
    for each in checks:
        effect = f"{each.effect.replace('_', ' '):<{effects}}", _STYLES[each.effect]
        say(Text.assemble(f"{each.name:<{names}}", effect, printable(each.text)), indent=names + effects)


def _duration(planned: Plan, stale: Backlog) -> str:
    expected_s = planned.expected_s(stale)
    if expected_s is None:
        return "unknown"
    return f"{'' if stale.exact else 'over '}{format_duration(expected_s)}" if stale.rows else "-"


def _age(value: Any, now: datetime) -> str:
    if not isinstance(value, datetime):
        return "-" if value is None else in_one_line(str(value), _SAMPLE_WIDTH)
    return format_age(value, now)
