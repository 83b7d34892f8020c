"""Checks of the persons and tenants that can be erased: the secret, the decisions, the rights and the object stores.

An erasure examines the same before its first change. It is late then, because the law sets a deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from housekeeping.core.errors import DeclarationError, DependentsRefused, SettingsError
from housekeeping.core.logs import counted
from housekeeping.core.settings import Settings
from housekeeping.database.catalog import quoted_name
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.doctor.tables import exists, grants, missing_rights
from housekeeping.erasures import subjects_of
from housekeeping.erasures.graph import read_reach
from housekeeping.ledger import erasures
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.subjects import Subject
from housekeeping.sweeps.values import Finding

_AREA: Final = "subjects"
_MAY_COUNT: Final = "SELECT has_database_privilege(current_database(), 'TEMPORARY'), quote_ident(current_database())"


def examine_subjects(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about the secret, and about the tables, rights and object stores of each `Subject`."""
    try:
        subjects = subjects_of(settings)
    except (DeclarationError, SettingsError) as error:
        yield Finding("error", _AREA, "declaration", str(error), "correct SUBJECTS, or HOUSEKEEPING_SWEEPS")
        return
    if not subjects:
        return
    with translate_postgres_errors():
        yield _secret(settings)
        for subject in subjects.values():
            yield from _subject(settings, subject)


def _secret(settings: Settings) -> Finding:
    subject = "HOUSEKEEPING_ERASURE_KEY"
    if settings.erasure_key is None:
        way_out = f"set {subject} to the output of: openssl rand -base64 32"
        return Finding("error", _AREA, subject, "is not set, so that every erasure is refused", way_out)
    try:
        erasures.require_known_secrets(settings.erasure_key)
    except SettingsError as error:
        text, _, way_out = str(error).partition("; ")
        return Finding("error", _AREA, subject, text, way_out)
    return Finding("fine", _AREA, subject, "is set, and has the secret of every erasure")


def _subject(settings: Settings, subject: Subject) -> Iterator[Finding]:
    try:
        with database.using(subject.database):
            root = quoted_name(subject.model)
            if not exists(root):
                text = f"its table {root} is not in {database.place}"
                yield Finding("error", _AREA, subject.name, text, "correct the table of the Subject")
                return
            missing = missing_rights(root, ("SELECT", "DELETE"))
            if missing:
                way_out = "; ".join(grants("current_user", {root: tuple(missing)}))
                yield Finding("error", _AREA, subject.name, f"{', '.join(missing)} on {root} not granted", way_out)
                return
        reach = read_reach(subject)
    except DependentsRefused as error:
        yield Finding("error", _AREA, subject.name, f"its erasure is refused: {error.problem}", error.way_out)
        return
    except DeclarationError as error:
        yield Finding("error", _AREA, subject.name, f"its erasure is refused: {error}", "correct the Subject")
        return
    yield Finding("fine", _AREA, subject.name, f"{counted(len(reach.tables), 'table')}, each with a decision")
    for name in dict.fromkeys(each for each, _ in reach.tables):
        with database.using(name):
            ((may_count, quoted),) = database.execute_sql(_MAY_COUNT, ()).fetchall()
        if not may_count:
            text = f"the role may not create temporary tables in {quoted}: erase and export cannot count the rows"
            yield Finding("error", _AREA, subject.name, text, f"GRANT TEMPORARY ON DATABASE {quoted} TO current_user")
    for location in dict.fromkeys(each.location for each in subject.objects):
        store = settings.object_stores.get(location)
        if store is None or not store.enabled:
            way_out = "add it, or enable it"
            text = f"HOUSEKEEPING_OBJECT_STORES has no location {location!r}, so that its erasure is refused"
            yield Finding("error", _AREA, subject.name, text, way_out)
