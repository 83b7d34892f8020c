"""Rights that the workers need on the application's tables, and the GRANT statements for them."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from peewee import Model

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.settings import Settings
from housekeeping.database.connection import database
from housekeeping.leases import fencing as fencing
from housekeeping.sweeps.checks.statements import recorded, updated_columns
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import models
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.registry import Family
from housekeeping.sweeps.stages.stage import Stage
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.workers import families

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
    predicate or the tables that a user's own action changes.
    """
    found = [
        family
        for family in families(settings)
        if workers is None or any(sweep.name in workers for sweep in family.sweeps)
    ]
    return {table: rights for family in found for table, (_, rights) in tables_of(family, settings).items()}


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
                if not _is_own(model):
                    found[model] = _merged(model, found.get(model, ()), rights)
    return {name_in_sql(model): (model, rights) for model, rights in found.items()}


def _is_unused(sweep: Sweep, settings: Settings | None) -> bool:
    """Return whether a sweep is off by default, and no setting enables it."""
    given = settings.workers.get(sweep.name) if settings is not None else None
    return not sweep.enabled and not (given is not None and given.enabled)


def users_of(model: type[Model], sweeps: Sequence[Sweep]) -> list[str]:
    """Return the names of the sweeps whose statements use the table; all sweeps if none is known to."""
    seen = [sweep.name for sweep in sweeps if any(_touches(stage, model) for stage in sweep.declared_stages())]
    return seen or [sweep.name for sweep in sweeps]


def _touches(stage: Stage, model: type[Model]) -> bool:
    own = [stage.model] if isinstance(stage, TableStage | PartitionStage) else []
    return name_in_sql(model) in {name_in_sql(each) for each in (*own, *_rights_of(stage))}


def _rights_of(stage: Stage) -> dict[type[Model], tuple[str, ...]]:
    try:
        return recorded(stage, SYSTEM_CLOCK.now()).rights()
    except Exception:  # another check reports a failing predicate
        return {}


def own_tables_grants(role: str, settings: Settings) -> Iterator[str]:
    """Yield the GRANT statements for the library's own tables."""
    schema = quoted_identifier(settings.schema_name)
    yield f"GRANT USAGE ON SCHEMA {schema} TO {role}"
    yield f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}"


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


def _is_own(model: type[Model]) -> bool:
    return model.__module__ == models.__name__ or model.__module__ == fencing.__name__


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
