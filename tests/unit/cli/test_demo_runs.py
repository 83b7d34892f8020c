from __future__ import annotations

from datetime import UTC, datetime, timedelta

from rich.console import Console

from tests.internals.demo import runs_table, sums_table
from tests.internals.ledger import Run

AT = datetime(2026, 11, 20, 12, tzinfo=UTC)


def test_demo_shows_the_purge_of_an_undeclared_table() -> None:
    run = Run(
        worker="purge:sessions",
        trigger="cli",
        started_at=AT,
        finished_at=AT + timedelta(seconds=1),
        outcome="done",
        counts={"deleted_rows": 7},
    )
    console = Console(width=120, record=True)

    console.print(runs_table([run], {}), sums_table([run], {}))

    assert console.export_text().count("deleted_rows 7") == 2
