"""Alembic operation that creates and upgrades the library's own tables, and filters for autogenerate.

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
        """Upgrade the tables to a version. Skips what ``housekeeping init`` has already applied.

        Parameters:
          to: The new version.
          since: Version that an earlier revision has created. Used only in Alembic's offline mode, which has no
            connection.
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
    """Exclude the library's own tables from autogenerate; for ``env.py``."""
    return not (type_ == "schema" and name == SCHEMA)


def include_object(object: Any, name: str | None, type_: str, reflected: bool, compare_to: object) -> bool:
    """Exclude archives of ``housekeeping init --with-archives`` from autogenerate, unless they have a model."""
    return not (type_ == "table" and reflected and compare_to is None and "archived_by_run" in object.columns)
