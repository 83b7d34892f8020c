"""Built-in workers: one package per family, named after its design document. No family imports another.

Each family's `worker` module declares its sweeps; start reading there. `user_status_cleanup` is the simplest one.
This module lists the families and applies the settings to them: which run, their limits and their tables' names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from peewee import Model

from housekeeping.core.errors import SettingsError
from housekeeping.core.settings import Settings, WorkerSettings
from housekeeping.database.connection import bind, database, handle_of
from housekeeping.sweeps.checks.archives import archives_of
from housekeeping.sweeps.companions import SUFFIX, following
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.family_setup import FamilySetup
from housekeeping.sweeps.ledger.models import MODELS as LEDGER
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.registry import Family, declared_by, each_once, family_of, imported
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.workers.batched_git_ref_updates import worker as _batched_git_ref_updates
from housekeeping.workers.bulk_imports import worker as _bulk_imports
from housekeeping.workers.ci_stuck_builds import worker as _ci_stuck_builds
from housekeeping.workers.object_storage import worker as _object_storage
from housekeeping.workers.old_runs import worker as _old_runs
from housekeeping.workers.outbox import worker as _outbox
from housekeeping.workers.user_status_cleanup import worker as _user_status_cleanup

#: The module of every built-in family, in the order of `housekeeping list`. Each has SWEEPS, MODELS (table name in
#: the documents -> model) and RIGHTS, and may have `configure`, which receives the settings.
BUILT_IN: Final[tuple[Any, ...]] = (
    _user_status_cleanup,
    _bulk_imports,
    _object_storage,
    _batched_git_ref_updates,
    _ci_stuck_builds,
    _old_runs,
    _outbox,
)

#: Always active: these clean the library's own tables.
_MAINTENANCE: Final = (_old_runs, _outbox)
#: The families that `HOUSEKEEPING_BUILT_IN` may name, by package.
FAMILIES: Final[dict[str, Any]] = {
    module.__name__.split(".")[-2]: module for module in BUILT_IN if module not in _MAINTENANCE
}


def families(settings: Settings, own: Sequence[Sweep] = ()) -> tuple[Family, ...]:
    """Return the built-in families, those of the modules in the settings, and an application's own.

    Raises:
      SettingsError: When a module is not found, cannot be imported or has no sweeps, or `HOUSEKEEPING_BUILT_IN` names
        an unknown family.
      DeclarationError: When two sweeps have the same name.
    """
    return each_once([*_built_in(settings), *imported(settings.sweeps), declared_by("install", own)])


def _built_in(settings: Settings) -> Iterator[Family]:
    named = _named(settings.built_in)
    for name, module in FAMILIES.items():
        family = replace(family_of(module), name=name)
        if named is None:
            yield replace(family, automatic=not _has_tables_named(family, settings))
        elif name in named:
            yield family
    for module in _MAINTENANCE:
        yield from _for_each_database(module, settings)


def _for_each_database(module: Any, settings: Settings) -> Iterator[Family]:
    """Yield the family of a module that cleans the library's own tables, for the ledger of each database."""
    family = family_of(module)
    yield family
    for name in settings.databases:
        copies = [replace(sweep, name=f"{sweep.name}.{name}", database=name) for sweep in family.sweeps]
        yield replace(family, name=f"{family.name}.{name}", sweeps=copies)
    for name, given in settings.workers.items():
        if given.database is not None and any(name.startswith(sweep.name) for sweep in family.sweeps):
            raise SettingsError(
                f'HOUSEKEEPING_WORKERS["{name}"]["database"] is {given.database!r}, but each database has a worker of '
                "its own for this; leave the key out"
            )


