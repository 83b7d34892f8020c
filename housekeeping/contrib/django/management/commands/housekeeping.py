"""``manage.py housekeeping``: the library's command line with the settings of the Django project."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand

from housekeeping.cli.main import main
from housekeeping.contrib.django import variables
from housekeeping.core.errors import SettingsError


class Command(BaseCommand):
    """Django command that runs any ``housekeeping`` command."""

    help = "Run a housekeeping command; for a list: manage.py housekeeping --help"
    requires_system_checks: Sequence[str] = []

    def run_from_argv(self, argv: Sequence[str]) -> None:
        """Run the command without Django's parsing of arguments."""
        self.handle(*argv[2:])

    def handle(self, *args: str, **options: Any) -> None:
        """Run the command with Django's settings as environment variables, which worker processes inherit."""
        try:
            os.environ.update(variables())
        except SettingsError as error:
            sys.exit(f"housekeeping: {error}")
        main(list(args), prog_name="manage.py housekeeping")
