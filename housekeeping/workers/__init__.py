"""Built-in workers: one package per family, named after its design document. No family imports another.

Each package declares its sweeps; `models` has its tables, if any. `user_status_cleanup` is the simplest one.
This module lists the families and applies the settings to them: which run, their limits and their tables' names.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from peewee import Model

from housekeeping.core.errors import DeclarationError, SettingsError
from housekeeping.core.redis import shared_redis
from housekeeping.core.settings import PREFIX, Settings, WorkerSettings
from housekeeping.database.connection import bind, database, handle_of
from housekeeping.engine.registry import (
    SUFFIX,
    Family,
    FamilySetup,
    declared_by,
    declared_tables,
    each_once,
    family_of,
    imported,
)
from housekeeping.ledger.schema import MODELS as LEDGER
from housekeeping.sweeps.declaration import Sweep, setting_of
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.values import Kept, SetupProblem
from housekeeping.workers import (
    batched_git_ref_updates,
    bulk_imports,
    ci_stuck_builds,
    maintenance,
    object_storage,
    user_status_cleanup,
)

#: The module of every built-in family, in the order of `housekeeping list`. Each has SWEEPS, MODELS (table name in
#: the documents -> model) and, for actions of its own, RIGHTS. `registry.family_of` says what else it may have.
BUILT_IN: Final[tuple[Any, ...]] = (
    user_status_cleanup,
    bulk_imports,
    object_storage,
    batched_git_ref_updates,
    ci_stuck_builds,
    maintenance,
)

#: The families that `HOUSEKEEPING_BUILT_IN` may name, by package.
FAMILIES: Final[dict[str, Any]] = {
    module.__name__.rpartition(".")[2]: module for module in BUILT_IN if module is not maintenance
}


def families(settings: Settings, own: Sequence[Sweep] = ()) -> tuple[Family, ...]:
    """Return the built-in families, those of the modules in the settings, and an application's own.

    Raises:
      SettingsError: When a module is not found, cannot be imported or has no sweeps, or `HOUSEKEEPING_BUILT_IN` names
        an unknown family.
      DeclarationError: When two sweeps have the same name.
    """
    return each_once([*_built_in(settings), *imported(settings.sweeps), declared_by("install", own)])


def kept_tables(settings: Settings) -> list[Kept]:
    """Return the tables that keep their rows, as the modules of sweeps and the settings declare.

    Raises:
      SettingsError: ``HOUSEKEEPING_KEPT`` has a wrong name or no reason, or a module cannot be imported.
    """
    try:
        given = [Kept(table, reason) for table, reason in settings.kept.items()]
    except DeclarationError as error:
        raise SettingsError(f"{PREFIX}KEPT: {error}") from None
    return [*(each for family in imported(settings.sweeps) for each in family.kept), *given]


def families_of(settings: Settings, workers: Container[str]) -> Iterator[Family]:
    """Yield the families of these workers, without other workers and their tables: those of one database, for example.

    Raises:
      SettingsError, DeclarationError: As `families`.
    """
    for family in families(settings):
        sweeps = [sweep for sweep in family.sweeps if sweep.name in workers]
        used = {model for sweep in sweeps for model in _models_of(family, sweep)}
        others = {model for sweep in family.sweeps if sweep not in sweeps for model in _models_of(family, sweep)} - used
        models = {name: model for name, model in family.models.items() if model not in others}
        if sweeps:
            yield replace(family, sweeps=tuple(sweeps), models=models)


def _built_in(settings: Settings) -> Iterator[Family]:
    named = _named(settings.built_in)
    for name, module in FAMILIES.items():
        family = replace(family_of(module), name=name)
        if named is None:
            yield replace(family, automatic=not _has_place_given(family, settings))
        elif name in named:
            yield family
    yield from _maintaining(maintenance.SWEEPS, settings)


def _maintaining(sweeps: Sequence[Sweep], settings: Settings) -> Iterator[Family]:
    """Yield the family of these sweeps, which are always active, for the ledger of each database."""
    family = replace(family_of(maintenance), sweeps=sweeps)
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


def _has_place_given(family: Family, settings: Settings) -> bool:
    """Return whether the settings name a table of the family, or the database of its tables. These must then exist."""
    given = [settings.workers[sweep.name] for sweep in family.sweeps if sweep.name in settings.workers]
    return bool(family.models) and any(each.table or each.tables or each.database is not None for each in given)


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
    return _acquainted(found, settings)


def only(settings: Settings, own: Sequence[Sweep]) -> dict[str, Sweep]:
    """Return an application's own sweeps by name with their settings applied, and what maintains the library's tables.

    Where there is a database, leases and outcomes of ticks write to it even without sweeps, so old rows are removed in
    any case. The outbox is delivered if one of the sweeps has an event.

    Raises:
      SettingsError: When ``HOUSEKEEPING_WORKERS`` has an unknown table or key for one of them, or a wrong value.
      DeclarationError: When two sweeps have the same name.
    """
    sweeps = maintenance.SWEEPS if _have_events(own) else (maintenance.old_runs,)
    maintained = [] if settings.database_url is None else _maintaining(sweeps, settings)
    found = each_once([declared_by("install", own), *maintained])
    return _acquainted(found, settings)


def _acquainted(found: Sequence[Family], settings: Settings) -> dict[str, Sweep]:
    """Return the families' sweeps with their settings applied, so that each knows all of them."""
    configured = {name: sweep for family in found for name, sweep in _configured(family, settings).items()}
    _check_databases(found, configured, settings)
    known: dict[str, Sweep] = {}
    for name, sweep in configured.items():
        known[name] = sweep.set_up(declared=known.values)
    return known


