"""Check whether a family of built-in workers is set up: its tables exist, with the columns that its workers use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from peewee import Field, Model, ProgrammingError

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.database.catalog import Table, optional_fields, read_table, table_of
from housekeeping.database.connection import database
from housekeeping.sweeps.checks.statements import FITTING, TEXTS, UNZONED, ZONED, updated_columns, used_fields
from housekeeping.sweeps.ledger.models import Run
from housekeeping.sweeps.registry import Family
from housekeeping.sweeps.setup_problem import SetupProblem

#: Built-in types that are no text, whatever an application keeps in them.
_NO_TEXTS: Final = {
    *(each for types in FITTING.values() if types != TEXTS for each in types),
    *("uuid", "json", "jsonb", "bytea", "real", "double precision", "interval"),
}
#: Column -> the field it is declared as.
_Columns = dict[str, Field]


class FamilySetup:
    """Check that a family's workers find what they need, asked whenever one of them is about to run.

    A table that fits is remembered. One that does not is looked at again each time, so that a table made later is
    noticed without a restart.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._needed: dict[type[Model], _Columns] = {}

    def __call__(self) -> SetupProblem | None:
        """Return what is missing; None when nothing is.

        A family whose tables have vanished since its last successful run is broken, and not without a setup: None.

        Raises:
          peewee.PeeweeException: When the database cannot be asked.
        """
        text = self._family.unconfigured() if self._family.unconfigured is not None else None
        if text is None:
            text = next(self._misfits(), None)
            if text is not None and self._has_worked():
                return None
        return None if text is None else SetupProblem(self._family.name, text)

    def _misfits(self) -> Iterator[str]:
        self._needed = self._needed or _needed_columns(self._family)
        for model in self._family.models.values():
            needed = self._needed.get(model, {})
            if _misfit(model, needed, table_of(model)) is not None:
                text = _misfit(model, needed, read_table(model))
                if text is not None:
                    yield text

    def _has_worked(self) -> bool:
        done = Run.worker.in_([sweep.name for sweep in self._family.sweeps]) & Run.outcome.in_(("done", "partial"))
        try:
            with database.atomic():
                return bool(Run.select(Run.id).where(done).limit(1).exists())
        except ProgrammingError:  # before `housekeeping init`
            return False


def by_problem(problems: Mapping[str, SetupProblem]) -> dict[SetupProblem, list[str]]:
    """Return the workers that share each problem."""
    found: dict[SetupProblem, list[str]] = {}
    for worker, problem in problems.items():
        found.setdefault(problem, []).append(worker)
    return found


def _needed_columns(family: Family) -> dict[type[Model], _Columns]:
    now = SYSTEM_CLOCK.now()
    found: dict[type[Model], _Columns] = {model: {} for model in family.models.values()}
    for sweep in family.sweeps:
        for walk in sweep.declared_stages():
            for field in used_fields(walk, now):
                found.setdefault(field.model, {})[field.column_name] = field
    for name, model in family.models.items():
        meta: Any = model._meta
        for column in updated_columns(family.rights.get(name, ())):
            found[model].setdefault(column, meta.columns[column])
    return {
        model: {column: field for column, field in columns.items() if field.name not in optional_fields(model)}
        for model, columns in found.items()
    }


def _misfit(model: type[Model], needed: _Columns, table: Table) -> str | None:
    meta: Any = model._meta
    name = meta.table_name
    if not table.exists:
        return f"table {name} is not in this database"
    missing = [column for column in sorted(needed) if column not in table.columns]
    if missing:
        return f"table {name} has no column {', '.join(missing)}"
    for column, field in sorted(needed.items()):
        if not _fits(field, table.columns[column]):
            expected = " or ".join(sorted(_fitting(field)))
            return f"column {name}.{column} is {table.columns[column]}, not {expected}"
    return None


def _fits(field: Field, type_name: str) -> bool:
    fitting = _fitting(field)
    # A text may be an enum or another type of the application's own, which compares with text.
    is_custom_text = fitting == TEXTS and type_name not in _NO_TEXTS
    return not fitting or type_name in fitting or is_custom_text


def _fitting(field: Field) -> set[str]:
    fitting = FITTING.get(getattr(field, "field_type", ""), set())
    # With or without a zone: sessions are in UTC.
    return fitting | ZONED | UNZONED if fitting & (ZONED | UNZONED) else fitting
