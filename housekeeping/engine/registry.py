"""Families of sweeps, built-in or from a module, with the tables and rights they need."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from peewee import Model, PeeweeException, ProgrammingError

from housekeeping.core.errors import DeclarationError, HousekeepingError, RunTakenOver, SettingsError
from housekeeping.core.logs import error_line, typed_error_line
from housekeeping.core.settings import PREFIX, Settings
from housekeeping.database.catalog import key_of, optional_fields, quoted_name, read_table, table_of
from housekeeping.database.connection import database
from housekeeping.database.errors import is_unavailable
from housekeeping.database.queries import STATEMENT_TIME
from housekeeping.ledger.runs import HEARTBEAT
from housekeeping.ledger.schema import Run
from housekeeping.sweeps import send
from housekeeping.sweeps.actions import ARCHIVED_AT, ARCHIVED_BY_RUN, Delete, Transition, archiving
from housekeeping.sweeps.declaration import QUEUE, Sweep
from housekeeping.sweeps.keyset import hold_of_another_table
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.rows import Call
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.values import Finding, Kept, Lease, Setup, SetupProblem

if TYPE_CHECKING:
    from dramatiq import Actor, Broker

    from housekeeping.engine import RunResult
    from housekeeping.sweeps.subjects import Subject
    from housekeeping.sweeps.validate_tables import Columns

T = TypeVar("T")

_SHOWN: Final = 60  # characters of a wrong value

#: Model -> declared name of its table; settings may rename the table later.
_declared: Final[dict[type[Model], str]] = {}


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
      kept: Tables that keep their rows.
      subjects: Persons and tenants that can be erased.
    """

    name: str
    sweeps: Sequence[Sweep]
    models: Mapping[str, type[Model]] = field(default_factory=dict)
    rights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    configure: Callable[[Settings], object] | None = None
    examine: Callable[[], Iterator[Finding]] | None = None
    unconfigured: Callable[[], str | None] | None = None
    automatic: bool = False
    kept: Sequence[Kept] = ()
    subjects: Sequence[Subject] = ()


def by_database(sweeps: Iterable[Sweep]) -> dict[str, list[Sweep]]:
    """Return the sweeps of each configured database, by its name, `MAIN` first."""
    found: dict[str, list[Sweep]] = {name: [] for name in database.by_name()}
    for sweep in sweeps:
        found.setdefault(sweep.database, []).append(sweep)
    return found


def family_of(module: ModuleType) -> Family:
    """Return the sweeps of a module: its ``SWEEPS``, or else all its global ones; likewise ``KEPT``. Its ``SUBJECTS``.

    ``MODELS``, ``RIGHTS``, ``configure`` and ``examine`` of the module are used if present. Otherwise tables and rights
    come from the declarations. ``DISABLED`` names the workers that run only where the settings enable them.

    Raises:
      SettingsError: The module has no sweeps, kept tables or subjects, one of these names has another type, or
        ``DISABLED`` names none of its sweeps.
    """
    sweeps, kept = _globals_of(module, "SWEEPS", Sweep), _globals_of(module, "KEPT", Kept)
    subjects: Sequence[Subject] = ()
    if hasattr(module, "SUBJECTS"):
        from housekeeping.sweeps.subjects import Subject  # most modules have none

        subjects = _globals_of(module, "SUBJECTS", Subject)
    if not (sweeps or kept or subjects):
        raise SettingsError(f"{module.__name__} has no sweeps; it should have a Sweep, or SWEEPS, a tuple of them")
    disabled = _globals_of(module, "DISABLED", str) if hasattr(module, "DISABLED") else ()
    names = [each.name for each in sweeps]
    for name in disabled:
        if name not in names:
            text = f"{module.__name__}.DISABLED names {name!r}, which is none of its sweeps"
            raise SettingsError(f"{text}; they are {', '.join(names)}")
    family = declared_by(module.__name__, [_disabled(each) if each.name in disabled else each for each in sweeps])
    return replace(
        family,
        models=getattr(module, "MODELS", family.models),
        rights=getattr(module, "RIGHTS", family.rights),
        configure=getattr(module, "configure", None),
        examine=getattr(module, "examine", None),
        unconfigured=getattr(module, "unconfigured", None),
        kept=kept,
        subjects=subjects,
    )


def _globals_of(module: ModuleType, name: str, kind: type[T]) -> Sequence[T]:
    given = getattr(module, name, None)
    found = [each for each in vars(module).values() if isinstance(each, kind)] if given is None else given
    if not isinstance(found, list | tuple) or not all(isinstance(each, kind) for each in found):
        text = f"{module.__name__}.{name} is {repr(given)[:_SHOWN]}"
        raise SettingsError(f"{text}; it should be a tuple of {kind.__name__}")
    return found


def _disabled(sweep: Sweep) -> Sweep:
    """Return the sweep as disabled; one object for each."""
    known: Sweep | None = vars(sweep).get("_as_disabled")
    if known is None:
        known = replace(sweep, setup=Setup(enabled=False))
        object.__setattr__(sweep, "_as_disabled", known)
    return known


