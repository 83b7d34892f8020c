"""Restore of a run: its rows move from the archive back to their table, as a run of its own in the ledger.

The run holds the sweep's lease. The sweep is paused before the first row moves, so that it does not delete the rows
again, even if this process dies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import and_
from typing import Any, Final

from peewee import JOIN, SQL, Column, Model, PeeweeException, Select, Tuple, fn

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import ArchiveMismatch, HousekeepingError, WrongArgument
from housekeeping.core.logs import counted, error_line
from housekeeping.database.catalog import (
    column_names,
    defers_keys,
    identify,
    key_of,
    quoted_name,
    read_columns,
    table_of,
)
from housekeeping.database.connection import database
from housekeeping.database.errors import is_unavailable
from housekeeping.engine import RunResult
from housekeeping.engine.purge import recorded_request, sweep_of
from housekeeping.engine.run import run_sweep
from housekeeping.ledger import history, operators, runs
from housekeeping.ledger.history import RunRecord
from housekeeping.ledger.operators import Override
from housekeeping.ledger.runs import PURGE, RESTORE
from housekeeping.ledger.schema import Run
from housekeeping.sweeps.actions import ADDED, ARCHIVED_BY_RUN, CLEARED_COLUMNS, takes_cleared
from housekeeping.sweeps.cascade import CascadeStage
from housekeeping.sweeps.conditions import condition_on
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.dependents import Link
from housekeeping.sweeps.restored_rows import CONFLICTS, RELINKED, RESTORED, Restore, RestoreCleared, array_of
from housekeeping.sweeps.stage import Backlog, as_cursor
from housekeeping.sweeps.table_stage import ARCHIVED_ROWS, TableStage
from housekeeping.sweeps.validate_tables import archives_of
from housekeeping.sweeps.values import Guard, Limits

#: What the name of a restoring run has before that of its sweep.
PREFIX: Final = "restore:"
#: Time limit of a restoring run. It renews its lease.
_LONGEST: Final = timedelta(days=1)
#: Seconds between looks at a run of the sweep that has to end first.
_LOOK_S: Final = 0.1


class RestoreSweep(Sweep):
    """Sweep that restores from an archive. The library declares it, so it needs no validation."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class RestoredTable:
    """Table whose archived rows are restored.

    Attributes:
      stage: The stage of the restoring run.
      lost_columns: Columns of the archive that the table no longer has. Their values are not restored.
    """

    source: type[Model]
    stage: TableStage
    lost_columns: tuple[str, ...] = ()

    def dry_run(self) -> dict[str, int]:
        """Return the counts of a restore, in the current transaction, and change nothing."""
        archive: Any = self.stage.model
        source: Any = self.source
        names = [column.column_name for column in key_of(self.source)]
        # The condition may name its columns without their table, so it stays apart from the join.
        rows = archive.select(*(archive._meta.columns[name] for name in names))
        archived = rows.where(self.stage.stale(SYSTEM_CLOCK.now())).cte("archived", materialized=True)
        keys = [Column(archived, name) for name in names]
        there = [source._meta.columns[name] for name in names]
        # A key that the run has archived several times is restored once.
        restored = fn.COUNT(Tuple(*keys).distinct()).filter(there[0].is_null())
        if isinstance(self.stage.action, RestoreCleared):
            # Rows that the restore brings back first are not there yet.
            restored = fn.COUNT(SQL("*"))
        joined = Select((archived,), [fn.COUNT(SQL("*")), restored]).with_cte(archived)
        same = reduce(and_, (column == key for column, key in zip(there, keys, strict=True)))
        total, free = joined.join(source, JOIN.LEFT_OUTER, on=same).tuples().execute(database)[0]
        return {RESTORED: free, CONFLICTS: total - free}


