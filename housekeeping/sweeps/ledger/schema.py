"""Schema of the library's own tables: creation, upgrade and version check."""

from __future__ import annotations

from typing import Final

from peewee import ProgrammingError

from housekeeping.core.errors import DatabaseUnavailable, SchemaMissing
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database, translate_postgres_errors, use_databases
from housekeeping.sweeps.ledger.migrations import MIGRATIONS as MIGRATIONS
from housekeeping.sweeps.ledger.models import MODELS, Run

#: Key of the advisory lock that keeps two ``init`` from running at once.
_ADVISORY_LOCK: Final = 0x686F757365  # "house"


def use_database(settings: Settings) -> None:
    """Use the databases of the settings; nothing is connected yet.

    Raises:
      SettingsError: When a URL is missing or invalid.
    """
    use_databases(settings.database_urls(), settings.prepared_statements)
    use_schema(settings.schema_name)


def use_schema(name: str) -> None:
    """Set the name of the schema."""
    for model in MODELS:
        model._meta.schema = name


def init() -> int:
    """Create or upgrade the tables in one transaction; return how many migrations were applied.

    Raises:
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    schema = _quoted()
    with translate_postgres_errors(), database.atomic():
        database.execute_sql("SELECT pg_advisory_xact_lock(%s)", (_ADVISORY_LOCK,))
        database.execute_sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        database.execute_sql(
            f"CREATE TABLE IF NOT EXISTS {schema}.migrations "
            "(version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
        )
        missing = range(_version() + 1, len(MIGRATIONS) + 1)
        for version in missing:
            database.execute_sql(MIGRATIONS[version - 1].format(schema=schema))
            database.execute_sql(f"INSERT INTO {schema}.migrations (version) VALUES (%s)", (version,))  # noqa: S608
    return len(missing)


def require_all() -> None:
    """Call `require` for each database. One that does not answer is passed over if another one does.

    Raises:
      SchemaMissing: A database lacks the tables, or they are too old.
      DatabaseUnavailable: When no database answers.
    """
    unavailable: list[DatabaseUnavailable] = []
    databases = database.by_name()
    for name in databases:
        try:
            with database.using(name):
                require()
        except DatabaseUnavailable as error:
            unavailable.append(error)
    if len(unavailable) == len(databases):
        raise unavailable[0]


def require() -> None:
    """Raise SchemaMissing unless the current database has the tables in the version that this code needs.

    Raises:
      SchemaMissing: The tables are missing or too old; the text names the command.
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    with translate_postgres_errors():
        try:
            version = _version()
        except ProgrammingError:
            version = 0
    name = Run._meta.schema
    if version == 0:
        raise SchemaMissing(f"the schema {name!r} is not in {database_in_words()}; run: housekeeping init")
    if version < len(MIGRATIONS):
        place = f" in {database_in_words()}" if database.several() else ""
        raise SchemaMissing(
            f"the schema {name!r}{place} is at version {version}, this code needs {len(MIGRATIONS)}; "
            "run: housekeeping init"
        )


def database_in_words() -> str:
    """Return how a text calls the current database; its name only if there are several."""
    return f"the database {database.selected!r}" if database.several() else "this database"


def _version() -> int:
    query = f"SELECT coalesce(max(version), 0) FROM {_quoted()}.migrations"  # noqa: S608
    version: int = database.execute_sql(query).fetchone()[0]
    return version


def _quoted() -> str:
    # Quoted, because a name that the settings allow may be a reserved word.
    return f'"{Run._meta.schema}"'
