"""Ready-made sweeps for tables that many applications have. Each function returns a `Sweep` for your sweep module.

::

    # cleanup/recipes.py, named by HOUSEKEEPING_SWEEPS=cleanup.recipes
    from datetime import timedelta

    from housekeeping.recipes import django_admin_log, django_sessions

    sessions = django_sessions()
    admin_log = django_admin_log(older_than=timedelta(days=365))

A recipe selects the rows that the package's own cleanup deletes, where it has one. It needs neither the package nor its
settings. The fields of `Sweep` can be given to it, except its stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from peewee import SQL, Expression, fn

from housekeeping.core.errors import DeclarationError
from housekeeping.sweeps.actions import Delete
from housekeeping.sweeps.conditions import Row
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.rows import Rows
from housekeeping.sweeps.stage import Batch
from housekeeping.sweeps.table_stage import TableStage, Write
from housekeeping.sweeps.tables import TableColumn, TableDescription, build_model
from housekeeping.sweeps.values import Limits

#: Rows per batch of a recipe. They are small, and no other session locks them for long.
BATCH_SIZE: Final = 1000


def table(name: str, key: str, **columns: str) -> Any:
    """Return a model of a table of another package.

    Parameters:
      name: The table, with its schema if it is not in the connection's search path.
      key: The column of the primary key.
      columns: Column -> its type in PostgreSQL.

    Raises:
      DeclarationError: The name has more than two parts.
    """
    *schema, bare = name.split(".")
    if len(schema) > 1 or not all((*schema, bare)):
        raise DeclarationError(f"{name!r} is no name of a table; write sessions, or shop.sessions")
    described: Sequence[TableColumn] = [TableColumn(each, each, kind, each != key) for each, kind in columns.items()]
    return build_model(TableDescription(bare, schema[0] if schema else None, bare, described, (key,)))


#: Default of Celery's ``result_expires``.
CELERY_KEEPS: Final = timedelta(days=1)
#: Default of ``prune_db_task_results --min-age-days``.
TASKS_KEEP: Final = timedelta(days=14)


def django_sessions(
    *, name: str = "recipes.django_sessions", table_name: str = "django_session", **given: Any
) -> Sweep:
    """Return a sweep that deletes expired sessions of Django's database backend, like ``manage.py clearsessions``."""
    session = table(table_name, "session_key", session_key="varchar(40)", expire_date="timestamptz")
    rows = Rows(session, stale=lambda row, now: row.expire_date < now, order="expire_date", action=Delete())
    return Sweep(name, rows, **_defaults(given, schedule="7 * * * *"))


def django_admin_log(
    *,
    older_than: timedelta,
    name: str = "recipes.django_admin_log",
    table_name: str = "django_admin_log",
    **given: Any,
) -> Sweep:
    """Return a sweep that deletes old entries of the admin's log, which Django keeps for ever.

    Parameters:
      older_than: Age from which an entry is deleted.
    """
    entry = table(table_name, "id", id="integer", action_time="timestamptz")
    # In the order of its key: action_time has no index.
    rows = Rows(entry, stale=lambda row, limit: row.action_time < limit, age=older_than, action=Delete())
    return Sweep(name, rows, **_defaults(given, schedule="27 3 * * *"))


def django_celery_results(
    *,
    older_than: timedelta = CELERY_KEEPS,
    name: str = "recipes.django_celery_results",
    **given: Any,
) -> Sweep:
    """Return a sweep that deletes old results of tasks and groups, like Celery's task ``celery.backend_cleanup``.

    Parameters:
      older_than: Time since the last change of a result, as in Celery's setting ``result_expires``.
    """
    task = table("django_celery_results_taskresult", "id", id="integer", date_done="timestamptz")
    group = table("django_celery_results_groupresult", "id", id="integer", date_done="timestamptz")

    def stage(model: Any, stage_name: str) -> Rows:
        return Rows(
            model,
            stale=lambda row, limit: row.date_done < limit,
            order="date_done",
            age=older_than,
            action=Delete(rows_counted_as=f"deleted_{stage_name}"),
            name=stage_name,
        )

    stages = [stage(task, "task_results"), stage(group, "group_results")]
    return Sweep(name, stages, **_defaults(given, schedule="37 * * * *"))


def django_tasks(
    *,
    older_than: timedelta = TASKS_KEEP,
    name: str = "recipes.django_tasks",
    table_name: str = "django_tasks_database_dbtaskresult",
    **given: Any,
) -> Sweep:
    """Return a sweep that deletes results of finished tasks of django-tasks-db, like ``prune_db_task_results``.

    Parameters:
      older_than: Time since the end of the task. Unlike in the command, queues and backends make no difference.
    """
    result = table(table_name, "id", id="uuid", status="varchar(10)", finished_at="timestamptz")
    rows = Rows(
        result,
        stale=lambda row, limit: row.status.in_(("SUCCESSFUL", "FAILED")) & (row.finished_at <= limit),
        age=older_than,
        action=Delete(),  # in the order of its key: finished_at has no index
    )
    return Sweep(name, rows, **_defaults(given, schedule="47 * * * *"))


