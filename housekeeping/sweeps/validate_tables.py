"""A sweep's stages compared with the real tables: columns, keys, archives and triggers.

`stages_of` gives the stages of a run once keys and columns are right, `problems_of` says what is wrong with archives.
Triggers that fire are shown by `plan`, and never stop a run. `tree` has what depends on deleted rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from peewee import Field, Model, NotSupportedError, OperationalError, ProgrammingError

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import DeclarationError, DependentsRefused
from housekeeping.core.logs import error_line
from housekeeping.database.catalog import (
    FITTING,
    TEXTS,
    UNZONED,
    ZONED,
    ColumnType,
    Table,
    catalog_version,
    column_names,
    declared_key_columns,
    forget_table,
    identify,
    optional_fields,
    quoted,
    quoted_name,
    read_columns,
    read_table,
    table_if_visible,
    table_of,
    vouches_for_key,
)
from housekeeping.database.connection import database
from housekeeping.database.errors import is_timeout
from housekeeping.database.queries import Recorder, explain
from housekeeping.sweeps.actions import (
    ARCHIVED_AT,
    ARCHIVED_BY_RUN,
    CLEARED_COLUMNS,
    archive_model,
    archiving,
    takes_cleared,
)
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.rows import Call
from housekeeping.sweeps.stage import Explainable, Stage
from housekeeping.sweeps.table_stage import TableStage


def recorded(stage: Stage, now: datetime) -> Recorder:
    """Return the fields, tables and changes of a stage's statements, without executing them.

    Raw SQL within them and the function of a `Call` are not included.
    """
    recorder = Recorder()
    queries = [each.query for each in stage.explain_queries(now)] if isinstance(stage, Explainable) else []
    if isinstance(stage, TableStage):
        queries += stage.statements_of_a_run(now)
    if isinstance(stage, PartitionStage):
        queries += [stage.column, *stage.keeping(now).values()]
    for query in queries:
        recorder.sql(query)
    return recorder


def used_fields(stage: Stage, now: datetime) -> set[Field]:
    """Return the fields that the statements of a stage use."""
    fields = recorded(stage, now).fields
    if isinstance(stage, TableStage) and isinstance(stage.action, Call):
        fields.update(stage.model._meta.sorted_fields)  # its function gets whole rows
    return fields


def updated_columns(rights: Iterable[str]) -> set[str]:
    """Return the columns in rights such as ``UPDATE (status, updated_at)``."""
    return {column for right in rights for named in re.findall(r"\((.*)\)", right) for column in named.split(", ")}


#: Built-in types that do not count as text, even if an application stores text in them.
_NO_TEXTS: Final = {
    *(each for types in FITTING.values() if types != TEXTS for each in types),
    *("uuid", "json", "jsonb", "bytea", "real", "double precision", "interval"),
}
#: Column -> the field it is declared as.
Columns = dict[str, Field]


def columns_of(stages: Iterable[Stage]) -> dict[type[Model], Columns]:
    """Return the columns that the statements of stages need, without optional ones."""
    now, found = SYSTEM_CLOCK.now(), dict[type[Model], Columns]()
    for stage in stages:
        for used in used_fields(stage, now):
            columns = found.setdefault(used.model, {})
            if used.name not in optional_fields(used.model):
                columns[used.column_name] = used
    return found


def misfit(model: type[Model], needed: Columns, table: Table) -> str | None:
    """Return why a table cannot be that of the model; None if it has all needed columns, of suitable types."""
    meta: Any = model._meta
    name = meta.table_name
    if not table.exists:
        return f"table {name} is not in {database.place}"
    missing = [column for column in sorted(needed) if column not in table.columns]
    if missing:
        return f"table {name} has no column {', '.join(missing)}"
    for column, needed_field in sorted(needed.items()):
        if not _fits(needed_field, table.columns[column]):
            expected = " or ".join(sorted(_fitting(needed_field)))
            return f"column {name}.{column} is {table.columns[column]}, not {expected}"
    return None


def _fits(field: Field, type_name: str) -> bool:
    fitting = _fitting(field)
    # A text may be an enum or another type of the application's own, which compares with text.
    is_custom_text = fitting == TEXTS and type_name not in _NO_TEXTS
    return not fitting or type_name in fitting or is_custom_text


def _fitting(field: Field) -> set[str]:
    fitting = FITTING.get(getattr(field, "field_type", ""), set())
    # With or without a zone: sessions are in UTC.
    return fitting | ZONED | UNZONED if fitting & (ZONED | UNZONED) else fitting


_NO_KEY: Final = "has no primary key and no unique index over NOT NULL columns, so its rows cannot be identified"

_SYSTEM_COLUMNS: Final = {"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}


def stages_of(sweep: Sweep) -> tuple[Stage, ...]:
    """Return the stages of a run, after checking their keys and columns against the real tables.

    Raises:
      DeclarationError: The key of a stage is not unique in its table, the table lacks a column that the stage uses, or
        a statement of its action identifies rows by a part of their key.
      DependentsRefused: A `Delete` cannot delete the dependents of its rows as declared.
      peewee.PeeweeException: If the database cannot be read.
    """
    try:
        stages = sweep.stages_for_run()
    except DependentsRefused as error:
        raise DependentsRefused(f"{sweep.name}: {error.problem}", error.advice, error.decisions) from None
    if sweep.texts.checked == catalog_version():
        return stages
    for stage in stages:
        if isinstance(stage, TableStage) and (missing := missing_column(stage)) is not None:
            raise DeclarationError(f"{sweep.name}: {missing}")
        if isinstance(stage, TableStage) and wrong_key(stage) is not None:
            forget_table(stage.model)  # it may have been given a key since it was looked at
            identify(stage.model)
            if (mismatch := wrong_key(stage)) is not None:
                forget_table(stage.model)
                raise DeclarationError(f"{sweep.name}: {'; '.join(mismatch)}")
        if isinstance(stage, TableStage):
            try:
                stage.statements_of_a_run(datetime.now(UTC))
            except DeclarationError as error:
                raise DeclarationError(f"{sweep.name}: {error}") from None
        if (refusal := refused_by_citus(stage)) is not None:
            raise DeclarationError(f"{sweep.name}: {'; '.join(each for each in refusal if each)}")
    sweep.texts.checked = catalog_version()
    return stages


def refused_by_citus(stage: Stage) -> tuple[str, str | None] | None:
    """Return why Citus refuses a statement of the stage, with the remedy if one is known; None if it accepts all.

    Raises:
      peewee.PeeweeException: If the database cannot be read.
    """
    now = datetime.now(UTC)
    explained = stage.explain_queries(now) if isinstance(stage, Explainable) else []
    model = stage.model if isinstance(stage, TableStage) else next((each.model for each in explained), None)
    if model is None or table_if_visible(model).distribution in (None, "local"):
        return None
    name = quoted_name(model)
    if isinstance(stage, TableStage):
        recorder = Recorder()
        recorder.sql(stage.stale(now))
        for other in map(quoted_name, (each for each in recorder.models if _is_local(each))):
            text = f"{name} is distributed, and its predicate or hold reads {other}, which is not"
            return text, f"SELECT create_reference_table('{other}'), or compare a column of {name} itself"
    changing = getattr(stage, "statements_of_a_run", lambda now: ())(now)
    for what, query in [*(("a batch", each) for each in changing), *((each.what, each.query) for each in explained)]:
        try:
            explain(query)
        except NotSupportedError as error:
            return f"Citus refuses {what} of the distributed table {name}: {error_line(error)}", None
        except OperationalError as error:
            if not is_timeout(error):
                raise
            return None  # the table is locked, so that a run cannot begin either
    return None


def _is_local(model: type[Model]) -> bool:
    return read_table(model).distribution == "local"  # an operator may just have made a reference table of it


def missing_column(stage: TableStage) -> str | None:
    """Return an error text for a column of the stage that its table lacks; None if it has all of them."""
    model: Any = stage.model
    absent, columns = {*model._meta.columns} - _SYSTEM_COLUMNS, frozenset[str]()
    for read in (table_of, read_table):  # the known one may be outdated
        columns = frozenset(read(model).columns)
        if not columns or absent <= columns:  # the first statement on a missing table reports it
            return None
    # Other sweeps may use further columns of the model.
    fields = used_fields(stage, datetime.now(UTC))
    missing = [each for each in fields if each.model is model and each.column_name in absent - columns]
    used = sorted(missing, key=lambda each: str(each.name))
    if not used:
        return None
    return (
        f"table {quoted_name(model)} has no column {used[0].column_name}, which {model.__name__}.{used[0].name} "
        f"declares; its columns are {', '.join(sorted(columns))}"
    )


def wrong_key(stage: TableStage) -> tuple[str, str] | None:
    """Return an error text for a stage's wrong key, with the right one; None if the key is right."""
    model, table = stage.model, table_of(stage.model)
    key, order = ([column.column_name for column in columns] for columns in (stage.key, stage.order))
    if not table.enforced or vouches_for_key(model) or (table.is_unique(key) and set(key) <= set(order)):
        return None
    name, declared = quoted_name(model), ", ".join(declared_key_columns(model))
    if not table.keys:
        return (
            f"{name} {_NO_KEY} ({model.__name__} declares the key ({declared}))",
            f"add one: ALTER TABLE {name} ADD PRIMARY KEY ({declared})",
        )
    keys = " and ".join(_in_brackets(key) for key in table.keys)
    return (
        f"{model.__name__} declares the key ({declared}) and order is {_in_brackets(order)}, "
        f"but rows of {name} are identified by {keys}",
        f"declare the primary key {_in_brackets(table.keys[0])} in {model.__name__}, and end the order with it",
    )


