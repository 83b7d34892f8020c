"""Checks of the tables of workers and erasures: existence, columns, rights, constraints, partitions and archives."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from peewee import Model, PeeweeException, ProgrammingError

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.errors import DeclarationError, DependentsRefused, SettingsError
from housekeeping.core.logs import counted, error_line
from housekeeping.core.settings import Settings
from housekeeping.database.catalog import (
    current_role,
    is_absent,
    optional_fields,
    partitioned_table_of,
    quoted,
    quoted_name,
    role_without_rows,
    table_if_visible,
    table_of,
)
from housekeeping.database.connection import LOCK_TIME, STATEMENT_TIME, database, time_limit, translate_postgres_errors
from housekeeping.database.errors import is_timeout, is_unavailable
from housekeeping.database.queries import database_now
from housekeeping.doctor.stages import unexamined
from housekeeping.engine.registry import Family
from housekeeping.erasures import subjects_of
from housekeeping.erasures.graph import cut_links, read_reach, stored_views
from housekeeping.insight.backlogs import hint_of
from housekeeping.insight.load import table_states
from housekeeping.ledger import erasures, schema
from housekeeping.sweeps.cascade import CascadeStage
from housekeeping.sweeps.declaration import Sweep, setting_of
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.stage import Stage
from housekeeping.sweeps.subjects import Subject
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.validate_tables import (
    archives_of,
    columns_of,
    compared,
    misfit,
    missing_key,
    recorded,
    updated_columns,
)
from housekeeping.sweeps.values import Finding
from housekeeping.workers import families, families_of


def examine_archives(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a finding about each archive; runs with a wrong one stop before they touch a row."""
    for sweep in sweeps.values():
        for archive, source, problem in compared(sweep.declared_stages()):
            subject = f"archive {quoted_name(archive)}"
            if problem is None and not table_of(source).exists:
                continue  # another check reports it
            if problem is None:
                takes = f"takes all columns of {quoted_name(source)}"
                if (statement := missing_key(source, archive)) is None:
                    yield Finding("fine", sweep.name, subject, takes)
                else:
                    text = f"{takes}; has no key, so its rows cannot be restored"
                    yield Finding("warning", sweep.name, subject, text, statement)
                continue
            way_out = "; ".join(problem.statements) or None
            if problem.is_missing:
                way_out = f"housekeeping init --with-archives, or: {way_out}"
            yield Finding("error", sweep.name, subject, f"{problem.text}; its runs fail before the first row", way_out)


#: SQL keywords that need quotes as names.
_RESERVED: Final = frozenset(
    "all analyse analyze and any array as asc asymmetric both case cast check collate column constraint create "
    "current_date current_role current_time current_timestamp current_user default deferrable desc distinct do else "
    "end except false fetch for foreign from grant group having in initially intersect into lateral leading limit "
    "localtime localtimestamp not null offset on only or order placing primary references returning select "
    "session_user some symmetric table then to trailing true union unique user using variadic when where window "
    "with".split()
)


def needed_rights(settings: Settings, workers: Container[str] | None = None) -> dict[str, tuple[str, ...]]:
    """Return the rights that the workers need, by configured table name.

    Parameters:
      workers: The names of the workers of one database; by default all.

    They include the rights that a family declares and those of its sweeps' statements, such as subqueries of a
    predicate or the tables that a custom action changes. `rights_of_dependents` returns the rights on dependents.
    """
    found = families(settings) if workers is None else families_of(settings, workers)
    return {table: rights for family in found for table, (_, rights) in tables_of(family, settings).items()}


