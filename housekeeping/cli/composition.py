"""What a command needs before it can begin: settings, logs, the database, the workers."""

from __future__ import annotations

import difflib

from housekeeping.foundation import logs
from housekeeping.foundation.errors import UnknownWorker
from housekeeping.foundation.settings import Settings
from housekeeping.installation import configured_sweeps, use_database
from housekeeping.sweeps import schema
from housekeeping.sweeps.declaration import Sweep


def settings_and_logs() -> Settings:
    """The settings, with logging set up as they say.

    Raises:
      SettingsError: When one is wrong.
    """
    settings = Settings.load()
    logs.configure(settings.log_level, settings.log_format)
    return settings


def workers_on_database(*, with_schema: bool = True) -> tuple[Settings, dict[str, Sweep]]:
    """The settings and the workers by name, with the database set up and the schema looked for.

    Raises:
      SettingsError: When a setting is missing or wrong.
      SchemaMissing: When the library's own tables are not there.
      DatabaseUnavailable: When PostgreSQL does not answer.
    """
    settings = settings_and_logs()
    sweeps = configured_sweeps(settings)
    use_database(settings)
    if with_schema:
        schema.require()
    return settings, sweeps


def chosen(sweeps: dict[str, Sweep], name: str) -> Sweep:
    """The worker of this name.

    Raises:
      UnknownWorker: When there is none; the text names those there are.
    """
    if name in sweeps:
        return sweeps[name]
    near = difflib.get_close_matches(name, sweeps, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the workers are {', '.join(sweeps)}"
    raise UnknownWorker(f"there is no worker {name!r}; {hint}")