def _in_brackets(columns: Sequence[str]) -> str:
    return f"({', '.join(columns)})"


@dataclass(frozen=True, slots=True)
class ArchiveProblem:
    """Reason why a run must not move rows to its archive.

    Attributes:
      archive: The archive's name.
      text: What is wrong.
      statements: The statements that correct it; none if they cannot.
      is_missing: Whether there is no archive yet.
      rewrites: Whether the statements rewrite the archive, so that an operator should choose the time for them.
    """

    archive: str
    text: str
    statements: tuple[str, ...] = ()
    is_missing: bool = False
    rewrites: bool = False

    @property
    def way_out(self) -> str | None:
        """What to do; None if no statement helps."""
        if self.is_missing:
            return "create it: housekeeping init --with-archives"
        return "; ".join(self.statements) or None

    def __str__(self) -> str:
        return self.text if self.way_out is None else f"{self.text}; {self.way_out}"


def archive_of(stage: TableStage) -> type[Model] | None:
    """Return the archive that takes the stage's rows; None without one."""
    action = archiving(stage.action)
    if action is None or action.archive_to is None:
        return None
    return archive_model(stage.model, action.archive_to)


def archives_of(stages: Iterable[Stage]) -> dict[type[Model], tuple[type[Model], bool]]:
    """Return the archives of these stages: archive -> its table, and whether its rows are deleted after a time."""
    found: dict[type[Model], tuple[type[Model], bool]] = {}
    for stage in stages:
        if isinstance(stage, TableStage) and (several := stage.archives()):
            found |= {archive: (source, False) for archive, source in several.items()}
        elif isinstance(stage, TableStage) and (found_here := archive_of(stage)) is not None:
            action = archiving(stage.action)
            found[found_here] = (stage.model, action is not None and action.archive_keep is not None)
    return found


