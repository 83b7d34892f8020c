"""Ready-made sweeps for tables that many applications have. Each function returns a `Sweep` for your sweep module.

::

    # cleanup/recipes.py, named by HOUSEKEEPING_SWEEPS=cleanup.recipes
    from datetime import timedelta

    from housekeeping.recipes import django_admin_log, django_sessions

    sessions = django_sessions()
    admin_log = django_admin_log(older_than=timedelta(days=365))

A recipe selects the rows that the package's own cleanup deletes, where it has one. It needs neither the package nor its
settings. Every field of `Sweep` can be given to it, except those that say which rows it selects.
"""

from __future__ import annotations

from housekeeping.recipes.django_tables import (
    django_admin_log,
    django_celery_results,
    django_sessions,
    django_tasks,
    simplejwt_tokens,
)
from housekeeping.recipes.flask_tables import flask_session
from housekeeping.recipes.job_queues import apscheduler_jobs, procrastinate_jobs

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
