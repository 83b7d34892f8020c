"""What a sweep is: what is stale, what is done with it, in which steps, within which limits, when."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Unpack

from blinker import NamedSignal
from peewee import Expression, Model, PeeweeException

from housekeeping.core.cron import Cron
from housekeeping.core.errors import DeclarationError, HousekeepingError, SettingsError
from housekeeping.core.sanitize import typed_error_line
from housekeeping.core.settings import WorkerSettings
from housekeeping.database.primary_key import identify
from housekeeping.leases.lease import SHORTEST_TTL
from housekeeping.sweeps.checks.field_types import refuse_wrong_types
from housekeeping.sweeps.checks.predicates import refuse_predicate
from housekeeping.sweeps.checks.validation import refuse_event, refuse_form, refuse_incomplete, refuse_walk
from housekeeping.sweeps.limits.breaker import Breaker
from housekeeping.sweeps.limits.throttle import ThrottleLimits
from housekeeping.sweeps.stages.actions import Action, allowed_by
from housekeeping.sweeps.stages.call import Call, CallStage
from housekeeping.sweeps.stages.stage import Preflight, Stage
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.sweeps.table_models import model_of
from housekeeping.sweeps.table_models.naming import Columns, event_columns_of, keyset_order, predicate_on

if TYPE_CHECKING:
    from housekeeping.sweeps.options import SweepOptions

DataConsistency = Literal["always", "sticky", "delayed"]

#: Sidekiq's default, which every design document refers to (リトライ仕様).
MAX_RETRIES: Final = 25

#: What a name is made of: it stands in addresses, Redis keys and on command lines.
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")

#: Counts that the engine adds to a run.
_RESERVED: Final = ("breaker", "clock_skew_s", "confirmed", "throttled", "unconfirmed")

#: Settings that become fields of the sweep; all others must be among its `options`.
_LENGTHS: Final = {"max_runtime_s": "max_runtime", "stale_after_s": "stale_after"}


@dataclass(frozen=True, slots=True)
class AlertThresholds:
    """When somebody should look.

    Attributes:
      longest_run: A run that takes longer.
      backlog: More records than this waiting after a run.
      most: Count -> more than this of it in one run.
      failed_runs: So many runs in a row that ended badly.
      overdue: So many periods of the schedule without a run.
    """

    longest_run: timedelta | None = None
    backlog: int | None = None
    most: Mapping[str, int] = field(default_factory=dict)
    failed_runs: int | None = None
    # No document has a number: one period may be lost to a restart, two to a restart at the wrong moment.
    overdue: int | None = 3

    def __post_init__(self) -> None:
        refuse_wrong_types("AlertThresholds", self)

    def changed(self, given: Mapping[str, float | None], counts: Sequence[str]) -> AlertThresholds:
        """The same with other limits, by the names that settings have for them; null switches one off.

        Parameters:
          counts: The worker's counts: a limit on one of them is named like it.

        Raises:
          DeclarationError: When there is no such alarm, or its limit is no whole number.
        """
        changes: dict[str, Any] = {"most": dict(self.most)}
        for name, limit in given.items():
            if name == "longest_run_s":
                changes["longest_run"] = None if limit is None else timedelta(seconds=limit)
                continue
            if limit is not None and limit != int(limit):
                raise DeclarationError(f"the alarm {name} is {limit}; it should be a whole number or null")
            number = None if limit is None else int(limit)
            if name in ("backlog", "failed_runs", "overdue"):
                changes[name] = number
            elif name in counts:
                changes["most"].pop(name, None)
                changes["most"] |= {} if number is None else {name: number}
            else:
                known = ", ".join(("longest_run_s", "backlog", "failed_runs", "overdue", *counts))
                raise DeclarationError(f"there is no alarm {name}; the alarms are {known}")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """The exclusive lease a sweep runs under.

    Attributes:
      key: Its name; sweeps and actors that name the same key exclude each other. A callable is given the argument of
        the run.
      ttl: How long it outlives a holder that died; renewed while the holder lives.
    """

    key: str | Callable[[Any], str]
    ttl: timedelta

    def __post_init__(self) -> None:
        refuse_wrong_types("LeaseConfig", self)

    def key_for(self, argument: Any) -> str:
        """The lease's name for a run with this argument."""
        return self.key(argument) if callable(self.key) else self.key


