"""Tables of runs from the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from rich.table import Table

from housekeeping.cli.formatting import table
from housekeeping.core.wording import format_duration
from housekeeping.presentation.formatting import format_counts
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.counts import in_order
from housekeeping.sweeps.ledger.models import Run

_SENT_BY: Final = {"enqueue": "demo"}  # the ledger records the demo's messages as enqueued by the application


def runs_table(runs: Iterable[Run], sweeps: dict[str, Sweep], *, wide: bool) -> Table:
    """Return a table with one row per run; `wide` adds its trigger and start."""
    further = ("SENT BY", "STARTED (UTC)") if wide else ()
    shown = table("LAST RUNS OF", *further, "OUTCOME", ">TOOK", "DID")
    for run in runs:
        origin = (_SENT_BY.get(run.trigger, run.trigger), run.started_at.strftime("%H:%M:%S")) if wide else ()
        shown.add_row(
            run.worker,
            *origin,
            run.outcome or "running",
            format_duration(_seconds(run)) if run.finished_at else "-",
            _did(run.counts, run.reason, sweeps[run.worker]) if run.outcome or any(run.counts.values()) else "-",
        )
    return shown


def sums_table(runs: Iterable[Run], sweeps: dict[str, Sweep], title: str) -> Table:
    """Return a table with one row for all runs with the same worker, trigger, outcome and reason."""
    alike: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.worker, run.trigger, run.outcome, run.reason), []).append(run)
    shown = table("WORKER", "SENT BY", ">RUNS", "OUTCOME", ">TOOK", "DID", title=title)
    for (worker, trigger, outcome, reason), same in alike.items():
        total: Counter[str] = Counter()
        for run in same:
            total.update({name: value for name, value in run.counts.items() if not isinstance(value, str)})
        took = format_duration(sum(map(_seconds, same)))
        did = _did(dict(total), reason, sweeps[worker])
        shown.add_row(worker, _SENT_BY.get(trigger, trigger), str(len(same)), outcome, took, did)
    return shown


def _seconds(run: Run) -> float:
    seconds: float = (run.finished_at - run.started_at).total_seconds()
    return seconds


def _did(did: dict[str, Any], reason: str | None, sweep: Sweep) -> str:
    return reason if reason and not any(did.values()) else format_counts(in_order(sweep, did))