def rights_of_dependents(settings: Settings) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return the rights that sweeps need on dependents and their archives, and the reasons why some are unknown.

    Only rights in the current database are returned. Dependents of a sweep may be in other databases.
    """
    found: dict[str, dict[str, None]] = {}
    unknown: list[str] = []
    sweeps = [each for family in families(settings) for each in family.sweeps if not _is_unused(each, settings)]
    for sweep in sweeps if settings.database_url is not None else ():
        here = database.selected
        try:
            with database.using(sweep.database):
                stages = [each.with_graph() for each in sweep.declared_stages() if isinstance(each, CascadeStage)]
                needed = [right for stage in stages if stage.graph is not None for right in stage.graph.rights.items()]
                archives = [name_in_sql(archive) for stage in stages for archive in stage.archives()]
                needed += [((sweep.database, archive), ("INSERT",)) for archive in archives]
        except (DeclarationError, PeeweeException) as error:
            if is_unavailable(error):
                raise
            unknown.append(f"{sweep.name}: {error_line(error)}")
            continue
        for (name, table), rights in needed:
            if name == here:
                found.setdefault(table, {}).update(dict.fromkeys(rights))
    return {table: tuple(rights) for table, rights in found.items()}, unknown


def rights_of_subjects(settings: Settings) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return the rights that erasures and exports need in the current database, and the reasons why some are unknown.

    Raises:
      peewee.PeeweeException: A catalog cannot be read.
    """
    found: dict[str, dict[str, None]] = {}
    unknown: list[str] = []
    try:
        subjects = subjects_of(settings)
    except (DeclarationError, SettingsError) as error:
        return {}, [f"subjects: {error}"]
    if settings.database_url is None:
        return {}, ["subjects: HOUSEKEEPING_DATABASE_URL is not set"] if subjects else []
    for subject in subjects.values():
        try:
            reach = read_reach(subject, needs=None)
        except DeclarationError as error:
            unknown.append(f"subject {subject.name}: {error}")
            continue
        for (name, table), rights in reach.rights.items():
            if name == database.selected:
                found.setdefault(table, {}).update(dict.fromkeys(rights))
    return {table: tuple(rights) for table, rights in found.items()}, unknown


def tables_of(family: Family, settings: Settings | None = None) -> dict[str, tuple[type[Model], tuple[str, ...]]]:
    """Return the model and the needed rights of each of the family's tables, by configured table name.

    Parameters:
      settings: Tell which of the sweeps that are off by default are used; None for none.
    """
    found = {model: family.rights.get(name, ("SELECT",)) for name, model in family.models.items()}
    for sweep in family.sweeps:
        if _is_unused(sweep, settings):
            continue
        for stage in sweep.declared_stages():
            for model, rights in _rights_of(stage).items():
                if model.__module__ != schema.__name__:
                    found[model] = _merged(model, found.get(model, ()), rights)
    return {name_in_sql(model): (model, rights) for model, rights in found.items()}


def _is_unused(sweep: Sweep, settings: Settings | None) -> bool:
    """Return whether a sweep is off by default, and no setting enables it."""
    given = settings.workers.get(sweep.name) if settings is not None else None
    return not sweep.enabled and not (given is not None and given.enabled)


def users_by_table(sweeps: Sequence[Sweep]) -> Callable[[type[Model]], list[str]]:
    """Return a function that names the sweeps whose statements use a table; all sweeps if none is known to."""
    users: dict[str, list[str]] = {}
    for sweep in sweeps:
        stages = sweep.declared_stages()
        models = {each.model for each in stages if isinstance(each, TableStage | PartitionStage)}
        for table in {name_in_sql(model) for model in models.union(*map(_rights_of, stages))}:
            users.setdefault(table, []).append(sweep.name)
    return lambda model: users.get(name_in_sql(model)) or [sweep.name for sweep in sweeps]


def _rights_of(stage: Stage) -> dict[type[Model], tuple[str, ...]]:
    try:
        return recorded(stage, SYSTEM_CLOCK.now()).rights()
    except Exception:  # another check reports a failing predicate
        return {}


def own_tables_grants(role: str, settings: Settings) -> Iterator[str]:
    """Yield the GRANT statements for the library's own tables."""
    own = quoted_identifier(settings.schema_name)
    yield f"GRANT USAGE ON SCHEMA {own} TO {role}"
    yield f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {own} TO {role}"


def name_in_sql(model: type[Model]) -> str:
    """Return the table's name, quoted if necessary."""
    meta: Any = model._meta
    return ".".join(quoted_identifier(part) for part in (meta.schema, meta.table_name) if part)


def exists(table: str) -> bool:
    """Return whether the table exists."""
    return bool(database.execute_sql("SELECT to_regclass(%s) IS NOT NULL", (table,)).fetchone()[0])


def missing_rights(table: str, needed: tuple[str, ...]) -> list[str]:
    """Return the needed rights that the current user lacks."""
    return [right for right in needed if not _has(table, right)]