def compared(stages: Iterable[Stage]) -> Iterator[tuple[type[Model], type[Model], ArchiveProblem | None]]:
    """Yield each archive of these stages with its table and with what is wrong; None if nothing is.

    Raises:
      peewee.PeeweeException: If the database cannot be read.
    """
    tables: dict[str, str] = {}
    for archive, (source, is_kept_for_a_time) in archives_of(stages).items():
        name, other = quoted_name(archive), tables.setdefault(quoted_name(archive), quoted_name(source))
        if other == quoted_name(source):
            yield archive, source, _problem_of(source, archive, is_kept_for_a_time)
        else:
            # Runs tell the rows of an archive apart, and both tables have the same one.
            text = f"archive {name} takes the rows of {other} and of {quoted_name(source)}; give each one an archive"
            yield archive, source, ArchiveProblem(name, text)


def problems_of(stages: Iterable[Stage]) -> Iterator[ArchiveProblem]:
    """Yield what is wrong with the archives of these stages.

    Raises:
      peewee.PeeweeException: If the database cannot be read.
    """
    for _, _, problem in compared(stages):
        if problem is not None:
            yield problem


def _problem_of(source: type[Model], archive: type[Model], is_kept_for_a_time: bool) -> ArchiveProblem | None:
    """Return why the archive cannot take all columns of the table; None if it can, or if there is no table.

    Parameters:
      is_kept_for_a_time: Whether a sweep deletes its rows by age, so that it needs an index for that.

    Raises:
      peewee.PeeweeException: If the database cannot be read.
    """
    name, columns = quoted_name(archive), read_columns(source)
    if not columns:
        return None  # the first statement on the table reports it
    if taken := [column.name for column in columns if column.name in added_types(archive)]:
        text = f"table {quoted_name(source)} has a column {taken[0]}, a name that its archive {name} uses itself"
        return ArchiveProblem(name, text)
    if quoted_name(source) == quoted_name(archive):
        return ArchiveProblem(name, f"table {name} is its own archive; name another table in archive_to")
    try:
        with database.atomic():
            present = set(column_names(archive))
    except ProgrammingError as error:  # no right on the schema
        return ArchiveProblem(name, f"archive {name} cannot be read: {error_line(error)}")
    if not present:
        statements = tuple(statements_for(source, archive, columns, with_index=is_kept_for_a_time))
        return ArchiveProblem(name, f"archive {name} is missing", statements, is_missing=True)
    needed = {**{column.name: column.sql_type for column in columns}, **added_types(archive)}
    missing = {column: sql_type for column, sql_type in needed.items() if column not in present}
    table = quoted_name(archive)
    if missing:
        statements = tuple(f"ALTER TABLE {table} ADD COLUMN {quoted(each)} {kind}" for each, kind in missing.items())
        return ArchiveProblem(name, f"archive {name} has no column {', '.join(missing)}", statements)
    others = database.execute_sql(_OTHER_TYPES, (quoted_name(source), quoted_name(archive))).fetchall()
    if not others:
        return None
    types = ", ".join(f"{column} is {archived} instead of {stored}" for column, archived, stored in others)
    statements = tuple(f"ALTER TABLE {table} ALTER COLUMN {quoted(column)} TYPE {kind}" for column, _, kind in others)
    return ArchiveProblem(name, f"archive {name} would change values: {types}", statements, rewrites=True)


