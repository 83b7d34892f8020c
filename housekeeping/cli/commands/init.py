"""``housekeeping init``: create or upgrade the library's own tables, and those of a trial."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import click

from housekeeping.cli.context import load_settings
from housekeeping.cli.formatting import notify
from housekeeping.cli.sample_data import add_sample_rows
from housekeeping.core.errors import Refused, WrongArgument
from housekeeping.core.settings import Settings
from housekeeping.core.wording import counted
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.doctor import postgres, tables
from housekeeping.sweeps.checks.archives import problems_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import schema
from housekeeping.sweeps.ledger.history import name_database
from housekeeping.sweeps.registry import Family, by_database
from housekeeping.workers import configured_sweeps, families


@click.command()
@click.option(
    "--with-tables", is_flag=True, help="Also create the tables that the built-in workers clean, for a trial."
)
@click.option("--with-sample-data", is_flag=True, help="Also add sample rows to these tables, for a trial.")
@click.option("--with-archives", is_flag=True, help="Also create the archives of sweeps that move rows to one.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: what was created, and statements to execute by hand."
)
def init(with_tables: bool, with_sample_data: bool, with_archives: bool, as_json: bool) -> None:
    """Create or upgrade the library's own tables. Can be repeated safely.

    The tables are in the schema "housekeeping", or the one that HOUSEKEEPING_SCHEMA names. Existing tables of the
    application are not changed, and --with-tables creates the missing ones. A warning on stderr names each configured
    table that is a partition of another table.

    A sweep may move its rows to an archive. The command prints the statements that create each missing archive and add
    missing columns to the others. --with-archives executes them, except for those that rewrite an archive.

    --with-sample-data adds a few hundred rows to each table of --with-tables, some of them stale. It stops if one of
    the tables already has rows.
    """
    if with_sample_data and not with_tables:
        raise WrongArgument("--with-sample-data needs --with-tables; give --with-tables as well")
    settings = load_settings()
    sweeps = configured_sweeps(settings)
    schema.use_database(settings)
    results: list[dict[str, Any]] = []
    for name, workers in by_database(sweeps.values()).items():
        with database.using(name), translate_postgres_errors():
            by_worker = {each.name: each for each in workers}
            for made in chain(
                _init_database(settings, by_worker, with_tables, with_sample_data),
                _init_archives(by_worker, with_archives),
            ):
                results.append(name_database(made.as_json(), name))
                if not as_json:
                    made.print()
    if as_json:
        click.echo(json.dumps(results))


@dataclass(frozen=True, slots=True)
class _Made:
    """Result of one part of the command.

    Attributes:
      kind: ``schema``, ``table``, ``sample rows`` or ``archive``.
      name: Its name in the database.
      statements: Statements that are left to the operator.
      place: Beginning of its line.
    """

    kind: str
    name: str
    result: str
    statements: Sequence[str] = ()
    place: str = ""

    def as_json(self) -> dict[str, Any]:
        values = {"kind": self.kind, "name": self.name, "result": self.result}
        return {**values, "statements": list(self.statements)} if self.statements else values

    def print(self) -> None:
        if self.statements:
            click.echo(self.result)
            for statement in self.statements:
                click.echo(f"{statement};")
            return
        kind = "table" if self.kind == "sample rows" else self.kind
        click.echo(f"{self.place}{kind} {self.name}: {self.result}")


def _init_archives(workers: dict[str, Sweep], with_archives: bool) -> Iterator[_Made]:
    """Yield the statements that create the archives or add missing columns, or execute them."""
    stages = [stage for each in workers.values() if each.enabled for stage in each.declared_stages()]
    for problem in problems_of(stages):
        if not problem.statements:
            notify(f"warning: {problem.text}")
            continue
        if problem.rewrites or not with_archives:
            option = "" if problem.rewrites else "add --with-archives or "
            text = f"{problem.text}; to correct that, {option}execute:"
            yield _Made("archive", problem.archive, text, problem.statements)
            continue
        with database.atomic():
            for statement in problem.statements:
                database.execute_sql(statement.replace("%", "%%"))
        yield _Made("archive", problem.archive, "created" if problem.is_missing else "missing columns added")


def _init_database(
    settings: Settings, workers: dict[str, Sweep], with_tables: bool, with_sample_data: bool
) -> Iterator[_Made]:
    """Create the tables in the current database, for its workers."""
    other = postgres.other_server()
    if other is not None:
        raise Refused(f"{other}; use PostgreSQL 13 or later")
    migrations = schema.init()
    result = "up to date" if not migrations else "created" if migrations == len(schema.MIGRATIONS) else "upgraded"
    place = f"database {database.selected}, " if settings.databases else ""
    yield _Made("schema", settings.schema_name, result, place=place)
    found = [family for family in families(settings) if any(sweep.name in workers for sweep in family.sweeps)]
    if with_tables:
        for family in found:
            yield from _create_tables(family)
    if with_sample_data:
        for table, rows in add_sample_rows(settings, found).items():
            yield _Made("sample rows", table, f"{counted(rows, 'sample row')}")
    for warning in tables.partitions(settings, {name: each for name, each in workers.items() if each.enabled}):
        notify(f"warning: {warning.text}; {warning.way_out}")


def _create_tables(family: Family) -> Iterator[_Made]:
    for model in family.models.values():
        meta: Any = model._meta
        exists = model.table_exists()
        if not exists:
            database.create_tables([model])
        yield _Made("table", meta.table_name, "already exists" if exists else "created")
