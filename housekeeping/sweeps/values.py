"""Values of a declaration, checked by pydantic: limits, guard, alerts, lease, argument, reference, a worker's state."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Final, Literal, TypeVar, dataclass_transform

import pydantic
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from housekeeping.core.errors import DeclarationError, WrongArgument
from housekeeping.core.logs import counted, described
from housekeeping.core.settings import LARGEST_BATCH
from housekeeping.sweeps.conditions import check_expression

T = TypeVar("T")
#: What becomes of the rows that hang from a deleted one.
Decision = Literal["delete", "clear", "keep"]

_CONFIG: Final = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="forbid", strict=True)
#: Type of pydantic's error -> what to write.
_FORMS: Final[Mapping[str, str]] = {
    "bool_type": "True or False",
    "callable_type": "a function",
    "int_from_float": "a whole number, such as 100",
    "int_type": "a whole number, such as 100",
    "float_type": "a number, such as 0.5",
    "dict_type": "a dictionary",
    "mapping_type": "a dictionary",
    "string_type": 'a text, such as "shop.expired"',
    "tuple_type": "a tuple",
}
#: Field -> what to write instead of a value of another type.
_EXAMPLES: Final[Mapping[str, str]] = {
    "event": 'Event(events.event("shop.order_expired"), "order_id")',
    "schedule": 'a cron expression: "*/5 * * * *"',
    "most": 'limits by count: {"failed": 100}',
    "unavailable_errors": "types of errors: (ConnectionError, TimeoutError)",
    "then": "Delete() or Transition(machine, event)",
}
_BOUNDS: Final = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than_equal": ("at most", "le"),
}


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def declared(kind: type[T]) -> type[T]:
    """Make a frozen dataclass whose values pydantic checks. A wrong one raises DeclarationError."""
    checked: Any = checked_dataclass(frozen=True, config=_CONFIG)(kind)
    init: Callable[..., None] = checked.__init__

    @functools.wraps(init)
    def __init__(self: Any, *arguments: Any, **given: Any) -> None:
        try:
            init(self, *arguments, **given)
        except pydantic.ValidationError as error:
            raise _refusal(checked, error, arguments, given) from None

    checked.__init__ = __init__
    return checked  # type: ignore[no-any-return]


def _refusal(
    kind: Any, error: pydantic.ValidationError, arguments: tuple[Any, ...], given: Mapping[str, Any]
) -> DeclarationError:
    errors = error.errors(include_url=False)
    first = errors[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, DeclarationError):  # of `__post_init__`
        return own
    names = [each.name for each in dataclasses.fields(kind) if each.init]
    field = first["loc"][0] if first["loc"] else ""
    field = names[field] if isinstance(field, int) and field < len(names) else field
    owner = next((each for each in (*arguments[:1], given.get("name")) if isinstance(each, str)), kind.__name__)
    owner = owner if "name" in names else kind.__name__
    if first["type"] in ("unexpected_keyword_argument", "unexpected_positional_argument"):
        near = difflib.get_close_matches(str(field), names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(names)}"
        return DeclarationError(f"{owner}: there is no field {field!r}; {hint}")
    if first["type"].startswith("missing"):
        return DeclarationError(f"{owner}: {field} is missing")
    same = [each for each in errors if each["loc"][:1] == first["loc"][:1]]
    forms = dict.fromkeys(_form(str(field), each) for each in same)
    return DeclarationError(f"{owner}: {field} is {written(first['input'])}; write {' or '.join(forms)}")


def _form(field: str, error: Any) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in _BOUNDS:
        comparison, bound = _BOUNDS[kind]
        limit = context[bound]  # a text for a time
        return (
            f"a time {comparison} {limit}"
            if isinstance(value, timedelta)
            else f"a number {comparison} {written(limit)}"
        )
    if field in _EXAMPLES:
        return _EXAMPLES[field]
    if kind == "time_delta_type":
        unit = "days" if field in ("age", "older_than", "archive_keep") else "seconds"
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else 30
        return f"timedelta({unit}={number})"
    if kind in ("is_instance_of", "dataclass_exact_type", "dataclass_type"):
        return f"{context.get('class') or context.get('class_name')}(...)"
    return _FORMS.get(kind) or str(error["msg"]).removeprefix("Input should be ")


def written(value: Any) -> str:
    """Return a value as a declaration writes it, with separators in a large number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}".removesuffix(".0")
    return repr(value).removeprefix("datetime.") if isinstance(value, timedelta) else described(value)


#: Longest time of a run, as in settings. A longer one is probably a mistake.
_LONGEST: Final = timedelta(days=7)
#: A longer promise may begin before the first date of PostgreSQL.
_LONGEST_LATE: Final = timedelta(days=100 * 366)
GuardAction = Literal["alert", "limit", "stop"]
_Positive = Annotated[float, Field(gt=0)]


