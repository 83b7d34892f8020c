"""Holds of the declared sweeps on the table of a purge, which keep its rows, too."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, Final

from peewee import Model

from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.stages.hold import Hold, hold_of_another_table
from housekeeping.sweeps.stages.table_stage import TableStage

#: Whether two names are one table, or a partitioned table and one of its partitions.
_HAS_SAME_ROWS: Final = """
SELECT to_regclass(%(declared)s) IN (
    SELECT to_regclass(%(purged)s)
    UNION SELECT relid FROM pg_partition_ancestors(to_regclass(%(purged)s))
    UNION SELECT relid FROM pg_partition_tree(to_regclass(%(purged)s))
)
"""


def holds_on(model: type[Model], database_name: str, sweeps: Iterable[Sweep]) -> dict[str, Hold]:
    """Return the holds of sweeps on the model's table, by the name of the sweep.

    The hold of a disabled or paused sweep counts as well.

    Parameters:
      database_name: The database of the table, which is the current one.

    Raises:
      peewee.PeeweeException: The catalog cannot be read.
    """
    found: dict[str, Hold] = {}
    for sweep in sweeps:
        for stage in sweep.declared_stages() if sweep.database == database_name else ():
            if isinstance(stage, TableStage | PartitionStage) and stage.hold is not None:
                if _has_same_rows(stage.model, model):
                    found[sweep.name] = hold_of_another_table(stage.hold, stage.model, model)
    return found


def any_of(holds: Mapping[str, Hold]) -> Hold | None:
    """Combine the holds into one that keeps a row if any of them does; None without holds."""
    if not holds:
        return None
    return lambda: reduce(operator.or_, [hold() for hold in holds.values()])


def _has_same_rows(declared: type[Model], purged: type[Model]) -> bool:
    names = {"declared": quoted_name(declared), "purged": quoted_name(purged)}
    row: Any = database.execute_sql(_HAS_SAME_ROWS, names).fetchone()
    return bool(row[0])