def _named(built_in: Sequence[str] | None) -> Sequence[str] | None:
    """Return the families that ``HOUSEKEEPING_BUILT_IN`` names; None if it is not set, so that their tables decide."""
    if built_in is None or list(built_in) == ["all"]:
        return None if built_in is None else tuple(FAMILIES)
    for name in built_in:
        if name not in FAMILIES:
            near = difflib.get_close_matches(name, FAMILIES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the families are {', '.join(FAMILIES)} (or all, or none)"
            raise SettingsError(f"HOUSEKEEPING_BUILT_IN names {name!r}, which is not a built-in family; {hint}")
    return built_in


def _has_tables_named(family: Family, settings: Settings) -> bool:
    """Return whether the settings rename a table of the family. Its tables must then exist."""
    given = [settings.workers[sweep.name] for sweep in family.sweeps if sweep.name in settings.workers]
    return any(each.table is not None or each.tables for each in given)


def configured_sweeps(settings: Settings, own: Sequence[Sweep] = ()) -> dict[str, Sweep]:
    """Return all workers by name with their settings applied, and bind their models to the tables.

    Parameters:
      own: Sweeps of an application, in addition to those of ``HOUSEKEEPING_SWEEPS``.

    Raises:
      SettingsError: When ``HOUSEKEEPING_WORKERS`` names an unknown worker, table or key, or has a wrong value; or
        ``HOUSEKEEPING_SWEEPS`` a module that is not found, cannot be imported, or has no sweeps.
      DeclarationError: When two sweeps have the same name.
    """
    found = families(settings, own)
    known = {sweep.name for family in found for sweep in family.sweeps}
    for name in settings.workers:
        if name not in known:
            raise SettingsError(
                f'HOUSEKEEPING_WORKERS["{name}"] is not a worker; the workers are {", ".join(sorted(known))}'
            )
    configured = {name: sweep for family in found for name, sweep in _configured(family, settings).items()}
    _check_databases(found, configured, settings)
    return configured


def only(settings: Settings, own: Sequence[Sweep]) -> dict[str, Sweep]:
    """Return an application's own sweeps by name with their settings applied.

    The only other worker is the outbox, if one of these sweeps has an event.

    Raises:
      SettingsError: When ``HOUSEKEEPING_WORKERS`` has an unknown table or key for one of them, or a wrong value.
      DeclarationError: When two sweeps have the same name.
    """
    outboxes = _for_each_database(_outbox, settings) if _have_events(own) else ()
    found = each_once([declared_by("install", own), *outboxes])
    configured = {name: sweep for family in found for name, sweep in _configured(family, settings).items()}
    _check_databases(found, configured, settings)
    return configured


def is_built_in(worker: str) -> bool:
    """Return whether a worker is one of the built-in ones."""
    return any(sweep.name == worker for family in BUILT_IN for sweep in family.SWEEPS)


def _have_events(sweeps: Sequence[Sweep]) -> bool:
    tables = [each for sweep in sweeps for each in sweep.declared_stages() if isinstance(each, TableStage)]
    return any(table.event is not None for table in tables)


def _check_databases(families: Iterable[Family], configured: Mapping[str, Sweep], settings: Settings) -> None:
    """Bind each model to the database of its workers.

    Raises:
      SettingsError: A worker's database is not configured, or workers of one table have different databases.
    """
    if settings.database_url is None:
        return
    users: dict[type[Model], Sweep] = {}
    for family in families:
        for sweep in (configured[each.name] for each in family.sweeps):
            if sweep.database not in settings.database_names:
                raise SettingsError(
                    f"{sweep.name} has the database {sweep.database!r}; the databases are "
                    f"{', '.join(settings.database_names)} (HOUSEKEEPING_DATABASES)"
                )
            for model in _models_of(family, sweep):
                other = users.setdefault(model, sweep)
                if other.database != sweep.database:
                    raise SettingsError(
                        f"{sweep.name} has the database {sweep.database!r}, and {other.name} has {other.database!r}; "
                        f"both use the table {model._meta.table_name}, so they need the same one"
                    )
                bind(model, handle_of(sweep.database) if settings.databases else database)


def _models_of(family: Family, sweep: Sweep) -> Iterable[type[Model]]:
    """Return the models of the application's tables; workers of a built-in family share all tables of the family."""
    if family.name in FAMILIES:
        return family.models.values()
    stages = sweep.declared_stages()
    models = [stage.model for stage in stages if isinstance(stage, TableStage | PartitionStage)]
    return [model for model in models if model not in LEDGER]


def _configured(family: Family, settings: Settings) -> dict[str, Sweep]:
    _bind_tables(family, settings)
    if family.configure is not None:
        family.configure(settings)
    check = FamilySetup(family) if family.automatic else None
    configured: dict[str, Sweep] = {}
    for sweep in family.sweeps:
        archived = configured.get(sweep.name.removesuffix(SUFFIX))
        declared = sweep if archived is None else following(sweep, archived)
        configured[sweep.name] = declared.configured(settings.workers.get(sweep.name, WorkerSettings()))
    return {name: replace(sweep, setup_problem=check) if check else sweep for name, sweep in configured.items()}


def _archives(family: Family) -> set[type[Model]]:
    return {archive for sweep in family.sweeps for archive in archives_of(sweep.declared_stages())}


def _bind_tables(family: Family, settings: Settings) -> None:
    """Bind the family's models to the tables named in the settings, or to the declared ones."""
    models = family.models
    names: dict[str, str] = {}
    for sweep in family.sweeps:
        given = settings.workers.get(sweep.name, WorkerSettings())
        where = f'HOUSEKEEPING_WORKERS["{sweep.name}"]'
        tables = dict(given.tables or {})
        if given.table is not None:
            own = [name for name, model in models.items() if model not in _archives(family)]
            if len(own) != 1:
                raise SettingsError(f'{where}["table"] is {given.table!r}; give "tables" for {", ".join(models)}')
            tables[own[0]] = given.table
        for table, name in tables.items():
            if table not in models:
                raise SettingsError(f'{where}["tables"] names {table!r}; it should name some of {", ".join(models)}')
            if names.setdefault(table, name) != name:
                raise SettingsError(f"{where} calls {table} {name!r}, another worker calls it {names[table]!r}")
    for table, model in models.items():
        *schema, name = names.get(table, table).split(".")
        meta: Any = model._meta
        meta.schema = schema[0] if schema else None
        meta.set_table_name(name)
