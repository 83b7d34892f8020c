"""Execution of one erasure: checks, objects, other systems, rows in passes, and the proof that nothing is left.

`execute` does it for the number of an erasure. Everything that it does can be done again: the erasure's row in the
ledger and the rows that are left are the only state, so a killed execution is repeated from its beginning.
"""

from __future__ import annotations

import csv
import math
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, Final, Literal

from peewee import DataError, PeeweeException

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import (
    BrokerUnavailable,
    ClocksDiffer,
    DatabaseUnavailable,
    DeclarationError,
    ErasureInterrupted,
    LeaseLost,
    ObjectNotDeleted,
    ObjectStoreUnavailable,
    RedisUnavailable,
    SettingsError,
    UnknownSubject,
)
from housekeeping.core.logs import counted, format_duration
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.settings import Settings
from housekeeping.core.telemetry import current_message
from housekeeping.database.catalog import escaped, key_of, quoted_name, sql_name, table_of
from housekeeping.database.connection import database
from housekeeping.database.errors import Kind, caused_by, is_unavailable, kind_of
from housekeeping.engine import RunResult
from housekeeping.engine.guard import RowGuard, much_in_words
from housekeeping.engine.purge import any_of, holds_on
from housekeeping.engine.run import run_sweep
from housekeeping.erasures.graph import TableName, cut_links, read_reach, refuse_unknown_columns, stored_views
from housekeeping.erasures.stages import Conditions, Stale, error_text, stage_of, text_of, typed_key, without_identity
from housekeeping.leases.lease import ExclusiveLease
from housekeeping.ledger import erasures
from housekeeping.sweeps.actions import Delete
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.stage import DETAILS, merged
from housekeeping.sweeps.subjects import Objects, Subject
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.values import Guard, Lease, Limits, Setup, declared
from housekeeping.workers.object_storage.stores import ObjectStore, StoreDeletion

logger = named_logger(__name__)

#: Passes over the rows. A pass finds what was locked, or written, during the one before.
PASSES: Final = 5
#: Seconds before the second pass; twice as many before each further one.
FIRST_WAIT_S: Final = 0.5
#: Rows up to which those that are left are counted.
COUNTED: Final = 10_000
_BATCH: Final = 1000
#: A run of an erasure is continued by another one after this time.
_RUNTIME: Final = timedelta(minutes=5)
_RETRY_S: Final = 60.0


_OUTAGES: Final = (
    DatabaseUnavailable,
    RedisUnavailable,
    BrokerUnavailable,
    ObjectStoreUnavailable,
    ClocksDiffer,
    LeaseLost,
    SettingsError,
)


@declared
class ErasureSweep(Sweep):
    """Sweep of one run of an erasure. Its name has a colon, which declared names cannot have."""

    _name_form: ClassVar[re.Pattern[str]] = re.compile(r"erase:[a-z0-9_]{1,63}")


