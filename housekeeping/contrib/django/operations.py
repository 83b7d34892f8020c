"""Django migration operation that creates and upgrades the library's own tables."""

from __future__ import annotations

from typing import Any

from django.db.migrations.operations.base import Operation

from housekeeping.contrib.django import aliases, load_settings
from housekeeping.ledger.schema import statements, version_of


class UpgradeHousekeeping(Operation):
    """Operation that upgrades the tables to a version, in the databases of ``HOUSEKEEPING``.

    It skips what ``housekeeping init`` has already applied. Reversing it keeps the tables, whose rows may be needed.

    Parameters:
      to: The new version.
    """

    reduces_to_sql = True

    def __init__(self, to: int) -> None:
        self.to = to

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing, because the tables have no Django models."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Execute the statements of ``housekeeping init`` that were not applied yet."""
        connection = schema_editor.connection
        if connection.alias not in aliases():
            return

        def scalar(query: str) -> Any:
            with connection.cursor() as cursor:
                cursor.execute(query)
                return cursor.fetchone()[0]

        name = load_settings().schema_name
        for statement in statements(name, min(version_of(name, scalar), self.to), self.to):
            schema_editor.execute(statement, None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Keep the tables."""

    def describe(self) -> str:
        """Return the line that ``migrate`` prints."""
        return f"Upgrade the tables of housekeeping to version {self.to}"
