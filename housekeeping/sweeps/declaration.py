"""Declaration of a sweep: its stages, when it runs, and within which limits; its checks, and what settings change."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, field, replace
from datetime import date, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Any, ClassVar, Final

import pydantic
from peewee import Field, FieldAlias, Model, Node, PeeweeException, PostgresqlDatabase

from housekeeping.core.cron import Cron
from housekeeping.core.errors import DeclarationError, HousekeepingError, SettingsError
from housekeeping.core.logs import described, typed_error_line
from housekeeping.core.settings import LARGEST_BATCH, MAIN, WorkerSettings
from housekeeping.database.catalog import identify, key_of
from housekeeping.database.connection import DatabaseHandle
from housekeeping.database.connection import database as current_database
from housekeeping.database.queries import StatementTexts
from housekeeping.sweeps.conditions import TWO_TIMES, Row, WithoutLists, bare, used_columns
from housekeeping.sweeps.keyset import needs_no_row, outer_columns
from housekeeping.sweeps.partitions import DropPartitions, PartitionStage
from housekeeping.sweeps.rows import EXAMPLE, HOLD_EXAMPLE, Call, Rows, takes_time
from housekeeping.sweeps.send import Send
from housekeeping.sweeps.stage import Stage
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.sweeps.values import Alerts, Argument, Guard, Lease, Limits, Setup, SetupProblem, declared, written

_SHOWN: Final = 200  # characters of the SQL
#: Time after which the lease of a killed run on a distributed table expires. A living run renews it.
_LEASE_TTL: Final = timedelta(minutes=5)

#: Renders SQL without a server.
_offline: Final = PostgresqlDatabase(None)


def check_predicates(sweep: Sweep, *, named: bool = False) -> None:
    """Check the predicate and the hold of each stage.

    Parameters:
      named: Whether to check those of tables that are given by their names as well, which needs the database.

    Raises:
      DeclarationError: One may match more, or hold fewer, rows than its author means. The text says what to write.
      Exception: One itself fails, so that nothing is known of it.
    """
    for part in sweep.parts:
        if isinstance(part, Rows | DropPartitions) and (named or not part.is_named):
            if part.stale is not None:
                age = part.age if isinstance(part, Rows) else None
                check_predicate(sweep.name, part.stale, part.model, has_age=age is not None)
            if part.hold is not None:
                check_hold(sweep.name, part.hold, part.model)


def recheck_predicates(sweep: Sweep) -> None:
    """Check the predicates of a sweep of which one failed when it was declared, or whose table is given by its name.

    Raises:
      DeclarationError: As `check_predicates`, or a predicate fails again.
      peewee.PeeweeException: A predicate needs the database, which fails.
    """
    try:
        check_predicates(sweep, named=True)
    except (PeeweeException, HousekeepingError):
        raise
    except Exception as error:
        failing = "stale or hold" if any(getattr(part, "hold", None) for part in sweep.parts) else "stale"
        raise DeclarationError(f"{sweep.name}: {failing} fails: {typed_error_line(error)}") from error


def check_predicate(name: str, stale: Callable[..., Any], model: type[Model], *, has_age: bool) -> None:
    """Reject a predicate that may match more rows than its author means; needs no database.

    Parameters:
      has_age: Whether the time that it gets is earlier by an age.

    Raises:
      DeclarationError: The text says what to write.
      Exception: The predicate itself fails, so that nothing is known of it.
    """
    row, timed = Row(model), takes_time(stale)
    if has_age and not timed:
        raise DeclarationError(f"{name}: stale is not given the time, so the age makes no difference; write {EXAMPLE}")
    with _named(f"{name}: stale"):
        conditions = [bare(stale(row, at) if timed else stale(row)) for at in (*TWO_TIMES, TWO_TIMES[0])]
    for condition in conditions:
        _check_condition(f"{name}: stale", condition, EXAMPLE)
    _check_tables(name, model, conditions[0])
    _check_columns(f"{name}: stale", row, model, conditions[0])
    first, second, first_again = map(_in_sql, conditions)
    if first != first_again:
        raise DeclarationError(
            f"{name}: stale reads the clock itself, such as datetime.now(), so an age does not apply; write a "
            f"comparison with the time it is given: {EXAMPLE}"
        )
    if timed and first == second:
        raise DeclarationError(
            f"{name}: stale does not depend on the time it is given, so rows of any age are stale; write a comparison "
            f"with it: {EXAMPLE}; or lambda row: ..., if the age does not matter"
        )
    sql = " ".join(WithoutLists().sql(condition).query()[0] for condition in conditions[:2])
    for used in used_columns(row):
        if not re.search(rf"(?<!\w){re.escape(used.column_name)}(?!\w)", sql):
            raise DeclarationError(
                f"{name}: stale uses row.{used.name}, but its SQL does not: {first[0][:_SHOWN]}; "
                "write (A) & (B) to join conditions"
            )


def check_hold(name: str, hold: Callable[..., Any], model: type[Model]) -> None:
    """Reject a hold that may hold fewer rows than its author means; needs no database.

    Raises:
      DeclarationError: The text says what to write.
      Exception: The hold itself fails, so that nothing is known of it.
    """
    row = Row(model)
    with _named(f"{name}: hold"):
        condition = bare(hold(row, TWO_TIMES[0]) if takes_time(hold) else hold(row))
    _check_condition(f"{name}: hold", condition, HOLD_EXAMPLE)
    _check_columns(f"{name}: hold", row, model, condition)
    if needs_no_row(condition, model):
        raise DeclarationError(
            f"{name}: hold joins by | conditions on different tables within another condition, so it would hold too "
            "few rows while one table is empty; write each other table as a query: "
            "fn.EXISTS(LegalHold.select().where(...))"
        )


def _in_sql(condition: Node) -> tuple[str, list[Any]]:
    """Return the SQL and its values; those of JSON, which are never equal, by their type."""
    sql, values = _offline.get_sql_context().sql(condition).query()
    return sql, [each if isinstance(each, str | int | float | Decimal | date | None) else type(each) for each in values]


@contextmanager
def _named(subject: str) -> Iterator[None]:
    """Say in an error of a row's columns where they are used."""
    try:
        yield
    except DeclarationError as error:
        raise DeclarationError(f"{subject} {error}") from None


