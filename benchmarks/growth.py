"""A worker on a backlog of 10,000, 100,000 and a million rows, also while another session's transaction stays open.

What is deleted while an old transaction is open cannot be cleaned away: a walk that starts over at the front passes
all of it again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import psycopg2

from benchmarks import statuses
from benchmarks.comparison import OURS, Comparison, Contestant, Place
from benchmarks.ours import ours
from benchmarks.rounds import Outcome
from housekeeping.workers.user_status_cleanup.models import UserStatus

_SIZES: Final = (10_000, 100_000, 1_000_000)
_BESIDE: Final = "beside an old transaction"
_FLAT: Final = 0.3  # maximum difference of the rates, as a share of the highest
_STEADY: Final = 1.1  # maximum ratio of peak memory


def _beside_an_old_transaction(contestant: Contestant) -> Contestant:
    def ready(place: Place) -> Callable[[], object]:
        old = psycopg2.connect(place.database_url)
        old.set_session(isolation_level="REPEATABLE READ", readonly=True)
        old.cursor().execute("SELECT count(*) FROM user_statuses WHERE user_id = 1")
        work = contestant(place)

        def beside() -> None:
            work()
            old.close()

        return beside

    return ready


_ALONE: Final = ours(statuses.WORKER, batch_size=1_000)

COMPARISONS: Final = tuple(
    Comparison(
        name=f"growth-{size}",
        template="statuses",
        models=(UserStatus,),
        fill=statuses.fill,
        undone=statuses.UNDONE,
        rows=size,
        # No other rows: among others, each of a few rows would write its own WAL page.
        among=size,
        rounds_at_most=2,
        contestants={OURS: _ALONE, _BESIDE: _beside_an_old_transaction(_ALONE)},
    )
    for size in _SIZES
)


def verdicts(outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line per contestant about all sizes; empty with fewer than two sizes."""
    grown = [each for each in outcomes if each.comparison in COMPARISONS]
    if len(grown) < 2:
        return []
    lines = []
    for name in (OURS, _BESIDE):
        rates = [each.middle(name, lambda turn: turn.rate) for each in grown if name in each.turns]
        memory = [each.middle(name, lambda turn: turn.resident_bytes) for each in grown if name in each.turns]
        if len(rates) < 2:
            continue
        flat, steady = 1 - min(rates) / max(rates), max(memory) / min(memory)
        met = flat <= _FLAT and steady <= _STEADY
        lines.append(
            f"growth, {name}: rates differ by {flat:.0%} (at most {_FLAT:.0%}), memory by {steady - 1:.0%} "
            f"(at most {_STEADY - 1:.0%}): {'met' if met else 'MISSED'}"
        )
    return lines
