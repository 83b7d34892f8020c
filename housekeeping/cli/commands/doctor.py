"""``housekeeping doctor``: check an installation, or print the GRANT statements of a role."""

from __future__ import annotations

import json
import sys
from typing import Final

import click
from peewee import PeeweeException
from rich.text import Text

from housekeeping.cli.context import load_settings, use_database_if_set
from housekeeping.cli.formatting import out, progress, say
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.sanitize import error_line, printable
from housekeeping.core.settings import Settings
from housekeeping.core.wording import counted
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.doctor import examine
from housekeeping.doctor.grants import exists, grants, missing_rights, needed_rights, own_tables_grants
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.registry import Finding, Level, by_database
from housekeeping.workers import configured_sweeps

#: Worst finding -> exit status; 2 is for wrong usage and settings.
_EXIT: Final[dict[Level, int]] = {"fine": 0, "warning": 3, "error": 1}
_LABEL: Final[dict[Level, tuple[str, str]]] = {
    "fine": ("ok      ", "green"),
    "warning": ("warning ", "yellow"),
    "error": ("ERROR   ", "bold red"),
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--grants", "role", metavar="ROLE", help="Print the GRANT statements that a role needs.")
def doctor(as_json: bool, role: str | None) -> None:
    """Check everything that the workers depend on and suggest repairs. Changes nothing.

    \b
    PostgreSQL  connection, version, schema, rights, timeouts, time zone,
                long transactions, autovacuum
    tables      needed columns, partitions, unique keys, foreign keys
    indexes     EXPLAIN of each worker's statements, and the missing
                CREATE INDEX CONCURRENTLY
    throttles   limits on WAL, your own functions (setting gates)
    Redis       eviction, persistence, other users
    others      dead letters, object stores, repositories, git, clocks,
                the dashboard's token, processes

    Exit status: 0 all fine; 3 warnings; 1 errors; 2 wrong settings.
    """
    settings = load_settings()
    sweeps = configured_sweeps(settings)
    use_database_if_set(settings)
    if role is not None:
        _print_grants(role, settings, sweeps)
        return
    findings: list[Finding] = []
    with progress("checking") as update:
        for finding in examine(settings, sweeps):
            findings.append(finding)
            update(f"checking {finding.area}: {finding.subject}")
    worst: Level = max((each.level for each in findings), key=["fine", "warning", "error"].index, default="fine")
    if as_json:
        click.echo(json.dumps({"level": worst, "findings": [each.as_json() for each in findings]}))
    else:
        _print(findings)
    sys.exit(_EXIT[worst])


def _print_grants(role: str, settings: Settings, sweeps: dict[str, Sweep]) -> None:
    if not settings.databases:
        _print_grants_in_database(role, settings)
        return
    for name, workers in by_database(sweeps.values()).items():
        click.echo(f"-- database {name}")
        with database.using(name):
            _print_grants_in_database(role, settings, {each.name for each in workers})


def _print_grants_in_database(role: str, settings: Settings, workers: set[str] | None = None) -> None:
    needed = needed_rights(settings, workers)
    for statement in (*own_tables_grants(role, settings), *grants(role, needed)):
        click.echo(f"{statement};")
    if settings.database_url is None:
        return
    try:
        with translate_postgres_errors():
            missing = {table: tuple(missing_rights(table, rights)) for table, rights in needed.items() if exists(table)}
            (user,) = database.execute_sql("SELECT quote_ident(current_user)").fetchone()
    except (HousekeepingError, PeeweeException) as error:
        click.echo(f"-- could not be compared with the rights of the current role: {error_line(error)}")
        return
    for statement in grants(user, {table: rights for table, rights in missing.items() if rights}):
        click.echo(f"-- {user}, the current role, lacks: {statement};")


def _print(findings: list[Finding]) -> None:
    area = ""
    for each in findings:
        if each.area != area:
            area = each.area
            out.print(area, style="bold")
        label, style = _LABEL[each.level]
        say(Text.assemble("  ", (label, style), printable(f"{each.subject}: {each.text}")))
        if each.way_out and each.level != "fine":
            say(f"          do: {each.way_out}")
    errors, warnings, fine = (sum(each.level == level for each in findings) for level in ("error", "warning", "fine"))
    out.print(f"{counted(errors, 'error')}, {counted(warnings, 'warning')}, {fine} fine")