def _check_condition(subject: str, condition: Any, example: str) -> None:
    """Reject what is no condition."""
    if isinstance(condition, Node):
        return
    hint = "; instead of column is None write column.is_null()" if isinstance(condition, bool) else ""
    if type(condition).__module__.partition(".")[0] in ("django", "sqlalchemy"):
        hint = "; write columns of the row: row.expires_at"
    raise DeclarationError(f"{subject} returns {described(condition)}; write a condition on columns: {example}{hint}")


def _check_columns(subject: str, row: Row, model: type[Model], condition: Node) -> None:
    """Reject a column of the table that is written as the model's: the library checks only those of the row."""
    used = used_columns(row)
    for column in outer_columns(condition):
        if isinstance(column, Field) and column.model is model and not any(column is each for each in used):
            raise DeclarationError(f"{subject} uses {model.__name__}.{column.name}; write row.{column.name}")


def _check_tables(name: str, model: type[Model], condition: Node) -> None:
    for column in outer_columns(condition):
        if isinstance(column, FieldAlias) or column.model is not model:
            field = column.field if isinstance(column, FieldAlias) else column
            owner = field.model.__name__
            what = f"an alias of {owner}" if isinstance(column, FieldAlias) else owner
            raise DeclarationError(
                f"{name}: stale uses {field.name} of {what}, but the stage processes the table of {model.__name__}; "
                f"put columns of other tables into a subquery: column.in_({owner}.select(...).where(...))"
            )


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Reject an option whose default its setting would not accept."""
    given = {key: value for key, value in options.items() if key in WorkerSettings.model_fields}
    try:
        WorkerSettings.model_validate(given)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False)[0]
        key = str(found["loc"][0])
        form = str(found["msg"]).removeprefix("Input should be ")
        raise DeclarationError(f"{name}: the option {key} is {written(given[key])}; it should be {form}") from None


def check_stage(name: str, table: Stage) -> None:
    """Reject a stage of a table that would miss rows or use another database, or whose action has nothing to call.

    Raises:
      DeclarationError: The text says what to write instead.
    """
    if not isinstance(table, TableStage):
        return
    if not 1 <= table.batch_size <= LARGEST_BATCH:
        raise DeclarationError(
            f"{name}, stage {table.name}: batch_size is {table.batch_size:,}; it should be 1 to {LARGEST_BATCH:,}"
        )
    kind = table.model
    meta: Any = kind._meta
    if not isinstance(meta.database, DatabaseHandle):
        raise DeclarationError(f"{name}: {kind.__name__} should be derived from housekeeping.BaseModel")
    key = key_of(kind)
    if not key:
        raise DeclarationError(f"{name}: {kind.__name__} has no primary key; declare that of its table")
    if not {column.name for column in key} <= {column.name for column in table.order}:
        columns = ", ".join(column.column_name for column in key)
        raise DeclarationError(
            f"{name}: the order of stage {table.name} must end with the primary key ({columns}), or rows could be "
            "missed"
        )
    if isinstance(table.action, Call) and type(table).prepare is TableStage.prepare:
        raise DeclarationError(f"{name}: a Call needs a CallStage, or nothing would be called")


#: Settings that a sweep which only sends messages has no use for.
_OF_ROWS: Final = ("batch_size", "max_rows_per_s", "rest", "max_runtime_s", "gates", "breaker")


def setting_of(sweep: Sweep) -> str:
    """Return the worker's settings as errors write them, such as ``HOUSEKEEPING_WORKERS["demo.batch"]``."""
    return f'HOUSEKEEPING_WORKERS["{sweep.name}"]'