def grants(role: str, rights: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the GRANT statements for these rights."""
    for table, needed in rights.items():
        yield f"GRANT {', '.join(needed)} ON {table} TO {role}"


def _merged(model: type[Model], known: tuple[str, ...], rights: Iterable[str]) -> tuple[str, ...]:
    meta: Any = model._meta
    for right in rights:
        if right == "FOR UPDATE":
            # FOR UPDATE needs the right to update at least one column.
            if any(each.startswith("UPDATE") for each in known):
                continue
            right = f"UPDATE ({meta.sorted_fields[0].column_name})"
        covered = right in known or (right.startswith("UPDATE") and updated_columns([right]) <= updated_columns(known))
        known = known if covered else (*known, right)
    return known


def quoted_identifier(name: str) -> str:
    """Return a name, quoted for SQL if necessary."""
    plain = re.fullmatch(r"[a-z_][a-z0-9_]*", name) is not None and name not in _RESERVED
    return name if plain else '"' + name.replace('"', '""') + '"'


def _has(table: str, right: str) -> bool:
    kind, columns = _parts(right)
    if not columns:
        row = database.execute_sql("SELECT has_table_privilege(%s, %s)", (table, kind)).fetchone()
        return bool(row[0])
    # Only existing columns: PostgreSQL raises for others, and another check reports them.
    row = database.execute_sql(
        "SELECT coalesce(bool_and(has_column_privilege(attrelid, attnum, %s)), true) FROM pg_attribute "
        "WHERE attrelid = to_regclass(%s) AND attname = ANY (%s) AND NOT attisdropped",
        (kind, table, columns),
    ).fetchone()
    return bool(row[0])


def _parts(right: str) -> tuple[str, list[str]]:
    found = re.fullmatch(r"(\w+)(?: \((.*)\))?", right)
    assert found is not None
    return found[1], [] if found[2] is None else found[2].split(", ")


def examine_columns(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a finding for each table that lacks a worker's columns, or has them with unsuitable types."""
    without_optional: set[type[Model]] = set()
    for sweep in sweeps.values():
        try:
            needed = columns_of(_stages_of(sweep))
        except Exception as error:
            if is_unavailable(error):
                raise
            if is_timeout(error):
                yield unexamined(sweep.name, "tables", error)
            else:
                yield Finding("error", sweep.name, "declaration", error_line(error), "correct the sweep's code")
            continue
        for model, columns in needed.items():
            subject = f"columns of {model._meta.table_name}"
            try:
                table = table_of(model)
            except ProgrammingError:  # no right on the schema
                continue
            if table.exists and (text := misfit(model, columns, table)) is not None:  # `examine_tables` reports others
                way_out = f'name the right table in {setting_of(sweep)}["tables"], or disable this worker'
                yield Finding("error", sweep.name, subject, text, way_out)
            absent = [each for each in optional_fields(model) if is_absent(getattr(model, each))]
            if absent and model not in without_optional:
                without_optional.add(model)
                text = (
                    f"optional columns are missing: {', '.join(absent)}; log lines, events and error reports omit them"
                )
                yield Finding("fine", sweep.name, subject, text)


def _stages_of(sweep: Sweep) -> Sequence[Stage]:
    try:
        return sweep.stages_for_run()
    except (ProgrammingError, DependentsRefused):  # no right on the schema, or `examine_stages` reports it
        return sweep.declared_stages()


_PARTITIONS: Final = "partitions"
_SUBJECTS: Final = "subjects"
#: Partitions whose reasons are listed.
_LISTED: Final = 3
#: PostgreSQL lets only the owner, or a member of that role, detach and drop.
_NOT_OWNED: Final = """
SELECT oid::regclass::text, pg_get_userbyid(relowner) FROM pg_class
WHERE (oid = to_regclass(%s) OR oid = ANY (%s::oid[])) AND NOT pg_has_role(relowner, 'USAGE') ORDER BY 1 LIMIT 1
"""


def examine_partitions(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
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
        yield Finding("fine", sweep.name, _PARTITIONS, hint)


def _dropped(sweep: Sweep, stage: PartitionStage, now: datetime, sweeps: Collection[str]) -> Iterator[Finding]:
    try:
        candidates = stage.candidates(now)
    except DeclarationError as error:
        yield Finding("error", sweep.name, _PARTITIONS, error_line(error), "see docs/howto/drop-partitions.md")
        return
    ids = [each.id for each in stage.table.partitions]
    not_owned: Any = database.execute_sql(_NOT_OWNED, (stage.table.name, ids)).fetchone()
    if not_owned is not None:
        table, owner = not_owned
        way_out = f"GRANT {owner} TO {current_role()}, or ALTER TABLE {table} OWNER TO {current_role()}"
        yield Finding("error", sweep.name, _PARTITIONS, f"only {owner}, the owner of {table}, can drop it", way_out)
        return
    for table, worker in stage.left_by_others.items():
        if worker not in sweeps:
            text = f"{table} was detached by {worker}, which is not configured and cannot drop it"
            way_out = f"drop or attach it, or keep it under another name: ALTER TABLE {table} RENAME TO ..."
            yield Finding("warning", sweep.name, _PARTITIONS, text, way_out)
    found = [(each, stage.reason_to_stay(each)) for each in candidates]
    staying = [f"{partition.name} ({reason})" for partition, reason in found if reason is not None]
    how = "concurrently" if stage.table.detaches_concurrently else "in short transactions that lock the table"
    text = f"{counted(len(found) - len(staying), 'partition')} can be dropped now; they are detached {how}"
    yield Finding("fine", sweep.name, _PARTITIONS, text)
    if staying:
        more = f", and {len(staying) - _LISTED} more" if len(staying) > _LISTED else ""
        text = (
            f"{counted(len(staying), 'partition')} whose range is over must stay: {', '.join(staying[:_LISTED])}{more}"
        )
        yield Finding("warning", sweep.name, _PARTITIONS, text)
    if warning := stage.table.warning(now):
        way_out = "create the next partitions, for example with pg_partman"
        yield Finding("warning", sweep.name, _PARTITIONS, warning, way_out)


def examine_tables(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about each table of each family with an enabled worker."""
    for family in families_of(settings, sweeps):
        enabled = [sweeps[sweep.name] for sweep in family.sweeps]
        declared, users_of = {model: name for name, model in family.models.items()}, users_by_table(enabled)
        archives = {name_in_sql(archive) for sweep in enabled for archive in archives_of(sweep.declared_stages())}
        for table, (model, rights) in tables_of(family, settings).items():
            if table not in archives or table_if_visible(model).exists:  # `examine_archives` reports others
                yield from _table(users_of(model), declared.get(model, table), model, rights)
    yield from lone_partitions(settings, sweeps)


def lone_partitions(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a warning for each table of an enabled worker that is only a partition of another table."""
    for family in families_of(settings, sweeps):
        for name, model in family.models.items():
            try:
                parent = partitioned_table_of(model)
            except ProgrammingError:  # no right on the schema; `examine_tables` reports it
                continue
            meta: Any = model._meta
            if parent is not None:
                users = users_by_table(family.sweeps)(model)
                see = "sees" if len(users) == 1 else "see"
                yield Finding(
                    "warning",
                    users[0],
                    f"table {name}",
                    f"{meta.table_name} is a partition of {parent}: {', '.join(users)} {see} only the rows of this "
                    "partition",
                    f'to clean all rows, set HOUSEKEEPING_WORKERS["{users[0]}"]["tables"] to {{"{name}": "{parent}"}}',
                )


def _table(users: list[str], name: str, model: Any, needed: tuple[str, ...]) -> Iterator[Finding]:
    worker, table = users[0], quoted_name(model)
    others = f"; also used by {', '.join(users[1:])}" if users[1:] else ""
    try:
        oid = database.execute_sql("SELECT to_regclass(%s)::oid", (table,)).fetchone()[0]
    except ProgrammingError as error:  # no right on the schema
        way_out = f'GRANT USAGE ON SCHEMA "{model._meta.schema}" TO {current_role()}'
        yield Finding("error", worker, f"rights on {name}", error_line(error), way_out)
        return
    if oid is None:
        way_out = f'name your table in HOUSEKEEPING_WORKERS["{worker}"]["tables"], or disable the worker'
        yield Finding("error", worker, f"table {name}", f"{table} is not in {database.place}{others}", way_out)
        return
    missing = missing_rights(table, needed)
    if missing:
        way_out = "; ".join(grants(current_role(), {table: tuple(missing)}))
        yield Finding("error", worker, f"rights on {name}", f"{', '.join(missing)} not granted{others}", way_out)
    else:
        yield Finding("fine", worker, f"table {name}", f"exists, with all needed rights{others}")
    if (role := role_without_rows(oid)) is not None:
        text = (
            f"row-level security on {table} applies to {role}: {', '.join(users)} may see no rows, and end as done "
            "without having cleaned them"
        )
        way_out = f"ALTER ROLE {role} BYPASSRLS, or CREATE POLICY housekeeping ON {table} TO {role} USING (true)"
        yield Finding("error", worker, f"rows of {name}", text, way_out)
    for state in table_states([table]):
        if state.problem is not None:
            yield Finding("warning", worker, f"autovacuum on {name}", *state.problem)


#: Whether a column is unique: by an index on it, or on an expression of it alone such as lower(email).
_IS_UNIQUE: Final = """
SELECT EXISTS (
    SELECT FROM pg_class JOIN pg_index ON indrelid = pg_class.oid
    JOIN pg_attribute ON attrelid = pg_class.oid AND attname = %(column)s
    WHERE pg_class.oid = to_regclass(%(table)s) AND (relkind = 'p' OR NOT relhassubclass)
    AND indisunique AND indisvalid AND indpred IS NULL AND indnkeyatts = 1 AND (indkey[0] = attnum OR (
        indkey[0] = 0 AND attnum = ALL (ARRAY(
            SELECT refobjsubid FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = indexrelid
            AND refclassid = 'pg_class'::regclass AND refobjid = indrelid AND refobjsubid > 0
        ))
    ))
)
"""
#: Whether the current role may create temporary tables, which are needed to count the rows of a subject.
MAY_COUNT: Final = """
SELECT has_database_privilege(current_database(), 'TEMPORARY'), quote_ident(current_database()),
    quote_ident(current_user)
"""


def examine_subjects(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the secret of erasures, and about the tables, rights and object stores of each `Subject`.

    An erasure checks the same before its first change. By then, a legal deadline may already be running.
    """
    try:
        subjects = subjects_of(settings)
    except (DeclarationError, SettingsError) as error:
        yield Finding("error", _SUBJECTS, "declaration", str(error), "correct SUBJECTS, or HOUSEKEEPING_SWEEPS")
        return
    if not subjects:
        return
    with translate_postgres_errors():
        yield _secret_of_erasures(settings)
        for subject in subjects.values():
            yield from _subject(settings, subject, sweeps.values())


def _secret_of_erasures(settings: Settings) -> Finding:
    subject = "HOUSEKEEPING_ERASURE_KEY"
    if settings.erasure_key is None:
        way_out = f"set {subject} to the output of: openssl rand -base64 32"
        return Finding("error", _SUBJECTS, subject, "is not set, so every erasure is refused", way_out)
    try:
        erasures.require_known_secrets(settings.erasure_key)
    except SettingsError as error:
        text, _, way_out = str(error).partition("; ")
        return Finding("error", _SUBJECTS, subject, text, way_out)
    return Finding("fine", _SUBJECTS, subject, "is set, and has the secret of every erasure")


def _subject(settings: Settings, subject: Subject, sweeps: Iterable[Sweep]) -> Iterator[Finding]:
    try:
        with database.using(subject.database):
            root = quoted_name(subject.model)
            if not exists(root):
                text = f"its table {root} is not in {database.place}"
                yield Finding("error", _SUBJECTS, subject.name, text, "correct the table of the Subject")
                return
        reach = read_reach(subject)
    except DependentsRefused as error:
        yield Finding("error", _SUBJECTS, subject.name, f"its erasure is refused: {error.problem}", error.way_out)
        return
    except DeclarationError as error:
        yield Finding("error", _SUBJECTS, subject.name, f"its erasure is refused: {error}", "correct the Subject")
        return
    yield Finding("fine", _SUBJECTS, subject.name, f"{counted(len(reach.tables), 'table')}, each with a decision")
    if subject.by is not None:
        with database.using(subject.database):
            (is_unique,) = database.execute_sql(_IS_UNIQUE, {"table": root, "column": subject.by}).fetchone()
        if not is_unique:
            text = f"{root} has no unique index on {subject.by}, its `by`: keys that match several rows are refused"
            way_out = f"CREATE UNIQUE INDEX ON {root} ({quoted(subject.by)}), or name a unique column in `by`"
            yield Finding("warning", _SUBJECTS, subject.name, text, way_out)
    for each in (*cut_links(reach, sweeps), *stored_views(reach)):
        way_out = f"{each.way_out}; see docs/howto/erase-a-person.md"
        yield Finding("warning", _SUBJECTS, subject.name, each.text, way_out)
    for name in dict.fromkeys(each for each, _ in reach.tables):
        with database.using(name):
            may_count, place, role = database.execute_sql(MAY_COUNT).fetchone()
        if not may_count:
            text = f"{role} may not create temporary tables in {place}: erase and export cannot count the rows"
            yield Finding("error", _SUBJECTS, subject.name, text, f"GRANT TEMPORARY ON DATABASE {place} TO {role}")
    for location in dict.fromkeys(each.location for each in subject.objects):
        store = settings.object_stores.get(location)
        if store is None or not store.enabled:
            way_out = "add it, or enable it"
            text = f"HOUSEKEEPING_OBJECT_STORES has no location {location!r}, so its erasure is refused"
            yield Finding("error", _SUBJECTS, subject.name, text, way_out)
