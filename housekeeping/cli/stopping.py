"""The end of a foreground run whose thread does not end by itself."""

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

#: Seconds for closing the ledger row; it waits for a COMMIT of the run that hangs.
_LONGEST_S: Final = 0.5


def close_run(sweep: Sweep, run_id: int | None, started_at: datetime) -> RunResult | None:
    """Close the row of a run whose thread still waits; None where that is not possible in time.

    From then on the run can commit nothing more. Its lease belongs to an ended run, which the next one takes over from.
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
    found: list[Closed] = []

    def close() -> None:
        try:
            with database.atomic():
                found.append(runs.fail(run_id, "partial", "shutdown", None, {}))
        except (PeeweeException, HousekeepingError):
            return  # the next run marks it as lost

    # On a connection of its own, which may hang as well.
    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(_LONGEST_S)
    return found[0] if found and not thread.is_alive() else None


def end_process(exit_code: int, line: str | None = None) -> NoReturn:
    """End the process at once, after saying so: what its threads wait for must not keep it."""
    if line is not None:
        click.echo(f"housekeeping: {printable(line)}", err=True)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)
