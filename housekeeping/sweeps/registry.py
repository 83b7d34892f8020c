"""Families of sweeps, built-in or from a module, with the tables and rights they need."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import ModuleType
from typing import Any, Final, Literal

from peewee import Model

from housekeeping.core.errors import DeclarationError, SettingsError
from housekeeping.core.sanitize import error_line, typed_error_line
from housekeeping.core.settings import PREFIX, Settings
from housekeeping.database.connection import database
from housekeeping.database.times import STATEMENT_TIME
from housekeeping.sweeps.companions import with_companions
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.stages.actions import Delete, Transition
from housekeeping.sweeps.stages.call import Call
from housekeeping.sweeps.stages.table_stage import TableStage

_SHOWN: Final = 60  # characters of a wrong value

#: Model -> declared name of its table; settings may rename the table later.
_declared: Final[dict[type[Model], str]] = {}


Level = Literal["fine", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
      level: ``warning``: works, but not correctly, or not for long; ``error``: does not work.
      area: The part of the installation: ``postgres``, ``redis``, ``broker``, or a worker's name.
      subject: The thing checked, in a few words.
      text: The result.
      way_out: What to do; None if there is nothing to do.
    """

    level: Level
    area: str
    subject: str
    text: str
    way_out: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``findings`` in ``housekeeping doctor --json``."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Family:
    """Sweeps of one module or worker, with their tables and rights.

    Attributes:
      name: The module or worker.
      models: The application's tables they touch, by declared name.
      rights: The rights they need on these tables, by declared name, as in GRANT.
      configure: Called with the settings before a sweep is used.
      examine: Yields findings of `housekeeping doctor` outside of PostgreSQL and Redis.
      unconfigured: Returns the missing setting as text; None when nothing is missing.
      automatic: Whether its workers are active only where they are set up (see `FamilySetup`).
    """

    name: str
    sweeps: Sequence[Sweep]
    models: Mapping[str, type[Model]] = field(default_factory=dict)
    rights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    configure: Callable[[Settings], object] | None = None
    examine: Callable[[], Iterator[Finding]] | None = None
    unconfigured: Callable[[], str | None] | None = None
    automatic: bool = False


def by_database(sweeps: Iterable[Sweep]) -> dict[str, list[Sweep]]:
    """Return the sweeps of each configured database, by its name, `MAIN` first."""
    found: dict[str, list[Sweep]] = {name: [] for name in database.by_name()}
    for sweep in sweeps:
        found.setdefault(sweep.database, []).append(sweep)
    return found


def family_of(module: ModuleType) -> Family:
    """Return the sweeps of a module: its ``SWEEPS``, or else all its global ones.

    ``MODELS``, ``RIGHTS``, ``configure`` and ``examine`` of the module are used if present. Otherwise tables and rights
    come from the declarations.

    Raises:
      SettingsError: The module has no sweeps, or ``SWEEPS`` has another type.
    """
    given = getattr(module, "SWEEPS", None)
    sweeps = [each for each in vars(module).values() if isinstance(each, Sweep)] if given is None else given
    if not isinstance(sweeps, list | tuple) or not all(isinstance(each, Sweep) for each in sweeps):
        raise SettingsError(f"{module.__name__}.SWEEPS is {repr(given)[:_SHOWN]}; it should be a tuple of Sweep")
    if not sweeps:
        raise SettingsError(f"{module.__name__} has no sweeps; it should have a Sweep, or SWEEPS, a tuple of them")
    family = declared_by(module.__name__, sweeps)
    return replace(
        family,
        models=getattr(module, "MODELS", family.models),
        rights=getattr(module, "RIGHTS", family.rights),
        configure=getattr(module, "configure", None),
        examine=getattr(module, "examine", None),
        unconfigured=getattr(module, "unconfigured", None),
    )


def declared_by(name: str, sweeps: Iterable[Sweep]) -> Family:
    """Return a family of these sweeps, with the tables and rights of their declarations."""
    models: dict[str, type[Model]] = {}
    rights: dict[str, tuple[str, ...]] = {}
    each_once = tuple(with_companions({id(sweep): sweep for sweep in sweeps}.values()))
    for sweep in each_once:
        for table in sweep.declared_stages():
            if isinstance(table, TableStage):
                known_as = _declared.setdefault(table.model, _table_of(table.model))
                models[known_as] = table.model
                rights[known_as] = tuple(dict.fromkeys((*rights.get(known_as, ()), *rights_for(table))))
            elif isinstance(table, PartitionStage):
                # Only the owner can drop a partition, which no GRANT allows; `housekeeping doctor` checks it.
                known_as = _declared.setdefault(table.model, _table_of(table.model))
                models[known_as] = table.model
                rights[known_as] = tuple(dict.fromkeys((*rights.get(known_as, ()), "SELECT")))
    return Family(name, each_once, models, rights)


def rights_for(table: TableStage) -> tuple[str, ...]:
    """Return the rights a stage needs on its table; a custom action counts as reading only."""
    action = table.action.then if isinstance(table.action, Call) else table.action
    if isinstance(action, Delete):
        # FOR UPDATE needs the right to update at least one column.
        return "SELECT", "DELETE", f"UPDATE ({table.order[0].column_name})"
    if isinstance(action, Transition):
        columns = (action.machine.field, *_changed_by(action))
        return "SELECT", f"UPDATE ({', '.join(getattr(each, 'column_name', each) for each in columns)})"
    return ("SELECT",)


def _changed_by(action: Transition) -> Iterable[Any]:
    try:
        return action.changes(STATEMENT_TIME)
    except (AttributeError, TypeError) as error:
        raise DeclarationError(
            f"Transition to {action.event!r}: its `changes` fails: {error_line(error)}; `now` is the time in SQL, to "
            "be used as it is or with a timedelta added"
        ) from error


def imported(names: Iterable[str]) -> Iterator[Family]:
    """Yield the families of these modules.

    Raises:
      SettingsError: A module is not found, cannot be imported, or has no sweeps.
    """
    for name in names:
        try:
            module = importlib.import_module(name)
        except DeclarationError as error:
            raise SettingsError(f"{PREFIX}SWEEPS: {name}: {error}") from error
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                problem = f"names {name!r}, which is not found; it should be a module that can be imported from here"
                raise SettingsError(f"{PREFIX}SWEEPS {problem}") from None
            problem = f"{name} cannot be imported: {typed_error_line(error)}"
            raise SettingsError(f"{PREFIX}SWEEPS: {problem} (housekeeping --debug shows where)") from error
        yield family_of(module)


def each_once(families: Iterable[Family]) -> tuple[Family, ...]:
    """Remove sweeps, models and rights of earlier families from later ones.

    Raises:
      DeclarationError: Two sweeps have the same name.
    """
    found: list[Family] = []
    sweeps: dict[str, tuple[Sweep, str]] = {}
    models: set[type[Model]] = set()
    for family in families:
        new = []
        for sweep in family.sweeps:
            if sweep.name not in sweeps:
                new.append(sweep)
            known, where = sweeps.setdefault(sweep.name, (sweep, family.name))
            if known is not sweep:
                raise DeclarationError(
                    f"{family.name}: there is a sweep {sweep.name} already, of {where}; give one of them another name"
                )
        own = {name: model for name, model in family.models.items() if model not in models}
        models.update(own.values())
        rights = {name: needed for name, needed in family.rights.items() if name in own}
        found.append(replace(family, sweeps=tuple(new), models=own, rights=rights))
    return tuple(found)


def _table_of(model: type[Model]) -> str:
    meta: Any = model._meta
    return ".".join(filter(None, (meta.schema, meta.table_name)))
