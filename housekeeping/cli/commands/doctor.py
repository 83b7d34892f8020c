"""``housekeeping doctor``"""

from __future__ import annotations

import json
import sys
from typing import Final

import click
from peewee import PeeweeException
from rich.text import Text

from housekeeping.cli.context import load_settings
from housekeeping.cli.formatting import out, progress
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.plural import counted
from housekeeping.core.sanitize import error_line, printable
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.doctor import examine
from housekeeping.doctor.grants import exists, grants, missing_rights, needed_rights, own_tables_grants
from housekeeping.installation import use_database
from housekeeping.sweeps.insight.diagnostics import Finding, Level
from housekeeping.workers import configured_sweeps

#: The worst finding -> exit status; 2 is taken by wrong usage and settings.
_EXIT: Final[dict[Level, int]] = {"fine": 0, "warning": 3, "error": 1}
_SIGN: Final[dict[Level, tuple[str, str]]] = {
    "fine": ("ok      ", "green"),
    "warning": ("warning ", "yellow"),
    "error": ("ERROR   ", "bold red"),
}


@click.command(short_help="Say what is wrong with an installation, and what to do.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option("--grants", "role", metavar="ROLE", help="Print the GRANT statements a role needs.")
def doctor(as_json: bool, role: str | None) -> None:
    """Look at everything the workers stand on; say what is wrong and what to do. Changes nothing.

    Connections and versions; the library's own tables; the columns each worker needs; tables that are only a
    partition of another; keys that are not unique; foreign keys on the rows that a worker deletes; the statements
    each worker runs, explained against the real tables: whether an index is used, and the CREATE INDEX CONCURRENTLY
    that is missing; rights, timeouts, time zone, long transactions, autovacuum; what Redis does when memory is full
    or it restarts, and who shares it; dead letters; object stores, repositories, git; the clocks.

    Exit status: 0 all fine; 3 warnings; 1 errors; 2 wrong settings.
    """
    settings = load_settings()
    sweeps = configured_sweeps(settings)
    if role is not None:
        _print_grants(role, settings)
        return
    if settings.database_url is not None:
        use_database(settings)
    found: list[Finding] = []
    with progress("looking") as say:
        for finding in examine(settings, sweeps):
            found.append(finding)
            say(f"looking at {finding.area}: {finding.subject}")
    worst: Level = max((each.level for each in found), key=["fine", "warning", "error"].index, default="fine")
    if as_json:
        click.echo(json.dumps({"level": worst, "findings": [each.as_json() for each in found]}))
    else:
        _show(found)
    sys.exit(_EXIT[worst])


def _print_grants(role: str, settings: Settings) -> None:
    needed = needed_rights(settings)
    for statement in (*own_tables_grants(role, settings), *grants(role, needed)):
        click.echo(f"{statement};")
    if settings.database_url is None:
        return
    use_database(settings)
    try:
        with translate_postgres_errors():
            lacking = {table: tuple(missing_rights(table, rights)) for table, rights in needed.items() if exists(table)}
            (user,) = database.execute_sql("SELECT quote_ident(current_user)").fetchone()
    except (HousekeepingError, PeeweeException) as error:
        click.echo(f"-- not compared with the rights of the current role: {error_line(error)}")
        return
    for statement in grants(user, {table: rights for table, rights in lacking.items() if rights}):
        click.echo(f"-- {user}, the current role, lacks: {statement};")


def _show(found: list[Finding]) -> None:
    area = ""
    for each in found:
        if each.area != area:
            area = each.area
            out.print(area, style="bold")
        sign, style = _SIGN[each.level]
        out.print(Text.assemble("  ", (sign, style), printable(f"{each.subject}: {each.text}")), soft_wrap=True)
        if each.way_out and each.level != "fine":
            out.print(f"          do: {each.way_out}", soft_wrap=True)
    numbers = [sum(each.level == level for each in found) for level in ("error", "warning", "fine")]
    out.print(f"{counted(numbers[0], 'error')}, {counted(numbers[1], 'warning')}, {numbers[2]} fine")
