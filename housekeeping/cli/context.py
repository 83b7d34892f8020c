"""What a command needs before it can begin: settings, logs, the database, the workers."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from peewee import ProgrammingError

from housekeeping.core.errors import SchemaMissing, UnknownWorker, WrongArgument
from housekeeping.core.settings import PREFIX, Settings
from housekeeping.core.telemetry import logs
from housekeeping.database.connection import one_line, sqlstate, translate_postgres_errors
from housekeeping.installation import broker_beside, use_database
from housekeeping.sweeps import actor_registry
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import schema
from housekeeping.workers import configured_sweeps

_UNDEFINED_TABLE: Final = "42P01"  # PostgreSQL's code


def settings_and_logs() -> Settings:
    """The settings, with logging set up as they say, and one's own sweeps found from the current folder.

    Raises:
      SettingsError: When one is wrong.
    """
    settings = Settings.load()
    logs.configure(settings.log_level, settings.log_format)
    here = str(Path.cwd())
    if settings.sweeps and here not in sys.path:
        # As dramatiq and periodiq do it.
        sys.path.insert(0, here)
    return settings


def workers_on_database(*, with_schema: bool = True) -> tuple[Settings, dict[str, Sweep]]:
    """The settings and the workers by name, with the database set up and the schema looked for.

    Parameters:
      with_schema: False for what does without, or finds out by itself; then nothing is connected yet.

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
    # Made by the first run that enqueues others; the other commands need no broker.
    actor_registry.provide_by(lambda: broker_beside(settings, sweeps))
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


@contextmanager
def reading_tables(sweep: Sweep) -> Iterator[None]:
    """Say in words that PostgreSQL does not answer, or does not have a table of the worker's.

    Raises:
      DatabaseUnavailable: When PostgreSQL does not answer.
      SchemaMissing: When a table is not there; the text names the way out.
    """
    try:
        with translate_postgres_errors():
            yield
    except ProgrammingError as error:
        missing = missing_table(sweep, error)
        if missing is None:
            raise
        raise missing from error


def missing_table(sweep: Sweep, error: BaseException | None) -> SchemaMissing | None:
    """What to say when the error comes from a table not being there; None when it does not."""
    if not isinstance(error, ProgrammingError) or sqlstate(error) != _UNDEFINED_TABLE:
        return None
    return SchemaMissing(
        f'{sweep.name}: {one_line(error)}; name yours in {PREFIX}WORKERS["{sweep.name}"]["tables"], '
        "or for a trial: housekeeping init --with-tables"
    )


def argument_of(sweep: Sweep, given: str | None) -> Any:
    """The argument of a run, as the worker takes it.

    Raises:
      WrongArgument: When it is missing, is none the worker can read, or the worker takes none.
    """
    if sweep.argument_name is None:
        if given is not None:
            raise WrongArgument(f"{sweep.name} takes no argument, but got {given!r}")
        return None
    if given is None:
        raise WrongArgument(f"{sweep.name} takes an argument: {sweep.argument_name}")
    try:
        return sweep.parse_argument(given)
    except ValueError:
        raise WrongArgument(f"{sweep.name} takes {sweep.argument_name}, but got {given!r}") from None
