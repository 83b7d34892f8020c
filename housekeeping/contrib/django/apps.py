"""Configuration of the Django app."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import Tags, register


class HousekeepingConfig(AppConfig):
    """Configuration of the app ``housekeeping``."""

    name = "housekeeping.contrib.django"
    label = "housekeeping"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks."""
        from housekeeping.contrib.django.checks import check_databases, check_declarations

        register(check_declarations)
        register(check_databases, Tags.database)
