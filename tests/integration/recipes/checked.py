"""Check that every recipe must pass on the table that its package has created."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest

from housekeeping import Sweep
from tests.internals.database import Database
from tests.internals.doctor import explain, fault_of
from tests.internals.engine import RunResult, run_sweep
from tests.internals.insight import plan
from tests.internals.sweeps import TableStage


def needs(*modules: str) -> pytest.MarkDecorator:
    """Return the mark of tests that create tables by these packages. They are skipped where one is not installed."""
    missing = [each for each in modules if find_spec(each) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}; the extra recipes has them")


def keys_of(database: Database, table: str, key: str) -> list[str]:
    """Return the keys of all rows as texts, sorted."""
    return sorted(row[0] for row in database.execute_sql(f"SELECT {key}::text FROM {table}").fetchall())


def assert_leaves(
    database: Database, sweep: Sweep, kept: Iterable[Any], *, table: str, key: str = "id", **counts: int
) -> RunResult:
    """Plan and run the sweep, check which rows of the table it leaves, and that a second run finds nothing."""
    before, expected = keys_of(database, table, key), sorted(map(str, kept))
    stale = len(before) - len(expected)
    assert stale > 0, "the test has no row for the recipe to delete"
    planned = plan(sweep)
    assert sum(each.stale.rows for each, _ in planned.stages if each.name != "group_results") == stale
    for stage in sweep.stages_for_run():
        assert isinstance(stage, TableStage)
        assert fault_of(explain(stage.explain_queries(planned.now)[0].query)) is None

    first, second = run_sweep(sweep), run_sweep(sweep)

    assert (first.outcome, second.outcome) == ("done", "done")
    assert keys_of(database, table, key) == expected
    assert counts.items() <= first.counts.items()
    assert not any(second.counts.values())
    return first
