"""Check for configured tables that are only a partition of another table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peewee import Model, ProgrammingError

from housekeeping.core.settings import Settings
from housekeeping.database.catalog import partitioned_table_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.diagnostics import Finding
from housekeeping.workers import families


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a warning for each table of an enabled worker that is a partition."""
    for family in families(settings):
        users = [sweep.name for sweep in family.sweeps if sweep.name in sweeps]
        for name, model in family.models.items():
            if not users:
                continue
            try:
                parent = partitioned_table_of(model)
            except ProgrammingError:  # no right on the schema; `tables` reports it
                continue
            if parent is not None:
                yield _warning(name, model, parent, users)


def _warning(name: str, model: type[Model], parent: str, users: list[str]) -> Finding:
    meta: Any = model._meta
    return Finding(
        "warning",
        users[0],
        f"table {name}",
        f"{meta.table_name} is a partition of {parent}: {', '.join(users)} see only the rows of this partition",
        f'to clean all rows, set HOUSEKEEPING_WORKERS["{users[0]}"]["tables"] to {{"{name}": "{parent}"}}',
    )