class Erasing:
    """What belongs to one subject, and how it is erased.

    Parameters:
      key: Values of its primary key, as PostgreSQL writes them.
      versions: Those of its row that were read before. The current one is added, if the row still exists.
      needs: As `read_reach`.

    Raises:
      DependentsRefused: As `read_reach`.
      peewee.PeeweeException: A database does not answer.
    """

    def __init__(
        self,
        subject: Subject,
        key: Sequence[str],
        versions: Sequence[Mapping[str, str | None]],
        sweeps: Collection[Sweep] = (),
        needs: Literal["erasure", "export"] = "erasure",
    ) -> None:
        self.subject, self._sweeps = subject, sweeps
        self.reach = read_reach(subject, needs=needs)
        with database.using(subject.database):
            model = subject.model
            self._key = [each.column_name for each in key_of(model)]
        self.versions = [*versions] or [dict(zip(self._key, key, strict=True))]
        current = self._read_row()
        self._was_gone = current is None
        if current is not None and current != self.versions[-1]:
            self.versions = [*versions, current]
        self._conditions = Conditions(self.reach, self.versions)

    def _read_row(self) -> dict[str, str | None] | None:
        names = tuple(dict.fromkeys((*self._key, *self.reach.columns)))
        with database.using(self.subject.database):
            columns = ", ".join(f"{sql_name(each)}::text" for each in names)
            where, values = Conditions(self.reach, self.versions).of_root("s")
            sql = f"SELECT {columns} FROM {quoted_name(self.subject.model)} AS s WHERE {where}"  # noqa: S608
            row: Any = database.execute_sql(sql, values).fetchone()
        return None if row is None else dict(zip(names, row, strict=True))

    @property
    def found(self) -> Mapping[str, str | None]:
        """The newest version of its row."""
        return self.versions[-1]

    @property
    def key(self) -> list[str]:
        """Values of its primary key, as its row has them."""
        return [str(self.found[each]) for each in self._key]

    def objects(self, settings: Settings) -> list[tuple[ObjectStore, str]]:
        """Return the stores of its objects, with the key or prefix in each version of its row. Raises as `located`.

        Without a version, its row was gone before this erasure, and so were the objects.
        """
        pairs = [(each, row) for each in self.subject.objects for row in self.versions]
        return [located(each, settings, row) for each, row in pairs if set(each.columns) <= row.keys()]

    @property
    def exists(self) -> bool:
        """Whether the subject's row exists."""
        return self._root_rows() > 0

    def left(self) -> dict[str, int]:
        """Return by table how many rows are not what they should be, counted up to `COUNTED` for each link."""
        self._conditions = Conditions(self.reach, self.versions)
        found = {self.reach.root[1]: self._root_rows()}
        for branch in self.reach.branches:
            name = branch.link.table
            if branch not in self.reach.kept_by(branch.table):
                found[name] = found.get(name, 0) + self._conditions.left(branch, COUNTED)
        return found

    def kept_rows(self) -> dict[str, int | None]:
        """Return the number of rows that will stay as they are by table, counted up to `COUNTED`.

        None if the subject's row is gone, because the values that referred to it are unknown.
        """
        found: dict[str, int | None] = {}
        for table in self.reach.tables:
            if self.reach.kept_by(table):
                before = found.get(table[1], 0)
                found[table[1]] = (
                    None if before is None or self._was_gone else before + self._conditions.kept(table, COUNTED)
                )
        return found

    def _root_rows(self) -> int:
        with database.using(self.subject.database):
            where, values = self._conditions.of_root("s")
            sql = f"SELECT count(*) FROM {quoted_name(self.subject.model)} AS s WHERE {where}"  # noqa: S608
            row: Any = database.execute_sql(sql, values).fetchone()
        return int(row[0])

    @property
    def kept(self) -> dict[str, str]:
        """The tables whose rows are kept, with the reason."""
        return {each.link.table: each.reason for each in self.reach.branches if each.reason is not None}

    @property
    def outside(self) -> list[str]:
        """What the erasure does not reach."""
        databases = ", ".join(dict.fromkeys(name for name, _ in self.reach.tables))
        called = [f"the system that {name_of(each.function)} calls, beyond its answer" for each in self.subject.also]
        stores = [f"versions of objects that the store {each.location} keeps" for each in self.subject.objects]
        return [
            f"backups, WAL and logs of the databases {databases}",
            *stores,
            *called,
            "messages, logs and caches of the application",
            *(each.text for each in cut_links(self.reach, self._sweeps)),
            *(f"{each.text}: {each.way_out}" for each in stored_views(self.reach)),
        ]

    def holding(self) -> str | None:
        """Return the sweep that holds a row of the subject, with the table; None if there is none."""
        now = SYSTEM_CLOCK.now()
        for table in self.reach.tables:
            with database.using(table[0]):
                model: Any = self.reach.model_of(table)
                for name, hold in holds_on(model, table[0], self._sweeps).items():
                    held = any_of({name: hold})
                    assert held is not None
                    if model.select(*key_of(model)).where(self._mine(table)(now) & held(now)).limit(1).exists():
                        return f"{table[1]}, by the hold of {name}"
        return None

    def unconfirmed(self) -> str | None:
        """Return which table it would change much of, so that it needs a confirmation; None if it needs none."""
        kind = self.subject.name
        changed = [each for each in self.reach.tables if self.reach.may_be_changed(each)]
        for name, tables in groupby(sorted(changed, key=itemgetter(0)), itemgetter(0)):
            with database.using(name):
                stages = [
                    TableStage(
                        name=each[1], stale=self._mine(each), order=key_of(self.reach.model_of(each)), action=Delete()
                    )
                    for each in tables
                ]
                sweep = self._sweep(name, stages)
                much = RowGuard(sweep, stages, SYSTEM_CLOCK.now()).much_of_a_table()
            if much is not None:
                shown = next(each.name for each in stages if quoted_name(each.model) == much["table"])
                found = much_in_words({**much, "table": shown}, f"belong to this {kind}", "the limit")
                command = f"housekeeping erase {kind} KEY"
                return f"{found}. Look: {command} --dry-run; then: {command} --confirm"
        return None

    def _mine(self, table: TableName) -> Stale:
        """Return the predicate of the rows of a table that belong to the subject."""
        return Stale(self._conditions, table)

    def sweeps(self, lease: str) -> Iterator[Sweep]:
        """Yield the sweeps of one pass, each of one database, in order.

        Parameters:
          lease: Key of the lease that the runs need.
        """
        conditions = self._conditions = Conditions(self.reach, self.versions)
        steps: list[tuple[TableName, Any]] = [(each.table, each) for each in self.reach.steps()]
        steps.append((self.reach.root, None))
        for name, group in groupby(enumerate(steps), lambda step: step[1][0][0]):
            with database.using(name):
                stages = [self._stage(conditions, number, *step) for number, step in group]
            yield self._sweep(name, stages, Lease(lease, 2 * _RUNTIME))

    def _sweep(self, of_database: str, stages: Sequence[TableStage], lease: Lease | None = None) -> Sweep:
        return ErasureSweep(
            f"erase:{self.subject.name}",
            stages,
            database=of_database,
            lease=lease,
            limits=Limits(_BATCH, _RUNTIME, resume="never"),
            guard=Guard(times_history=None, first_run=False),  # `unconfirmed` checks the whole erasure
            setup=Setup(declared=lambda: self._sweeps),
        )

    def _stage(self, conditions: Conditions, number: int, table: TableName, branch: Any) -> TableStage:
        hold = any_of(holds_on(self.reach.model_of(table), table[0], self._sweeps))
        name = "subject" if branch is None else f"{number + 1} {branch.link.name}"
        return stage_of(conditions, branch, name, hold, _BATCH)


