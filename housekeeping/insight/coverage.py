"""Coverage: each table of each database with its sweeps, the reason why it may grow, or the state "undecided"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, TypeVar, get_args

from peewee import Model, PeeweeException

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import DeclarationError, HousekeepingError
from housekeeping.core.logs import error_line
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit, translate_postgres_errors
from housekeeping.engine.registry import by_database
from housekeeping.erasures.graph import read_reach
from housekeeping.ledger.schema import MODELS, Run, TableSize
from housekeeping.ledger.table_sizes import (
    growth_of_tables,
    oldest_rows,
    read_cascades,
    read_named,
    read_tables,
)
from housekeeping.sweeps.actions import archiving, delete_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.rows import OfTable, Rows
from housekeeping.sweeps.stage import OfTables
from housekeeping.sweeps.subjects import Subject
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.validate_tables import archives_of, recorded
from housekeeping.sweeps.values import Kept

T = TypeVar("T")

#: ``own``: a table of the library. ``archive``: rows that a sweep has archived.
CoverageState = Literal["swept", "kept", "undecided", "own", "archive"]


#: Names of the library's own tables, in the schema of the settings.
_OWN: Final = {"migrations", *(model._meta.table_name for model in MODELS)}


@dataclass(frozen=True, slots=True)
class CoveredTable:
    """A table with its coverage. A partitioned table includes its partitions.

    Attributes:
      database: Name of its database.
      table: Its name, with the schema if it needs one.
      by: The sweeps and subjects that clean it, or that fill it if it is an archive.
      reason: Why it is kept, why its sweeps do not count, or the table whose deletions cascade to it; else None.
      rows: Estimated; None if unknown.
      bytes: Size with indexes; None while another session holds an exclusive lock on it.
      growth_bytes_per_day: Between two nights; None if unknown.
      oldest_at: Time of the oldest stale row at the end of a sweep's last run; None if none was left, or its age
        is unknown.
    """

    database: str
    schema: str
    table: str
    state: CoverageState
    by: tuple[str, ...] = ()
    reason: str | None = None
    rows: int | None = None
    bytes: int | None = None
    growth_bytes_per_day: int | None = None
    oldest_at: datetime | None = None

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``tables`` in ``housekeeping coverage --json``, always with its database."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Coverage:
    """Tables of all databases, the fastest growing first.

    Attributes:
      unfit: Names of `Kept` that match no table; empty while a database is unavailable.
      unavailable: Database -> why it could not be read.
    """

    at: datetime
    tables: Sequence[CoveredTable] = ()
    unfit: Sequence[str] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def undecided(self) -> list[CoveredTable]:
        """The undecided tables."""
        return [each for each in self.tables if each.state == "undecided"]

    @property
    def counts(self) -> dict[str, int]:
        """Number of tables by state."""
        return {state: sum(each.state == state for each in self.tables) for state in get_args(CoverageState)}

    def as_json(self) -> dict[str, Any]:
        """Return what ``housekeeping coverage --json`` prints."""
        return {
            "at": self.at,
            "counts": self.counts,
            "tables": self.tables,
            "unknown_kept": self.unfit,
            "unavailable": self.unavailable,
        }


@dataclass(frozen=True, slots=True)
class _Touch:
    """A change of a table, by its name in SQL, by a sweep.

    Attributes:
      how: The table whose deletions cascade to it; None if its own rows are stale.
    """

    sweep: str
    table: str
    how: str | None = None
    deletes: bool = False
    is_archive: bool = False


def read_coverage(sweeps: Iterable[Sweep], kept: Sequence[Kept], subjects: Iterable[Subject] = ()) -> Coverage:
    """Read the coverage of all databases from their catalogs and ledgers; no row of a table is read.

    A database that does not answer is among `Coverage.unavailable`.
    """
    tables, unavailable, fitting = list[CoveredTable](), dict[str, str](), set[str]()
    of_databases, elsewhere = by_database(sweeps), dict[str, list[_Touch]]()
    # A cascade may reach into another database, which is read after those of all sweeps.
    touches: dict[str, _Touches] = {}
    for name, own in of_databases.items():
        read = _read_in(name, unavailable, partial(_Touches, own))
        if read is not None:
            touches[name] = read
            for other, touch in read.elsewhere:
                elsewhere.setdefault(other, []).append(touch)
    reasons: dict[str, list[Kept]] = {}
    for subject in subjects:
        _read_subject(subject, touches, elsewhere, reasons)
    for name, found in touches.items():
        known = [*kept, *reasons.get(name, ())]
        covered = _read_in(name, unavailable, partial(found.cover, name, elsewhere.get(name, ()), known))
        if covered is not None:
            tables += covered[0]
            fitting |= covered[1]
    tables.sort(
        key=lambda each: (-(each.growth_bytes_per_day or 0), -(each.bytes or 0), each.database, each.schema, each.table)
    )
    unfit = [] if unavailable else [each.table for each in kept if each.table not in fitting]
    return Coverage(SYSTEM_CLOCK.now(), tables, unfit, unavailable)


def _read_in(name: str, unavailable: dict[str, str], read: Callable[[], T]) -> T | None:
    """Return what `read` returns in a database; None if it cannot be read, with the reason in `unavailable`."""
    try:
        with database.using(name), translate_postgres_errors(), time_limit(STATEMENT_TIME, LOCK_TIME):
            return read()
    except (HousekeepingError, PeeweeException) as error:
        unavailable[name] = error_line(error)
    return None


def _read_subject(
    subject: Subject,
    touches: Mapping[str, _Touches],
    elsewhere: dict[str, list[_Touch]],
    reasons: dict[str, list[Kept]],
) -> None:
    """Add the tables whose rows an erasure deletes or changes, and the reasons why it keeps others."""
    if subject.database not in touches:
        return
    own = elsewhere.setdefault(subject.database, [])
    try:
        reach = read_reach(subject)
    except DeclarationError as error:
        touches[subject.database].refuse(subject.name, f"subject {subject.name} is refused: {error}")
        with database.using(subject.database):
            own.append(_Touch(subject.name, quoted_name(subject.model)))
        return
    except (HousekeepingError, PeeweeException):
        return  # the database is among the unavailable ones
    own.append(_Touch(subject.name, reach.root[1]))
    for branch in reach.branches:
        if branch.deletes or branch.values:
            elsewhere.setdefault(branch.table[0], []).append(_Touch(subject.name, branch.table[1]))
        else:
            reason = f"{subject.name}: {branch.reason}"
            reasons.setdefault(branch.table[0], []).append(Kept(branch.table[1], reason))


class _Touches:
    """Tables that the sweeps of the current database change.

    Attributes:
      elsewhere: Changed tables of other databases, with the name of the database.
    """

    def __init__(self, sweeps: Sequence[Sweep]) -> None:
        self._workers = [sweep.name for sweep in sweeps]
        self._touches = [touch for sweep in sweeps for touch in _touched_by(sweep)]
        self._ids = read_named(sorted({each.table for each in self._touches}))
        met = {each.sweep for each in self._touches if each.table in self._ids}
        self._inactive = {sweep.name: why for sweep in sweeps if sweep.name in met and (why := _inactive(sweep))}
        self.elsewhere: list[tuple[str, _Touch]] = []
        for sweep in sweeps:
            if sweep.name in met and sweep.name not in self._inactive:
                self._read_graphs(sweep)

    def _read_graphs(self, sweep: Sweep) -> None:
        """Add the dependents that the sweep itself deletes."""
        for part in sweep.parts:
            delete = delete_of(part)
            if delete is None or delete.dependents is None:
                continue
            try:
                graph = delete.read_graph(part.model)
            except DeclarationError as error:
                self._inactive[sweep.name] = f"{sweep.name} is refused: {error}"
                continue
            for link in graph.links:
                if link.decision == "delete":
                    touch = _Touch(sweep.name, link.table, f"with the rows of {link.parent}")
                    self.elsewhere.append((link.database, touch))

    def refuse(self, name: str, why: str) -> None:
        """Let the touches of a sweep or subject not count."""
        self._inactive[name] = why

    def cover(self, name: str, cascaded: Sequence[_Touch], kept: Sequence[Kept]) -> tuple[list[CoveredTable], set[str]]:
        """Return the tables of the current database, and the names of `Kept` that match one."""
        tables, schema = read_tables(), Run._meta.schema
        names = {*(each.table for each in cascaded), *(each.table for each in kept)}
        ids = self._ids | read_named(sorted(names))
        labels = {each.id: each.label for each in tables}
        touches: dict[int, list[_Touch]] = {}
        for touch in (*self._touches, *cascaded):
            if touch.table in ids:
                touches.setdefault(ids[touch.table], []).append(touch)
        self._cascade(touches, labels)
        reasons = {ids[each.table]: each.reason for each in kept if each.table in ids}
        has_ledger = any((each.schema, each.name) == (schema, TableSize._meta.table_name) for each in tables)
        growth, oldest = (growth_of_tables(), oldest_rows(self._workers)) if has_ledger else ({}, {})
        found = []
        for each in tables:
            state, by, reason = self._state(touches.get(each.id, ()), reasons.get(each.id))
            found.append(
                CoveredTable(
                    database=name,
                    schema=each.schema,
                    table=each.label,
                    state="own" if each.schema == schema and each.name in _OWN else state,
                    by=by,
                    reason=reason,
                    rows=each.rows,
                    bytes=each.size,
                    growth_bytes_per_day=growth.get((each.schema, each.name)),
                    oldest_at=min((oldest[sweep] for sweep in by if sweep in oldest), default=None),
                )
            )
        return found, {each.table for each in kept if each.table in ids}

    def _cascade(self, touches: dict[int, list[_Touch]], labels: Mapping[int, str]) -> None:
        """Add the tables that PostgreSQL cascades to when a sweep deletes rows."""
        children = read_cascades()
        waiting = [(table, touch) for table, known in touches.items() for touch in known if touch.deletes]
        while waiting:
            parent, touch = waiting.pop()
            for child in children.get(parent, ()):
                known = touches.setdefault(child, [])
                if all(each.sweep != touch.sweep for each in known):
                    known.append(replace(touch, how=f"with the rows of {labels.get(parent, 'another table')}"))
                    waiting.append((child, known[-1]))

    def _state(
        self, touches: Sequence[_Touch], reason: str | None
    ) -> tuple[CoverageState, tuple[str, ...], str | None]:
        active = [each for each in touches if each.sweep not in self._inactive]
        by = tuple(dict.fromkeys(each.sweep for each in active))
        if any(each.is_archive for each in touches):
            return "archive", by, reason
        if active:
            return "swept", by, None if any(each.how is None for each in active) else active[0].how
        if reason is not None:
            return "kept", (), reason
        return "undecided", (), next((self._inactive[each.sweep] for each in touches), None)


def _inactive(sweep: Sweep) -> str | None:
    """Return why a sweep does not run in this installation; None if it does."""
    if not sweep.enabled:
        return f"{sweep.name} is disabled"
    problem = sweep.lacks()
    return None if problem is None else f"{sweep.name} is not set up: {problem.text}"


def _touched_by(sweep: Sweep) -> Iterator[_Touch]:
    """Yield the tables that a sweep changes. Only the archive of a table without a model needs a query."""
    parts = sweep.parts
    for part in parts:
        delete = delete_of(part)
        # The dependents of a sweep with `dependents` are in its graph.
        deletes = delete is not None and delete.dependents is None
        names = [part.table] if isinstance(part, OfTable) and part.is_named else [*map(quoted_name, _models_of(part))]
        yield from (_Touch(sweep.name, name, deletes=deletes) for name in names)
    is_archived = any(archiving(part.action) is not None for part in parts if isinstance(part, Rows) and part.is_named)
    for archive in archives_of(sweep.declared_stages() if is_archived else sweep.known_stages()):
        yield _Touch(sweep.name, quoted_name(archive), is_archive=True)


def _models_of(part: Any) -> Iterable[type[Model]]:
    """Return the tables whose rows a stage changes or drops."""
    if isinstance(part, OfTable | PartitionStage):
        return [part.model]
    if isinstance(part, TableStage):
        changes = recorded(part, SYSTEM_CLOCK.now()).changes
        return [
            model for model, rights in changes.items() if any(each.startswith(("DELETE", "UPDATE")) for each in rights)
        ]
    return part.tables if isinstance(part, OfTables) else ()
