"""Whether each table has the columns that the statements of its workers name, with types that fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from peewee import Field, Model, ProgrammingError

from housekeeping.core.clock import SYSTEM_CLOCK
from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.database.catalog import Table, is_absent, optional_fields, table_of
from housekeeping.sweeps.checks.needed_columns import FITTING, KNOWN_TYPES, UNZONED, ZONED, fields_used, updated_columns
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.engine.error_mapping import is_unavailable
from housekeeping.sweeps.insight.diagnostics import Finding
from housekeeping.workers import families

#: Column -> the workers that need it.
Needed = dict[str, list[str]]


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a finding for each column that is missing or of another type, by table."""
    needed_columns, broken = _needed(settings, sweeps)
    yield from broken
    for model, needed in needed_columns.items():
        try:
            table = table_of(model)
        except ProgrammingError:  # a schema that may not be used; `tables` has a finding of it
            continue
        if table.exists:
            yield from _absent(model, needed, table)
            yield from _of_another_type(model, needed, table)


def _needed(settings: Settings, sweeps: dict[str, Sweep]) -> tuple[dict[type[Model], Needed], list[Finding]]:
    """Return the columns that the workers need, and a finding for each worker whose statements cannot be made."""
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
            for sweep in family.sweeps:
                if sweep.name in sweeps:
                    need(model, updated_columns(family.rights.get(name, ())), sweep.name)
    return found, broken


def _fields_of(sweep: Sweep) -> set[Field]:
    try:
        walks = sweep.stages_for_run()
    except ProgrammingError:  # as above
        walks = sweep.declared_stages()
    return set().union(*(fields_used(walk, SYSTEM_CLOCK.now()) for walk in walks))


def _absent(model: type[Model], needed: Needed, table: Table) -> Iterator[Finding]:
    meta: Any = model._meta
    name = meta.table_name
    for column, workers in needed.items():
        if column not in table.columns:
            yield Finding(
                "error",
                workers[0],
                f"columns of {name}",
                f"{name} has no column {column}; needed by {', '.join(workers)}",
                f'name the table that has it in HOUSEKEEPING_WORKERS["{workers[0]}"]["tables"], or disable '
                f"{'these workers' if len(workers) > 1 else 'this worker'}",
            )
    left_out = [each for each in optional_fields(model) if is_absent(getattr(model, each))]
    if left_out:
        worker = next(iter(needed.values()))[0]
        text = f"without the optional {', '.join(left_out)}: log lines, events and error reports leave them out"
        yield Finding("fine", worker, f"columns of {name}", text)


def _of_another_type(model: type[Model], needed: Needed, table: Table) -> Iterator[Finding]:
    meta: Any = model._meta
    for column, workers in needed.items():
        there, declared = table.columns.get(column), meta.columns.get(column)
        fitting = FITTING.get(getattr(declared, "field_type", ""))
        if there is None or fitting is None or there not in KNOWN_TYPES or there in fitting:
            continue
        # Times with and without a zone can be compared; that is wrong only in a session outside of UTC.
        both_times = there in ZONED | UNZONED and fitting <= ZONED | UNZONED
        yield Finding(
            "warning" if both_times else "error",
            workers[0],
            f"columns of {meta.table_name}",
            f"{meta.table_name}.{column} is {there}, not {' or '.join(sorted(fitting))}; used by {', '.join(workers)}",
            "keep the sessions in UTC (no timezone in HOUSEKEEPING_DATABASE_URL)"
            if both_times
            else f'name the right table in HOUSEKEEPING_WORKERS["{workers[0]}"]["tables"], or disable these workers',
        )