def declared_by(name: str, sweeps: Iterable[Sweep]) -> Family:
    """Return a family of these sweeps, with the tables and rights of their declarations."""
    models: dict[str, type[Model]] = {}
    rights: dict[str, tuple[str, ...]] = {}
    each_once = tuple(with_companions({id(sweep): sweep for sweep in sweeps}.values()))
    for sweep in each_once:
        for table in sweep.known_stages():
            if isinstance(table, TableStage | PartitionStage):
                known_as = _declared.setdefault(table.model, _table_of(table.model))
                models[known_as] = table.model
                rights[known_as] = tuple(dict.fromkeys((*rights.get(known_as, ()), *rights_for(table))))
    return Family(name, each_once, models, rights)


def declared_tables(family: Family) -> dict[type[Model], str]:
    """Return the declared name of each model's table. Several models of the family's sweeps may be of one table."""
    of_sweeps = {
        stage.model
        for sweep in family.sweeps
        for stage in sweep.known_stages()
        if isinstance(stage, TableStage | PartitionStage)
    }
    others = {model: _declared[model] for model in of_sweeps if _declared.get(model) in family.models}
    return others | {model: name for name, model in family.models.items()}


def rights_for(table: TableStage | PartitionStage) -> tuple[str, ...]:
    """Return the rights a stage needs on its table; a custom action counts as reading only.

    Only the owner can drop a partition, which no GRANT allows; `housekeeping doctor` checks it.
    """
    if isinstance(table, PartitionStage):
        return ("SELECT",)
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


class FamilySetup:
    """Check that a family's workers find what they need, asked whenever one of them is about to run.

    A table that fits is remembered. One that does not is looked at again each time, so that a table made later is
    noticed without a restart.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._needed: dict[type[Model], Columns] = {}

    def __call__(self) -> SetupProblem | None:
        """Return what is missing; None when nothing is.

        A family whose tables have vanished since its last successful run is broken, and not without a setup: None.

        Raises:
          peewee.PeeweeException: If the database cannot be read.
        """
        text = self._family.unconfigured() if self._family.unconfigured is not None else None
        if text is None:
            text = next(self._misfits(), None)
            if text is not None and self._has_worked():
                return None
        return None if text is None else SetupProblem(self._family.name, text)

    def _misfits(self) -> Iterator[str]:
        from housekeeping.sweeps.validate_tables import misfit

        for model in self._family.models.values():
            meta: Any = model._meta
            if misfit(model, meta.columns, table_of(model)) is None:
                continue  # it has even the columns that no statement needs
            self._needed = self._needed or _needed_columns(self._family)
            text = misfit(model, self._needed[model], read_table(model))
            if text is not None:
                yield text

    def _has_worked(self) -> bool:
        done = Run.worker.in_([sweep.name for sweep in self._family.sweeps]) & Run.outcome.in_(("done", "partial"))
        try:
            with database.atomic():
                return bool(Run.select(Run.id).where(done).limit(1).exists())
        except ProgrammingError:  # before `housekeeping init`
            return False


def setup_problems(sweeps: Iterable[Sweep]) -> dict[str, SetupProblem | None]:
    """Return why workers are not set up, by name; None for those that are. A check that several share is made once.

    A worker that cannot be examined, for example for lack of a right, is left out.

    Raises:
      peewee.PeeweeException, DatabaseUnavailable: The database does not answer.
    """
    known: dict[Any, SetupProblem | None] = {}
    found = {}
    for sweep in sweeps:
        check = sweep.enabled and sweep.setup.problem
        try:
            if check not in known:
                known[check] = sweep.lacks()
            found[sweep.name] = known[check]
        except (HousekeepingError, PeeweeException) as error:
            if is_unavailable(error):
                raise
    return found


def by_problem(problems: Mapping[str, SetupProblem]) -> dict[SetupProblem, list[str]]:
    """Return the workers that share each problem."""
    found: dict[SetupProblem, list[str]] = {}
    for worker, problem in problems.items():
        found.setdefault(problem, []).append(worker)
    return found


def _needed_columns(family: Family) -> dict[type[Model], Columns]:
    from housekeeping.sweeps.validate_tables import columns_of, updated_columns

    found: dict[type[Model], Columns] = {model: {} for model in family.models.values()}
    found |= columns_of(stage for sweep in family.sweeps for stage in sweep.known_stages())
    for name, model in family.models.items():
        meta: Any = model._meta
        for column in updated_columns(family.rights.get(name, ())):
            if meta.columns[column].name not in optional_fields(model):
                found[model].setdefault(column, meta.columns[column])
    return found


#: What the name of an archive's sweep has after that of its sweep.
SUFFIX: Final = ".archive"
#: Attribute of a sweep that holds the sweep of its archive.
_COMPANION: Final = "_archive_sweep"


def with_companions(sweeps: Iterable[Sweep]) -> Iterator[Sweep]:
    """Yield the sweeps, each followed by the sweep of its archive if that keeps its rows for a time."""
    for sweep in sweeps:
        yield sweep
        companion = archive_sweep(sweep)
        if companion is not None:
            yield companion


def archive_sweep(sweep: Sweep) -> Sweep | None:
    """Return the sweep that deletes old rows from a sweep's archives; None if they stay for ever.

    It has the schedule and the limits of the sweep, and settings of its own. There is one object for each sweep.
    """
    known: Sweep | None = vars(sweep).get(_COMPANION)
    if known is None and (known := _made_for(sweep)) is not None:
        object.__setattr__(sweep, _COMPANION, known)
    return known


def _made_for(sweep: Sweep) -> Sweep | None:
    """Return a sweep with a stage for each archive that keeps its rows for a time; None without one."""
    tables = [stage for stage in sweep.known_stages() if isinstance(stage, TableStage)]
    aged = [(stage, age) for stage in tables if (age := getattr(archiving(stage.action), "archive_keep", None))]
    if not aged:
        return None
    from housekeeping.sweeps.validate_tables import archive_of

    keeping: dict[type[Model] | None, tuple[TableStage, timedelta]] = {}
    for stage, age in aged:
        keeping.setdefault(archive_of(stage), (stage, age))
    ages = {age.total_seconds() for _, age in keeping.values()}
    lease = None if sweep.lease is None else Lease(f"{sweep.name}{SUFFIX}", sweep.lease.ttl)
    return Sweep(
        f"{sweep.name}{SUFFIX}",
        lambda own: [_deleting(own, *each, alone=len(keeping) == 1) for each in keeping.values()],
        schedule=sweep.schedule,
        lease=lease,
        limits=replace(sweep.limits, resume="interrupted"),
        options={"stale_after_s": ages.pop()} if len(ages) == 1 else {},
        actor={name: sweep.actor[name] for name in ("queue_name", "feature_category") if name in sweep.actor},
        database=sweep.database,
    )


def _deleting(own: Sweep, stage: TableStage, age: timedelta, *, alone: bool) -> TableStage:
    """Return the stage of the companion that deletes the old rows of a stage's archive."""
    from housekeeping.sweeps.validate_tables import archive_of

    archive: Any = archive_of(stage)
    at, run = getattr(archive, ARCHIVED_AT), getattr(archive, ARCHIVED_BY_RUN)
    key = [getattr(archive, column.name) for column in key_of(stage.model)]
    return TableStage(
        name="rows" if alone else quoted_name(archive),
        stale=lambda now: at <= now - (own.stale_after or age),
        hold=None if stage.hold is None else hold_of_another_table(stage.hold, stage.model, archive),
        order=(at, *key, run),
        action=Delete(),
        batch_size=own.limits.batch,
    )