#: Types of the columns that an archive adds.
ADDED_TYPES: Final = {ARCHIVED_AT: "timestamp with time zone", ARCHIVED_BY_RUN: "bigint"}


def added_types(archive: type[Model]) -> dict[str, str]:
    """Return the columns that an archive has besides those of its table, with their types."""
    return ADDED_TYPES | ({CLEARED_COLUMNS: "text[]"} if takes_cleared(archive) else {})


#: Columns of both tables whose type in the archive is neither the same, nor the same without a limit, nor one that
#: PostgreSQL converts to implicitly. Only an assignment converts to those: it rounds values, or fails on the way back.
#: Four types are left out of these: floating point rounds, `name` truncates, and `bpchar` ignores blanks at the end.
_OTHER_TYPES: Final = """SELECT one.attname::text, format_type(two.atttypid, two.atttypmod),
    format_type(one.atttypid, one.atttypmod)
FROM pg_attribute AS one JOIN pg_attribute AS two USING (attname)
WHERE one.attrelid = to_regclass(%s) AND two.attrelid = to_regclass(%s)
AND one.attnum > 0 AND two.attnum > 0 AND NOT one.attisdropped AND NOT two.attisdropped
AND (one.atttypid, one.atttypmod) <> (two.atttypid, two.atttypmod)
AND NOT (two.atttypmod = -1 AND (one.atttypid = two.atttypid OR EXISTS (
    SELECT FROM pg_cast WHERE castsource = one.atttypid AND casttarget = two.atttypid AND castcontext = 'i'
        AND casttarget NOT IN ('float4'::regtype, 'float8'::regtype, 'name'::regtype, 'bpchar'::regtype)
))) ORDER BY one.attnum
"""


def statements_for(
    source: type[Model], archive: type[Model], columns: Sequence[ColumnType], *, with_index: bool
) -> Iterator[str]:
    """Yield the statements that create an archive.

    Its key begins with the run, for restoring, and the time lets the same row be archived again.

    Parameters:
      with_index: Whether to create an index by age as well.
    """
    meta: Any = archive._meta
    if meta.schema:
        yield f"CREATE SCHEMA IF NOT EXISTS {quoted(meta.schema)}"
    lines = [f"{quoted(column.name)} {column.sql_type}" for column in columns]
    for name, kind in added_types(archive).items():
        lines.append(f"{quoted(name)} {kind}{' NOT NULL' if name in ADDED_TYPES else ''}")
    key = _key_columns(source)
    lines.append(f"PRIMARY KEY ({_listed((ARCHIVED_BY_RUN, ARCHIVED_AT, *key))})")
    yield f"CREATE TABLE {quoted_name(archive)} ({', '.join(lines)})"
    if with_index:
        yield f"CREATE INDEX ON {quoted_name(archive)} ({_listed((ARCHIVED_AT, *key, ARCHIVED_BY_RUN))})"


