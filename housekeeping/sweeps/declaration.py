"""Declaration of a sweep: which rows are stale, what is done with them, when, and within which limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

from blinker import NamedSignal
from peewee import Expression, Model

from housekeeping.core.errors import DeclarationError
from housekeeping.core.settings import MAIN, WorkerSettings
from housekeeping.database.connection import database as current_database
from housekeeping.database.primary_key import identify
from housekeeping.sweeps.checks.field_types import check_types
from housekeeping.sweeps.checks.limits import check_limits
from housekeeping.sweeps.checks.predicates import check_predicates, recheck_predicates
from housekeeping.sweeps.checks.validation import check_form, check_names, check_stage
from housekeeping.sweeps.lease_config import LeaseConfig
from housekeeping.sweeps.limits.declared import AlertThresholds, Breaker, ThrottleLimits
from housekeeping.sweeps.only_stage import only_stage
from housekeeping.sweeps.partitions.action import DropPartitions
from housekeeping.sweeps.partitions.stage import PartitionStage
from housekeeping.sweeps.setup_problem import SetupProblem
from housekeeping.sweeps.stages.actions import Action
from housekeeping.sweeps.stages.call import Call, CallStage
from housekeeping.sweeps.stages.hold import Hold
from housekeeping.sweeps.stages.row_log import RowLog
from housekeeping.sweeps.stages.stage import Preflight, Stage
from housekeeping.sweeps.stages.table_stage import TableStage
from housekeeping.sweeps.table_models import model_of
from housekeeping.sweeps.table_models.naming import Columns, event_columns_of, hold_on, keyset_order, predicate_on
from housekeeping.sweeps.worker_settings import configured

if TYPE_CHECKING:
    from housekeeping.sweeps.options import SweepOptions

DataConsistency = Literal["always", "sticky", "delayed"]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Declaration of one kind of cleanup, which the engine runs.

    ::

        expired = Sweep(
            name="sessions.expired",
            stale=lambda now: Session.expires_at <= now,
            order=(Session.expires_at, Session.id),
            action=Delete(),
            schedule="*/5 * * * *",
        )

    Attributes:
      name: Public name of the worker: in actors, settings, the ledger and logs.
      stale: Which rows are stale, given the time at which the run began, minus `stale_after` if that is set.
      hold: Returns the condition of rows that must stay although they are stale, or a query that finds something for
        each of them. Runs, plans and backlogs leave them out. It is SQL, so the next batch sees a new hold.
      always_stale: Whether `stale` may ignore the time or drop a column that it uses. By default such a predicate is
        rejected, because it may match far more rows than is meant.
      order: Columns that order the rows, oldest first, ending with those of the primary key.
      action: What is done with the stale rows: `Delete`, `Transition`, `Call`, or an action of your own. With
        `DropPartitions`, `stale` is optional and `order` begins with the column by which the table is partitioned.
      event: Event announced with the changed rows of each batch (see `housekeeping.events`).
      event_columns: Content of the event's rows: key -> column. Default: the columns of `order`.
      columns: Further columns to read for the row log, by their key in it. Columns in the model's ``optional_fields``
        are left out if the table lacks them.
      row_log: Log line of each changed row. The option ``log_records``, if the sweep has it, switches it off.
      stage_name: Name of the sweep's only stage, in plans and cursors.
      stages: Makes the stages of a sweep that has several, or of another kind. Replaces `stale`, `order`, `action` and
        the fields of its only stage.
      counts: Names of all counts, in the order in which they are shown. Default: the action's.
      progress_counts: The counts that are processed rows, for rates. Without one, the backlog is counted at the end of
        a run only if an alert threshold needs it.
      schedule: Cron expression; None if the sweep runs only on request.
      batch_size: Rows per transaction.
      max_runtime: How long a run starts new batches.
      max_rows_per_s: Most rows per second, on average; None for no limit. Shards share it.
      rest: Pause after each batch, as a multiple of the batch's duration.
      shards: Number of concurrent runs that share the work of one message. Each skips the rows that another has locked.
      stale_after: Age from which a row is stale; None if the worker has no such setting.
      lease: Exclusive lease that a run needs; None lets runs overlap and skip each other's rows.
      before_lease: Work that a run does before it takes its lease, such as enqueuing other workers. A held lease, a
        tripped breaker, a throttle or an unreachable database does not prevent it; a paused or disabled worker does.
      options: Further settings of the worker, by their name in ``HOUSEKEEPING_WORKERS``, with their defaults.
      argument_name: Name of the run's argument; None if runs take no argument.
      parse_argument: Converts the argument from the command line; a `ValueError` rejects it.
      resume_after_limit: Whether the next run also resumes after a run that reached its limits. Otherwise it
        resumes only after an interrupted run. A resumed run continues to the end, then starts at the front.
      ignore_cursor: Whether a run starts at the front even after an interrupted one.
      start_message: Info line logged when a run begins.
      rediscovered: Whether a scheduler finds the work again and sends it again. Then a retry waits at most 10 minutes,
        and with ``deduplicate="until_executed"`` a new message replaces one that waits for a retry.
      queue: Dramatiq queue of the actor.
      alerts: Alert thresholds.
      target_batch: How long a batch should take. Slower batches shrink, never above `batch_size`. None for always
        `batch_size`. Only table stages follow it.
      throttle: Health of the database that a run needs to continue.
      breaker: How many rows are too many for one run, and what happens then.
      confirm_first_run: Whether a first run that would process over 20 % of a table and at least 1,000 rows is skipped
        until it is confirmed. The same holds for the first run after a change of the predicate, `stale_after` or the
        table.
      feature_category, data_consistency: Recorded as actor options.
      actor_options: Further options of the actor.
      database: Name of the database with the tables and with the ledger of the runs, from ``HOUSEKEEPING_DATABASES``.
      partitioned: Models whose key is read from their table before a run, for `stages` that use `key_of`. A sweep whose
        `order` ends with the columns of the key does not need it.
      setup_problem: Returns what the worker lacks to run at all, such as a table, or None. A worker that is not set
        up is not scheduled and raises no alert, and its runs are skipped (`not_set_up`).
    """

    name: str
    stale: Callable[[datetime], Expression] | None = None
    hold: Hold | None = None
    always_stale: bool = False
    order: tuple[Any, ...] = ()
    action: Action | DropPartitions | None = None
    event: NamedSignal | None = None
    event_columns: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    row_log: RowLog | None = None
    stage_name: str = "rows"
    stages: Callable[[Sweep], Sequence[Stage]] | None = None
    counts: tuple[str, ...] = ()
    progress_counts: tuple[str, ...] = ()
    schedule: str | None = None
    batch_size: int = 100
    max_runtime: timedelta = timedelta(minutes=5)
    max_rows_per_s: float | None = None
    rest: float = 0.0
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
    database: str = MAIN
    partitioned: tuple[type[Model], ...] = ()
    enabled: bool = True
    setup_problem: Callable[[], SetupProblem | None] | None = None
    #: Form of the name, which is used in URLs, Redis keys and on command lines. A purge's name has another one.
    _name_form: ClassVar[re.Pattern[str]] = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
    #: Whether the predicates could not be checked at declaration, because one of them raised.
    _unchecked: ClassVar[bool] = False

    if not TYPE_CHECKING:  # type checkers know the fields

        def __new__(cls, *_: Any, **given: Any) -> Sweep:
            check_names(cls, given)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        check_form(self)
        check_types(self.name, self)
        if self.action is not None:
            counted = tuple(self.action.counted_as)
            failed = ("failed",) if isinstance(self.action, Call) else ()
            object.__setattr__(self, "counts", self.counts or (*counted, *failed, "batches", "out_of_time"))
            object.__setattr__(self, "progress_counts", self.progress_counts or counted[:1])
        check_limits(self)
        for each in self.declared_stages():
            if isinstance(each, TableStage):
                check_stage(self.name, each)
        try:
            check_predicates(self)
        except DeclarationError:
            raise
        except Exception:
            # It may need the database, or be wrong. It is checked again when the sweep is used.
            object.__setattr__(self, "_unchecked", True)

    @staticmethod
    def on(
        table: object,
        *,
        name: str,
        stale: Callable[[Columns, datetime], Expression] | None = None,
        action: Action | DropPartitions,
        order: str | Sequence[str] = (),
        hold: Callable[[Columns], Any] | None = None,
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
          hold: Returns the condition of rows that must stay, given the table's columns.
          event_columns: What each row of the event holds: key -> column.
          options: The other fields of `Sweep`.

        Raises:
          DeclarationError: The sweep is invalid, or `model_of` rejects the table.
        """
        model = model_of(table)
        return Sweep(
            name=name,
            stale=None if stale is None else predicate_on(name, model, stale),
            order=keyset_order(name, model, order),
            hold=None if hold is None else hold_on(name, model, hold),
            action=action,
            event_columns=event_columns_of(name, model, event_columns or {}),
            **options,
        )

    def lacks(self) -> SetupProblem | None:
        """Return why the worker is not set up; None when it is, or is disabled.

        Raises:
          peewee.PeeweeException: When the database cannot be asked.
        """
        if not self.enabled or self.setup_problem is None:
            return None
        with current_database.using(self.database):
            return self.setup_problem()

    def stages_for_run(self) -> tuple[Stage, ...]:
        """Return the stages of a run, in order, adapted to the tables of this database.

        Raises:
          DeclarationError: When a predicate fails.
          peewee.PeeweeException: When the database cannot be asked.
        """
        if self._unchecked:
            recheck_predicates(self)
            object.__setattr__(self, "_unchecked", False)
        for model in self.partitioned:
            identify(model)
        return tuple(
            each.on_real_columns() if isinstance(each, TableStage) else each for each in self.declared_stages()
        )

    def declared_stages(self) -> tuple[Stage, ...]:
        """Return the stages of a run, in order, as declared, without a query."""
        if self.stages is not None:
            return tuple(self.stages(self))
        return (only_stage(self),)

    @property
    def divisible(self) -> bool:
        """Whether concurrent runs can share the work: each skips the rows that another has locked."""
        stages = self.declared_stages()
        changes_rows = all(isinstance(each, TableStage) and not isinstance(each, CallStage) for each in stages)
        return changes_rows and self.argument_name is None

    @property
    def model(self) -> type[Model]:
        """The table of the first stage."""
        first = self.declared_stages()[0]
        if not isinstance(first, TableStage | PartitionStage):
            raise DeclarationError(f"{self.name} has no table")
        return first.model

    def configured(self, settings: WorkerSettings) -> Sweep:
        """Return a copy with the worker's settings applied.

        Raises:
          SettingsError: A setting does not apply to this worker, or its value cannot work.
        """
        return configured(self, settings)
