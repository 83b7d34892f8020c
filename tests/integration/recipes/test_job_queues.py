"""Recipes for procrastinate and APScheduler on the tables that the packages create."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from housekeeping import Limits
from housekeeping.recipes import apscheduler_jobs, procrastinate_jobs
from tests.integration.recipes.checked import assert_leaves, keys_of, needs
from tests.internals.core import DeclarationError
from tests.internals.database import Database

if TYPE_CHECKING:
    import psycopg

#: Status of a job -> days since its last event.
JOBS = (("succeeded", 40), ("succeeded", 31), ("failed", 40), ("succeeded", 29), ("cancelled", 40), ("todo", 40))


@pytest.fixture
def jobs(postgres: Database, application_url: str) -> Iterator[psycopg.Connection[Any]]:
    """The tables of procrastinate with a job for each of `JOBS`, and a job without an event."""
    import procrastinate
    import psycopg

    schema = Path(procrastinate.__file__).parent / "sql" / "schema.sql"
    with psycopg.connect(application_url, autocommit=True) as connection:
        connection.execute(schema.read_bytes())
        for status, days in JOBS:
            connection.execute(
                "WITH job AS (INSERT INTO procrastinate_jobs (queue_name, task_name, status) "
                "VALUES ('default', 'send', %s) RETURNING id), "
                "deferred AS (INSERT INTO procrastinate_periodic_defers (task_name, defer_timestamp, job_id) "
                "SELECT 'send', id, id FROM job) "
                "INSERT INTO procrastinate_events (job_id, type, at) "
                "SELECT id, 'started'::procrastinate_job_event_type, now() - %s - interval '9 d' FROM job "
                "UNION ALL SELECT id, 'succeeded', now() - %s FROM job",
                (status, timedelta(days=days), timedelta(days=days)),
            )
        # Triggers have written events of their own.
        connection.execute("DELETE FROM procrastinate_events WHERE at > now() - interval '1 minute'")
        connection.execute(
            "INSERT INTO procrastinate_jobs (queue_name, task_name, status) VALUES ('default', 'send', 'succeeded')"
        )
        connection.execute("DELETE FROM procrastinate_events WHERE job_id = (SELECT max(id) FROM procrastinate_jobs)")
        yield connection


def left_by_procrastinate(connection: psycopg.Connection[Any], statuses: list[str]) -> list[int]:
    """Return the jobs that procrastinate's own statement leaves, and undo it."""
    from procrastinate import sql

    with connection.transaction(force_rollback=True):
        connection.execute(sql.queries["delete_old_jobs"], {"statuses": statuses, "queue": None, "nb_hours": 30 * 24})
        return [row[0] for row in connection.execute("SELECT id FROM procrastinate_jobs").fetchall()]


@needs("procrastinate", "psycopg")
@pytest.mark.parametrize("statuses", [["succeeded"], ["succeeded", "failed", "cancelled", "aborted"]])
def test_old_jobs_go_as_by_remove_old_jobs(
    jobs: psycopg.Connection[Any], postgres: Database, statuses: list[str]
) -> None:
    sweep = procrastinate_jobs(
        older_than=timedelta(days=30), statuses=statuses, limits=Limits(batch=1, batch_takes=None)
    )
    kept = left_by_procrastinate(jobs, statuses)

    assert_leaves(postgres, sweep, kept, table="procrastinate_jobs")

    assert len(keys_of(postgres, "procrastinate_events", "job_id")) == 2 * (len(kept) - 1)


@pytest.mark.parametrize("statuses", ["succeeded", (), ("succeeded", "doing")])
def test_unfinished_jobs_of_procrastinate_are_rejected(statuses: Any) -> None:
    with pytest.raises(DeclarationError, match="statuses"):
        procrastinate_jobs(older_than=timedelta(days=30), statuses=statuses)


def _job(scheduler: Any, name: str, due: datetime | None) -> Any:
    from apscheduler.job import Job
    from apscheduler.triggers.date import DateTrigger

    trigger = DateTrigger(run_date=due or datetime.now(UTC), timezone=UTC)
    limits = {"misfire_grace_time": 1, "coalesce": True, "max_instances": 1, "executor": "default"}
    call = {"func": "builtins:print", "args": (), "kwargs": {}, "name": "print", "trigger": trigger}
    return Job(scheduler, id=name, next_run_time=due, **call, **limits)


@pytest.fixture
def scheduled(postgres: Database, application_url: str) -> Iterator[None]:
    """Jobs of APScheduler that are due later, were due 40 and 20 days ago, and one that is paused."""
    import psycopg
    import sqlalchemy
    from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
    from apscheduler.schedulers.background import BackgroundScheduler

    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(application_url))
    store, scheduler = SQLAlchemyJobStore(engine=engine), BackgroundScheduler(timezone=UTC)
    store.start(scheduler, "default")
    now = datetime.now(UTC)
    for name, days in (("later", 3), ("gone", -40), ("late", -20), ("paused", None)):
        due = None if days is None else now + timedelta(days=days)
        store.add_job(_job(scheduler, name, due))
    yield
    engine.dispose()


@needs("apscheduler", "psycopg", "sqlalchemy")
def test_jobs_that_no_scheduler_runs_any_more_go(scheduled: None, postgres: Database) -> None:
    sweep = apscheduler_jobs(older_than=timedelta(days=30))

    assert_leaves(postgres, sweep, ["later", "late", "paused"], table="apscheduler_jobs", deleted_rows=1)