def _wrong_value(sweep: Sweep, settings: WorkerSettings) -> str:
    """Return the setting that makes the sweep invalid, with its value: one key, or all if only several together do."""
    for name in sorted(settings.model_fields_set):
        try:
            _changed(sweep, settings, {name})
        except DeclarationError:
            return f'{setting_of(sweep)}["{name}"] is {getattr(settings, name)!r}'
    return f"{setting_of(sweep)} is { {name: getattr(settings, name) for name in settings.model_fields_set}!r}"


def _changed(sweep: Sweep, settings: WorkerSettings, names: Iterable[str]) -> Sweep:
    fields: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    options: dict[str, Any] = {}
    age: timedelta | None = None
    only_sends = all(isinstance(each, Send) for each in sweep.parts)
    for name in names:
        value = getattr(settings, name)
        if only_sends and name in _OF_ROWS:
            raise _unused(sweep, name, value)
        if name in sweep.options:
            options[name] = value
        elif name in ("schedule", "database"):
            fields[name] = value
        elif name == "enabled":
            fields["setup"] = replace(sweep.setup, enabled=value)
        elif name == "batch_size":
            limits["batch"] = value
        elif name == "max_runtime_s":
            limits["runtime"] = timedelta(seconds=value)
        elif name == "max_rows_per_s":
            limits["rows_per_s"] = value
        elif name == "rest":
            limits["rest"] = value
        elif name == "target_batch_s" and any(isinstance(each, Rows | TableStage) for each in sweep.parts):
            limits["batch_takes"] = None if value is None else timedelta(seconds=value)
        elif name == "gates":
            limits["throttle"] = replace(sweep.limits.throttle, **_throttle(sweep, value))
        elif name == "breaker":
            fields["guard"] = replace(sweep.guard, **{key: getattr(value, key) for key in value.model_fields_set})
        elif name == "alarms":
            fields["alerts"] = _alerts(sweep, value)
        elif name == "stale_after_s" and sweep.stale_after is not None:
            age = timedelta(seconds=value)
        elif name == "lease_ttl_s" and sweep.lease is not None:
            fields["lease"] = replace(sweep.lease, ttl=timedelta(seconds=value))
        # The worker's models were bound to their tables before, and pings are sent by the process.
        elif name not in ("table", "tables", "ping_url"):
            raise _unused(sweep, name, value)
    changed = replace(sweep, **fields, limits=replace(sweep.limits, **limits), options={**sweep.options, **options})
    return changed if age is None else changed.with_age(age)


def _unused(sweep: Sweep, name: str, value: Any) -> SettingsError:
    return SettingsError(f'{setting_of(sweep)}["{name}"] is {value!r}, but this worker has no use for it')


def _throttle(sweep: Sweep, value: Any) -> dict[str, Any]:
    given = {key: getattr(value, key) for key in value.model_fields_set}
    if given.get("custom") is not None:
        given["custom"] = _function_named(given["custom"], f'{setting_of(sweep)}["gates"]["custom"]')
    return given


