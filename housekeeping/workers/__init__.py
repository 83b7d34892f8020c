"""Floor 2: one package a worker family, named after its design document; none knows another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from housekeeping.foundation.errors import SettingsError
from housekeeping.foundation.settings import Settings, WorkerSettings
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.families import Family, declared_by, each_once, family_of, imported
from housekeeping.sweeps.table_pass import TablePass
from housekeeping.workers.batched_git_ref_updates import worker as _batched_git_ref_updates
from housekeeping.workers.bulk_imports import worker as _bulk_imports
from housekeeping.workers.ci_stuck_builds import worker as _ci_stuck_builds
from housekeeping.workers.object_storage import worker as _object_storage
from housekeeping.workers.old_runs import worker as _old_runs
from housekeeping.workers.outbox import worker as _outbox
from housekeeping.workers.user_status_cleanup import worker as _user_status_cleanup

#: Every built-in family's module, in the order they are listed. Each has SWEEPS and MODELS (by the table's name in
#: the documents), and may have `configure`, which is given the settings. Underscored: the packages keep their names.
BUILT_IN: Final[tuple[Any, ...]] = (
    _user_status_cleanup,
    _bulk_imports,
    _object_storage,
    _batched_git_ref_updates,
    _ci_stuck_builds,
    _old_runs,
    _outbox,
)

#: Kept where the other built-in workers are switched off: they look after the library's own tables.
_MAINTENANCE: Final = (_old_runs, _outbox)


def families(settings: Settings, own: Sequence[Sweep] = ()) -> tuple[Family, ...]:
    """The built-in workers, those of the modules that the settings name, and an application's own.

    Raises:
      SettingsError: When a module is not found, cannot be imported, or has no sweeps.
      DeclarationError: When two sweeps have the same name.
    """
    built_in = [family_of(module) for module in BUILT_IN if settings.built_in or module in _MAINTENANCE]
    return each_once([*built_in, *imported(settings.sweeps), declared_by("install", own)])


def configured_sweeps(settings: Settings, own: Sequence[Sweep] = ()) -> dict[str, Sweep]:
    """All workers by name, with what the settings say of them; binds their models to the tables.

    Parameters:
      own: An application's, beside those of ``HOUSEKEEPING_SWEEPS``.

    Raises:
      SettingsError: When ``HOUSEKEEPING_WORKERS`` names a worker, table or key that there is not, or a wrong value; or
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
    return {name: sweep for family in found for name, sweep in _configured(family, settings).items()}


def only(settings: Settings, own: Sequence[Sweep]) -> dict[str, Sweep]:
    """An application's own sweeps by name, with what the settings say of them.

    Without any other worker, but for the one that delivers the events of these sweeps.

    Raises:
      SettingsError: When ``HOUSEKEEPING_WORKERS`` has a table or key of theirs that there is not, or a wrong value.
      DeclarationError: When two sweeps have the same name.
    """
    found = each_once([declared_by("install", own), *([family_of(_outbox)] if _have_events(own) else [])])
    return {name: sweep for family in found for name, sweep in _configured(family, settings).items()}


def _have_events(sweeps: Sequence[Sweep]) -> bool:
    tables = [each for sweep in sweeps for each in sweep.declared() if isinstance(each, TablePass)]
    return any(table.sends is not None for table in tables)


def _configured(family: Family, settings: Settings) -> dict[str, Sweep]:
    _bind_tables(family, settings)
    if family.configure is not None:
        family.configure(settings)
    return {sweep.name: sweep.configured(settings.workers.get(sweep.name, WorkerSettings())) for sweep in family.sweeps}


def _bind_tables(family: Family, settings: Settings) -> None:
    """Give the family's models the names their tables have in this database; the declared ones unless said."""
    models = family.models
    names: dict[str, str] = {}
    for sweep in family.sweeps:
        given = settings.workers.get(sweep.name, WorkerSettings())
        where = f'HOUSEKEEPING_WORKERS["{sweep.name}"]'
        tables = dict(given.tables or {})
        if given.table is not None:
            if len(models) != 1:
                raise SettingsError(f'{where}["table"] is {given.table!r}; give "tables" for {", ".join(models)}')
            tables[next(iter(models))] = given.table
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