@declared
class Throttle:
    """Health of the database above which a run is throttled. None or False disables a check.

    Attributes:
      replication_lag_s: Seconds that a standby lags. 30: a healthy one lags under a second, and readers notice half
        a minute. A consumer of a logical slot is no standby; `slot_lag_mb` is about all slots.
      waiting_locks: Sessions that wait for locks on the sweep's tables. 10: single ones are normal under load. Ten of
        them mean a migration or a hot row, which the run would delay.
      vacuum: Whether a vacuum of the tables throttles. Off, because every cleanup is followed by one.
      batch_s: Average seconds of the run's batches since the last check. Off, because it differs by table.
      wait_s: How long a run waits before its first batch, and how long it then continues slowly before it ends. It
        always processes one batch.
      wal_mb_per_s: Megabytes of WAL that the whole server writes per second. Off, because it differs by server.
      slot_lag_mb: Megabytes of WAL that the server keeps for the slowest replication slot. Off, because it differs by
        server.
      custom: Returns None, or the reason to wait as text. Called at most every two seconds, outside of transactions.
    """

    replication_lag_s: _Positive | None = 30
    waiting_locks: Annotated[int, Field(ge=0)] | None = 10
    vacuum: bool = False
    batch_s: _Positive | None = None
    wait_s: Annotated[float, Field(ge=0, le=3600)] = 10
    wal_mb_per_s: _Positive | None = None
    slot_lag_mb: _Positive | None = None
    custom: Callable[[], str | None] | None = None


@declared
class Limits:
    """Limits of a run.

    Attributes:
      batch: Rows per transaction. With `batch_takes`, those of a stage's first one.
      runtime: How long a run starts new batches.
      resume: After which runs the next one continues where they ended. ``interrupted``: only after one that was
        interrupted. ``after_limit``: also after one that reached its limits; then rows that cannot be changed do not
        use up every run. ``never``: each run starts at the front. A resumed run continues to the end, then starts at
        the front.
      rows_per_s: Most rows per second, on average; None for no limit.
      rest: Pause after each batch, as a multiple of the batch's duration.
      batch_takes: How long a batch should take. A quick batch makes the next one of its stage larger, up to 20 times
        `batch` and 10,000 rows. A slow one makes it smaller, down to a tenth of `batch`. So do a throttle and a session
        that waits for the batch's locks. None for always `batch`. Only stages of tables follow it. With handlers of the
        event in the transaction, or in the outbox, a batch never has more rows than `batch`. The batches of a `Call`
        always have `batch` rows: its function takes the time, and holds no lock.
      throttle: Health of the database that a run needs to continue.
    """

    batch: Annotated[int, Field(ge=1, le=LARGEST_BATCH)] = 100
    runtime: Annotated[timedelta, Field(gt=timedelta(), le=_LONGEST)] = timedelta(minutes=5)
    _: KW_ONLY
    resume: Literal["interrupted", "after_limit", "never"] = "interrupted"
    rows_per_s: _Positive | None = None
    rest: Annotated[float, Field(ge=0, le=1000)] = 0.0
    batch_takes: Annotated[timedelta, Field(gt=timedelta(), le=timedelta(minutes=1))] | None = timedelta(seconds=0.2)
    throttle: Throttle = Throttle()


@declared
class Guard:
    """What happens when far more rows are stale than usual.

    Attributes:
      times_history: Allow this many times the most rows that a past run processed, and at least 10,000. Applies after
        ten runs. None for no such limit.
      share: Allow this share of the rows of the sweep's tables: 0.5 is half. Applies from the first run. None for no
        such limit.
      first_run: Whether a first run that would process over 20 % of a table and at least 1,000 rows is skipped until it
        is confirmed. The same holds for the first run after a change of the predicate, the age, the table or the tables
        of dependents, and if one of these has over 10,000 rows and no index to find dependents by.
      action: ``alert``: the run continues and raises an alert. ``limit``: the run processes the allowed number of rows,
        ends as ``partial: breaker`` and raises an alert; the next run resumes. ``stop``: the run ends as
        ``failed: breaker`` before the first change.
    """

    times_history: Annotated[float, Field(ge=1)] | None = 100
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    first_run: bool = True
    action: GuardAction = "alert"


@declared
class Alerts:
    """Limits above which a sweep raises an alert; None disables one.

    Attributes:
      longest_run: Duration of a run.
      backlog: Stale rows left after a run.
      most: Limits on counts of one run, by the name of the count.
      failed_runs: Failed runs in a row.
      overdue: Periods of the schedule without a run.
      late: How long rows may stay after they have become stale, however the runs end. Rows on hold do not count. Needs
        a `stale` that uses its time, or an order by a time.
    """

    longest_run: Annotated[timedelta, Field(ge=timedelta())] | None = None
    backlog: Annotated[int, Field(ge=0)] | None = None
    most: Mapping[str, Annotated[int, Field(ge=0)]] = field(default_factory=dict)
    failed_runs: Annotated[int, Field(ge=0)] | None = None
    # No document has a number: one period may be lost to a restart, two to a restart at the wrong moment.
    overdue: Annotated[int, Field(ge=0)] | None = 3
    late: Annotated[timedelta, Field(gt=timedelta(), le=_LONGEST_LATE)] | None = None

    def changed(self, given: Mapping[str, float | None], counts: Sequence[str]) -> Alerts:
        """Return a copy with the limits of the setting ``alarms``.

        Parameters:
          counts: The worker's counts. The limit of a count has the name of the count.

        Raises:
          DeclarationError: There is no such alert, or its limit is not a whole number.
        """
        changes: dict[str, Any] = {"most": dict(self.most)}
        for name, limit in given.items():
            if name in ("longest_run_s", "late_s"):
                changes[name.removesuffix("_s")] = None if limit is None else timedelta(seconds=limit)
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
                known = ", ".join(("longest_run_s", "late_s", "backlog", "failed_runs", "overdue", *counts))
                raise DeclarationError(f"there is no alarm {name}; the alarms are {known}")
        return dataclasses.replace(self, **changes)


