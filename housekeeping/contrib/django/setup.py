"""First module of ``HOUSEKEEPING_SWEEPS``: sets up Django in processes that Django has not started.

It also declares the tables of Django that keep their rows.
"""

from __future__ import annotations

import django
from django.apps import apps

from housekeeping.sweeps.values import Kept

if not apps.ready:
    django.setup()

KEPT = [
    Kept(table, reason)
    for app, table, reason in (
        (None, "django_migrations", "Django reads all applied migrations"),
        ("django.contrib.contenttypes", "django_content_type", "one row for each model"),
        ("django.contrib.auth", "auth_permission", "a few rows for each model"),
    )
    if app is None or apps.is_installed(app)
]
