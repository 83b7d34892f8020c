"""Command group that prints each error in one line and exits with its status."""

from __future__ import annotations

import gc
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, Final, NoReturn

import click

import housekeeping
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.sanitize import error_line, printable

#: Name -> where the command is, and its line in the help. Only the command that is used is imported.
_COMMANDS: Final = {
    "demo": ("housekeeping.demo.command:demo", "Show the workers at work on servers of their own."),
    "init": ("housekeeping.cli.commands.init:init", "Create or upgrade the library's own tables."),
    "list": ("housekeeping.cli.commands.list:list_workers", "List the workers: schedule, next tick, limits, state."),
    "plan": ("housekeeping.cli.commands.plan:plan", "Show what a run would do now; changes nothing."),
    "run": ("housekeeping.cli.commands.run:run", "Run a worker once, in the foreground."),
    "purge": ("housekeeping.cli.commands.purge:purge", "Delete rows of a table once, without a worker."),
    "enqueue": ("housekeeping.cli.commands.enqueue:enqueue", "Send a run to the workers."),
    "worker": ("housekeeping.cli.commands.worker:worker", "Run the workers: a dramatiq process."),
    "scheduler": ("housekeeping.cli.commands.worker:scheduler", "Run the schedule: a periodiq process."),
    "status": ("housekeeping.cli.commands.status:status", "Show the status of every worker."),
    "runs": ("housekeeping.cli.commands.runs:runs", "List past runs, or show one of them."),
    "why": ("housekeeping.cli.commands.why:why", "Explain the outcome of a tick or a run."),
    "pause": ("housekeeping.cli.commands.pause:pause", "Pause a worker."),
    "narrow": ("housekeeping.cli.commands.pause:narrow", "Temporarily lower a worker's limits."),
    "resume": ("housekeeping.cli.commands.pause:resume", "Resume a paused or narrowed worker."),
    "acknowledge": ("housekeeping.cli.commands.acknowledge:acknowledge", "Acknowledge active alerts for a day."),
    "restore": ("housekeeping.cli.commands.restore:restore", "Restore what a run has moved to an archive."),
    "leases": ("housekeeping.cli.commands.leases:leases", "List and release leases."),
    "dedup": ("housekeeping.cli.commands.dedup:dedup", "List and release deduplication keys."),
    "deadletters": (
        "housekeeping.cli.commands.deadletters:dead_letters",
        "List, show, requeue and delete messages that failed for good.",
    ),
    "actions": ("housekeeping.cli.commands.actions:actions", "List what operators have changed, and when."),
    "doctor": ("housekeeping.cli.commands.doctor:doctor", "Check the installation and suggest repairs."),
    "web": ("housekeeping.cli.commands.web:web", "Serve the dashboard."),
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
        return self.load().make_context(*args, **more)


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
