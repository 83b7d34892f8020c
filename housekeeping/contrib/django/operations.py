"""Operation of Django's migrations that creates and upgrades the library's own tables."""

from __future__ import annotations

from typing import Any

from django.db.migrations.operations.base import Operation

from housekeeping.contrib.django import aliases, load_settings
from housekeeping.ledger.schema import statements, version_of


class UpgradeHousekeeping(Operation):
    """Take the tables to a version, in the databases of ``HOUSEKEEPING``.

    What ``housekeeping init`` has applied already is omitted. Reversing leaves the tables, whose rows may be needed.

    Parameters:
      to: The new version.
    """

    reduces_to_sql = True

    def __init__(self, to: int) -> None:
        self.to = to

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing: the tables have no models of Django."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Execute the statements of ``housekeeping init`` that are missing."""
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
        """Leave the tables."""

    def describe(self) -> str:
        """Return the line that ``migrate`` prints."""
        return f"Take the tables of housekeeping to version {self.to}"
