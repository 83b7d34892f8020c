"""System checks of settings and declarations, and with ``manage.py check --database default`` of sweeps and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Warning
from peewee import PeeweeException

from housekeeping.contrib.django import aliases, load_settings
from housekeeping.core.errors import DeclarationError, HousekeepingError
from housekeeping.core.logs import counted
from housekeeping.core.settings import Settings
from housekeeping.database.catalog import table_of
from housekeeping.database.connection import close_databases, database
from housekeeping.doctor import examine
from housekeeping.erasures import subjects_of
from housekeeping.insight.coverage import read_coverage
from housekeeping.ledger.schema import use_database
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.partitions import PartitionStage
from housekeeping.sweeps.table_stage import TableStage
from housekeeping.workers import configured_sweeps, kept_tables


def check_declarations(app_configs: Any, **options: Any) -> list[CheckMessage]:
    """Return an error if a setting or a sweep is wrong."""
    try:
        configured_sweeps(load_settings())
    except HousekeepingError as error:
        return [Error(str(error), id="housekeeping.E001")]
    return []


def check_databases(app_configs: Any, databases: Sequence[str] | None, **options: Any) -> list[CheckMessage]:
    """Return warnings about sweeps, such as a missing index, and about tables without a decision.

    They are not errors, because ``migrate`` runs the checks before it creates tables and indexes. For the same reason,
    a sweep whose table is missing gets no warning.
    """
    try:
        if not set(databases or ()) & set(aliases()):
            return []
        settings = load_settings()
        sweeps = configured_sweeps(settings)
    except HousekeepingError:
        return []  # `check_declarations` reports it
    use_database(settings)
    try:
        return _warnings(settings, sweeps)
    finally:
        close_databases()  # otherwise Django's test runner could not drop its databases


def _warnings(settings: Settings, sweeps: dict[str, Sweep]) -> list[CheckMessage]:
    existing = {name for name, sweep in sweeps.items() if _has_tables(sweep)}
    found = [
        Warning(f"{each.area}, {each.subject}: {each.text}", hint=each.way_out, id="housekeeping.W001")
        for each in examine(settings, sweeps, only_databases=True)
        if each.level != "fine" and each.area in existing
    ]
    undecided = read_coverage(sweeps.values(), kept_tables(settings), subjects_of(settings).values()).undecided
    if undecided:
        tables = counted(len(undecided), "table is", "tables are")
        text = f"{tables} undecided: {', '.join(sorted(each.table for each in undecided))}"
        hint = "Declare a sweep, or a Kept with the reason why the table may grow; see: manage.py housekeeping coverage"
        found.append(Warning(text, hint=hint, id="housekeeping.W002"))
    return found


def _has_tables(sweep: Sweep) -> bool:
    """Return whether the tables of the sweep's stages exist; True if the catalog cannot be read."""
    try:
        with database.using(sweep.database):
            stages = sweep.declared_stages()
            return all(table_of(each.model).exists for each in stages if isinstance(each, TableStage | PartitionStage))
    except DeclarationError:  # a table that was declared by name does not exist
        return False
    except PeeweeException:  # the findings report it
        return True
