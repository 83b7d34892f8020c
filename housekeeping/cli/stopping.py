"""End of a foreground run whose thread still hangs."""

from __future__ import annotations

import os
import sys
import threading
from datetime import UTC, datetime
from typing import Final, NoReturn

import click
from peewee import PeeweeException

from housekeeping.core.errors import HousekeepingError
from housekeeping.core.sanitize import printable
from housekeeping.database.connection import database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.counts import in_order, initial_counts
from housekeeping.sweeps.engine.results import RunResult
from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.ledger.runs import Closed

#: Seconds to close the ledger row, which waits for a pending COMMIT of the run.
_LONGEST_S: Final = 0.5


def close_run(sweep: Sweep, run_id: int | None, started_at: datetime) -> RunResult | None:
    """Record the end of a run whose thread still hangs, and return its result; `None` if that takes too long.

    Afterward the run cannot commit any more. The next run takes over its lease.
    """
    closed = Closed("partial", "shutdown", {}) if run_id is None else _closed(run_id)
    if closed is None:
        return None
    return RunResult(
        sweep.name,
        closed.outcome,
        closed.reason,
        run_id,
        started_at,
        (datetime.now(UTC) - started_at).total_seconds(),
        in_order(sweep, {**initial_counts(sweep), **closed.counts}),
    )


def _closed(run_id: int) -> Closed | None:
    results: list[Closed] = []

    def close() -> None:
        try:
            with database.atomic():
                results.append(runs.fail(run_id, "partial", "shutdown", None, {}))
        except (PeeweeException, HousekeepingError):
            return  # the next run marks it as lost

    # In a thread with its own connection, which may hang as well.
    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(_LONGEST_S)
    return results[0] if results and not thread.is_alive() else None


def end_process(exit_code: int, line: str | None = None) -> NoReturn:
    """Exit at once after printing a line. Hanging threads would delay a normal exit."""
    if line is not None:
        click.echo(f"housekeeping: {printable(line)}", err=True)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)
