"""Check that the workers' tables exist and are whole, with the needed rights and with working autovacuum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from peewee import ProgrammingError

from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.core.wording import counted
from housekeeping.database.catalog import partitioned_table_of, quoted_name
from housekeeping.database.connection import database
from housekeeping.doctor.archives import is_archive
from housekeeping.doctor.grants import grants, missing_rights, quoted_identifier, tables_of, users_of
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.registry import Finding
from housekeeping.workers import families

_DEAD_ROWS: Final = 100_000  # fewer do not matter, whatever their share
_DEAD_SHARE: Final = 0.3  # PostgreSQL's autovacuum starts at 0.2 by default
#: The role if policies hide rows of a table from it. They do not if a permissive policy lets it do everything with all
#: rows, and no restrictive one takes rows away.
_HIDDEN_FROM: Final = """WITH policies AS (
    SELECT polpermissive, polcmd, pg_get_expr(polqual, polrelid) AS rows FROM pg_policy
    WHERE polrelid = %(table)s AND EXISTS (
        SELECT FROM unnest(polroles) AS role WHERE role = 0 OR pg_has_role(current_user, role, 'USAGE')
    )
)
SELECT current_user::text WHERE row_security_active(%(table)s::oid) AND (
    NOT EXISTS (SELECT FROM policies WHERE polpermissive AND polcmd = '*' AND rows = 'true')
    OR EXISTS (SELECT FROM policies WHERE NOT polpermissive)
)
"""


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about each table of each family with an enabled worker."""
    for family in families(settings):
        enabled = [sweep for sweep in family.sweeps if sweep.name in sweeps]
        if not enabled:
            continue
        declared = {model: name for name, model in family.models.items()}
        for table, (model, rights) in tables_of(family, settings).items():
            if not is_archive(model, enabled) or _exists(model):  # `archives` reports a missing one
                yield from _table(users_of(model, enabled), declared.get(model, table), model, rights)
    yield from partitions(settings, sweeps)


def partitions(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a warning for each table of an enabled worker that is only a partition of another table."""
    for family in families(settings):
        enabled = [sweep for sweep in family.sweeps if sweep.name in sweeps]
        for name, model in family.models.items():
            if not enabled:
                continue
            try:
                parent = partitioned_table_of(model)
            except ProgrammingError:  # no right on the schema; `tables` reports it
                continue
            meta: Any = model._meta
            if parent is not None:
                users = users_of(model, enabled)
                see = "sees" if len(users) == 1 else "see"
                yield Finding(
                    "warning",
                    users[0],
                    f"table {name}",
                    f"{meta.table_name} is a partition of {parent}: {', '.join(users)} {see} only the rows of this "
                    "partition",
                    f'to clean all rows, set HOUSEKEEPING_WORKERS["{users[0]}"]["tables"] to {{"{name}": "{parent}"}}',
                )


def _exists(model: Any) -> bool:
    try:
        return bool(database.execute_sql("SELECT to_regclass(%s) IS NOT NULL", (quoted_name(model),)).fetchone()[0])
    except ProgrammingError:  # no right on the schema
        return True


def _table(users: list[str], name: str, model: Any, needed: tuple[str, ...]) -> Iterator[Finding]:
    worker, table = users[0], quoted_name(model)
    others = f"; also used by {', '.join(users[1:])}" if users[1:] else ""
    try:
        oid = database.execute_sql("SELECT to_regclass(%s)::oid", (table,)).fetchone()[0]
    except ProgrammingError as error:  # no right on the schema
        way_out = f'GRANT USAGE ON SCHEMA "{model._meta.schema}" TO current_user'
        yield Finding("error", worker, f"rights on {name}", error_line(error), way_out)
        return
    if oid is None:
        way_out = f'name your table in HOUSEKEEPING_WORKERS["{worker}"]["tables"], or disable the worker'
        yield Finding("error", worker, f"table {name}", f"{table} is not in this database{others}", way_out)
        return
    missing = missing_rights(table, needed)
    if missing:
        way_out = "; ".join(grants("current_user", {table: tuple(missing)}))
        yield Finding("error", worker, f"rights on {name}", f"{', '.join(missing)} not granted{others}", way_out)
    else:
        yield Finding("fine", worker, f"table {name}", f"exists, with all needed rights{others}")
    yield from _row_security(users, name, table, oid)
    yield from _vacuum(worker, name, table, oid)


def _row_security(users: list[str], name: str, table: str, oid: int) -> Iterator[Finding]:
    for (role,) in database.execute_sql(_HIDDEN_FROM, {"table": oid}):
        text = (
            f"row-level security on {table} applies to {role}: {', '.join(users)} may see no rows, and end as done "
            "without having cleaned them"
        )
        quoted = quoted_identifier(role)
        way_out = f"ALTER ROLE {quoted} BYPASSRLS, or CREATE POLICY housekeeping ON {table} TO {quoted} USING (true)"
        yield Finding("error", users[0], f"rows of {name}", text, way_out)


def _vacuum(worker: str, name: str, table: str, oid: int) -> Iterator[Finding]:
    row = database.execute_sql(
        "SELECT n_live_tup, n_dead_tup, EXISTS (SELECT FROM pg_options_to_table(reloptions) "
        "WHERE option_name = 'autovacuum_enabled' AND NOT option_value::bool), "
        "EXISTS (SELECT FROM pg_stat_progress_vacuum AS p WHERE p.relid = c.oid) "
        "FROM pg_class AS c LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid WHERE c.oid = %s",
        (oid,),
    ).fetchone()
    live, dead, off, at_work = row[0] or 0, row[1] or 0, row[2], row[3]
    if off:
        way_out = f"ALTER TABLE {table} RESET (autovacuum_enabled)"
        yield Finding("warning", worker, f"autovacuum on {name}", "is off: deleted rows are never removed", way_out)
    elif dead > _DEAD_ROWS and dead > _DEAD_SHARE * (live + dead) and not at_work:
        text = f"{counted(dead, 'dead row')} and {counted(live, 'live one')}, and no running VACUUM"
        yield Finding("warning", worker, f"autovacuum on {name}", text, f"VACUUM {table}; is a long transaction open?")
