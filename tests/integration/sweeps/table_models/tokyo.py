"""A Django application in Tokyo; prints which of its two rows are left by a sweep.

One expired half an hour ago, the other expires in half an hour: with a wrong time zone, both or none would be left.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import django
from django.db import connection, models
from django.utils import timezone

from housekeeping import Delete, Rows, Settings, Sweep
from tests.internals.database import connect_to, database
from tests.internals.engine import run_sweep
from tests.internals.ledger import schema

SOON = timedelta(minutes=30)

django.setup()


class Token(models.Model):
    id = models.TextField(primary_key=True)
    expires_at = models.DateTimeField()

    class Meta:
        app_label = "shop"


def main() -> None:
    settings = Settings.load()
    database.initialize(connect_to(settings.require_database_url()))
    schema.use_schema(settings.schema_name)
    with connection.schema_editor() as editor:
        editor.create_model(Token)
    Token.objects.create(id="expired", expires_at=timezone.now() - SOON)
    Token.objects.create(id="valid", expires_at=timezone.now() + SOON)

    run_sweep(Sweep("shop.tokens", Rows(Token, stale=lambda row, now: row.expires_at <= now, action=Delete())))

    sys.stdout.write(" ".join(Token.objects.values_list("id", flat=True)))


if __name__ == "__main__":
    main()
