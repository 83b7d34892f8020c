"""Command group that prints each error in one line and exits with its status, and the setup of its commands."""

from __future__ import annotations

import gc
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

import housekeeping
from housekeeping.core import logs
from housekeeping.core.clock import impatient
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.logs import error_line, printable

if TYPE_CHECKING:
    from housekeeping.core.settings import Settings
    from housekeeping.sweeps.declaration import Sweep


def load_settings() -> Settings:
    """Return the settings after configuring logging and making the user's modules importable.

    Raises:
      SettingsError: A setting is wrong.
    """
    from housekeeping.core.settings import Settings

    settings = Settings.load()
    logs.configure(settings.log_level, settings.log_format)
    here = str(Path.cwd())
    has_functions = any(worker.gates is not None and worker.gates.custom for worker in settings.workers.values())
    if (settings.sweeps or has_functions) and here not in sys.path:
        # dramatiq and periodiq do the same.
        sys.path.insert(0, here)
    return settings


def use_database_if_set(settings: Settings) -> None:
    """Configure the database if there is one, such as for the action log; connects to nothing yet."""
    from housekeeping.ledger import schema

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
    from housekeeping.core.pings import pings
    from housekeeping.ledger import schema
    from housekeeping.sweeps import send
    from housekeeping.workers import configured_sweeps

    settings = load_settings()
    sweeps = configured_sweeps(settings)
    schema.use_database(settings)
    pings.use(settings)
    if with_schema:
        schema.require_all()

    def provide() -> None:
        """Create the broker, for the first run that enqueues other runs. Most commands never need it."""
        from housekeeping.app import broker_without_database

        broker_without_database(settings, sweeps)

    send.provide_by(provide)
    return settings, sweeps


#: Name -> where the command is, and its line in the help. Only the command that is used is imported.
_COMMANDS: Final = {
    "demo": ("housekeeping.demo.demo:demo", "Show the workers at work on servers of their own."),
    "init": ("housekeeping.cli.install:init", "Create or upgrade the library's own tables."),
    "list": ("housekeeping.cli.install:list_workers", "List the workers: schedule, next ticks, limits, state."),
    "plan": ("housekeeping.cli.run:plan", "Show what a run would do now; changes nothing."),
    "run": ("housekeeping.cli.run:run", "Run a worker once, in the foreground."),
    "purge": ("housekeeping.cli.undo:purge", "Delete rows of a table once, without a worker."),
    "enqueue": ("housekeeping.cli.queues:enqueue", "Send a run to the workers."),
    "worker": ("housekeeping.cli.serve:worker", "Run the workers: a dramatiq process."),
    "scheduler": ("housekeeping.cli.serve:scheduler", "Run the schedule: a periodiq process."),
    "serve": ("housekeeping.cli.serve:serve", "Run schedule and workers in one process, without Redis."),
    "status": ("housekeeping.cli.status:status", "Show the status of every worker."),
    "coverage": ("housekeeping.cli.status:coverage", "List every table, and what keeps it clean."),
    "runs": ("housekeeping.cli.ask:runs", "List past runs, or show one of them."),
    "why": ("housekeeping.cli.ask:why", "Explain the outcome of a tick or a run."),
    "pause": ("housekeeping.cli.operate:pause", "Pause a worker."),
    "narrow": ("housekeeping.cli.operate:narrow", "Temporarily lower a worker's limits."),
    "resume": ("housekeeping.cli.operate:resume", "Resume a paused or narrowed worker."),
    "stop": ("housekeeping.cli.operate:stop", "Stop one running run after its batch."),
    "erase": ("housekeeping.cli.erase:erase", "Erase a person or tenant from all tables."),
    "export": ("housekeeping.cli.erase:export", "Write all rows of a person or tenant."),
    "erasures": ("housekeeping.cli.erase:list_erasures", "List erasures of persons and tenants."),
    "receipt": ("housekeeping.cli.erase:receipt", "Print the receipt of an erasure, or verify a saved one."),
    "acknowledge": ("housekeeping.cli.operate:acknowledge", "Acknowledge active alerts until they end."),
    "restore": ("housekeeping.cli.undo:restore", "Restore what a run has moved to an archive."),
    "leases": ("housekeeping.cli.queues:leases", "List and release leases."),
    "dedup": ("housekeeping.cli.queues:dedup", "List and release deduplication keys."),
    "deadletters": (
        "housekeeping.cli.queues:dead_letters",
        "List, show, requeue and delete messages that failed for good.",
    ),
    "errors": ("housekeeping.cli.queues:errors", "Show the errors of the last hours, each cause once."),
    "actions": ("housekeeping.cli.operate:actions", "List what operators have changed, and when."),
    "doctor": ("housekeeping.cli.install:doctor", "Check the installation and suggest repairs."),
    "web": ("housekeeping.cli.serve:web", "Serve the dashboard."),
    "uninstall": ("housekeeping.cli.uninstall:uninstall", "Remove the library's tables and Redis keys."),
}
#: Commands that may wait long for a server, because they do work. All others have the limits of `impatient`.
_PATIENT: Final = {
    "demo",
    "init",
    "run",
    "purge",
    "restore",
    "erase",
    "export",
    "enqueue",
    "worker",
    "scheduler",
    "serve",
    "web",
    "uninstall",
}
_EPILOG = """\b
First steps:
  housekeeping demo                     try it with servers of its own
  export HOUSEKEEPING_DATABASE_URL=postgresql://user:password@host/database
  export HOUSEKEEPING_REDIS_URL=redis://host:6379/0
  housekeeping init                     create the library's own tables
  housekeeping list                     show the workers and their schedules
  housekeeping plan NAME                show what a run would do now

\b
Exit status: 0 done, partial or skipped; 1 failed; 2 wrong usage, settings or
schema; 3 doctor has warnings."""


