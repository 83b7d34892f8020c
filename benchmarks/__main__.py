"""Command ``python -m benchmarks``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import foreground, growth, report
from benchmarks.catalogue import COMPARISONS
from benchmarks.rounds import Outcome, compare
from benchmarks.servers import started
from benchmarks.stage import Stage, extend

_NAMES: Final = [*COMPARISONS, foreground.NAME]


@click.command()
@click.option("--only", multiple=True, type=click.Choice(_NAMES), help="A comparison; all unless given.")
@click.option("--contestant", multiple=True, help="A contestant; all unless given.")
@click.option("--rows", type=int, help="Stale records; else each comparison's own number.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Turns of each contestant.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every turn to this file, too.")
@click.option("--fsync", type=click.Choice(["on", "off"]), default="on", show_default=True, help="As in PostgreSQL.")
def main(
    only: tuple[str, ...],
    contestant: tuple[str, ...],
    rows: int | None,
    rounds: int,
    json_file: Path | None,
    fsync: str,
) -> None:
    """Compare the workers with hand-written programs for the same work, on temporary servers."""
    with started(durable=fsync == "on") as servers:
        stage = Stage(servers)
        with stage.connected() as admin:
            extend(admin, "pg_stat_statements")
        head = report.machine(servers)
        report.show_machine(head)
        written: list[dict[str, Any]] = []
        outcomes: list[Outcome] = []
        for name in only or _NAMES:
            if name == foreground.NAME:
                latencies = foreground.measure(stage, min(rounds, 3))
                report.show_foreground(latencies)
                written.append({"name": name, "latencies": latencies})
                continue
            comparison = COMPARISONS[name]
            stale = rows or comparison.rows
            among = stale * comparison.among // comparison.rows
            outcome = compare(stage, comparison, stale, among, rounds, list(contestant))
            outcomes.append(outcome)
            report.show(outcome, stale, among)
            written.append(report.as_json(outcome, stale, among))
        verdicts = growth.verdicts(outcomes)
        report.say(verdicts)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": head, "comparisons": written, "verdicts": verdicts}, indent=1))


if __name__ == "__main__":
    main()