def execute(
    number: int,
    settings: Settings,
    subjects: Mapping[str, Subject],
    sweeps: Collection[Sweep] = (),
    stopping: threading.Event | None = None,
) -> None:
    """Execute an erasure, and record how it ended. One that has ended, or does not exist, changes nothing.

    Parameters:
      subjects: Those that can be erased, by name.
      sweeps: All declared sweeps, whose holds it respects.
      stopping: Ends it after the current batch once it is set.

    Raises:
      ErasureInterrupted: It is to be continued later.
      Exception: A server is unavailable; it is to be tried again.
    """
    row = erasures.begin(number)
    if row is None:
        return
    subject = subjects.get(row.subject)
    if subject is None:
        erasures.end(number, "failed", f"there is no subject {row.subject!r}", of_runs={}, proof=None)
        return
    execution = _Execution(number, row, subject, settings, sweeps, stopping or threading.Event())
    try:
        without_identity(execution.run)
    except Exception as error:
        if isinstance(error, ErasureInterrupted) or _is_outage(error):
            raise
        logger.exception("Erasure failed", erasure=number, error=error_text(error))
        execution.end(None, "failed", error_text(error))


class _Execution:
    """One execution of an erasure."""

    def __init__(
        self,
        number: int,
        row: Any,
        subject: Subject,
        settings: Settings,
        sweeps: Collection[Sweep],
        stopping: threading.Event,
    ) -> None:
        self._number, self._row, self._subject, self._settings = number, row, subject, settings
        self._sweeps, self._stopping = sweeps, stopping
        self._worker = f"erase:{subject.name}"
        self._error: str | None = None

    def run(self) -> None:
        try:
            erasing = Erasing(self._subject, self._row.key, self._row.found or [], self._sweeps)
            held = erasing.holding()
            objects = erasing.objects(self._settings)
        except DeclarationError as error:
            self._refuse(str(error), None)
            return
        # Kept rows are counted before the first change; a killed execution has done so.
        proof = self._row.proof or {"kept": erasing.kept_rows()}
        noted: Any = {"kept": erasing.kept, "outside": erasing.outside, "proof": proof}
        if not erasures.note_found(self._number, self._row.found, erasing.versions, **noted):
            # It may have changed rows since their versions and numbers were read.
            raise ErasureInterrupted("another process is executing it", _RETRY_S)
        self._row.found, self._row.proof = erasing.versions, proof
        if held is not None:
            self._refuse(f"on hold: {held}", erasing)
            return
        # One that has changed something passed before.
        much = None if self._row.confirmed or self._has_counts() else erasing.unconfirmed()
        if much is not None:
            self._refuse(much, erasing)
            return
        try:
            for each in objects:
                self._delete_objects(*each)
            for call in self._subject.also:
                self._call(call, erasing.key)
        except ObjectNotDeleted as error:
            self.end(erasing, "failed", str(error))
            return
        self._erase_rows(erasing)

    def _refuse(self, text: str, erasing: Erasing | None) -> None:
        """End as refused, or as incomplete if an earlier execution has changed something."""
        self.end(erasing, "incomplete" if self._has_counts() else "refused", text)

    def end(self, erasing: Erasing | None, state: str, error: str | None = None, proof: Any = None) -> None:
        """Record how it has ended."""
        databases = self._databases(erasing)
        of_runs = self._counts_of_runs()
        values = set[str]()
        if state != "refused":
            versions = [row.values() for row in self._row.found or ()]
            values = {*self._row.key, ",".join(self._row.key), *(each for row in versions for each in row if each)}
        erasures.forget_rows(self._number, self._worker, databases, values)
        erasures.end(self._number, state, error, of_runs=of_runs, proof=proof)
        if state == "done":
            logger.info("Erasure is done", erasure=self._number, kind=self._subject.name)
        else:
            logger.error("Erasure ended", erasure=self._number, kind=self._subject.name, state=state, error=error)

    def _databases(self, erasing: Erasing | None) -> list[str]:
        return (
            list(database.by_name()) if erasing is None else list(dict.fromkeys(at for at, _ in erasing.reach.tables))
        )

    def _has_counts(self) -> bool:
        """Return whether any execution has changed something."""
        return bool(erasures.counts_of(self._number) or self._counts_of_runs())

    def _counts_of_runs(self) -> dict[str, Any]:
        """Return the rows that the runs of all executions have changed, by table."""
        found: dict[str, Any] = {}
        for counts in erasures.counts_of_runs(self._number, self._worker, database.by_name()):
            found = merged(found, (counts.get(DETAILS) or {}).get("dependents") or {})
        return {name: each for name, each in found.items() if any(each.values())}

    # -- objects and other systems

    def _delete_objects(self, store: ObjectStore, key: str) -> None:
        deletion = StoreDeletion(store, hides_keys=True)
        pages = store.paths_below(key) if key.endswith("/") else iter([[key]])
        for paths in pages:
            while paths and deletion.unavailable is None:
                some, paths = paths[: deletion.at_once], paths[deletion.at_once :]
                deleted = deletion.delete(some)
                if deleted.refused:
                    raise ObjectNotDeleted(f"the store {store.location} refused {len(deleted.refused)} objects")
                if deleted.gone:
                    erasures.count(self._number, f"objects in {store.location}", "deleted", len(deleted.gone))
            if deletion.unavailable is not None:
                raise ErasureInterrupted(f"the store {store.location} is unavailable", _RETRY_S)

    def _call(self, call: Any, key: Sequence[str]) -> None:
        name = name_of(call.function)
        try:
            call.function(*key)
        except Exception as error:
            # Its text may have the key.
            if call.is_unavailable(error):
                raise ErasureInterrupted(f"{name}: {type(error).__name__}", _RETRY_S) from None
            raise ObjectNotDeleted(f"{name} raised {type(error).__name__}") from None
        erasures.count(self._number, f"call of {name}", "called", 1)

    # -- rows

    def _erase_rows(self, erasing: Erasing) -> None:
        passes, wait_s = 0, FIRST_WAIT_S
        while True:
            passes += 1
            if self._pass(erasing):
                self._error = None
            left = erasing.left()
            proof = {"passes": passes, "left": left, **self._row.proof}
            if not any(left.values()):
                self.end(erasing, "done", None, proof)
                return
            if passes >= PASSES:
                rows = counted(sum(left.values()), "row is", "rows are")
                why = f": {self._error}" if self._error else ""
                held = erasing.holding()
                why += f"; on hold: {held}" if held else ""
                self.end(erasing, "incomplete", f"{rows} left{why}", proof)
                return
            if self._stopping.wait(wait_s):
                raise ErasureInterrupted("the process stops")
            wait_s *= 2

    def _pass(self, erasing: Erasing) -> bool:
        """Run the sweeps of one pass. Return whether no row has failed, and no run stopped without a change."""
        is_fine = True
        for place, sweep in enumerate(erasing.sweeps(f"erasure.{self._row.key_hmac[:32]}")):
            while (result := self._run(sweep, place)).reason == "out_of_time" and _has_changed(result):
                logger.info("Erasure continues in another run", erasure=self._number)
            if result.reason == "out_of_time":
                # Another run would end as this one did. The proof decides.
                is_fine, self._error = False, "a run reached its time limit and changed nothing"
                continue
            self._judge(sweep, result)
            failed = result.outcome == "failed" or bool(result.counts.get("failed"))
            is_fine = is_fine and not failed
            if failed:
                self._error = str(result.reason or counted(result.counts["failed"], "row") + " failed")
        return is_fine

    def _run(self, sweep: Sweep, place: int) -> RunResult:
        # An ended run is not repeated. The rows that it has left get a run with a new message id.
        ended = erasures.count_ended_runs(self._number, self._worker, sweep.database)
        with _part_of_message(f"{place}.{ended}"):
            return run_sweep(sweep, noted={erasures.OF_ERASURE: self._number}, stopping=self._stopping)

    def _judge(self, sweep: Sweep, result: RunResult) -> None:
        """Raise if the erasure cannot go on now."""
        if result.reason == "lease_held":
            free_s = self._free_in(sweep).total_seconds()
            raise ErasureInterrupted(
                "another process executes it; if that process was killed, it can continue in "
                f"{format_duration(math.ceil(free_s))}",
                _RETRY_S,
            )
        if result.outcome == "lost_lease" or (result.outcome == "skipped" and result.reason != "already_done"):
            raise ErasureInterrupted(f"run skipped: {result.reason}", _RETRY_S)
        if result.outcome == "partial":
            raise ErasureInterrupted(f"run ended: {result.reason}")
        if result.outcome == "failed" and result.error is not None and _is_outage(result.error):
            raise result.error

    def _free_in(self, sweep: Sweep) -> timedelta:
        """Return the time until a run of the sweep can begin if the holder of its lease is dead."""
        assert sweep.lease is not None
        expires_in = ExclusiveLease(sweep.lease.key_for(None), sweep.lease.ttl).remaining() or timedelta()
        dead_in = erasures.dead_in(self._number, self._worker, sweep.database)
        return max(timedelta(), expires_in if dead_in is None else min(expires_in, dead_in))