@dataclass(frozen=True, slots=True)
class Restoration:
    """Restore of the rows that one run has archived.

    Attributes:
      sweep: The sweep of the run.
      restoring: The sweep that restores the rows.
      tables: The tables, in the order in which they are restored.
      where: Condition on the rows; None for all rows of the run.
    """

    sweep: Sweep
    run_id: int
    restoring: RestoreSweep
    tables: tuple[RestoredTable, ...]
    where: str | None = None

    def dry_run(self) -> RunResult:
        """Return what would be restored, and change nothing.

        Raises:
          peewee.PeeweeException: The database does not answer.
        """
        started, now = SYSTEM_CLOCK.monotonic(), SYSTEM_CLOCK.now()
        with database.using(self.sweep.database), database.atomic():
            found = [table.dry_run() for table in self.tables]
        counts = {name: sum(each[name] for each in found) for name in (RESTORED, CONFLICTS)}
        spent = SYSTEM_CLOCK.monotonic() - started
        return RunResult(self.restoring.name, "done", None, None, now, spent, counts, dry_run=True)

    def carry_out(self, *, pause: bool, said_by: str | None = None, **options: Any) -> RunResult:
        """Restore the rows, and return the run's result. A failed run does not raise.

        Parameters:
          pause: Whether the sweep stays paused afterward. A sweep without a lease is always paused meanwhile.
          said_by: The operator.
          options: Parameters of `run_sweep`.

        Raises:
          HousekeepingError: A run of the sweep did not end in time; nothing was restored.
          peewee.PeeweeException: The database does not answer.
        """
        with database.using(self.sweep.database):
            if not pause and self.restoring.lease is not None:
                return self._run(**options)
            before = operators.override_of(self.sweep.name)
            self._pause(before, said_by)
            try:
                self._wait_for_runs(options.get("stopping"))
                return self._run(**options)
            finally:
                if not pause:
                    self._undo_pause(before)

    def _run(self, **options: Any) -> RunResult:
        noted = {RESTORE: {"run_id": self.run_id, "where": self.where}}
        return run_sweep(self.restoring, noted=noted, **options)

    def _pause(self, before: Override | None, said_by: str | None) -> None:
        if not _is_paused_for_good(before):
            operators.switch(Override(self.sweep.name, "paused", self._reason, said_by=said_by))

    @property
    def _reason(self) -> str:
        return f"restore of run {self.run_id}; a run would delete its rows again"

    def _undo_pause(self, before: Override | None) -> None:
        now = operators.override_of(self.sweep.name)
        if now is None or now.reason != self._reason:
            return  # an operator has resumed, paused or narrowed the sweep meanwhile
        if before is None:
            operators.resume(self.sweep.name)
        elif not _is_paused_for_good(before):
            operators.switch(before)

    def _wait_for_runs(self, stopping: threading.Event | None) -> None:
        deadline = time.monotonic() + runs.SILENCE.total_seconds()
        while runs.is_at_work(self.sweep.name) and not (stopping is not None and stopping.is_set()):
            if time.monotonic() > deadline:
                raise HousekeepingError(
                    f"a run of {self.sweep.name} did not end within {runs.SILENCE.total_seconds():.0f} s, although it "
                    "is paused; nothing was restored"
                )
            time.sleep(_LOOK_S)


def _is_paused_for_good(override: Override | None) -> bool:
    return override is not None and override.state == "paused" and override.until is None


def restoration_of(sweep: Sweep, run_id: int, where: str | None = None) -> Restoration:
    """Return the restore of a run, in the sweep's database.

    Parameters:
      where: SQL condition on the columns of the archive; None for all rows of the run.

    Raises:
      WrongArgument: The sweep has no archive, or `where` is no condition on it.
      ArchiveMismatch: The archive or its table is missing.
      peewee.PeeweeException: The database does not answer.
    """
    with database.using(sweep.database):
        stages = sweep.declared_stages()
        archives = archives_of(stages)
        if not archives:
            raise WrongArgument(f"{sweep.name} has no archive, so its rows cannot be restored (Delete(archive_to=...))")
        # In reverse: rows that reference others were deleted before them.
        cascades = [each for each in stages if isinstance(each, CascadeStage)]
        links: dict[type[Model], tuple[Link, ...]] = {}
        for stage in cascades:
            links |= stage.links_in_circles()
        restored = [
            _restored_table(sweep, archive, source, links.get(source, ()), run_id, where)
            for archive, (source, _) in reversed(archives.items())
        ]
        # Once the rows that they name are back.
        archive_of = {source: archive for archive, (source, _) in archives.items()}
        for stage in cascades:
            for cleared in stage.cleared_columns():
                action = RestoreCleared(*cleared)
                restored.append(_restored_columns(sweep, archive_of[action.source], action, run_id, where))
        for each in list(restored):
            if isinstance(each.stage.action, Restore) and each.stage.action.relinked:
                action = RestoreCleared(each.source, each.stage.action.relinked, False, RELINKED)
                restored.append(_restored_columns(sweep, archive_of[each.source], action, run_id, where))
        tables = tuple(restored)
        return Restoration(sweep, run_id, _sweep(sweep, tables), tables, where)


