"""``housekeeping init``: create or upgrade the library's own tables."""

from __future__ import annotations

from typing import Any

import click

from housekeeping.cli.context import load_settings
from housekeeping.cli.sample_data import add_sample_rows
from housekeeping.core.errors import WrongArgument
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.doctor import tables
from housekeeping.sweeps.ledger import schema
from housekeeping.sweeps.ledger.schema import use_database
from housekeeping.workers import configured_sweeps, families


@click.command()
@click.option(
    "--with-tables", is_flag=True, help="Also create the tables that the built-in workers clean, for a trial."
)
@click.option("--with-sample-data", is_flag=True, help="Also add sample rows to these tables, for a trial.")
def init(with_tables: bool, with_sample_data: bool) -> None:
    """Create or upgrade the library's own tables. Can be repeated safely.

    The tables are in the schema "housekeeping", or the one that HOUSEKEEPING_SCHEMA names. The application's tables are
    not changed. --with-tables creates those that do not exist. A warning on stderr names each configured table that is
    a partition of another table.

    --with-sample-data adds a few hundred rows to each table of --with-tables, some of them stale. It stops if one of
    the tables already has rows.
    """
    if with_sample_data and not with_tables:
        raise WrongArgument("--with-sample-data needs --with-tables; give --with-tables as well")
    settings = load_settings()
    sweeps = configured_sweeps(settings)
    use_database(settings)
    migrations = schema.init()
    name = settings.schema_name
    result = "up to date" if not migrations else "created" if migrations == len(schema.MIGRATIONS) else "upgraded"
    click.echo(f"schema {name}: {result}")
    with translate_postgres_errors():
        if with_tables:
            _create_tables(settings)
        if with_sample_data:
            for line in add_sample_rows(settings):
                click.echo(line)
        for warning in tables.partitions(settings, {name: each for name, each in sweeps.items() if each.enabled}):
            click.echo(f"warning: {warning.text}; {warning.way_out}", err=True)


def _create_tables(settings: Settings) -> None:
    for family in families(settings):
        for model in family.models.values():
            meta: Any = model._meta
            exists = model.table_exists()
            if not exists:
                database.create_tables([model])
            click.echo(f"table {meta.table_name}: {'already exists' if exists else 'created'}")