#: Raised by a group without a command, to show its help. Click has it since 8.2.
_HELP: Final = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _Group(click.Group):
    """Command group that prints errors in one line, or with --debug as a traceback."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        with _usage_in_one_line():
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _usage_in_one_line():
                return super().invoke(ctx)
        except HousekeepingError as error:
            if ctx.params.get("debug"):
                raise
            _exit(str(error), error.exit_code)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click handles these
        except KeyboardInterrupt:
            _exit("interrupted", 130)
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            from peewee import PeeweeException

            source = "PostgreSQL" if isinstance(error, PeeweeException) else type(error).__name__
            _exit(f"{source}: {error_line(error)} (housekeeping --debug shows the traceback)", 1)


class LazyCommand(click.Command):
    """Command whose module is imported when the command is used, but not to list it in the help."""

    def __init__(self, name: str, path: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self._path: Final = path

    def load(self) -> click.Command:
        """Import the command."""
        gc.disable()  # its passes over all new modules find nothing and take a fifth of the time
        try:
            command: click.Command = pkgutil.resolve_name(self._path)
        finally:
            gc.enable()
        return command

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        context = self.load().make_context(*args, **more)
        if self.name not in _PATIENT:
            context.with_resource(impatient())
        return context


@contextmanager
def _usage_in_one_line() -> Iterator[None]:
    """Print a usage error in one line instead of click's four."""
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, _HELP):
            raise
        message = " ".join(error.format_message().split()).rstrip(".")
        _exit(f"{message} ({error.ctx.command_path} --help)" if error.ctx else message, error.exit_code)


def _exit(line: str, exit_code: int) -> NoReturn:
    click.echo(f"housekeeping: {printable(line)}", err=True)
    sys.exit(exit_code)


@click.group(cls=_Group, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(housekeeping.__version__, "-V", "--version", prog_name="housekeeping")
@click.option("--debug", is_flag=True, help="Show a traceback instead of one line when something fails.")
def main(debug: bool) -> None:
    """Keep a PostgreSQL application clean: delete expired rows and resolve stuck ones, in small batches.

    Settings come from the environment (HOUSEKEEPING_...) and from a .env file.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Escape characters that the terminal's encoding lacks, instead of failing.
            stream.reconfigure(errors="backslashreplace")


for _name, (_path, _short_help) in _COMMANDS.items():
    main.add_command(LazyCommand(_name, _path, _short_help))
