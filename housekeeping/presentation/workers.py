"""Lookup of the worker that an operator names, of its argument, and of a table that it lacks."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from peewee import ProgrammingError

from housekeeping.core.errors import DeclarationError, SchemaMissing, UnknownWorker, WrongArgument
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import PREFIX
from housekeeping.database.connection import database, sqlstate, translate_postgres_errors
from housekeeping.sweeps.declaration import Sweep
from housekeeping.workers import is_built_in

_UNDEFINED_TABLE: Final = "42P01"  # SQLSTATE


def find_worker(sweeps: dict[str, Sweep], name: str) -> Sweep:
    """Return the worker with this name.

    Raises:
      UnknownWorker: No worker has the name. The message suggests a similar one.
    """
    if name in sweeps:
        return sweeps[name]
    near = difflib.get_close_matches(name, sweeps, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the workers are {', '.join(sweeps)}"
    raise UnknownWorker(f"there is no worker {name!r}; {hint}")


def parse_argument(sweep: Sweep, text: str | None) -> Any:
    """Return the argument of a run, converted to the worker's type.

    Raises:
      WrongArgument: The argument is missing, cannot be converted, or the worker takes none.
    """
    if sweep.argument_name is None:
        if text is not None:
            raise WrongArgument(f"{sweep.name} takes no argument, but got {text!r}")
        return None
    if text is None:
        raise WrongArgument(f"{sweep.name} takes an argument: {sweep.argument_name}")
    try:
        return sweep.parse_argument(text)
    except ValueError:
        raise WrongArgument(f"{sweep.name} takes {sweep.argument_name}, but got {text!r}") from None


@contextmanager
def translate_table_errors(sweep: Sweep) -> Iterator[None]:
    """Translate the errors of queries on the worker's tables into errors that name the remedy.

    Raises:
      DatabaseUnavailable: PostgreSQL does not answer.
      SchemaMissing: A table does not exist, or the family of a built-in worker is not set up.
    """
    try:
        with database.using(sweep.database), translate_postgres_errors():
            yield
    except (ProgrammingError, DeclarationError) as error:
        with database.using(sweep.database), translate_postgres_errors():
            problem = sweep.lacks()
        if problem is not None:
            raise SchemaMissing(f"{sweep.name}: not set up: {problem.text}; {_remedy(sweep)}") from error
        missing = missing_table_error(sweep, error)
        if missing is None:
            raise
        raise missing from error


def missing_table_error(sweep: Sweep, error: BaseException | None) -> SchemaMissing | None:
    """Return an error that names the remedy if the given one is a missing table, else `None`."""
    if not isinstance(error, ProgrammingError) or sqlstate(error) != _UNDEFINED_TABLE:
        return None
    return SchemaMissing(f"{sweep.name}: {error_line(error)}; {_remedy(sweep)}")


def _remedy(sweep: Sweep) -> str:
    setting = f'{PREFIX}WORKERS["{sweep.name}"]'
    if not is_built_in(sweep.name):
        return f'create the table, or name yours in {setting}["tables"]'
    return f'name your table in {setting}["tables"], or for a trial: housekeeping init --with-tables'