#: Sidekiq's default, which every design document refers to (リトライ仕様).
MAX_RETRIES: Final = 25
#: Options of an actor that its sweep may replace.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "queue_name": QUEUE,
    "max_retries": MAX_RETRIES,
    "idempotent": True,
    "feature_category": "not_owned",
    "data_consistency": "always",
    "rediscovered": False,
}


def register(broker: Broker, sweep: Sweep) -> Actor[..., None]:
    """Declare the sweep's actor on `broker`, which must have the library's middleware."""
    # Imported here: the commands that only list workers need no client of a server.
    import dramatiq

    from housekeeping.engine.alerts import declare_metrics
    from housekeeping.engine.run import run_sweep

    def without_argument() -> None:
        raise_for_retry(sweep, run_sweep(sweep))

    def with_argument(argument: Any) -> None:
        raise_for_retry(sweep, run_sweep(sweep, argument))

    schedule: dict[str, Any] = {"schedule": sweep.schedule} if sweep.schedule and sweep.enabled else {}
    decorator: Any = dramatiq.actor(
        broker=broker,
        actor_name=sweep.name,
        time_limit=int(time_limit_of(sweep).total_seconds() * 1000),
        sweep=sweep,
        metrics=partial(declare_metrics, sweep),
        **{**_DEFAULTS, **schedule, **sweep.actor},
    )
    actor: Actor[..., None] = decorator(without_argument if sweep.argument is None else with_argument)
    send.remember(actor)
    return actor


def time_limit_of(sweep: Sweep) -> timedelta:
    """Return the time after which a hanging run is interrupted. It is far above the run's own time limit."""
    return 2 * sweep.limits.runtime + timedelta(minutes=1)


def raise_for_retry(sweep: Sweep, result: RunResult) -> None:
    """Raise if the message is to be delivered again: the run's error, or Requeue."""
    from housekeeping.brokers.dramatiq_internals import Requeue

    if result.is_deferred and sweep.actor.get("rediscovered"):
        return  # a retry would not keep to the delay; the scheduler sends the argument again when it has passed
    result.raise_for_failure()
    if isinstance(result.error, RunTakenOver):
        if sweep.argument is not None:
            raise result.error  # the run that took over may have another argument
        # The run that took over may still be killed. To end the message here would record its work as done.
        raise Requeue(f"{sweep.name} was taken over", HEARTBEAT)
    if result.retry_after is not None:
        raise Requeue(f"{sweep.name} waits for the lease of its own dead attempt", result.retry_after)
    if (result.outcome, result.reason) == ("partial", "shutdown"):
        raise Requeue(f"{sweep.name} stopped for the shutdown of its process")
