"""The command group: one clear line for each error, and the exit status that goes with it."""

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
  housekeeping demo                     see it work on servers of its own
  export HOUSEKEEPING_DATABASE_URL=postgresql://user:password@host/database
  export HOUSEKEEPING_REDIS_URL=redis://host:6379/0
  housekeeping init                     make the library's own tables
  housekeeping list                     the workers and when they run
  housekeeping plan NAME                what a run of one would do now

\b
Exit status: 0 done, partial or skipped; 1 failed; 2 wrong usage, settings or schema."""


#: What a group without a command raises, to show its help; click has it from 8.2 on.
_HELP: Final = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _Group(click.Group):
    """Turns what goes wrong into one line; a traceback only when it is asked for."""

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
            _end(str(error), error.exit_code)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click's own affair
        except KeyboardInterrupt:
            _end("interrupted", 130)
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            who = "PostgreSQL says" if isinstance(error, PeeweeException) else type(error).__name__
            _end(f"{who}: {error_line(error)} (housekeeping --debug shows where)", 1)


@contextmanager
def _usage_in_one_line() -> Iterator[None]:
    """What was mistyped, and the way out; click itself takes four lines for it."""
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, _HELP):
            raise
        said = " ".join(error.format_message().split()).rstrip(".")
        _end(f"{said} ({error.ctx.command_path} --help)" if error.ctx else said, error.exit_code)


def _end(line: str, exit_code: int) -> NoReturn:
    click.echo(f"housekeeping: {printable(line)}", err=True)
    sys.exit(exit_code)


@click.group(cls=_Group, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(housekeeping.__version__, "-V", "--version", prog_name="housekeeping")
@click.option("--debug", is_flag=True, help="Show a traceback instead of one line when something fails.")
def main(debug: bool) -> None:
    """Keep a PostgreSQL application clean: delete what expired, settle what is stuck, in small bounded steps.

    Settings come from the environment (HOUSEKEEPING_...) and from a .env file.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal that cannot show a character is no reason to fail.
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
