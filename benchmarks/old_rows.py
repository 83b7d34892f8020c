"""Command ``python -m benchmarks.old_rows``: delete, archive and drop old rows, also with pt-archiver."""

from __future__ import annotations

import click

from benchmarks import mariadb, pt_archiver, report, retention, visits
from benchmarks.rounds import Outcome, compare
from benchmarks.servers import Stage, extend, started


@click.command()
@click.option("--rows", type=click.IntRange(100), default=visits.ROWS, show_default=True, help="Old rows.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Turns of each contestant.")
@click.option("--write-page", is_flag=True, help="Write the figures into the documentation.")
def main(rows: int, rounds: int, write_page: bool) -> None:
    """Compare deleting, archiving and dropping old rows with plain SQL, and pt-archiver with plain SQL on MariaDB."""
    with started(durable=True) as servers:
        stage = Stage(servers)
        with stage.connected() as admin:
            extend(admin, "pg_stat_statements")
        conditions = report.machine(servers)
        outcomes = [compare(stage, each, rows, rounds, []) for each in retention.COMPARISONS]
    conditions["rows"] = f"{rows:,} old among {2 * rows:,}, batches of {visits.BATCH:,}, {rounds} rounds"
    missing = mariadb.missing_programs()
    if missing is not None:
        click.echo(f"pt-archiver is left out: {missing}", err=True)
    else:
        outcomes += _on_mariadb(conditions, rows, rounds)
    report.show(conditions, outcomes, {})
    if write_page:
        report.write_page(conditions, outcomes, {}, part="old rows")


def _on_mariadb(conditions: dict[str, str], rows: int, rounds: int) -> list[Outcome]:
    with mariadb.started() as server:
        (version,) = server.execute("SELECT version()")
        conditions["servers"] += f", MariaDB {version}"
        conditions["pt-archiver"] = pt_archiver.version()
        conditions["MariaDB"] = ", ".join(f"{name} {value}" for name, value in mariadb.SETTINGS.items())
        return pt_archiver.compare(server, rows, rounds)


if __name__ == "__main__":
    main()
