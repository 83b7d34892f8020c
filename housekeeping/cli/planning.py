"""``housekeeping plan``"""

from __future__ import annotations

import json

import click

from housekeeping.cli.composition import argument_of, chosen, workers_on_database
from housekeeping.cli.tables import out, table
from housekeeping.sweeps.plan import plan as make_plan


@click.command()
@click.argument("name")
@click.argument("argument", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def plan(name: str, argument: str | None, as_json: bool) -> None:
    """Show what a run of worker NAME would do now. Changes nothing, leaves no row, takes no lease.

    The numbers come from the very query of the run, in one read-only snapshot.
    """
    _, sweeps = workers_on_database()
    sweep = chosen(sweeps, name)
    planned = make_plan(sweep, argument_of(sweep, argument))
    if as_json:
        click.echo(json.dumps(planned.as_json()))
        return
    facts = table("", "")
    facts.show_header = False
    facts.add_row("worker", planned.worker)
    for each, batches in planned.passes:
        facts.add_row(f"would settle in {each.name}", f"{each.stale}, in {batches:,} batches")
        if each.samples:
            facts.add_row("  from, to", f"{each.oldest}, {each.newest}")
    out.print(facts)
    for each, _ in planned.passes:
        if each.samples:
            samples = table(*each.samples[0], title=f"\nfirst in order of {each.name}")
            for row in each.samples:
                samples.add_row(*(str(value) for value in row.values()))
            out.print(samples)
