"""``housekeeping init``"""

from __future__ import annotations

from typing import Any

import click

from housekeeping.cli.context import load_settings
from housekeeping.cli.sample_data import add_sample_rows
from housekeeping.core.errors import WrongArgument
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.doctor import partitions
from housekeeping.installation import use_database
from housekeeping.sweeps.ledger import schema
from housekeeping.workers import configured_sweeps, families


@click.command(short_help="Make the library's own tables, or bring them up to date.")
@click.option("--with-tables", is_flag=True, help="Also make the application's tables the workers clean, for a trial.")
@click.option("--with-sample-data", is_flag=True, help="Also fill these tables with made-up rows, for a trial.")
def init(with_tables: bool, with_sample_data: bool) -> None:
    """Make the library's own tables, or bring them up to date. Harmless to repeat.

    They live in a schema of their own: "housekeeping", unless HOUSEKEEPING_SCHEMA names another. The
    application's tables are not touched; with --with-tables those that are missing are made. A table that is only a
    partition of another is told on stderr.

    --with-sample-data adds a few hundred rows to each table that --with-tables makes, some of them stale. It refuses
    when one of the tables has rows already.
    """
    if with_sample_data and not with_tables:
        raise WrongArgument("--with-sample-data fills the tables of a trial; give --with-tables as well")
    settings = load_settings()
    sweeps = configured_sweeps(settings)
    use_database(settings)
    steps = schema.init()
    name = settings.schema_name
    done = "is up to date" if not steps else "made" if steps == len(schema.MIGRATIONS) else "upgraded"
    click.echo(f"schema {name}: {done}")
    with translate_postgres_errors():
        if with_tables:
            _make_tables(settings)
        if with_sample_data:
            for line in add_sample_rows(settings):
                click.echo(line)
        for warning in partitions.examine(settings, {name: each for name, each in sweeps.items() if each.enabled}):
            click.echo(f"warning: {warning.text}; {warning.way_out}", err=True)


def _make_tables(settings: Settings) -> None:
    for family in families(settings):
        for model in family.models.values():
            meta: Any = model._meta
            there = model.table_exists()
            if not there:
                database.create_tables([model])
            click.echo(f"table {meta.table_name}: {'is there' if there else 'made'}")
