"""Check of foreign keys that reference deleted rows: the rows that they protect, and their cost."""

from __future__ import annotations

from collections.abc import Iterator

from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database
from housekeeping.sweeps.checks.references import sampled_references
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.error_mapping import is_unavailable
from housekeeping.sweeps.insight.diagnostics import Finding


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a finding for each foreign key that references the rows of a stage that deletes."""
    now = database_now()
    for sweep in sweeps.values():
        try:
            with database.atomic():
                found = sampled_references(sweep.stages_for_run(), now)
        except Exception as error:  # another check reports missing tables and columns, and failing predicates
            if is_unavailable(error):
                raise
            yield Finding("warning", sweep.name, "references", f"cannot be examined: {error_line(error)}")
            continue
        for each in found:
            yield Finding(each.level, sweep.name, f"references to {each.referenced}", each.text, each.way_out)
