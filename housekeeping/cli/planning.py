"""``housekeeping plan``"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import click

from housekeeping.cli.composition import argument_of, chosen, reading_tables, workers_on_database
from housekeeping.cli.tables import length, progress, show, table
from housekeeping.sweeps.plan import Plan
from housekeeping.sweeps.plan import plan as make_plan


@click.command(short_help="Show what a run would do now; changes nothing.")
@click.argument("name")
@click.argument("argument", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def plan(name: str, argument: str | None, as_json: bool) -> None:
    """Show what a run of worker NAME would do now. Changes nothing, leaves no row, takes no lease.

    The numbers come from the very query of the run, in one read-only snapshot. Works before
    "housekeeping init", too. The names are those of "housekeeping list"; a few workers take an ARGUMENT.
    """
    _, sweeps = workers_on_database(with_schema=False)
    sweep = chosen(sweeps, name)
    about = argument_of(sweep, argument)
    with reading_tables(sweep), progress(f"{name}: counting"):
        planned = make_plan(sweep, about)
    if as_json:
        click.echo(json.dumps(planned.as_json()))
    else:
        _show(planned)


def _show(planned: Plan) -> None:
    facts = table(planned.worker, ">WOULD SETTLE", ">IN BATCHES", ">OLDEST", ">NEWEST")
    for each, batches in planned.passes:
        oldest, newest = (_age(value, planned.now) for value in (each.oldest, each.newest))
        facts.add_row(each.name, str(each.stale), f"{batches:,}", oldest, newest)
    show(facts)
    for each, _ in planned.passes:
        if each.samples:
            samples = table(*each.samples[0], title=f"\nfirst in order of {each.name}")
            for row in each.samples:
                samples.add_row(*(str(value) for value in row.values()))
            show(samples)


def _age(value: Any, now: datetime) -> str:
    if not isinstance(value, datetime):
        return "-" if value is None else str(value)
    return f"{length((now - value).total_seconds())} ago"