@dataclass(frozen=True, slots=True)
class _DeleteTokens(Delete):
    """Delete expired tokens together with their entries in the blacklist. The foreign key does not cascade.

    Attributes:
      entry: Model of the blacklist.
    """

    entry: Any = None

    @property
    def counted_as(self) -> Sequence[str]:
        return ("deleted_rows", "deleted_blacklisted")

    def write(self, table: TableStage, batch: Batch, chosen: Expression) -> Write:
        tokens: Any = table.model.delete().where(chosen).returning(*table.key).cte("tokens")
        entries = self.entry.delete().where(self.entry.token_id.in_(tokens.select(tokens.c.id)))
        return Write([tokens, entries.returning(self.entry.id).cte("entries")], self.counted_as)


def simplejwt_tokens(*, name: str = "recipes.simplejwt_tokens", **given: Any) -> Sweep:
    """Return a sweep that deletes expired tokens and their entries in the blacklist, like ``flushexpiredtokens``."""
    token = table("token_blacklist_outstandingtoken", "id", id="bigint", expires_at="timestamptz")
    entry = table("token_blacklist_blacklistedtoken", "id", id="bigint", token_id="bigint")
    # In the order of its key: expires_at has no index.
    rows = Rows(token, stale=lambda row, now: row.expires_at <= now, action=_DeleteTokens(entry=entry))
    return Sweep(name, rows, **_defaults(given, schedule="57 * * * *"))


def _defaults(given: Mapping[str, Any], **defaults: Any) -> Any:
    return {"limits": Limits(BATCH_SIZE), **defaults, **given}


def flask_session(*, name: str = "recipes.flask_session", table_name: str = "sessions", **given: Any) -> Sweep:
    """Return a sweep that deletes expired sessions of Flask-Session's SQLAlchemy backend.

    Parameters:
      table_name: As in ``SESSION_SQLALCHEMY_TABLE``.
    """
    session = table(table_name, "id", id="integer", expiry="timestamp")
    # In the order of its key: expiry has no index.
    rows = Rows(session, stale=lambda row, now: row.expiry <= now, action=Delete())
    return Sweep(name, rows, **_defaults(given, schedule="17 * * * *"))


#: States of a job of procrastinate that no worker changes.
FINISHED: Final = ("succeeded", "failed", "cancelled", "aborted")


def procrastinate_jobs(
    *,
    older_than: timedelta,
    statuses: Sequence[str] = ("succeeded",),
    name: str = "recipes.procrastinate_jobs",
    schema: str | None = None,
    **given: Any,
) -> Sweep:
    """Return a sweep that deletes finished jobs of procrastinate, like its task ``remove_old_jobs``.

    Their events go with them by the foreign key. A trigger of procrastinate unlinks periodic defers.

    Parameters:
      older_than: Time since the job's last event.
      statuses: States of the deleted jobs: ``succeeded``, ``failed``, ``cancelled``, ``aborted``.
      schema: Schema of procrastinate's tables, if it is not in the connection's search path.

    Raises:
      DeclarationError: A status is that of an unfinished job, or unknown.
    """
    if isinstance(statuses, str) or not statuses or (wrong := [each for each in statuses if each not in FINISHED]):
        found = repr(statuses) if isinstance(statuses, str) or not statuses else repr(wrong[0])
        raise DeclarationError(f"{name}: statuses has {found}; it should be a tuple of {', '.join(FINISHED)}")
    prefix = f"{schema}." if schema else ""
    job = table(f"{prefix}procrastinate_jobs", "id", id="bigint", status="procrastinate_job_status")
    event = table(f"{prefix}procrastinate_events", "id", id="bigint", job_id="bigint", at="timestamptz")

    def stale(row: Row, limit: datetime) -> Any:
        events = event.select(SQL("1")).where(event.job_id == row.id)
        is_old = fn.EXISTS(events) & ~fn.EXISTS(events.where(event.at >= limit))
        return row.status.in_(tuple(statuses)) & is_old

    rows = Rows(job, stale=stale, age=older_than, action=Delete())
    return Sweep(name, rows, **_defaults(given, schedule="12 * * * *"))


def apscheduler_jobs(
    *,
    older_than: timedelta,
    name: str = "recipes.apscheduler_jobs",
    table_name: str = "apscheduler_jobs",
    **given: Any,
) -> Sweep:
    """Return a sweep that deletes jobs of APScheduler 3 that no scheduler has run since they were due.

    APScheduler removes a finished job by itself. Jobs stay if their scheduler is gone. Paused jobs are kept.

    Parameters:
      older_than: Time since the job was due. It should be longer than any outage of a scheduler.
      table_name: As in ``SQLAlchemyJobStore(tablename=...)``.
    """
    job = table(table_name, "id", id="varchar(191)", next_run_time="double precision")
    rows = Rows(
        job,
        stale=lambda row, limit: row.next_run_time < limit.timestamp(),
        order="next_run_time",
        age=older_than,
        action=Delete(),
    )
    return Sweep(name, rows, **_defaults(given, schedule="42 3 * * *"))


__all__ = [
    "apscheduler_jobs",
    "django_admin_log",
    "django_celery_results",
    "django_sessions",
    "django_tasks",
    "flask_session",
    "procrastinate_jobs",
    "simplejwt_tokens",
]
