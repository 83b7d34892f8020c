"""The library's own tables: their columns, their creation, and the check of their version."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Final, TypeVar

from peewee import (
    SQL,
    BigAutoField,
    BigIntegerField,
    BlobField,
    BooleanField,
    CompositeKey,
    DoubleField,
    IntegerField,
    JSONField,
    NodeList,
    ProgrammingError,
    TextField,
    fn,
)

from housekeeping.core.errors import DatabaseUnavailable, SchemaMissing
from housekeeping.core.settings import MAIN, Settings
from housekeeping.database.catalog import escaped
from housekeeping.database.connection import BaseModel, database, translate_postgres_errors, use_databases
from housekeeping.database.queries import UtcDateTimeField

T = TypeVar("T")

#: A database's name begins with a letter, so 03:00 is a time and no label.
_LABEL: Final = re.compile(r"(?:([A-Za-z][A-Za-z0-9_-]*):)?([0-9]{1,30})")


def run_label(run_id: int, name: str) -> str:
    """Return a run's label: ``4711`` in the main database, ``ci:4711`` in the database ``ci``."""
    return str(run_id) if name == MAIN else f"{name}:{run_id}"


def name_database(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the values with the name of their database, if there are several databases."""
    return {**values, "database": name} if database.several() else values


def parse_run_label(text: str) -> tuple[str, int] | None:
    """Return the database's name and the run id in a `run_label`; None for another text."""
    found = _LABEL.fullmatch(text)
    return None if found is None else (found[1] or MAIN, int(found[2]))


def newest(query: Any, order: Sequence[Any], limit: int, *given: tuple[Any, Any]) -> Any:
    """Return the first rows of a query, by these columns in descending order.

    Parameters:
      given: Values of a filter, each with its condition, which is left out if the value is None.
    """
    conditions = [condition for value, condition in given if value is not None]
    ordered = query.order_by(*(column.desc() for column in order)).limit(limit)
    return ordered.where(*conditions) if conditions else ordered


def page_of(rows: Sequence[T], limit: int) -> tuple[Sequence[T], int | None]:
    """Return a page of rows, of which one more was read if there are more, and the id after which the next one begins.

    The id is None on the last page.
    """
    last: Any = rows[limit - 1] if len(rows) > limit else None
    return rows[:limit], last and last.id


#: The database's clock, because several machines write and compare these times.
NOW: Final = SQL("clock_timestamp()")


def seconds_since(column: Any) -> Any:
    """Return the SQL for the seconds that have passed since a column's time, by the database's clock."""
    return fn.EXTRACT(NodeList((SQL("EPOCH FROM"), NOW - column)))


#: What is said of an action without a result.
NOT_ENDED: Final = "not ended, or its process was killed"


class _Own(BaseModel):
    """Base class of the library's own tables, which are in the schema of the settings."""

    if not TYPE_CHECKING:  # as in `BaseModel`

        class Meta:
            schema = "housekeeping"


class Run(_Own):
    """One attempt at a run; `outcome` is NULL while it is running.

    Attributes:
      host, pid: The process that runs it, or that recorded it.
      traceback: Traceback of the error that ended it, cut at a limit.
      rejected: The records that it rejected by cause, up to a limit.
      stopped_by: The operator who asked it to stop after its batch.
      oldest_at: Time of the oldest stale row at its end, if the order of the rows tells it.
    """

    id = BigAutoField()
    worker = TextField()
    message_id = TextField(null=True)
    tick = UtcDateTimeField(null=True)
    trigger = TextField()
    epoch = BigIntegerField(null=True)
    started_at = UtcDateTimeField()
    heartbeat_at = UtcDateTimeField()
    finished_at = UtcDateTimeField(null=True)
    outcome = TextField(null=True)
    reason = TextField(null=True)
    counts = JSONField(default=dict)
    cursor = JSONField(null=True)
    error = TextField(null=True)
    backlog = BigIntegerField(null=True)
    backlog_exact = BooleanField(null=True)
    host = TextField(null=True)
    pid = IntegerField(null=True)
    traceback = TextField(null=True)
    rejected = JSONField(null=True)
    stopped_by = TextField(null=True)
    oldest_at = UtcDateTimeField(null=True)

    class Meta:
        table_name = "runs"


#: Order of a worker's runs, newest first, which only the index `runs_began` has. If ordered by `id`, PostgreSQL may use
#: the primary key and read the rows of all workers.
NEWEST_FIRST: Final = NodeList((SQL("-"), Run.id))


class LeaseRow(_Own):
    """Latest epoch of a lease, and the token of its holder.

    All keys share one sequence. So a row can be deleted, and the next epoch of its key is still higher. `used_at` is
    the time of the last acquisition, or of the last fence, accurate to a day.
    """

    key = TextField(primary_key=True)
    epoch = BigIntegerField()
    holder = TextField()
    used_at = UtcDateTimeField()

    class Meta:
        table_name = "leases"


class HeldLeaseRow(_Own):
    """Holder of a lease, in an installation without Redis.

    It is not in `LeaseRow`, because a batch locks that row until its end, and a renewal would wait for it.
    """

    key = TextField(primary_key=True)
    holder = TextField()
    expires_at = UtcDateTimeField()

    class Meta:
        table_name = "held_leases"


class TickRow(_Own):
    """Sent tick of a worker, in an installation without Redis; the latest ones, and those that have not ended.

    Attributes:
      holder: Process that runs it; NULL if there is none.
      due_at: Time from which a process may run it: for a retry, the end of its delay; with a holder, the time at which
        the holder counts as dead. NULL once the tick has ended.
      attempts: Number of attempts that have begun.
      retries: Number of attempts that have failed.
    """

    worker = TextField()
    tick = UtcDateTimeField()
    message_id = TextField()
    holder = TextField(null=True)
    due_at = UtcDateTimeField(null=True)
    attempts = IntegerField(default=0)
    retries = IntegerField(default=0)

    class Meta:
        table_name = "ticks"
        primary_key = CompositeKey("worker", "tick")


class ProcessRow(_Own):
    """Last heartbeat of a process, in an installation without Redis."""

    id = TextField(primary_key=True)
    heartbeat = JSONField()
    at = UtcDateTimeField()

    class Meta:
        table_name = "processes"


class Switch(_Own):
    """Current override of a worker: paused, or with lower limits."""

    worker = TextField(primary_key=True)
    state = TextField()
    reason = TextField(null=True)
    until = UtcDateTimeField(null=True)
    since = UtcDateTimeField()
    said_by = TextField(null=True)
    batch_size = IntegerField(null=True)
    max_runtime_s = DoubleField(null=True)
    rows_per_s = DoubleField(null=True)

    class Meta:
        table_name = "switches"


class Rejection(_Own):
    """Records that a worker's last run for an argument rejected for one cause, or the error that ended that run.

    Attributes:
      subject: The run's argument as text; empty for a worker without one.
      rows: The number of rejected records; 0 if the run failed.
      times: Runs in a row that failed or rejected every record; 0 if the last one processed some.
      not_before: Earliest time to schedule a run for the subject again; None for any time.
      position: Where the last run ended, like the ledger's cursor; None if it failed.
    """

    worker = TextField()
    subject = TextField()
    cause = TextField()
    since = UtcDateTimeField()
    last_at = UtcDateTimeField()
    rows = BigIntegerField()
    times = IntegerField()
    not_before = UtcDateTimeField(null=True)
    position = JSONField(null=True)
    sample = JSONField()

    class Meta:
        table_name = "rejections"
        primary_key = CompositeKey("worker", "subject", "cause")


class OutboxRow(_Own):
    """One row of an event, waiting for its handler; deleted once the handler has taken it."""

    id = BigAutoField()
    event = TextField()
    subscription = TextField()
    worker = TextField()
    run_id = BigIntegerField(null=True)
    contents = JSONField()
    attempts = IntegerField(default=0)
    created_at = UtcDateTimeField()
    due_at = UtcDateTimeField()
    error = TextField(null=True)

    class Meta:
        table_name = "outbox"


class ActionRow(_Own):
    """One action of an operator, an entry of the log.

    Attributes:
      user: The operator: ``user@machine`` on the command line; on the dashboard ``user@address``, with the user of the
        proxy's header or of the login, or ``dashboard``.
      target: The worker, lease, key, message or alert; ``dashboard`` for a login.
      result: What it did; NULL until it has ended, and if its process was killed.
    """

    id = BigAutoField()
    at = UtcDateTimeField()
    user = TextField(column_name="user_name")
    action = TextField()
    target = TextField()
    result = TextField(null=True)

    class Meta:
        table_name = "actions"

    @property
    def result_in_words(self) -> Any:
        """The result, or that there is none."""
        return self.result or NOT_ENDED

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``actions`` in ``housekeeping actions --json``."""
        return {name: getattr(self, name) for name in ("id", "at", "user", "action", "target", "result")}


class AlertRow(_Own):
    """One alert from its beginning to its end; `ended_at` is NULL while it is active.

    Attributes:
      worker: Empty for an alert of the whole installation.
      subject: The queue or the server of an alert; usually empty.
      seen_at: When it was last evaluated, accurate to half a minute.
      delivered: The latest event that the webhook's receiver has accepted: ``begin`` or ``end``.
      attempts, due_at: Attempts to deliver the next event, and when it is sent (again).
    """

    id = BigAutoField()
    worker = TextField()
    name = TextField()
    subject = TextField()
    severity = TextField()
    text = TextField()
    limit = DoubleField(null=True)
    value = DoubleField(null=True)
    began_at = UtcDateTimeField()
    seen_at = UtcDateTimeField()
    ended_at = UtcDateTimeField(null=True)
    acknowledged_at = UtcDateTimeField(null=True)
    acknowledged_by = TextField(null=True)
    delivered = TextField(null=True)
    attempts = IntegerField(default=0)
    due_at = UtcDateTimeField()

    class Meta:
        table_name = "alerts"


class Evaluation(_Own):
    """Time at which a process last began to evaluate the alerts of the installation; one row."""

    single = BooleanField(primary_key=True, default=True)
    began_at = UtcDateTimeField()

    class Meta:
        table_name = "evaluations"


class Deployment(_Own):
    """What the process that booted last consists of, by name: versions, masked settings, declarations; one row."""

    single = BooleanField(primary_key=True, default=True)
    state = JSONField()

    class Meta:
        table_name = "deployments"


class Completion(_Own):
    """Completion of a plain actor's message, written in the transaction of its effect.

    Attributes:
      name: Actor, and message id or a digest of the idempotency key.
      result: Result of the actor, as Dramatiq encodes it; NULL if it was not given.
    """

    name = TextField(primary_key=True)
    message_id = TextField()
    expires_at = UtcDateTimeField()
    result = BlobField(null=True)

    class Meta:
        table_name = "completions"


class DetachedPartition(_Own):
    """Partition that a worker is detaching, or has detached and not dropped yet.

    Attributes:
      id: The table's oid. A table of another oid or name is another one.
      partition_of: The partitioned table.
      bounds: The bounds that the partition had, as SQL.
    """

    id = BigIntegerField()
    name = TextField()
    worker = TextField()
    partition_of = TextField()
    bounds = TextField()

    class Meta:
        table_name = "detached_partitions"
        primary_key = CompositeKey("id", "name")


class TableSize(_Own):
    """Bytes of a table of the database in the last night, and in one before."""

    schema_name = TextField()
    table_name = TextField()
    size = BigIntegerField()
    at = UtcDateTimeField()
    size_before = BigIntegerField(null=True)
    before = UtcDateTimeField(null=True)

    class Meta:
        table_name = "table_sizes"
        primary_key = CompositeKey("schema_name", "table_name")


class Erasure(_Own):
    """One erasure of a person or tenant, and its receipt. All are in the database ``main``.

    Attributes:
      subject: Name of the `Subject`.
      state: ``requested``, ``running``, or how it ended: ``done``, ``incomplete`` (rows are left), ``failed``,
        ``refused`` (nothing was changed).
      key: Values of the subject's primary key, as PostgreSQL writes them. NULL once it has ended.
      found: The versions of the subject's row that were seen: values by column, by which references lead to it, as
        PostgreSQL writes them. So an erasure that was killed after the row was deleted can continue. NULL once it has
        ended.
      key_hmac: `ledger.erasures.key_hmac` of subject and key.
      confirmed: Whether an operator has confirmed that it may change much of a table.
      counts: Rows by table: ``{"comment": {"deleted": 12}}``; ``objects`` and ``calls`` are counted likewise.
      kept: Reasons by table whose rows are kept.
      proof: Result of the final check: ``{"passes": 1, "left": {"comment": 0}, "kept": {"invoice": 2}}``. Before, only
        ``kept``: rows that stay as they are, counted before the first change.
      outside: What the erasure could not reach, such as backups and other systems, as texts.
      error: Why it was refused, failed or is incomplete, without anything that identifies the subject.
    """

    id = BigAutoField()
    subject = TextField()
    state = TextField(default="requested")
    key = JSONField(null=True)
    found = JSONField(null=True)
    key_hmac = TextField()
    requester = TextField()
    reason = TextField(null=True)
    confirmed = BooleanField(default=False)
    requested_at = UtcDateTimeField()
    started_at = UtcDateTimeField(null=True)
    ended_at = UtcDateTimeField(null=True)
    counts = JSONField(default=dict)
    kept = JSONField(default=dict)
    proof = JSONField(null=True)
    outside = JSONField(default=list)
    error = TextField(null=True)

    class Meta:
        table_name = "erasures"


#: Every model of the library's own tables.
MODELS: Final[tuple[type[_Own], ...]] = tuple(_Own.__subclasses__())


#: Key of the advisory lock that keeps two ``init`` from running at once.
_ADVISORY_LOCK: Final = 0x686F757365  # "house"


def use_database(settings: Settings) -> None:
    """Use the databases of the settings; nothing is connected yet.

    Raises:
      SettingsError: When a URL is missing or invalid.
    """
    use_databases(settings.database_urls(), settings.prepared_statements)
    use_schema(settings.schema_name)


def use_schema(name: str) -> None:
    """Set the name of the schema."""
    for model in MODELS:
        model._meta.schema = name


def statements(name: str, since: int = 0, to: int | None = None) -> list[str]:
    """Return the statements that upgrade the tables from one version to another. Execute them in one transaction.

    Parameters:
      name: The schema.
      since: Current version of the tables; 0 if they do not exist.
      to: New version of the tables; None for that of this release.
    """
    from housekeeping.ledger.migrations import MIGRATIONS

    if to is not None and not since <= to <= len(MIGRATIONS):
        raise ValueError(
            f"there is no version {to} since {since}; this release has the versions 1 to {len(MIGRATIONS)}"
        )
    schema = f'"{name}"'  # quoted, because the settings allow reserved words
    found = []
    if since == 0:
        found.append(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        columns = "version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now()"
        found.append(f"CREATE TABLE IF NOT EXISTS {schema}.migrations ({columns})")
    for version, text in enumerate(MIGRATIONS[since:to], since + 1):
        found += dedent(text.format(schema=schema)).strip().removesuffix(";").split(";\n")
        found.append(f"INSERT INTO {schema}.migrations (version) VALUES ({version})")  # noqa: S608
    return found


def missing_statements() -> tuple[int, list[str]]:
    """Return the version of the tables in the current database, 0 without tables, and the missing `statements`."""
    name: Any = Run._meta.schema
    version = version_of(name, lambda query: database.execute_sql(query).fetchone()[0])
    return version, statements(name, version)


def version_of(name: str, scalar: Callable[[str], Any]) -> int:
    """Return the version of the tables in a schema, 0 without tables.

    Parameters:
      scalar: Executes a query without parameters and returns its value.
    """
    if scalar(f"SELECT to_regclass('\"{name}\".migrations')") is None:
        return 0
    return int(scalar(f'SELECT coalesce(max(version), 0) FROM "{name}".migrations'))  # noqa: S608


def init() -> int:
    """Create or upgrade the tables in one transaction; return how many migrations were applied.

    Raises:
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    from housekeeping.ledger.migrations import MIGRATIONS

    with translate_postgres_errors(), database.atomic():
        database.execute_sql("SELECT pg_advisory_xact_lock(%s)", (_ADVISORY_LOCK,))
        version, missing = missing_statements()
        if missing:
            database.execute_sql(escaped(";\n".join(missing)))
    return max(len(MIGRATIONS) - version, 0)


def require_all() -> None:
    """Call `require` for each database. One that does not answer is passed over if another one does.

    Raises:
      SchemaMissing: A database lacks the tables, or they are too old.
      DatabaseUnavailable: When no database answers.
    """
    unavailable: list[DatabaseUnavailable] = []
    databases = database.by_name()
    for name in databases:
        try:
            with database.using(name):
                require()
        except DatabaseUnavailable as error:
            unavailable.append(error)
    if len(unavailable) == len(databases):
        raise unavailable[0]


def require() -> None:
    """Raise SchemaMissing unless the current database has the tables in the version that this code needs.

    Raises:
      SchemaMissing: The tables are missing or too old; the text names the command.
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    from housekeeping.ledger.migrations import MIGRATIONS

    name = Run._meta.schema
    with translate_postgres_errors():
        try:
            # Quoted, because a name that the settings allow may be a reserved word.
            query = f'SELECT coalesce(max(version), 0) FROM "{name}".migrations'  # noqa: S608
            version: int = database.execute_sql(query).fetchone()[0]
        except ProgrammingError:
            version = 0
    if version == 0:
        raise SchemaMissing(f"the schema {name!r} is not in {database.place}; run: housekeeping init")
    if version < len(MIGRATIONS):
        place = f" in {database.place}" if database.several() else ""
        raise SchemaMissing(
            f"the schema {name!r}{place} is at version {version}, this code needs {len(MIGRATIONS)}; "
            "run: housekeeping init"
        )
