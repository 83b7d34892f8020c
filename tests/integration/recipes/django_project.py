"""Django project that creates the tables of one application by its migrations, and fills them.

``python -m tests.integration.recipes.django_project APPLICATION`` prints, as JSON, the keys that the package's own
cleanup leaves. The cleanup is rolled back.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final

import django
from django.conf import settings

_APPLICATIONS: Final = {
    "sessions": ["django.contrib.sessions"],
    "admin": ["django.contrib.admin", "django.contrib.messages"],
    "celery": ["django_celery_results"],
    "tasks": ["django_tasks", "django_tasks_db"],
    "tokens": ["rest_framework_simplejwt.token_blacklist"],
}


def _sessions() -> tuple[Any, Callable[[], object]]:
    from django.contrib.sessions.backends.db import SessionStore
    from django.contrib.sessions.models import Session
    from django.core.management import call_command
    from django.utils import timezone

    for number, days in enumerate((-3, -1, 1, 14)):
        Session.objects.create(
            session_key=f"key-{number}",
            session_data=SessionStore().encode({"n": number}),
            expire_date=timezone.now() + timedelta(days=days),
        )
    return Session, lambda: call_command("clearsessions")


def _admin() -> tuple[Any, Callable[[], object]]:
    from django.contrib.admin.models import ADDITION, LogEntry
    from django.contrib.auth.models import User
    from django.utils import timezone

    user = User.objects.create(username="ann")
    for days in (500, 366, 364, 1):
        LogEntry.objects.create(
            user=user, action_flag=ADDITION, object_repr="it", action_time=timezone.now() - timedelta(days=days)
        )
    old = LogEntry.objects.filter(action_time__lt=timezone.now() - timedelta(days=365))
    return LogEntry, old.delete


def _celery() -> tuple[Any, Callable[[], object]]:
    from django.utils import timezone
    from django_celery_results.models import GroupResult, TaskResult

    for number, hours in enumerate((50, 25, 23, 1)):
        for model, key in ((TaskResult, "task_id"), (GroupResult, "group_id")):
            row = model.objects.create(**{key: f"id-{number}"})
            model.objects.filter(pk=row.pk).update(date_done=timezone.now() - timedelta(hours=hours))

    def cleanup() -> None:
        TaskResult.objects.delete_expired(timedelta(days=1))
        GroupResult.objects.delete_expired(timedelta(days=1))

    return TaskResult, cleanup


def _tasks() -> tuple[Any, Callable[[], object]]:
    from django.core.management import call_command
    from django.utils import timezone
    from django_tasks_db.models import DBTaskResult

    for status, days in (("SUCCESSFUL", 20), ("FAILED", 15), ("SUCCESSFUL", 13), ("READY", None), ("RUNNING", None)):
        DBTaskResult.objects.create(
            status=status,
            args_kwargs={"args": [], "kwargs": {}},
            task_path="shop.tasks.send",
            backend_name="default",
            run_after=timezone.now(),
            finished_at=None if days is None else timezone.now() - timedelta(days=days),
            exception_class_path="",
            traceback="",
        )
    return DBTaskResult, lambda: call_command("prune_db_task_results", "--queue-name", "*", verbosity=0)


def _tokens() -> tuple[Any, Callable[[], object]]:
    from django.core.management import call_command
    from django.utils import timezone
    from rest_framework_simplejwt.token_blacklist.models import BlacklistedToken, OutstandingToken

    for number, hours in enumerate((-30, -2, -1, 1, 30)):
        token = OutstandingToken.objects.create(
            jti=str(number), token="token", expires_at=timezone.now() + timedelta(hours=hours)
        )
        if number % 2 == 0:
            BlacklistedToken.objects.create(token=token)
    return OutstandingToken, lambda: call_command("flushexpiredtokens")


_FILLED: Final = {"sessions": _sessions, "admin": _admin, "celery": _celery, "tasks": _tasks, "tokens": _tokens}


def main(application: str) -> None:
    """Create and fill the tables of an application, and print the keys that its own cleanup leaves."""
    settings.configure(
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", *_APPLICATIONS[application]],
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **json.loads(os.environ["DATABASE"])}},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        SECRET_KEY="secret",
        USE_TZ=True,
        TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}},
    )
    django.setup()
    from django.core.management import call_command
    from django.db import transaction

    call_command("migrate", verbosity=0, skip_checks=True)
    model, cleanup = _FILLED[application]()
    with transaction.atomic():
        cleanup()
        kept: Iterable[Any] = list(model.objects.values_list("pk", flat=True))
        transaction.set_rollback(True)
    sys.stdout.write(json.dumps([str(key) for key in kept]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the packages
    main(sys.argv[1])