def _restored_table(
    sweep: Sweep, archive: Any, source: type[Model], links: tuple[Link, ...], run_id: int, where: str | None
) -> RestoredTable:
    identify(source)
    present, columns = set(column_names(archive)), read_columns(source)
    for table, found in ((archive, present), (source, columns)):
        if not found:
            raise ArchiveMismatch(f"nothing was restored: table {quoted_name(table)} is missing")
    condition = _of_run(archive, run_id, where)
    if takes_cleared(archive):
        condition &= Column(archive._meta.table, CLEARED_COLUMNS).is_null()
    stage = TableStage(
        name=quoted_name(archive),
        stale=lambda now: condition,
        order=key_of(archive),
        action=Restore(
            source,
            tuple(each for each in columns if each.name in present and not each.generated),
            defers_keys(source),
            tuple(each for each in links if present.issuperset(each.columns)),
        ),
        batch_size=sweep.limits.batch,
        counts=(RESTORED, CONFLICTS, "batches"),
        progress_counts=(RESTORED,),
        # If the run archived a key twice, its newest row wins. A row that references another row of its table was
        # archived before it, and can only come back after it.
        newest_first=True,
    )
    known = {*ADDED, CLEARED_COLUMNS, *(column.name for column in columns)}
    return RestoredTable(source, stage, tuple(sorted(present - known)))


def _restored_columns(
    sweep: Sweep, archive: Any, action: RestoreCleared, run_id: int, where: str | None
) -> RestoredTable:
    """Return the part of a restore that writes columns back."""
    marked = Column(archive._meta.table, CLEARED_COLUMNS) == array_of(action.columns)
    condition = _of_run(archive, run_id, where) & marked
    stage = TableStage(
        name=f"{quoted_name(archive)} {', '.join(action.columns)}",
        stale=lambda now: condition,
        order=key_of(archive),
        action=action,
        batch_size=sweep.limits.batch,
        counts=(action.restored, CONFLICTS, "batches"),
        progress_counts=(action.restored,),
        newest_first=True,
    )
    return RestoredTable(action.source, stage)


def _of_run(archive: Any, run_id: int, where: str | None) -> Any:
    """Return the condition of the rows that a run has archived."""
    condition: Any = getattr(archive, ARCHIVED_BY_RUN) == run_id
    return condition if where is None else condition & condition_on(archive, where)


def sweep_of_run(record: RunRecord, sweeps: Mapping[str, Sweep]) -> Sweep:
    """Return the sweep of a run that may have archived rows: a declared one, or that of a purge.

    Raises:
      WrongArgument: The run has restored rows itself, or its sweep or table is no longer there.
    """
    worker = record.worker
    if PURGE in record.counts:
        return sweep_of(recorded_request(record))
    if worker.startswith(PREFIX):
        raise WrongArgument(f"run {record.label} has restored rows; give the run that archived them")
    if worker not in sweeps:
        raise WrongArgument(f"run {record.label} is one of {worker}, which is not declared here (HOUSEKEEPING_SWEEPS)")
    if sweeps[worker].database != record.database:
        now = sweeps[worker].database
        raise WrongArgument(f"run {record.label} was in the database {record.database!r}, but {worker} is in {now!r}")
    return sweeps[worker]


#: Archived rows of a run that are counted at most, and of which keys can be listed.
MOST_ARCHIVED: Final = 10_000


