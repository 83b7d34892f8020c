"""Alembic: an operation that creates and upgrades the library's own tables, and what autogenerate leaves alone.

In a revision::

    import housekeeping.contrib.alembic

    def upgrade() -> None:
        op.upgrade_housekeeping(to=1)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from alembic.operations import MigrateOperation, Operations
from sqlalchemy import text

from housekeeping.ledger.schema import statements, version_of

#: The library's schema.
SCHEMA: Final = os.environ.get("HOUSEKEEPING_SCHEMA", "housekeeping")


@Operations.register_operation("upgrade_housekeeping")
class UpgradeHousekeeping(MigrateOperation):
    """Operation that creates or upgrades the library's own tables, as ``housekeeping init`` does."""

    def __init__(self, to: int, since: int, schema: str) -> None:
        self.to = to
        self.since = since
        self.schema = schema

    @classmethod
    def upgrade_housekeeping(cls, operations: Operations, to: int, since: int = 0, schema: str = SCHEMA) -> None:
        """Take the tables to a version. What ``housekeeping init`` has applied already is omitted.

        Parameters:
          to: The new version.
          since: Version that an earlier revision has created. Only the offline mode of Alembic, which has no
            connection, depends on it.
          schema: By default ``HOUSEKEEPING_SCHEMA`` or "housekeeping".

        Raises:
          ValueError: This release of the library does not have the version.
        """
        operations.invoke(cls(to, since, schema))


@Operations.implementation_for(UpgradeHousekeeping)
def _upgrade(operations: Operations, operation: UpgradeHousekeeping) -> None:
    since = operation.since
    if not operations.get_context().as_sql:
        connection = operations.get_bind()
        since = version_of(operation.schema, lambda query: connection.scalar(text(query)))
    for statement in statements(operation.schema, min(since, operation.to), operation.to):
        operations.execute(statement)


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """Leave out the library's own tables; for ``env.py``."""
    return not (type_ == "schema" and name == SCHEMA)


def include_object(object: Any, name: str | None, type_: str, reflected: bool, compare_to: object) -> bool:
    """Leave out archives, which ``housekeeping init --with-archives`` creates, unless they have a model."""
    return not (type_ == "table" and reflected and compare_to is None and "archived_by_run" in object.columns)
