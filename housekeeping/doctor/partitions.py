"""Checks of partitions: those that a sweep drops, and those that a sweep could drop instead of deleting their rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime
from typing import Any, Final

from housekeeping.core.errors import DeclarationError
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.core.wording import counted
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import database
from housekeeping.database.errors import is_unavailable
from housekeeping.database.time_limit import LOCK_TIME, STATEMENT_TIME, time_limit
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.partitions.hint import hint_of
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.registry import Finding
from housekeeping.sweeps.stages.stage import Stage

_SUBJECT: Final = "partitions"
#: Partitions whose reasons are listed.
_LISTED: Final = 3
#: PostgreSQL lets only the owner, or a member of that role, detach and drop.
_NOT_OWNED: Final = """
SELECT oid::regclass::text, pg_get_userbyid(relowner) FROM pg_class
WHERE (oid = to_regclass(%s) OR oid = ANY (%s::oid[])) AND NOT pg_has_role(relowner, 'USAGE') ORDER BY 1 LIMIT 1
"""


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the partitions of each sweep's table."""
    now = database_now()
    for sweep in sweeps.values():
        try:
            with time_limit(STATEMENT_TIME, LOCK_TIME):
                found = [each for stage in sweep.stages_for_run() for each in _findings(sweep, stage, now, sweeps)]
        except Exception as error:
            if is_unavailable(error):
                raise
            # Earlier checks report missing tables and columns, and failing predicates.
            continue
        yield from found


def _findings(sweep: Sweep, stage: Stage, now: datetime, sweeps: Collection[str]) -> Iterator[Finding]:
    if isinstance(stage, PartitionStage):
        yield from _dropped(sweep, stage, now, sweeps)
        return
    hint = hint_of(stage, now)
    if hint is not None:
        yield Finding("fine", sweep.name, _SUBJECT, hint)


def _dropped(sweep: Sweep, stage: PartitionStage, now: datetime, sweeps: Collection[str]) -> Iterator[Finding]:
    try:
        candidates = stage.candidates(now)
    except DeclarationError as error:
        yield Finding("error", sweep.name, _SUBJECT, error_line(error), "see docs/howto/drop-partitions.md")
        return
    ids = [each.id for each in candidates.table.partitions]
    not_owned: Any = database.execute_sql(_NOT_OWNED, (candidates.table.name, ids)).fetchone()
    if not_owned is not None:
        table, owner = not_owned
        way_out = f"GRANT {owner} TO current_user, or ALTER TABLE {table} OWNER TO current_user"
        yield Finding("error", sweep.name, _SUBJECT, f"only {owner}, the owner of {table}, can drop it", way_out)
        return
    for table, worker in candidates.left_by_others.items():
        if worker not in sweeps:
            text = f"{table} was detached by {worker}, which is not configured and cannot drop it"
            way_out = f"drop or attach it, or keep it: COMMENT ON TABLE {table} IS NULL"
            yield Finding("warning", sweep.name, _SUBJECT, text, way_out)
    found = [(each.partition, candidates.reason_to_stay(each)) for each in candidates.all()]
    staying = [f"{partition.name} ({reason})" for partition, reason in found if reason is not None]
    how = "concurrently" if candidates.table.detaches_concurrently else "in short transactions that lock the table"
    text = f"{counted(len(found) - len(staying), 'partition')} can be dropped now; they are detached {how}"
    yield Finding("fine", sweep.name, _SUBJECT, text)
    if staying:
        more = f", and {len(staying) - _LISTED} more" if len(staying) > _LISTED else ""
        text = (
            f"{counted(len(staying), 'partition')} whose range is over must stay: {', '.join(staying[:_LISTED])}{more}"
        )
        yield Finding("warning", sweep.name, _SUBJECT, text)