def _has_changed(result: RunResult) -> bool:
    """Return whether a run has deleted or anonymised rows."""
    by_table = (result.counts.get(DETAILS) or {}).get("dependents") or {}
    return any(each.get(name) for each in by_table.values() for name in ("deleted", "cleared", "anonymised"))


def _is_outage(error: BaseException) -> bool:
    """Return whether the same execution may succeed later."""
    if isinstance(error, PeeweeException):
        return kind_of(error) not in (Kind.ROW, Kind.STATEMENT)
    return isinstance(error, _OUTAGES) or is_unavailable(error) or caused_by(error, (ConnectionError,))


def located(objects: Objects, settings: Settings, found: Mapping[str, str | None]) -> tuple[ObjectStore, str]:
    """Return the store of objects and their key or prefix.

    Raises:
      DeclarationError: There is no such location, or the key could be another one's.
    """
    given = settings.object_stores.get(objects.location)
    if given is None or not given.enabled:
        raise DeclarationError(f"HOUSEKEEPING_OBJECT_STORES has no location {objects.location!r}")
    key = objects.key
    for name in objects.columns:
        value = found.get(name)
        if not value or value in (".", "..") or "/" in value:
            raise DeclarationError(
                f"Objects({objects.location!r}): the column {name} of the subject cannot be part of a key"
            )
        key = key.replace(f"{{{name}}}", value)
    return ObjectStore(objects.location, given), key


