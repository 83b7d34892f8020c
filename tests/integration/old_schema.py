"""Schema of the library as an older release has created it."""

from __future__ import annotations

from housekeeping.core.settings import Settings
from housekeeping.database.connection import Database
from housekeeping.sweeps.ledger import schema


def schema_of_version(version: int, postgres: Database, settings: Settings) -> None:
    """Replace the schema by one with the first migrations only."""
    name = settings.schema_name
    postgres.execute_sql(
        f"DROP SCHEMA {name} CASCADE; CREATE SCHEMA {name};"
        f"CREATE TABLE {name}.migrations (version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now());"
        f"INSERT INTO {name}.migrations SELECT generate_series(1, {version})"
    )
    for migration in schema.MIGRATIONS[:version]:
        postgres.execute_sql(migration.format(schema=name))
