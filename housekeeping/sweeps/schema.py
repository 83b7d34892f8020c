"""The library's own tables, in a schema of their own: made, upgraded and looked for here."""

from __future__ import annotations

from typing import Final

from peewee import ProgrammingError

from housekeeping.foundation.db import database, reaching_postgres
from housekeeping.foundation.errors import SchemaMissing
from housekeeping.sweeps.own_tables import Lease, Run, Switch, SwitchChange

#: Applied in order, each once, all in one transaction; a released step is never changed, only followed.
MIGRATIONS: Final = (
    """
    CREATE TABLE {schema}.runs (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        worker text NOT NULL,
        message_id text,
        tick timestamptz,
        trigger text NOT NULL CHECK (trigger IN ('schedule', 'enqueue', 'cli', 'parent')),
        epoch bigint,
        started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        heartbeat_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        finished_at timestamptz,
        outcome text CHECK (
            outcome IN ('done', 'partial', 'skipped', 'failed', 'lost_lease', 'lost', 'missed')
        ),
        reason text,
        counts jsonb NOT NULL DEFAULT '{{}}',
        cursor jsonb,
        error text,
        CHECK ((outcome IS NULL) = (finished_at IS NULL))
    ) WITH (fillfactor = 80);
    COMMENT ON COLUMN {schema}.runs.outcome IS 'NULL while the run goes on';
    CREATE INDEX runs_worker_id ON {schema}.runs (worker, id);
    CREATE INDEX runs_worker_tick ON {schema}.runs (worker, tick) WHERE tick IS NOT NULL;
    CREATE INDEX runs_message_id ON {schema}.runs (message_id);
    CREATE INDEX runs_unfinished ON {schema}.runs (worker) WHERE outcome IS NULL;
    CREATE INDEX runs_finished_at ON {schema}.runs (finished_at, id);
    CREATE TABLE {schema}.leases (
        key text PRIMARY KEY,
        epoch bigint NOT NULL,
        holder text NOT NULL
    );
    COMMENT ON COLUMN {schema}.leases.holder IS 'token of the run that has this epoch';
    CREATE TABLE {schema}.switches (
        worker text PRIMARY KEY,
        state text NOT NULL CHECK (state IN ('paused', 'narrow')),
        reason text,
        until timestamptz
    );
    """,
    """
    ALTER TABLE {schema}.switches
        ADD COLUMN since timestamptz NOT NULL DEFAULT clock_timestamp(),
        ADD COLUMN said_by text,
        ADD COLUMN batch_size integer CHECK (batch_size > 0),
        ADD COLUMN max_runtime_s double precision CHECK (max_runtime_s > 0);
    CREATE TABLE {schema}.switch_changes (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        worker text NOT NULL,
        state text NOT NULL CHECK (state IN ('paused', 'narrow', 'on')),
        reason text,
        until timestamptz,
        at timestamptz NOT NULL,
        said_by text,
        batch_size integer,
        max_runtime_s double precision
    );
    CREATE INDEX switch_changes_worker ON {schema}.switch_changes (worker, id);
    ALTER TABLE {schema}.runs ADD COLUMN backlog bigint, ADD COLUMN backlog_exact boolean;
    COMMENT ON COLUMN {schema}.runs.backlog IS 'what waited at its end, counted up to a limit';
    """,
)

#: Held while the schema is made, so that two ``init`` at once make it once: any number will do, if it is ours.
_ADVISORY_LOCK: Final = 0x686F757365  # "house"


def use_schema(name: str) -> None:
    """Keep the library's own tables in the schema of this name."""
    for model in (Run, Lease, Switch, SwitchChange):
        model._meta.schema = name


def init() -> int:
    """Make or upgrade the library's own tables; returns how many steps were missing (0: nothing to do).

    One transaction: a crash leaves the schema as it was.

    Raises:
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    schema = _quoted()
    with reaching_postgres(), database.atomic():
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


def require() -> None:
    """Return when the library's own tables are there and as new as this code.

    Raises:
      SchemaMissing: When they are not; the text names the way out.
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    with reaching_postgres():
        try:
            version = _version()
        except ProgrammingError:
            version = 0
    name = Run._meta.schema
    if version == 0:
        raise SchemaMissing(f"the schema {name!r} is not in this database; run: housekeeping init")
    if version < len(MIGRATIONS):
        raise SchemaMissing(
            f"the schema {name!r} is at version {version}, this code needs {len(MIGRATIONS)}; run: housekeeping init"
        )


def _version() -> int:
    query = f"SELECT coalesce(max(version), 0) FROM {_quoted()}.migrations"  # noqa: S608
    version: int = database.execute_sql(query).fetchone()[0]
    return version


def _quoted() -> str:
    # A plain name by the settings' rule; quoted for the reserved words among those.
    return f'"{Run._meta.schema}"'