#: A table as SQL has it: ``country``, ``audit.event`` or ``"User"``.
_TABLE_NAME: Final = re.compile(r'(?:(?:[A-Za-z_][\w$]*|"[^"]+")\.)?(?:[A-Za-z_][\w$]*|"[^"]+")')


@declared
class Kept:
    """Declaration that a table may grow, for `housekeeping coverage`. Put it into a module of sweeps.

    ::

        KEPT = (Kept("country", "reference data"), Kept("audit.event", "security log"))

    Attributes:
      table: Its name as in SQL, with the schema if the search path needs it. A partitioned table with its partitions.
      reason: Why it may grow.
    """

    table: str
    reason: str

    def __post_init__(self) -> None:
        if not _TABLE_NAME.fullmatch(self.table):
            raise DeclarationError(f'Kept: {self.table!r} is no name of a table; write it as in SQL: "audit.event"')
        if not self.reason.strip():
            raise DeclarationError(f"Kept({self.table!r}) has no reason; write why the table may grow")


@declared
class Lease:
    """Exclusive lease that a run needs.

    Attributes:
      key: Name of the lease. Sweeps and actors with the same key exclude each other. A function is called with the
        argument of the run.
      ttl: Time after which the lease of a dead holder expires. A living holder renews it.
    """

    key: str | Callable[[Any], str]
    # A lease shorter than 3 s cannot be renewed in time.
    ttl: Annotated[timedelta, Field(ge=timedelta(seconds=3), le=timedelta(days=7))]

    def key_for(self, argument: Any) -> str:
        """Return the key of the lease for a run with this argument."""
        return self.key(argument) if callable(self.key) else self.key


@declared
class Argument:
    """Argument of a sweep's runs.

    Attributes:
      label: What it is, in texts: ``project id``.
      type: Converts it from the command line; a `ValueError` rejects it.
    """

    label: str
    type: Callable[[str], Any] = str


@dataclass(frozen=True, slots=True)
class SetupProblem:
    """Reason why a worker is not set up.

    Attributes:
      family: Family of workers that share the problem.
      text: What is missing, such as a table.
    """

    family: str
    text: str


@dataclass(frozen=True, slots=True)
class Setup:
    """State of a worker in this installation.

    Attributes:
      enabled: Whether the settings, or the worker's default, enable it.
      problem: Returns what the worker lacks to run at all, such as a table, or None. A worker that is not set up is not
        scheduled and raises no alert, and its runs are skipped (`not_set_up`).
      declared: Returns all sweeps of the installation; a cascade respects their holds.
    """

    enabled: bool = True
    problem: Callable[[], SetupProblem | None] | None = None
    declared: Callable[[], Iterable[Any]] = field(default=tuple, repr=False, compare=False)


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


@declared
class Reference:
    """A link between two tables without a foreign key, for the `references` of a `Delete`.

    ::

        Reference("attachment.owner_id", "account.id", where="owner_type = 'Account'")

    Attributes:
      referencing: The dependents' table and column: ``"table.column"``, or ``"table.a,b"`` for several columns.
      referenced: The table and the column that they refer to, likewise.
      where: SQL condition of the dependents, on their table alone, for a column whose meaning depends on another one.
      database: Name of the dependents' database, from ``HOUSEKEEPING_DATABASES``; None for that of the sweep.
    """

    referencing: str
    referenced: str
    _: KW_ONLY
    where: str | None = None
    database: str | None = None

    def __post_init__(self) -> None:
        (_, columns), (_, others) = named_columns(self.referencing), named_columns(self.referenced)
        if len(columns) != len(others):
            raise DeclarationError(
                f"Reference: {self.referencing!r} has {counted(len(columns), 'column')}, and {self.referenced!r} has "
                f"{len(others)}; write one for each"
            )
        if self.where is not None:
            try:
                check_expression(self.where)
            except WrongArgument as error:
                raise DeclarationError(f"Reference({self.referencing!r}): {str(error).replace('--', '')}") from None


def named_columns(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the table and the columns that one side of a reference names."""
    table, _, names = text.rpartition(".")
    columns = tuple(each.strip().strip('"') for each in names.split(","))
    if not table or not all(columns):
        raise DeclarationError(f'Reference: {text!r} names no column; write "table.column", or "table.a,b" for two')
    return table, columns
