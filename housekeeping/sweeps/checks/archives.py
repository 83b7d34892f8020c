"""Comparison of archives with their tables: what a run would lose, and the statements that prevent it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from peewee import Model, ProgrammingError

from housekeeping.core.errors import ArchiveMismatch
from housekeeping.core.sanitize import error_line
from housekeeping.database.catalog import quoted_name
from housekeeping.database.column_types import read_columns
from housekeeping.database.connection import database
from housekeeping.sweeps.checks.archive_tables import ADDED_TYPES, other_types, quoted, statements_for
from housekeeping.sweeps.stages.actions import archiving
from housekeeping.sweeps.stages.archive import ADDED, archive_model
from housekeeping.sweeps.stages.stage import Stage
from housekeeping.sweeps.stages.table_stage import TableStage


@dataclass(frozen=True, slots=True)
class ArchiveProblem:
    """Reason why a run must not move rows to its archive.

    Attributes:
      archive: The archive's name.
      text: What is wrong.
      statements: The statements that correct it; none if they cannot.
      is_missing: Whether there is no archive yet.
      rewrites: Whether the statements rewrite the archive, so that an operator should choose the time for them.
    """

    archive: str
    text: str
    statements: tuple[str, ...] = ()
    is_missing: bool = False
    rewrites: bool = False

    @property
    def way_out(self) -> str | None:
        """What to do; None if no statement helps."""
        if self.is_missing:
            return "create it: housekeeping init --with-archives"
        return "; ".join(self.statements) or None

    def __str__(self) -> str:
        return self.text if self.way_out is None else f"{self.text}; {self.way_out}"


def archive_of(stage: TableStage) -> type[Model] | None:
    """Return the archive that takes the stage's rows; None without one."""
    action = archiving(stage.action)
    if action is None or action.archive_to is None:
        return None
    return archive_model(stage.model, action.archive_to)


def archives_of(stages: Iterable[Stage]) -> dict[type[Model], tuple[type[Model], bool]]:
    """Return the archives of these stages: archive -> its table, and whether its rows are deleted after a time."""
    found: dict[type[Model], tuple[type[Model], bool]] = {}
    for stage in stages:
        if isinstance(stage, TableStage) and (found_here := archive_of(stage)) is not None:
            action = archiving(stage.action)
            found[found_here] = (stage.model, action is not None and action.archive_keep is not None)
    return found


def compared(stages: Iterable[Stage]) -> Iterator[tuple[type[Model], type[Model], ArchiveProblem | None]]:
    """Yield each archive of these stages with its table and with what is wrong; None if nothing is.

    Raises:
      peewee.PeeweeException: When the database cannot be asked.
    """
    tables: dict[str, str] = {}
    for archive, (source, is_kept_for_a_time) in archives_of(stages).items():
        name, other = quoted_name(archive), tables.setdefault(quoted_name(archive), quoted_name(source))
        if other == quoted_name(source):
            yield archive, source, _problem_of(source, archive, is_kept_for_a_time)
        else:
            # Runs tell the rows of an archive apart, and both tables have the same one.
            text = f"archive {name} takes the rows of {other} and of {quoted_name(source)}; give each one an archive"
            yield archive, source, ArchiveProblem(name, text)


def problems_of(stages: Iterable[Stage]) -> Iterator[ArchiveProblem]:
    """Yield what is wrong with the archives of these stages.

    Raises:
      peewee.PeeweeException: When the database cannot be asked.
    """
    for _, _, problem in compared(stages):
        if problem is not None:
            yield problem


def require_archives(stages: Sequence[Stage]) -> None:
    """Raise unless each archive of the stages can take all columns of its table.

    Raises:
      ArchiveMismatch: An archive is missing, or lacks a column.
      peewee.PeeweeException: When the database cannot be asked.
    """
    for problem in problems_of(stages):
        raise ArchiveMismatch(f"nothing was changed: {problem}")


def _problem_of(source: type[Model], archive: type[Model], is_kept_for_a_time: bool) -> ArchiveProblem | None:
    """Return why the archive cannot take all columns of the table; None if it can, or if there is no table.

    Parameters:
      is_kept_for_a_time: Whether a sweep deletes its rows by age, so that it needs an index for that.

    Raises:
      peewee.PeeweeException: When the database cannot be asked.
    """
    name, columns = quoted_name(archive), read_columns(source)
    if not columns:
        return None  # the first statement on the table reports it
    if taken := [column.name for column in columns if column.name in ADDED]:
        text = f"table {quoted_name(source)} has a column {taken[0]}, a name that its archive {name} uses itself"
        return ArchiveProblem(name, text)
    if quoted_name(source) == quoted_name(archive):
        return ArchiveProblem(name, f"table {name} is its own archive; name another table in archive_to")
    try:
        with database.atomic():
            present = {column.name for column in read_columns(archive)}
    except ProgrammingError as error:  # no right on the schema
        return ArchiveProblem(name, f"archive {name} cannot be read: {error_line(error)}")
    if not present:
        statements = tuple(statements_for(source, archive, columns, with_index=is_kept_for_a_time))
        return ArchiveProblem(name, f"archive {name} is missing", statements, is_missing=True)
    needed = {**{column.name: column.sql_type for column in columns}, **ADDED_TYPES}
    missing = {column: sql_type for column, sql_type in needed.items() if column not in present}
    table = quoted_name(archive)
    if missing:
        statements = tuple(f"ALTER TABLE {table} ADD COLUMN {quoted(each)} {kind}" for each, kind in missing.items())
        return ArchiveProblem(name, f"archive {name} has no column {', '.join(missing)}", statements)
    if not (others := other_types(source, archive)):
        return None
    types = ", ".join(f"{each.name} is {each.archived} instead of {each.stored}" for each in others)
    statements = tuple(f"ALTER TABLE {table} ALTER COLUMN {quoted(each.name)} TYPE {each.stored}" for each in others)
    return ArchiveProblem(name, f"archive {name} would change values: {types}", statements, rewrites=True)