def name_of(function: Any) -> str:
    """Return the name of a function of another system."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


@contextmanager
def _part_of_message(part: str) -> Iterator[None]:
    """Give a run within the block a message id for itself, because the ledger has one completed run of each message."""
    message = current_message.get()
    if message is None:
        yield
        return
    before = current_message.set(replace(message, message_id=f"{message.message_id}.{part}"))
    try:
        yield
    finally:
        current_message.reset(before)


def find_key(subject: Subject, key: Any) -> tuple[list[str], bool]:
    """Return the values of a subject's primary key as PostgreSQL writes them, and whether it has such a row.

    Parameters:
      key: A value of the primary key, several separated by commas as in CSV, or a value of the column `by`. A tuple has
        values of the primary key.

    Raises:
      UnknownSubject: It cannot be a key.
      DeclarationError: Several rows have this value, in the column `by` or as the primary key; or there is no such
        column.
      peewee.PeeweeException: The database does not answer.
    """
    return without_identity(_find_key, subject, key)


def _find_key(subject: Subject, key: Any) -> tuple[list[str], bool]:
    with database.using(subject.database):
        refuse_unknown_columns(subject)
        model = subject.model
        columns, table, types = typed_key(model), quoted_name(model), table_of(model).columns
        is_exact = isinstance(key, tuple | list)
        whole = [str(each) for each in (key if is_exact else [key])]
        given = _parts(whole[0]) if len(whole) == 1 and len(columns) > 1 else whole
        select = f"SELECT {', '.join(text_of(name, kind) for name, kind in columns.items())} FROM {table}"  # noqa: S608
        casts = [f"%s::text::{kind}" for kind in columns.values()]
        texts = ", ".join(text_of(f"({each})", kind) for each, kind in zip(casts, columns.values(), strict=True))
        values = _rows(f"SELECT {texts}", given) if len(given) == len(columns) else []
        rows = _rows(f"{select} WHERE ({', '.join(columns)}) = ({', '.join(casts)})", given) if values else []
        if subject.by is not None and not is_exact:
            where = f"{sql_name(subject.by)} = %s::text::{escaped(types[subject.by])}"
            others = _rows(f"{select} WHERE {where} LIMIT 2", whole)
            column = f"this value in the column {subject.by}, the `by` of Subject({subject.name!r})"
            if rows and others not in ([], rows):
                raise DeclarationError(
                    f"one row of {model._meta.table_name} has this primary key, and another one {column}; give the "
                    f"primary key of the other one, or the {subject.by} of the first one; in Python, a tuple is always "
                    "a primary key"
                )
            if len(others) > 1:
                raise DeclarationError(
                    f"several rows of {model._meta.table_name} have {column}; give the primary key instead"
                )
            rows = rows or others
        if rows or values:
            return list((rows or values)[0]), bool(rows)
        if subject.by is not None and len(given) == 1:
            raise UnknownSubject(f"there is no {subject.name} with this key")
    raise UnknownSubject(f"this cannot be the key of a {subject.name}")


def _parts(key: str) -> list[str]:
    """Return the parts of a composite key. Quotation marks around a part allow commas in it, as in CSV."""
    try:
        return next(csv.reader([key], strict=True), [])
    except csv.Error:
        return key.split(",")


def _rows(sql: str, values: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the rows of a query; none if a value is none of its type."""
    try:
        with database.atomic():
            found: list[tuple[str, ...]] = database.execute_sql(sql, list(values)).fetchall()
    except (DataError, ValueError):  # ValueError: the driver cannot send it, such as a NUL
        return []
    return found
