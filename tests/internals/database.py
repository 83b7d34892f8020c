"""Parts of `housekeeping.database` that tests use."""

from __future__ import annotations

from peewee import Model

from housekeeping.core.clock import ClockSkew
from housekeeping.database import catalog, connection
from housekeeping.database.catalog import forget_table, key_of, quoted_name
from housekeeping.database.connection import (
    _BLOCKS,
    Database,
    DatabaseHandle,
    PreparedStatements,
    bind,
    close_databases,
    connect_to,
    database,
    handle_of,
    translate_postgres_errors,
)
from housekeeping.database.errors import cause_of, error_in
from housekeeping.database.queries import (
    CompiledQuery,
    NaiveUtcDateTimeField,
    Parameter,
    PreparedQuery,
    database_now,
    statement_time,
)
from housekeeping.database.state_machines import CONFLICT_RETRIES
from housekeeping.middleware.consistency import Replicas, WalPosition, WalPositionReader, data_consistency_used


def restore_declared_key(model: type[Model]) -> None:
    """Restore the declared key and fields of the model; the next `identify` reads the catalog again."""
    catalog._identified.pop(model, None)
    catalog._use_key(model, catalog.declared_key_columns(model), catalog.Table(exists=False))
    forget_table(model)
