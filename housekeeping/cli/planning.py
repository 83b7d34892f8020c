"""``housekeeping plan``"""

from __future__ import annotations

import json

import click

from housekeeping.cli.composition import chosen, workers_on_database
from housekeeping.cli.tables import out, table
from housekeeping.sweeps.plan import plan as make_plan


@click.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def plan(name: str, as_json: bool) -> None:
    """Show what a run of worker NAME would do now. Changes nothing, leaves no row, takes no lease.

    The numbers come from the very query of the run, in one read-only snapshot.
    """
    _, sweeps = workers_on_database()
    planned = make_plan(chosen(sweeps, name))
    if as_json:
        click.echo(json.dumps(planned.as_json()))
        return
    facts = table("", "")
    facts.show_header = False
    facts.add_row("worker", planned.worker)
    facts.add_row("would settle", f"{planned.stale} rows of {chosen(sweeps, name).model._meta.table_name}")
    facts.add_row("in batches", f"{planned.batches:,}")
    facts.add_row("oldest", str(planned.as_json()["oldest"] or "-"))
    facts.add_row("newest", str(planned.as_json()["newest"] or "-"))
    out.print(facts)
    if planned.samples:
        samples = table(*planned.samples[0], title="\nfirst in order")
        for row in planned.samples:
            samples.add_row(*(str(value) for value in row.values()))
        out.print(samples)
