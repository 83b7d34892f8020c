"""Whether a second run over the same rows changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from housekeeping.sweeps.declaration import Sweep
from housekeeping.testing.outcomes import last_run, nothing_to_do, run_to_the_end, totals
from housekeeping.testing.tables import Outside, Tables

#: pytest shows the line of the test, not those of this module.
__tracebackhide__: Final = True


def assert_idempotent(
    sweep: Sweep,
    argument: Any = None,
    *,
    now: datetime | None = None,
    ignoring: Sequence[str] = (),
    outside: Outside | None = None,
) -> None:
    """Run the sweep over the rows that are there to its end, then once more: the second run must change nothing.

    Compared are the contents of all tables in the search path and what the ledger counts. The tables are left as the
    runs leave them.

    ::

        def test_it_is_idempotent(expired_sessions):
            assert_idempotent(sweep)

    Parameters:
      argument: What the runs are about, for a sweep that takes an argument.
      now: The time of both runs; the present unless given.
      ignoring: Columns that may differ, such as one that a trigger sets.
      outside: Reads what the sweep does outside of PostgreSQL, such as the names of files; compared as well.

    Raises:
      AssertionError: With the first rows that differ. Also when the first run had nothing to do, which proves nothing.
    """
    now = now or datetime.now(UTC)
    with Tables(sweep) as tables:
        tables.keep("at_first")
        before, seen_before = last_run(), outside() if outside else None
        run_to_the_end(sweep, argument, now)
        settled, seen = totals(sweep, before), outside() if outside else None
        if not tables.differences("at_first") and seen == seen_before:
            raise AssertionError(nothing_to_do(sweep, before))
        tables.keep("after_the_first")
        between = last_run()
        run_to_the_end(sweep, argument, now)
        wrong = [str(difference) for difference in tables.differences("after_the_first", ignoring)]
        again = totals(sweep, between)
        if any(again.values()):
            wrong.append(f"  the ledger counts {again} for the second run, and {settled} for the first")
        if outside and (after := outside()) != seen:
            wrong += [f"  outside, after the first:  {seen!r}", f"  outside, after the second: {after!r}"]
    if wrong:
        legend = "  (- after the first run, + after the second)"
        lines = [f"{sweep.name} is not idempotent: a second run over the same rows changed", *wrong, legend]
        raise AssertionError("\n".join(lines))
