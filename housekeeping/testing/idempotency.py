"""Assertion that a second run over the same rows changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from housekeeping.sweeps.declaration import Sweep
from housekeeping.testing.outcomes import last_run, nothing_changed, progress_since, run_to_the_end
from housekeeping.testing.tables import Outside, Tables

#: pytest shows the line of the test instead of this module's.
__tracebackhide__: Final = True


def assert_idempotent(
    sweep: Sweep,
    argument: Any = None,
    *,
    now: datetime | None = None,
    ignoring: Sequence[str] = (),
    outside: Outside | None = None,
) -> None:
    """Run the sweep to its end twice and assert that the second time changes nothing.

    Compares the contents of all tables in the search path and the counts in the ledger. The tables keep the changes of
    the runs.

    ::

        def test_it_is_idempotent(expired_sessions):
            assert_idempotent(sweep)

    Parameters:
      argument: The sweep's argument, if it has one.
      now: The time of both runs; the current time unless given.
      ignoring: Columns that may differ, such as one that a trigger sets.
      outside: Returns the sweep's effects outside of PostgreSQL, such as names of files, which are compared as well.

    Raises:
      AssertionError: With the first rows that differ. Also when the first run has nothing to do, which proves nothing.
    """
    now = now or datetime.now(UTC)
    with Tables(sweep) as tables:
        tables.save("at_first")
        before, seen_before = last_run(), outside() if outside else None
        run_to_the_end(sweep, argument, now)
        first, seen = progress_since(sweep, before), outside() if outside else None
        if not tables.differences("at_first") and seen == seen_before:
            raise AssertionError(nothing_changed(sweep, before))
        tables.save("after_the_first")
        between = last_run()
        run_to_the_end(sweep, argument, now)
        problems = [str(difference) for difference in tables.differences("after_the_first", ignoring)]
        again = progress_since(sweep, between)
        if any(again.values()):
            problems.append(f"  counts of the second run are {again}, those of the first are {first}")
        if outside and (after := outside()) != seen:
            problems += [f"  outside, after the first:  {seen!r}", f"  outside, after the second: {after!r}"]
    if problems:
        legend = "  (- after the first run, + after the second)"
        lines = [f"{sweep.name} is not idempotent: a second run over the same rows changed", *problems, legend]
        raise AssertionError("\n".join(lines))
