"""Command ``python -m benchmarks``."""

from __future__ import annotations

from typing import Final

import click

from benchmarks import foreground, report
from benchmarks.catalogue import COMPARISONS, TURNS, USUAL
from benchmarks.rounds import compare
from benchmarks.servers import Stage, extend, started

_NAMES: Final = [*TURNS]


@click.command()
@click.option("--only", multiple=True, type=click.Choice(_NAMES), help="A comparison; by default those with targets.")
@click.option("--contestant", multiple=True, help="A contestant; all unless given.")
@click.option("--rows", type=int, help="Stale records; else each comparison's own number.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Turns of each contestant.")
@click.option("--fsync", type=click.Choice(["on", "off"]), default="on", show_default=True, help="As in PostgreSQL.")
@click.option("--write-page", is_flag=True, help="Write the figures of all comparisons into the documentation.")
def main(
    only: tuple[str, ...], contestant: tuple[str, ...], rows: int | None, rounds: int, fsync: str, write_page: bool
) -> None:
    """Compare the workers with hand-written programs for the same work, on temporary servers."""
    names = only or (_NAMES if write_page else USUAL)
    with started(durable=fsync == "on") as servers:
        stage = Stage(servers)
        with stage.connected() as admin:
            extend(admin, "pg_stat_statements")
        conditions = report.machine(servers)
        outcomes = []
        for name in names:
            if name in COMPARISONS:
                click.echo(f"{name} ...", err=True)
                outcomes.append(compare(stage, COMPARISONS[name], rows, rounds, list(contestant)))
        latencies = foreground.measure(stage, min(rounds, 3)) if foreground.NAME in names else {}
    report.show(conditions, outcomes, latencies)
    if write_page:
        report.write_page(conditions, outcomes, latencies)


if __name__ == "__main__":
    main()
