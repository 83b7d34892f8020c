"""Check that each table has the columns that its workers use, with suitable types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from peewee import Field, Model, ProgrammingError

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.database.catalog import Table, is_absent, optional_fields, table_of
from housekeeping.database.errors import is_unavailable
from housekeeping.doctor.grants import users_of
from housekeeping.sweeps.checks.statements import FITTING, KNOWN_TYPES, UNZONED, ZONED, updated_columns, used_fields
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.registry import Finding
from housekeeping.workers import families

#: Column -> the workers that need it.
Needed = dict[str, list[str]]


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a finding for each column that is missing or has an unsuitable type."""
    needed_columns, broken = _needed(settings, sweeps)
    yield from broken
    for model, needed in needed_columns.items():
        try:
            table = table_of(model)
        except ProgrammingError:  # no right on the schema; `tables` reports it
            continue
        if table.exists:
            yield from _missing(model, needed, table)
            yield from _wrong_types(model, needed, table)


def _needed(settings: Settings, sweeps: dict[str, Sweep]) -> tuple[dict[type[Model], Needed], list[Finding]]:
    """Return the columns that the workers need, and a finding for each worker whose statements cannot be built."""
    found: dict[type[Model], Needed] = {}
    broken: list[Finding] = []

    def need(model: type[Model], columns: Iterable[str], worker: str) -> None:
        for column in columns:
            workers = found.setdefault(model, {}).setdefault(column, [])
            if worker not in workers:
                workers.append(worker)

    for sweep in sweeps.values():
        try:
            fields = _fields_of(sweep)
        except Exception as error:
            if is_unavailable(error):
                raise
            broken.append(Finding("error", sweep.name, "declaration", error_line(error), "correct the sweep's code"))
            continue
        for field in fields:
            need(field.model, [field.column_name], sweep.name)
    for family in families(settings):
        for name, model in family.models.items():
            enabled = [sweep for sweep in family.sweeps if sweep.name in sweeps]
            for worker in users_of(model, enabled):
                need(model, updated_columns(family.rights.get(name, ())), worker)
    return found, broken


def _fields_of(sweep: Sweep) -> set[Field]:
    try:
        stages = sweep.stages_for_run()
    except ProgrammingError:  # no right on the schema
        stages = sweep.declared_stages()
    return set().union(*(used_fields(stage, SYSTEM_CLOCK.now()) for stage in stages))


def _missing(model: type[Model], needed: Needed, table: Table) -> Iterator[Finding]:
    meta: Any = model._meta
    name = meta.table_name
    for column, workers in needed.items():
        if column not in table.columns:
            yield Finding(
                "error",
                workers[0],
                f"columns of {name}",
                f"{name} has no column {column}; needed by {', '.join(workers)}",
                f'name the table that has the column in HOUSEKEEPING_WORKERS["{workers[0]}"]["tables"], or disable '
                f"{'these workers' if len(workers) > 1 else 'this worker'}",
            )
    absent = [each for each in optional_fields(model) if is_absent(getattr(model, each))]
    if absent:
        worker = next(iter(needed.values()))[0]
        text = f"optional columns are missing: {', '.join(absent)}; log lines, events and error reports omit them"
        yield Finding("fine", worker, f"columns of {name}", text)


def _wrong_types(model: type[Model], needed: Needed, table: Table) -> Iterator[Finding]:
    meta: Any = model._meta
    for column, workers in needed.items():
        actual, declared = table.columns.get(column), meta.columns.get(column)
        fitting = FITTING.get(getattr(declared, "field_type", ""))
        if actual is None or fitting is None or actual not in KNOWN_TYPES or actual in fitting:
            continue
        # Times with and without time zone can be compared. The result is wrong only in sessions outside UTC.
        both_times = actual in ZONED | UNZONED and fitting <= ZONED | UNZONED
        yield Finding(
            "warning" if both_times else "error",
            workers[0],
            f"columns of {meta.table_name}",
            f"{meta.table_name}.{column} is {actual}, not {' or '.join(sorted(fitting))}; used by {', '.join(workers)}",
            "keep the sessions in UTC (no timezone in HOUSEKEEPING_DATABASE_URL)"
            if both_times
            else f'name the right table in HOUSEKEEPING_WORKERS["{workers[0]}"]["tables"], or disable these workers',
        )
