"""Check whether far more rows are stale than a plan showed, before a run that was confirmed by that plan."""

from __future__ import annotations

from typing import Any, Final

from housekeeping.database.clock_skew import database_now
from housekeeping.sweeps.checks.unique_keys import stages_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.limits.bounded_counts import CountFailed, count_stale
from housekeeping.sweeps.stages.stage import Backlog

#: Growth that needs no new look: up to twice the rows, or 1,000 rows more.
_TIMES: Final = 2
_ROWS: Final = 1000


def stale_if_outgrown(sweep: Sweep, argument: Any, seen: Backlog) -> Backlog | None:
    """Return the stale rows if they are far more than the plan showed, or cannot be counted (then 0, not exact).

    Returns None if the plan still holds. The worker's database must be the current one.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    if not seen.exact:
        return None  # the plan showed that there is no end to them
    most = max(_TIMES * seen.rows, seen.rows + _ROWS)
    try:
        stale = count_stale(stages_of(sweep), database_now(), most, argument, sweep.max_runtime)
    except CountFailed:
        return Backlog(0, exact=False)
    return stale if not stale.exact or stale.rows > most else None