def _function_named(name: str, setting: str) -> Any:
    module, _, function_name = name.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), function_name)
    except Exception as error:
        raise SettingsError(
            f"{setting} is {name!r}, which cannot be imported: {typed_error_line(error)}; it should be the dotted name "
            "of a function, such as shop.health.reason_to_wait"
        ) from None
    if not callable(function):
        raise SettingsError(f"{setting} is {name!r}, which is no function but {described(function)}")
    return function


def _alerts(sweep: Sweep, given: Mapping[str, float | None]) -> Alerts:
    try:
        return sweep.alerts.changed(given, sweep.counts)
    except DeclarationError as error:
        raise SettingsError(f'{setting_of(sweep)}["alarms"] is {given!r}; {error}') from None


#: Queue of an actor that names none.
QUEUE: Final = "cronjob"
#: Counts that the engine adds to a run.
_RESERVED: Final = (
    "breaker",
    "clock_skew_s",
    "confirmed",
    "details",
    "predicate",
    "redis_clock_skew_s",
    "throttled",
    "unconfirmed",
)
#: Counts of every stage; they follow the counts of all stages.
_LAST: Final = ("failed", "batches", "out_of_time")
_EXAMPLE: Final = 'Rows(Session, stale=lambda row, now: row.expires_at <= now, order="expires_at", action=Delete())'