@dataclass(frozen=True, slots=True)
class SetupProblem:
    """Why a worker is not set up.

    Attributes:
      family: The family of workers that share the problem.
      text: What is missing, such as a table.
    """

    family: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One kind of cleaning, as a declaration; the engine runs it.

    ::

        expired = Sweep(
            name="sessions.expired",
            stale=lambda now: Session.expires_at <= now,
            order=(Session.expires_at, Session.id),
            action=Delete(),
            schedule="*/5 * * * *",
        )

    Attributes:
      name: The worker's public name: actor, settings, ledger and logs use it.
      stale: Which rows are stale, given the time the run began, less `stale_after` where that is said.
      always_stale: Whether `stale` need not depend on the time, nor keep every column it uses. False: such a predicate
        is rejected, because it may match far more rows than is meant.
      order: The columns the walk follows, oldest first, ending with those of the primary key.
      action: What is done with the stale rows: `Delete`, `Transition`, `Call`, or one's own.
      event: The event to announce with the changed rows of each batch (see `housekeeping.events`).
      event_columns: What each row of the event holds: key -> column of the table. The columns of `order` by default.
      stages: In place of those three: makes the passes of a sweep that has several, or of another kind.
      counts: The names of all counts, in the order they are shown.
      progress_counts: The counts that are stale records a run has finished with, for rates. Without one, the backlog
        is not counted at the end of a run, unless an alert threshold needs it.
      schedule: A cron expression; none: the sweep runs only when asked.
      batch_size: Records a statement, and so a transaction.
      max_runtime: How long a run takes new batches; asked after each full batch.
      shards: Between how many runs at the same time the work of a message is divided: each takes batches that no other
        has locked. For a backlog that one run cannot get through; 1: one run.
      stale_after: How old is stale; none: the worker has no use for it.
      lease: The exclusive lease a run needs; none: runs may overlap, and skip each other's rows.
      before_lease: Work that a run does before it takes its lease, such as enqueuing other workers. A held lease, a
        tripped breaker, a throttle or an unreachable database does not prevent it; only a paused or disabled worker
        skips it.
      options: Further settings the worker takes, by their name in ``HOUSEKEEPING_WORKERS``, with their defaults.
      argument_name: What the one argument of a run is called; none: it takes none.
      parse_argument: Makes the argument from a word of the command line; a `ValueError` refuses it.
      resume_after_limit: Whether the next run resumes after a run that reached its limits; otherwise only after an
        interrupted run. A run that resumes continues to the end, then processes what lies before its beginning.
      ignore_cursor: Whether a run starts at the front even after an interrupted one.
      start_message: An info line to be logged when a run begins.
      rediscovered: Whether a scheduler finds the work again and sends it again. Then a retry waits no longer than 10
        minutes, and with ``deduplicate="until_executed"`` a new message supersedes one that waits for a retry.
      queue: The Dramatiq queue of its actor.
      alarms: When somebody should look.
      target_batch: How long a batch should take: it gets smaller when it takes longer, and never larger than
        `batch_size`; null: batches of one size. Only passes through tables follow it.
      gates: How the database must be for a run to go on.
      breaker: How much more than usual is too much for one run, and whether it then alerts, limits or stops the run.
      confirm_first_run: Whether a run is skipped until it is confirmed, when no run has ended yet and it would process
        over 20 % of a table, and 1,000 rows or more.
      feature_category, data_consistency: Recorded as actor options.
      actor_options: Further options of its actor.
      partitioned: Models that are given the key of their table as their own before a run, for `passes` that take it
        from there (`key_of`). A sweep whose `order` ends with the columns of the key needs no such thing.
      setup_problem: Returns what the worker lacks to run at all, such as a table; None: nothing. A worker that is not
        set up is not scheduled, raises no alert, and its runs are skipped (`not_set_up`).
    """

    name: str
    stale: Callable[[datetime], Expression] | None = None
    always_stale: bool = False
    order: tuple[Any, ...] = ()
    action: Action | None = None
    event: NamedSignal | None = None
    event_columns: Mapping[str, Any] = field(default_factory=dict)
    stages: Callable[[Sweep], Sequence[Stage]] | None = None
    counts: tuple[str, ...] = ()
    progress_counts: tuple[str, ...] = ()
    schedule: str | None = None
    batch_size: int = 100
    max_runtime: timedelta = timedelta(minutes=5)
    shards: int = 1
    stale_after: timedelta | None = None
    lease: LeaseConfig | None = None
    before_lease: Preflight | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    argument_name: str | None = None
    parse_argument: Callable[[str], Any] = str
    resume_after_limit: bool = False
    ignore_cursor: bool = False
    start_message: str | None = None
    rediscovered: bool = False
    queue: str = "cronjob"
    alerts: AlertThresholds = AlertThresholds()
    target_batch: timedelta | None = None
    throttle: ThrottleLimits = ThrottleLimits()
    breaker: Breaker = Breaker()
    confirm_first_run: bool = True
    feature_category: str = "not_owned"
    data_consistency: DataConsistency = "always"
    actor_options: Mapping[str, Any] = field(default_factory=dict)
    partitioned: tuple[type[Model], ...] = ()
    enabled: bool = True
    setup_problem: Callable[[], SetupProblem | None] | None = None
    #: Whether its predicates could not be checked where it was declared, because one of them failed.
    _unchecked: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise DeclarationError(f'Sweep: name is {self.name!r}; write a text, such as "sessions.expired"')
        if not _NAME.fullmatch(self.name):
            raise DeclarationError(
                f"{self.name!r} is no name for a sweep; it should be letters, digits and _ . - such as sessions.expired"
            )
        refuse_incomplete(self.name, self.stale, self.order, self.action, self.stages)
        refuse_form(self.name, self.stale, self.order, self.action)
        refuse_event(self.name, self.event, self.event_columns, has_stages=self.stages is not None)
        refuse_wrong_types(self.name, self)
        if not self.counts and self.action is not None:
            failed = ("failed",) if isinstance(self.action, Call) else ()
            object.__setattr__(self, "counts", (*self.action.counted_as, *failed, "batches", "out_of_time"))
        if not self.progress_counts and self.action is not None:
            object.__setattr__(self, "progress_counts", tuple(self.action.counted_as[:1]))
        if reserved := [name for name in self.counts if name in _RESERVED]:
            raise DeclarationError(
                f"{self.name}: the engine itself counts {reserved[0]!r}; give this count another name"
            )
        if self.batch_size < 1 or self.max_runtime <= timedelta():
            raise DeclarationError(f"{self.name}: batch_size must be at least 1 and max_runtime longer than nothing")
        if self.stale_after is not None and self.stale_after <= timedelta():
            raise DeclarationError(
                f"{self.name}: stale_after is {self.stale_after!r}, so rows that are not old yet would be stale; write "
                "how old a row must be, such as timedelta(days=14), or None"
            )
        if self.shards < 1 or (self.shards > 1 and not self.divisible):
            raise DeclarationError(
                f"{self.name}: shards should be 1, but for a sweep through tables without an argument"
            )
        if self.lease is not None:
            if self.lease.ttl < SHORTEST_TTL:
                raise DeclarationError(f"{self.name}: the lease's ttl must be at least 3 seconds")
            if self.max_runtime >= self.lease.ttl:
                raise DeclarationError(f"{self.name}: max_runtime must be below the lease's ttl ({self.lease.ttl})")
        if self.schedule is not None:
            if self.argument_name is not None:
                raise DeclarationError(f"{self.name} takes an argument ({self.argument_name}), so it has no schedule")
            Cron(self.schedule)
        for each in self.declared_stages():
            if isinstance(each, TableStage):
                refuse_walk(self.name, each)
        try:
            self._refuse_predicates()
        except DeclarationError:
            raise
        except Exception:
            # It may need the database, or be wrong: each run, plan and status of this sweep says so, and no other's.
            object.__setattr__(self, "_unchecked", True)

    def _refuse_predicates(self) -> None:
        walks = [each.stale for each in self.declared_stages() if isinstance(each, TableStage)]
        for stale in walks if self.stale is None else [self.stale]:
            refuse_predicate(self.name, stale, always_stale=self.always_stale)

    def _check_now(self) -> None:
        """Check the predicates that could not be checked before."""
        try:
            self._refuse_predicates()
        except (PeeweeException, HousekeepingError):
            raise
        except Exception as error:
            raise DeclarationError(f"{self.name}: stale fails: {typed_error_line(error)}") from error
        object.__setattr__(self, "_unchecked", False)

    @staticmethod
    def on(
        table: object,
        *,
        name: str,
        stale: Callable[[Columns, datetime], Expression],
        action: Action,
        order: str | Sequence[str] = (),
        event_columns: Mapping[str, str] | None = None,
        **options: Unpack[SweepOptions],
    ) -> Sweep:
        """Declare a sweep on a table that Django or SQLAlchemy has declared, with columns by name.

        ::

            expired = Sweep.on(
                shop.models.Session,
                name="shop.expired_sessions",
                stale=lambda row, now: row.expires_at <= now,
                order="expires_at",
                action=Delete(),
            )

        Parameters:
          table: A Django model, a SQLAlchemy `Table` or mapped class, or a model derived from `BaseModel`.
          stale: Returns the predicate, given the table's columns as attributes, and the time as for `Sweep.stale`.
          order: The names of the columns that order the rows. The primary key is appended; by default it is the order.
          event_columns: What each row of the event holds: key -> column.
          options: The other fields of `Sweep`.

        Raises:
          DeclarationError: When the sweep cannot work, or `model_of` refuses the table.
        """
        model = model_of(table)
        return Sweep(
            name=name,
            stale=predicate_on(name, model, stale),
            order=keyset_order(name, model, order),
            action=action,
            event_columns=event_columns_of(name, model, event_columns or {}),
            **options,
        )

    def lacks(self) -> SetupProblem | None:
        """Return why the worker is not set up; None when it is, or is disabled.

        Raises:
          peewee.PeeweeException: When the database cannot be asked.
        """
        return self.setup_problem() if self.enabled and self.setup_problem is not None else None

    def stages_for_run(self) -> tuple[Stage, ...]:
        """The passes of a run, in order, on the tables as they are in this database.

        Raises:
          DeclarationError: When a predicate fails.
          peewee.PeeweeException: When the database cannot be asked.
        """
        if self._unchecked:
            self._check_now()
        for model in self.partitioned:
            identify(model)
        return tuple(
            each.on_real_columns() if isinstance(each, TableStage) else each for each in self.declared_stages()
        )

    def declared_stages(self) -> tuple[Stage, ...]:
        """The passes of a run, in order, on the tables as they were declared; the database is not asked."""
        if self.stages is not None:
            return tuple(self.stages(self))
        assert self.stale is not None and self.action is not None
        stale, length, allowed = self.stale, self.stale_after or timedelta(), allowed_by(self.action)
        one: dict[str, Any] = {
            "name": "rows",
            # Rows that the action leaves as they are would be met by each run, and counted by each plan.
            "stale": lambda now: stale(now - length) if allowed is None else stale(now - length) & allowed,
            "order": self.order,
            "action": self.action,
            "batch_size": self.batch_size,
        }
        if self.event is not None:
            known = {column.name for column in self.order}
            named = {key: column.name for key, column in self.event_columns.items()}
            one["columns"] = {each.name: each for each in self.event_columns.values() if each.name not in known}
            one["event"] = self.event, named or tuple(column.name for column in self.order)
        return (CallStage(**one) if isinstance(self.action, Call) else TableStage(**one),)

    @property
    def divisible(self) -> bool:
        """Whether runs at the same time can share its work: each leaves out the rows that another has locked."""
        walks = self.declared_stages()
        changes_rows = all(isinstance(each, TableStage) and not isinstance(each, CallStage) for each in walks)
        return changes_rows and self.argument_name is None

    @property
    def model(self) -> type[Model]:
        """The table that the first pass walks."""
        first = self.declared_stages()[0]
        if not isinstance(first, TableStage):
            raise DeclarationError(f"{self.name} does not walk a table")
        return first.model

    def configured(self, settings: WorkerSettings) -> Sweep:
        """The same sweep with what the settings say of it.

        Raises:
          SettingsError: When a setting has no use here, or its value cannot work.
        """
        given = {name: getattr(settings, name) for name in settings.model_fields_set}
        changes: dict[str, Any] = {}
        where = f'HOUSEKEEPING_WORKERS["{self.name}"]'
        for name, value in given.items():
            if name in ("enabled", "schedule", "batch_size"):
                changes[name] = value
            elif name == "max_runtime_s" or (name == "stale_after_s" and self.stale_after is not None):
                changes[_LENGTHS[name]] = timedelta(seconds=value)
            elif name == "lease_ttl_s" and self.lease is not None:
                changes["lease"] = dataclasses.replace(self.lease, ttl=timedelta(seconds=value))
            elif name == "shards" and self.divisible:
                changes["shards"] = value
            elif name == "alarms":
                changes["alerts"] = self._alert_thresholds(value, where)
            elif name == "target_batch_s" and any(isinstance(each, TableStage) for each in self.declared_stages()):
                changes["target_batch"] = None if value is None else timedelta(seconds=value)
            elif name in ("gates", "breaker"):
                field_name = "throttle" if name == "gates" else name
                given_limits = {key: getattr(value, key) for key in value.model_fields_set}
                changes[field_name] = dataclasses.replace(getattr(self, field_name), **given_limits)
            elif name in self.options:
                changes["options"] = {**changes.get("options", self.options), name: value}
            elif name not in ("table", "tables"):  # the worker's models were bound to their tables before this
                raise SettingsError(f'{where}["{name}"] is {value!r}, but this worker has no use for it')
        try:
            return dataclasses.replace(self, **changes)
        except DeclarationError as error:
            raise SettingsError(f"{where} is {given!r}; {error}") from None

    def _alert_thresholds(self, given: Mapping[str, float | None], where: str) -> AlertThresholds:
        try:
            return self.alerts.changed(given, self.counts)
        except DeclarationError as error:
            raise SettingsError(f'{where}["alarms"] is {given!r}; {error}') from None
