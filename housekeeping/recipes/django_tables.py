"""Recipes for Django and packages of Django applications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Unpack

from peewee import Expression

from housekeeping.recipes.tables import BATCH_SIZE, table
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.options import SweepOptions
from housekeeping.sweeps.stages.actions import Delete, Write
from housekeeping.sweeps.stages.stage import Batch
from housekeeping.sweeps.stages.table_stage import TableStage

#: Default of Celery's ``result_expires``.
CELERY_KEEPS: Final = timedelta(days=1)
#: Default of ``prune_db_task_results --min-age-days``.
TASKS_KEEP: Final = timedelta(days=14)


def django_sessions(
    *, name: str = "recipes.django_sessions", table_name: str = "django_session", **options: Unpack[SweepOptions]
) -> Sweep:
    """Return a sweep that deletes expired sessions of Django's database backend, like ``manage.py clearsessions``."""
    session = table(table_name, "session_key", session_key="varchar(40)", expire_date="timestamptz")
    return Sweep(
        name=name,
        stale=lambda now: session.expire_date < now,
        order=(session.expire_date, session.session_key),
        action=Delete(),
        **_defaults(options, schedule="7 * * * *"),
    )


def django_admin_log(
    *,
    older_than: timedelta,
    name: str = "recipes.django_admin_log",
    table_name: str = "django_admin_log",
    **options: Unpack[SweepOptions],
) -> Sweep:
    """Return a sweep that deletes old entries of the admin's log, which Django keeps for ever.

    Parameters:
      older_than: Age from which an entry is deleted.
    """
    entry = table(table_name, "id", id="integer", action_time="timestamptz")
    return Sweep(
        name=name,
        stale=lambda limit: entry.action_time < limit,
        order=(entry.id,),  # action_time has no index
        action=Delete(),
        **_defaults(options, schedule="27 3 * * *", stale_after=older_than),
    )


def django_celery_results(
    *,
    older_than: timedelta = CELERY_KEEPS,
    name: str = "recipes.django_celery_results",
    **options: Unpack[SweepOptions],
) -> Sweep:
    """Return a sweep that deletes old results of tasks and groups, like Celery's task ``celery.backend_cleanup``.

    Parameters:
      older_than: Time since the last change of a result, as in Celery's setting ``result_expires``.
    """
    task = table("django_celery_results_taskresult", "id", id="integer", date_done="timestamptz")
    group = table("django_celery_results_groupresult", "id", id="integer", date_done="timestamptz")

    def stage(sweep: Sweep, stage_name: str, model: Any) -> TableStage:
        return TableStage(
            name=stage_name,
            stale=lambda now: model.date_done < now - (sweep.stale_after or older_than),
            order=(model.date_done, model.id),
            action=Delete(rows_counted_as=f"deleted_{stage_name}"),
            batch_size=sweep.batch_size,
        )

    return Sweep(
        name=name,
        stages=lambda sweep: [stage(sweep, "task_results", task), stage(sweep, "group_results", group)],
        **_defaults(
            options,
            schedule="37 * * * *",
            stale_after=older_than,
            counts=("deleted_task_results", "deleted_group_results", "batches", "out_of_time"),
            progress_counts=("deleted_task_results", "deleted_group_results"),
        ),
    )


def django_tasks(
    *,
    older_than: timedelta = TASKS_KEEP,
    name: str = "recipes.django_tasks",
    table_name: str = "django_tasks_database_dbtaskresult",
    **options: Unpack[SweepOptions],
) -> Sweep:
    """Return a sweep that deletes results of finished tasks of django-tasks-db, like ``prune_db_task_results``.

    Parameters:
      older_than: Time since the end of the task. Unlike in the command, queues and backends make no difference.
    """
    result = table(table_name, "id", id="uuid", status="varchar(10)", finished_at="timestamptz")
    return Sweep(
        name=name,
        stale=lambda limit: result.status.in_(("SUCCESSFUL", "FAILED")) & (result.finished_at <= limit),
        order=(result.id,),  # finished_at has no index
        action=Delete(),
        **_defaults(options, schedule="47 * * * *", stale_after=older_than),
    )


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


def simplejwt_tokens(*, name: str = "recipes.simplejwt_tokens", **options: Unpack[SweepOptions]) -> Sweep:
    """Return a sweep that deletes expired tokens and their entries in the blacklist, like ``flushexpiredtokens``."""
    token = table("token_blacklist_outstandingtoken", "id", id="bigint", expires_at="timestamptz")
    entry = table("token_blacklist_blacklistedtoken", "id", id="bigint", token_id="bigint")
    return Sweep(
        name=name,
        stale=lambda now: token.expires_at <= now,
        order=(token.id,),  # expires_at has no index
        action=_DeleteTokens(entry=entry),
        **_defaults(options, schedule="57 * * * *"),
    )


def _defaults(options: SweepOptions, **defaults: Any) -> Any:
    return {"batch_size": BATCH_SIZE, **defaults, **options}
