"""The breaker: a run that would touch far more than runs before it stops before the first change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

from housekeeping.foundation.db import database
from housekeeping.foundation.errors import BreakerTripped
from housekeeping.foundation.logs import logger as named_logger
from housekeeping.sweeps.confirmation import Confirmation, named
from housekeeping.sweeps.ledger import Counts
from housekeeping.sweeps.passes import Backlog, Pass
from housekeeping.sweeps.table_pass import TablePass
from housekeeping.sweeps.vitals import table_name

logger = named_logger(__name__)

#: With fewer runs nobody can say what is usual.
ENOUGH: Final = 10
#: Records that never trip it by history: a worker that settled three a day may settle a few thousand after a holiday.
FLOOR: Final = 10_000
#: Options that bound what one run settles, however much is stale.
_AT_MOST: Final = ("max_deletes", "max_projects")

_ROWS: Final = """
WITH RECURSIVE ours (id) AS (
    SELECT to_regclass(name)::oid FROM unnest(%s::text[]) AS name
    UNION SELECT inhrelid FROM ours JOIN pg_inherits ON inhparent = ours.id
)
SELECT CASE WHEN min(reltuples) >= 0 AND sum(reltuples) > 0 THEN sum(reltuples)::bigint END
FROM ours JOIN pg_class ON pg_class.oid = ours.id WHERE relkind <> 'p'
"""


@dataclass(frozen=True, slots=True)
class Breaker:
    """How much more than usual is too much; off until there is history. Null switches a limit off.

    Attributes:
      times_history: So many times the most that any of the last runs settled, and 10,000 records at the least.
      share: So much of the tables that the sweep walks, as PostgreSQL's statistics know them: 0.5 is half.
    """

    times_history: float | None = 100
    share: float | None = None


class Breakable(Protocol):
    """A sweep, as far as its breaker asks."""

    @property
    def name(self) -> str: ...

    @property
    def breaker(self) -> Breaker: ...

    @property
    def options(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Limit:
    rows: int
    words: str


def check(
    sweep: Breakable,
    settled: Sequence[int],
    passes: Sequence[Pass],
    now: datetime,
    argument: Any = None,
    confirmation: Confirmation | None = None,
) -> None:
    """Return when a run may begin; it counts what is stale, and no further than to the limit.

    Parameters:
      settled: How many records each of the last runs settled; fewer than ten are no history.
      confirmation: A person's word, in place of the limits.

    Raises:
      BreakerTripped: When more is stale than the limits allow; the text has the numbers and the way to go on.
    """
    if confirmation is None:
        limits = _limits(sweep.breaker, settled, passes)
    else:
        most = confirmation.most
        logger.info("Run is confirmed", plan_id=confirmation.plan_id, rows=confirmation.rows, exact=confirmation.exact)
        limits = [] if most is None else [_Limit(most, f"and the plan counted {confirmation.rows:,}")]
    if not limits:
        return
    limit = min(limits, key=lambda each: each.rows)
    if any(sweep.options[name] <= limit.rows for name in _AT_MOST if name in sweep.options):
        return
    waiting = Backlog(0)
    for each in passes:
        waiting += each.backlog(now, limit.rows, argument)
    if waiting.exact and waiting.rows <= limit.rows:
        return
    about = named(sweep.name, argument)
    raise BreakerTripped(
        f"more than {limit.rows:,} records are stale, {limit.words}; nothing was changed. To go on: "
        f"housekeeping plan {about}, then housekeeping run {about} --confirm with the plan's id"
    )


def _limits(breaker: Breaker, settled: Sequence[int], passes: Sequence[Pass]) -> list[_Limit]:
    if len(settled) < ENOUGH:
        return []
    found = []
    if breaker.times_history is not None:
        most = max(settled)
        allowed = max(FLOOR, int(breaker.times_history * most))
        words = f"and the last {len(settled)} runs settled {most:,} at the most (allowed is {breaker.times_history:g} "
        found.append(_Limit(allowed, f"{words}times that, {FLOOR:,} at the least)"))
    if breaker.share is not None and (rows := _rows_of(passes)) is not None:
        found.append(_Limit(int(breaker.share * rows), f"which is {breaker.share:.0%} of about {rows:,} in all"))
    return found


def _rows_of(passes: Sequence[Pass]) -> int | None:
    """About how many rows the tables have; null when one of them was never analysed."""
    tables = sorted({table_name(each.model) for each in passes if isinstance(each, TablePass)})
    if not tables:
        return None
    (rows,) = database.execute_sql(_ROWS, (tables,)).fetchone()
    return None if rows is None else int(rows)


def settled_by(counts: Counts, settles: Sequence[str]) -> int:
    """How many records a run took from what was stale, by its counts."""
    return sum(int(counts.get(name) or 0) for name in settles)