def missing_key(source: type[Model], archive: type[Model]) -> str | None:
    """Return the statement that adds the key by which rows are restored; None if the archive has one.

    Raises:
      peewee.PeeweeException: If the database cannot be read.
    """
    key = (ARCHIVED_BY_RUN, ARCHIVED_AT, *_key_columns(source))
    if read_table(archive).is_unique(key):
        return None
    return f"ALTER TABLE {quoted_name(archive)} ADD PRIMARY KEY ({_listed(key)})"


def _key_columns(source: type[Model]) -> Sequence[str]:
    table, declared = read_table(source), declared_key_columns(source)
    return table.keys[0] if table.keys and not table.is_unique(declared) else declared


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names))


#: Of a table and its partitions; a trigger of a partitioned table is listed once. Constraints have internal triggers,
#: which are left out. An UPDATE fires a trigger on columns only if it names one of them.
_FIRED: Final = """
WITH RECURSIVE ours (id) AS (
    SELECT to_regclass(%(table)s)::oid UNION SELECT inhrelid FROM ours JOIN pg_inherits ON inhparent = ours.id
), events (event, bit, rule) AS (VALUES ('INSERT', 4, '3'), ('DELETE', 8, '4'), ('UPDATE', 16, '2'))
SELECT 'trigger', tgrelid::regclass::text, tgname::text, event,
    CASE WHEN tgtype & 2 <> 0 THEN 'BEFORE' WHEN tgtype & 64 <> 0 THEN 'INSTEAD OF' ELSE 'AFTER' END
        || format(' %%s, for each %%s: %%s()', event, CASE WHEN tgtype & 1 <> 0 THEN 'row' ELSE 'statement' END,
                  tgfoid::regproc)
FROM pg_trigger JOIN ours ON ours.id = tgrelid JOIN events ON tgtype & bit <> 0
WHERE NOT tgisinternal AND tgparentid = 0 AND tgenabled IN ('O', 'A') AND event = ANY (%(events)s) AND (
    event <> 'UPDATE' OR cardinality(tgattr::smallint[]) = 0 OR EXISTS (
        SELECT FROM pg_attribute
        WHERE attrelid = tgrelid AND attnum = ANY (tgattr::smallint[]) AND attname = ANY (%(columns)s)
    )
)
UNION ALL
SELECT 'rule', ev_class::regclass::text, rulename::text, event,
    format('ON %%s DO %%s; a batch fails unless exactly one statement replaces its own', event,
           CASE WHEN is_instead THEN 'INSTEAD' ELSE 'ALSO' END)
FROM pg_rewrite JOIN ours ON ours.id = ev_class JOIN events ON ev_type::text = rule
WHERE ev_enabled IN ('O', 'A') AND event = ANY (%(events)s)
ORDER BY 1 DESC, 2, 3, 4
"""


@dataclass(frozen=True, slots=True)
class FiringTrigger:
    """A trigger or a rule that fires when a stage changes rows.

    Attributes:
      kind: ``trigger`` or ``rule``.
      table: Its table, as SQL has it.
      event: ``INSERT``, ``UPDATE`` or ``DELETE``.
      effect: When it fires, and what it calls.
    """

    stage: str
    kind: str
    table: str
    name: str
    event: str
    effect: str

    @property
    def text(self) -> str:
        """Description in one line."""
        return f"{self.kind} {self.name} on {self.table} fires: {self.effect}"

    def as_json(self) -> dict[str, Any]:
        """One element of ``triggers`` in ``housekeeping plan --json``."""
        return {**asdict(self), "text": self.text}


def triggers_of(stages: Iterable[Stage], now: datetime) -> list[FiringTrigger]:
    """Return the triggers and rules that the statements of the stages fire, without executing the statements.

    Raises:
      peewee.PeeweeException: If the database cannot be read.
    """
    found = []
    for stage in stages:
        for model, changes in recorded(stage, now).changes.items():
            events = [change.split()[0] for change in changes if change != "FOR UPDATE"]
            given = {"table": quoted_name(model), "events": events, "columns": list(updated_columns(changes))}
            rows = database.execute_sql(_FIRED, given).fetchall() if events else []
            found += [FiringTrigger(stage.name, *row) for row in rows]
    return found
