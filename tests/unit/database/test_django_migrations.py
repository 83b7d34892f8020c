"""Migrations of the app for Django (docs/howto/own-sweep-django.md)."""

from __future__ import annotations

import importlib
import pkgutil

from tests.internals.ledger import migrations


def test_last_migration_takes_the_tables_to_the_newest_version() -> None:
    package = importlib.import_module("housekeeping.contrib.django.migrations")
    names = sorted(each.name for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))
    operations = [each for name in names for each in importlib.import_module(name).Migration.operations]

    versions = [each.to for each in operations if hasattr(each, "to")]

    assert versions == sorted(versions)
    assert versions[-1] == len(migrations.MIGRATIONS)
