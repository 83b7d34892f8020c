"""Command group that prints each error in one line and exits with its status."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, Final, NoReturn

import click
from peewee import PeeweeException

import housekeeping
from housekeeping.cli.commands.deadletters import dead_letters
from housekeeping.cli.commands.dedup import dedup
from housekeeping.cli.commands.doctor import doctor
from housekeeping.cli.commands.enqueue import enqueue
from housekeeping.cli.commands.init import init
from housekeeping.cli.commands.leases import leases
from housekeeping.cli.commands.list import list_workers
from housekeeping.cli.commands.pause import narrow, pause, resume
from housekeeping.cli.commands.plan import plan
from housekeeping.cli.commands.run import run
from housekeeping.cli.commands.runs import runs
from housekeeping.cli.commands.status import status
from housekeeping.cli.commands.web import web
from housekeeping.cli.commands.why import why
from housekeeping.cli.commands.worker import scheduler, worker
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.sanitize import error_line, printable
from housekeeping.demo.command import demo

_EPILOG = """\b
First steps:
  housekeeping demo                     try it with servers of its own
  export HOUSEKEEPING_DATABASE_URL=postgresql://user:password@host/database
  export HOUSEKEEPING_REDIS_URL=redis://host:6379/0
  housekeeping init                     create the library's own tables
  housekeeping list                     show the workers and their schedules
  housekeeping plan NAME                show what a run would do now

\b
Exit status: 0 done, partial or skipped; 1 failed; 2 wrong usage, settings or schema;
3 doctor has warnings."""


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
            source = "PostgreSQL" if isinstance(error, PeeweeException) else type(error).__name__
            _exit(f"{source}: {error_line(error)} (housekeeping --debug shows the traceback)", 1)


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


for command in (
    demo,
    init,
    list_workers,
    plan,
    run,
    enqueue,
    worker,
    scheduler,
    status,
    runs,
    why,
    pause,
    narrow,
    resume,
    leases,
    dedup,
    dead_letters,
    doctor,
    web,
):
    main.add_command(command)
