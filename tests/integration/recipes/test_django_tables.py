"""Recipes for Django on the tables that the packages' migrations create, compared with the packages' own cleanup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from psycopg2.extensions import parse_dsn

from housekeeping import Limits
from housekeeping.recipes import (
    django_admin_log,
    django_celery_results,
    django_sessions,
    django_tasks,
    simplejwt_tokens,
)
from housekeeping.testing.assertions import assert_survives_kill
from tests.integration.recipes.checked import assert_leaves, keys_of, needs
from tests.internals.database import Database
from tests.session_settings import NEEDS_SESSION

pytestmark = [
    pytest.mark.slow,
    needs("django", "psycopg"),
]

#: Creates and fills the tables of an application, and returns the keys that its own cleanup would leave.
Filled = Callable[[str], list[str]]


@pytest.fixture
def filled(postgres: Database, application_url: str) -> Filled:
    given = parse_dsn(application_url)
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    database = {names[name]: given.pop(name) for name in names if name in given}

    def fill(application: str) -> list[str]:
        finished = subprocess.run(
            [sys.executable, "-m", "tests.integration.recipes.django_project", application],
            env={**os.environ, "DATABASE": json.dumps({**database, "OPTIONS": given})},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert finished.returncode == 0, finished.stderr
        kept: list[str] = json.loads(finished.stdout)
        return kept

    return fill


def test_expired_sessions_go_as_by_clearsessions(filled: Filled, postgres: Database) -> None:
    kept = filled("sessions")

    assert_leaves(postgres, django_sessions(), kept, table="django_session", key="session_key", deleted_rows=2)


def test_old_entries_of_the_admin_log_go(filled: Filled, postgres: Database) -> None:
    kept = filled("admin")

    sweep = django_admin_log(older_than=timedelta(days=365))

    assert_leaves(postgres, sweep, kept, table="django_admin_log", deleted_rows=2)


@needs("django_celery_results")
def test_old_results_go_as_by_the_backend_cleanup_of_celery(filled: Filled, postgres: Database) -> None:
    kept = filled("celery")
    table = "django_celery_results_taskresult"

    assert_leaves(postgres, django_celery_results(), kept, table=table, deleted_task_results=2, deleted_group_results=2)

    assert len(keys_of(postgres, "django_celery_results_groupresult", "id")) == 2


@needs("django_tasks", "django_tasks_db")
def test_finished_tasks_go_as_by_prune_db_task_results(filled: Filled, postgres: Database) -> None:
    kept = filled("tasks")

    assert_leaves(postgres, django_tasks(), kept, table="django_tasks_database_dbtaskresult", deleted_rows=2)


@needs("rest_framework_simplejwt")
def test_expired_tokens_go_with_their_blacklist_entries(filled: Filled, postgres: Database) -> None:
    kept = filled("tokens")

    assert_leaves(
        postgres,
        simplejwt_tokens(limits=Limits(batch=2, batch_takes=None)),
        kept,
        table="token_blacklist_outstandingtoken",
        deleted_rows=3,
        deleted_blacklisted=2,
    )

    assert len(keys_of(postgres, "token_blacklist_blacklistedtoken", "id")) == 1


@needs("rest_framework_simplejwt")
@NEEDS_SESSION
def test_deletion_of_tokens_survives_a_kill_at_every_point(filled: Filled) -> None:
    filled("tokens")

    points = assert_survives_kill(simplejwt_tokens(limits=Limits(batch=2, batch_takes=None)))

    assert any("token_blacklist" in point for point in points)
