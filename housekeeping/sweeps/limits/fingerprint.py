"""Fingerprint of which rows a sweep selects, to notice that its predicate or its table has changed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from housekeeping.database.catalog import quoted_name
from housekeeping.sweeps.checks.list_values import WithoutLists
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.stages.stage import Stage
from housekeeping.sweeps.stages.table_stage import TableStage

#: Two times that differ in every part: values that depend on the time differ in their SQL.
_TIMES: Final = (datetime(2024, 2, 12, 3, 14, 15, 926535, UTC), datetime(2026, 11, 25, 16, 47, 38, 1, UTC))
#: A list of values, which the application may read from anywhere, or one value.
_VALUES: Final = re.compile(r"\(%s(?:, %s)*\)|%s")


def fingerprint(sweep: Sweep, stages: Sequence[Stage]) -> str:
    """Return a short text that changes with the tables, the predicates and the age of the stale rows.

    Values that depend on the time, and the values of lists, do not change it.
    """
    parts = [str(sweep.stale_after)]
    for stage in stages:
        if isinstance(stage, TableStage):
            parts += [stage.name, quoted_name(stage.model), _predicate(stage.stale)]
        elif isinstance(stage, PartitionStage):
            stale = "" if stage.stale is None else _predicate(stage.stale)
            parts += [stage.name, quoted_name(stage.model), stale, str(stage.action.older_than)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _predicate(stale: Callable[[datetime], Any]) -> str:
    (sql, values), (_, later) = (WithoutLists().sql(stale(at)).query() for at in _TIMES)
    pairs = zip(values, later, strict=False)
    return _VALUES.sub(lambda found: _written(found[0], pairs), sql)


def _written(place: str, pairs: Iterator[tuple[Any, Any]]) -> str:
    taken = [next(pairs, (None, None)) for _ in range(place.count("%s"))]
    if place != "%s":
        return "(...)"
    ((value, later),) = taken
    return repr(value) if value == later and not isinstance(value, list | tuple) else "..."