@declared
class Sweep:
    """Declaration of one kind of cleanup, which the engine runs.

    ::

        expired = Sweep(
            "shop.expired_sessions",
            Rows(Session, stale=lambda row, now: row.expires_at <= now, order="expires_at", action=Delete()),
            schedule="*/5 * * * *",
        )

    Attributes:
      name: Public name of the worker: in actors, settings, the ledger and logs.
      stages: `Rows`, `DropPartitions`, a stage of your own, or several of them in order. A function that is given the
        sweep makes a stage, or several, of the limits and options that settings have changed.
      schedule: Cron expression; None if the sweep runs only on request.
      lease: Exclusive lease that a run needs; None lets runs overlap and skip each other's rows, except on a
        distributed table of Citus: there rows cannot be locked, and a run needs the lease of the sweep's name.
      limits: Limits of a run.
      guard: What happens when far more rows are stale than usual.
      alerts: Alert thresholds.
      argument: Argument of a run; None if runs take none.
      options: Further settings of the worker, by their name in ``HOUSEKEEPING_WORKERS``, with their defaults.
      actor: Options of the dramatiq actor, such as ``queue_name``, ``deduplicate`` or ``feature_category``. With
        ``rediscovered``, a scheduler finds the work again and sends it again, so a retry waits at most 10 minutes.
      database: Name of the database with the tables and with the ledger of the runs, from ``HOUSEKEEPING_DATABASES``.
      setup: State of the worker in this installation; set by the registry.
    """

    name: str
    stages: Any
    _: KW_ONLY
    schedule: str | None = None
    lease: Lease | None = None
    limits: Limits = Limits()
    guard: Guard = Guard()
    alerts: Alerts = Alerts()
    argument: Argument | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    actor: Mapping[str, Any] = field(default_factory=dict)
    database: str = MAIN
    setup: Setup = Setup()
    #: Form of the name, which is used in URLs, Redis keys and on command lines. A purge's name has another one.
    _name_form: ClassVar[re.Pattern[str]] = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
    #: How messages call the predicate and its rows; a purge has a WHERE instead.
    predicate_name: ClassVar[str] = "`stale`"
    rows_called: ClassVar[str] = "stale"
    #: How messages call the way to decide about dependents, given the name of a link.
    decides_by: ClassVar[str] = 'decide about them: Delete(dependents={{"{}": "delete"}}), or "clear" or "keep"'
    #: Whether the predicates could not be checked at declaration, because one of them raised.
    _unchecked: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self._name_form.fullmatch(self.name):
            raise DeclarationError(
                f"{self.name!r} is no name for a sweep; it should be letters, digits and _ . - such as sessions.expired"
            )
        _check_parts(self)
        check_options(self.name, self.options)
        if reserved := [count for count in self.counts if count in _RESERVED]:
            raise DeclarationError(
                f"{self.name}: the engine itself counts {reserved[0]!r}; give this count another name"
            )
        if self.lease is not None and self.limits.runtime >= self.lease.ttl:
            raise DeclarationError(f"{self.name}: limits.runtime must be below the lease's ttl ({self.lease.ttl})")
        if self.schedule is not None:
            if self.argument is not None:
                raise DeclarationError(f"{self.name} takes an argument ({self.argument.label}), so it has no schedule")
            Cron(self.schedule)
        for each in self.known_stages():
            check_stage(self.name, each)
        try:
            check_predicates(self)
        except DeclarationError:
            raise
        except Exception:
            # It may need the database, or be wrong. It is checked again when the sweep is used.
            object.__setattr__(self, "_unchecked", True)
        if any(getattr(part, "is_named", False) for part in self.parts):
            object.__setattr__(self, "_unchecked", True)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The declared stages. A function among them is called with the sweep, and its stages take its place."""
        return tuple(_flattened(self, self.stages))

    @property
    def enabled(self) -> bool:
        """Whether the worker is enabled in this installation."""
        return self.setup.enabled

    def lacks(self) -> SetupProblem | None:
        """Return why the worker is not set up; None when it is, or is disabled.

        Raises:
          peewee.PeeweeException: If the database cannot be read.
        """
        if not self.setup.enabled or self.setup.problem is None:
            return None
        with current_database.using(self.database):
            return self.setup.problem()

    def stages_for_run(self) -> tuple[Stage, ...]:
        """Return the stages of a run, in order, adapted to the tables of this database.

        Raises:
          DeclarationError: When a predicate fails.
          peewee.PeeweeException: If the database cannot be read.
        """
        if self._unchecked:
            recheck_predicates(self)
            object.__setattr__(self, "_unchecked", False)
        for each in self.declared_stages():
            if isinstance(each, TableStage):
                identify(each.model)
        return tuple(
            each.on_real_columns().with_holds(self._holding) if isinstance(each, TableStage) else each
            for each in self.declared_stages()
        )

    def _holding(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the name and database of each sweep of the installation with a hold, and the stage that has it."""
        others = [each for each in self.setup.declared() if each.name != self.name]
        for sweep in (self, *others):
            if not any(getattr(part, "hold", None) for part in sweep.parts):
                continue
            with current_database.using(sweep.database):
                try:
                    stages = sweep.declared_stages()
                except DeclarationError as error:
                    raise DeclarationError(f"{self.name}: the holds of {sweep.name} cannot be read: {error}") from None
            yield from ((sweep.name, sweep.database, each) for each in stages if getattr(each, "hold", None))

    def lease_for_run(self) -> Lease | None:
        """Return the lease that a run needs: the declared one; without one, on a distributed table, a lease of its own.

        Raises:
          DeclarationError, peewee.PeeweeException: As `declared_stages`.
        """
        stages = () if self.lease is not None else self.declared_stages()
        if not any(isinstance(each, TableStage) and each.is_distributed for each in stages):
            return self.lease
        return Lease(self.name if self.argument is None else lambda argument: f"{self.name}:{argument}", _LEASE_TTL)

    def declared_stages(self) -> tuple[Stage, ...]:
        """Return the stages of a run, in order, as declared. Only the table of a name needs a query.

        Raises:
          DeclarationError: There is no table of this name.
          peewee.PeeweeException: The table of a name cannot be read from the catalog.
        """
        return tuple(self._stages_of(self.parts))

    def known_stages(self) -> tuple[Stage, ...]:
        """Return the stages whose tables are known without a query."""
        return tuple(self._stages_of(self.parts, named=False))

    def _stages_of(self, parts: Sequence[Any], *, named: bool = True) -> Iterator[Stage]:
        logs = bool(self.options.get("log_records", True))
        for part in parts:
            if isinstance(part, Rows) and (named or not part.is_named):
                yield part.stage(self.name, self.limits.batch, alone=len(parts) == 1, logs=logs)
            elif isinstance(part, DropPartitions) and (named or not part.is_named):
                yield part.stage(self.name)
            elif not isinstance(part, Rows | DropPartitions):
                yield part

    @cached_property
    def counts(self) -> tuple[str, ...]:
        """Names of all counts of a run, in the order in which they are shown."""
        parts = self.parts
        names = dict.fromkeys(name for part in parts for name in part.counts)
        if len(parts) == 1:
            return tuple(names)
        return (*(name for name in names if name not in _LAST), *(name for name in _LAST if name in names))

    @property
    def unit(self) -> str:
        """What its backlog counts, for texts: ``partition`` if it only drops partitions, else ``row``."""
        return "partition" if all(isinstance(part, DropPartitions | PartitionStage) for part in self.parts) else "row"

    @cached_property
    def progress_counts(self) -> tuple[str, ...]:
        """The counts that are processed rows, for rates. Without one, the backlog is counted at the end of a run only
        if an alert threshold needs it."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.progress_counts))

    @cached_property
    def texts(self) -> StatementTexts:
        """Compiled statements of this process's runs."""
        return StatementTexts()

    @property
    def stale_after(self) -> timedelta | None:
        """Age from which a row is stale; None if the worker has no such setting."""
        ages = [part.age for part in self.parts if isinstance(part, Rows) and part.age is not None]
        given = self.options.get("stale_after_s")
        return ages[0] if ages else None if given is None else timedelta(seconds=given)

    @property
    def queue(self) -> str:
        """Dramatiq queue of the actor."""
        return str(self.actor.get("queue_name", QUEUE))

    @property
    def records_backlog(self) -> bool:
        """Whether a run records the backlog at its end. Not with an argument: several runs share the backlog then."""
        limits = (self.alerts.backlog, self.alerts.late)
        return self.argument is None and (bool(self.progress_counts) or limits != (None, None))

    @property
    def start_message(self) -> str | None:
        """Info line logged when a run begins; None without one."""
        return next((text for part in self.parts if (text := getattr(part, "start_message", None))), None)

    @property
    def model(self) -> type[Model]:
        """The table of the first stage."""
        first = self.declared_stages()[0]
        if not isinstance(first, TableStage | PartitionStage):
            raise DeclarationError(f"{self.name} has no table")
        return first.model

    def with_age(self, age: timedelta) -> Sweep:
        """Return a copy in which rows are stale from this age."""
        if "stale_after_s" in self.options:
            return replace(self, options={**self.options, "stale_after_s": age.total_seconds()})
        stages = [
            replace(part, age=age) if isinstance(part, Rows) and part.age is not None else part
            for part in _listed(self.stages)
        ]
        return replace(self, stages=stages)

    def set_up(self, **changes: Any) -> Sweep:
        """Return a copy with changes of its setup. The declaration is the same, and is not checked again."""
        copied = copy.copy(self)
        is_unchecked = self._unchecked or any(getattr(part, "is_named", False) for part in self.parts)
        vars(copied).update(setup=replace(self.setup, **changes), _unchecked=is_unchecked)
        return copied

    def configured(self, settings: WorkerSettings) -> Sweep:
        """Return a copy with the worker's settings applied.

        Raises:
          SettingsError: A setting does not apply to this worker, or its value cannot work.
        """
        if not settings.model_fields_set:
            return self
        try:
            return _changed(self, settings, settings.model_fields_set)
        except DeclarationError as error:
            text = str(error).removeprefix(f"{self.name}: ")
            raise SettingsError(f"{_wrong_value(self, settings)}; {text}") from None


def _listed(stages: Any) -> Sequence[Any]:
    return stages if isinstance(stages, list | tuple) else (stages,)


def _is_stage(part: Any) -> bool:
    return isinstance(part, Rows | DropPartitions) or hasattr(part, "prepare")


def _flattened(sweep: Sweep, stages: Any) -> Iterator[Any]:
    for each in _listed(stages):
        if not _is_stage(each) and callable(each):
            each = each(sweep)
            yield from _flattened(sweep, each)
        else:
            yield each


def _check_parts(sweep: Sweep) -> None:
    parts = sweep.parts
    if not parts:
        raise DeclarationError(f"{sweep.name} has no stage; write Sweep({sweep.name!r}, {_EXAMPLE})")
    for part in parts:
        if not _is_stage(part):
            raise DeclarationError(f"{sweep.name}: {described(part)} is no stage; write {_EXAMPLE}")
        if not hasattr(part, "counts"):
            raise DeclarationError(
                f"{sweep.name}: {type(part).__name__} does not name its counts; give it counts and progress_counts, "
                'such as ("deleted_rows", "batches", "out_of_time") and ("deleted_rows",)'
            )
