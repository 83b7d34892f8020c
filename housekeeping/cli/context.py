"""Setup that a command needs: settings, logging, the database and the workers."""

from __future__ import annotations

import sys
from pathlib import Path

from housekeeping.core.settings import Settings
from housekeeping.core.telemetry import logs
from housekeeping.sweeps import actor_registry
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import schema
from housekeeping.workers import configured_sweeps


def load_settings() -> Settings:
    """Return the settings after configuring logging and making the user's modules importable.

    Raises:
      SettingsError: A setting is wrong.
    """
    settings = Settings.load()
    logs.configure(settings.log_level, settings.log_format)
    here = str(Path.cwd())
    has_functions = any(worker.gates is not None and worker.gates.custom for worker in settings.workers.values())
    if (settings.sweeps or has_functions) and here not in sys.path:
        # dramatiq and periodiq do the same.
        sys.path.insert(0, here)
    return settings


def use_database_if_set(settings: Settings) -> None:
    """Configure the database if there is one, such as for the log of actions; connects to nothing yet."""
    if settings.database_url is not None:
        schema.use_database(settings)


def load_workers(*, with_schema: bool = True) -> tuple[Settings, dict[str, Sweep]]:
    """Return the settings and the workers by name, after configuring the database and checking the schema.

    Parameters:
      with_schema: Whether to require the schema. False connects to nothing yet.

    Raises:
      SettingsError: A setting is missing or wrong.
      SchemaMissing: The library's own tables do not exist.
      DatabaseUnavailable: PostgreSQL does not answer.
    """
    settings = load_settings()
    sweeps = configured_sweeps(settings)
    schema.use_database(settings)
    if with_schema:
        schema.require_all()

    def provide() -> None:
        """Create the broker, for the first run that enqueues other runs. Most commands never need it."""
        from housekeeping.installation import broker_without_database

        broker_without_database(settings, sweeps)

    actor_registry.provide_by(provide)
    return settings, sweeps