def is_built_in(worker: str) -> bool:
    """Return whether a worker is one of the built-in ones."""
    return any(sweep.name == worker for family in BUILT_IN for sweep in family.SWEEPS)


def _have_events(sweeps: Sequence[Sweep]) -> bool:
    return any(getattr(part, "event", None) is not None for sweep in sweeps for part in sweep.parts)


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
                    f"{_given_database(sweep, settings)}; the databases are "
                    f"{', '.join(settings.database_names)} (HOUSEKEEPING_DATABASES)"
                )
            for model in _models_of(family, sweep):
                other = users.setdefault(model, sweep)
                if other.database != sweep.database:
                    raise SettingsError(
                        f"{_given_database(sweep, settings)}, and {_given_database(other, settings)}; "
                        f"both use the table {model._meta.table_name}, so they need the same one"
                    )
                bind(model, handle_of(sweep.database) if settings.databases else database)


def _given_database(sweep: Sweep, settings: Settings) -> str:
    """Return what gives the sweep its database, with the name of the database: its settings, or its declaration."""
    given = settings.workers.get(sweep.name)
    if given is not None and given.database is not None:
        return f'{setting_of(sweep)}["database"] is {sweep.database!r}'
    return f"{sweep.name} has the database {sweep.database!r}"


def _models_of(family: Family, sweep: Sweep) -> Iterable[type[Model]]:
    """Return the models of the application's tables; workers of a built-in family share all tables of the family."""
    if family.name in FAMILIES:
        return family.models.values()
    stages = sweep.known_stages()
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
        declared = sweep if archived is None else replace(sweep, database=archived.database)
        configured[sweep.name] = declared.configured(settings.workers.get(sweep.name, WorkerSettings()))
    for name, sweep in configured.items():
        problem = _lack_of_redis(family, sweep) if shared_redis.is_replaced(settings) else None
        if problem is not None or check is not None:
            configured[name] = sweep.set_up(problem=check if problem is None else partial(SetupProblem, *problem))
    return configured


def _lack_of_redis(family: Family, sweep: Sweep) -> tuple[str, str] | None:
    """Return the family, and why the sweep cannot run without Redis; None if it can."""
    needs = next((getattr(stage, "needs_redis", None) for stage in sweep.known_stages()), None)
    return None if needs is None else (family.name, f"{needs}, and HOUSEKEEPING_REDIS_URL is not set")


def _archives(family: Family) -> set[type[Model]]:
    from housekeeping.sweeps.validate_tables import archives_of

    return {archive for sweep in family.sweeps for archive in archives_of(sweep.known_stages())}


def _bind_tables(family: Family, settings: Settings) -> None:
    """Bind the family's models to the tables named in the settings, or to the declared ones."""
    models = family.models
    names: dict[str, str] = {}
    for sweep in family.sweeps:
        given = settings.workers.get(sweep.name, WorkerSettings())
        where = setting_of(sweep)
        tables = dict(given.tables or {})
        if given.table is not None:
            own = [name for name, model in models.items() if model not in _archives(family)]
            if not own:
                raise SettingsError(f'{where}["table"] is {given.table!r}, but this worker has no table to name')
            if len(own) != 1:
                raise SettingsError(f'{where}["table"] is {given.table!r}; give "tables" for {", ".join(models)}')
            tables[own[0]] = given.table
        for table, name in tables.items():
            if table not in models:
                known = f"it should name some of {', '.join(models)}" if models else "this worker has no table to name"
                raise SettingsError(f'{where}["tables"] names {table!r}; {known}')
            if names.setdefault(table, name) != name:
                raise SettingsError(f"{where} calls {table} {name!r}, another worker calls it {names[table]!r}")
    for model, table in declared_tables(family).items():
        *schema, name = names.get(table, table).split(".")
        meta: Any = model._meta
        meta.schema = schema[0] if schema else None
        meta.set_table_name(name)