@dataclass(frozen=True, slots=True)
class ArchivedTable:
    """Rows of one run in an archive.

    Attributes:
      table: The table that they come from.
      rows: Their number, counted up to `MOST_ARCHIVED`.
      keys: The keys of some of them, in the order in which they were archived.
    """

    table: str
    rows: Backlog
    keys: Sequence[Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``archived`` in ``housekeeping runs ID --json``."""
        return {"table": self.table, "rows": self.rows.rows, "rows_exact": self.rows.exact, "keys": self.keys}


@dataclass(frozen=True, slots=True)
class Undo:
    """What of a run can be undone.

    Attributes:
      text: In words.
      command: What an operator types; None if nothing can be undone.
      archived: The rows that a restore would bring back.
      next_skip: How many rows to skip for the next keys; None if none follow.
    """

    text: str
    command: str | None = None
    archived: Sequence[ArchivedTable] = ()
    next_skip: int | None = None


def undo_of(record: RunRecord, sweeps: Mapping[str, Sweep], *, skip: int, limit: int) -> Undo | None:
    """Return what of a run in the current database can be undone; None for a run that has processed nothing.

    Parameters:
      skip, limit: The keys to list, of each table.

    Raises:
      peewee.PeeweeException, DatabaseUnavailable: The database does not answer.
    """
    if RESTORE in record.counts or not any(type(each) is int and each for each in record.counts.values()):
        return None
    if not record.counts.get(ARCHIVED_ROWS):
        return Undo("its changes cannot be undone: it has archived no rows")
    try:
        archives: Any = archives_of(sweep_of_run(record, sweeps).declared_stages())
        found = [_archived(archive, source, record.run_id, skip, limit) for archive, (source, _) in archives.items()]
    except WrongArgument as error:
        return Undo(f"its rows cannot be restored from here: {error}")
    except PeeweeException as error:
        if is_unavailable(error):
            raise
        return Undo(f"whether its rows can be restored is unknown, the archive cannot be read: {error_line(error)}")
    archived = [each for each in found if each.rows.rows]
    if not archived:
        return Undo("its changes cannot be undone: its rows are no longer in the archive, or have been restored")
    rows = ", ".join(f"{each.rows} of {each.table}" for each in archived)
    following = skip + limit if any(each.rows.rows > skip + limit for each in archived) else None
    text = f"these archived rows can be restored: {rows}"
    return Undo(text, f"housekeeping restore {record.label}", archived, following)


def _archived(archive: Any, source: type[Model], run_id: int, skip: int, limit: int) -> ArchivedTable:
    of_run = archive.select(SQL("1")).where(getattr(archive, ARCHIVED_BY_RUN) == run_id).limit(MOST_ARCHIVED + 1)
    rows = int(Select((of_run.alias("of_run"),), [fn.COUNT(SQL("1"))]).tuples().execute(database)[0][0])
    names = [column.column_name for column in key_of(source)]
    keys = archive.select(*(archive._meta.columns[name] for name in names)).where(
        getattr(archive, ARCHIVED_BY_RUN) == run_id
    )
    listed = keys.order_by(*key_of(archive)).offset(min(skip, MOST_ARCHIVED)).limit(limit).tuples().execute(database)
    return ArchivedTable(
        quoted_name(source).replace('"', ""),
        Backlog(min(rows, MOST_ARCHIVED), rows <= MOST_ARCHIVED),
        [dict(zip(names, as_cursor(row) or (), strict=True)) for row in listed],
    )


def warning_of_restored_rows(worker: str) -> str | None:
    """Return what the worker's next run does to rows that were restored since its last one; None without such rows."""
    last = Run.select(fn.MAX(Run.id)).where((Run.worker == worker) & history.began()).scalar() or 0
    restores = [each for each in history.recent(f"{PREFIX}{worker}", _RESTORES) if each.run_id > last]
    rows = sum(each.counts.get(RESTORED) or 0 for each in restores)
    if not rows:
        return None
    return f"the next run processes {counted(rows, 'restored row')} again if still stale, {_named(restores)}"


_RESTORES: Final = 50  # restores since the last run that are read


def _named(restores: Sequence[RunRecord]) -> str:
    of = dict.fromkeys(str(each.counts[RESTORE]["run_id"]) for each in restores if each.counts.get(RESTORED))
    return f"of {'run' if len(of) == 1 else 'runs'} {', '.join(of)}"


def sweeps_of_archived_run(sweeps: Iterable[Sweep], run: tuple[str, int]) -> list[Sweep]:
    """Return the sweeps whose archive has rows of this run, in the current database.

    Parameters:
      run: Database and id of the run.

    Raises:
      peewee.PeeweeException: The database does not answer.
    """
    found = []
    for sweep in sweeps:
        archives: Any = archives_of(sweep.declared_stages()) if sweep.database == run[0] else {}
        for archive in archives:
            by_run = archive.select(SQL("1")).where(getattr(archive, ARCHIVED_BY_RUN) == run[1]).limit(1)
            if table_of(archive).exists and by_run.scalar(database):
                found.append(sweep)
    return found


def _sweep(sweep: Sweep, tables: tuple[RestoredTable, ...]) -> RestoreSweep:
    # A lease of each argument says nothing about runs with other arguments.
    lease = None if sweep.lease is None or callable(sweep.lease.key) else sweep.lease
    return RestoreSweep(
        f"{PREFIX}{sweep.name}",
        [table.stage for table in tables],
        lease=lease,
        limits=Limits(
            sweep.limits.batch,
            _LONGEST,
            resume="never",
            batch_takes=sweep.limits.batch_takes,
            throttle=sweep.limits.throttle,
        ),
        guard=Guard(times_history=None, first_run=False),
        actor={"feature_category": sweep.actor["feature_category"]} if "feature_category" in sweep.actor else {},
        database=sweep.database,
    )
