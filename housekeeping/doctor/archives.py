"""Check that the archive of each sweep exists, with all columns of its table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from peewee import Model

from housekeeping.core.settings import Settings
from housekeeping.database.catalog import quoted_name, table_of
from housekeeping.sweeps.checks.archive_tables import missing_key
from housekeeping.sweeps.checks.archives import archives_of, compared
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.registry import Finding


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield a finding about each archive; runs with a wrong one stop before they touch a row."""
    for sweep in sweeps.values():
        for archive, source, problem in compared(sweep.declared_stages()):
            subject = f"archive {quoted_name(archive)}"
            if problem is None and not table_of(source).exists:
                continue  # another check reports it
            if problem is None:
                takes = f"takes all columns of {quoted_name(source)}"
                if (statement := missing_key(source, archive)) is None:
                    yield Finding("fine", sweep.name, subject, takes)
                else:
                    text = f"{takes}; has no key, so its rows cannot be restored"
                    yield Finding("warning", sweep.name, subject, text, statement)
                continue
            way_out = "; ".join(problem.statements) or None
            if problem.is_missing:
                way_out = f"housekeeping init --with-archives, or: {way_out}"
            yield Finding("error", sweep.name, subject, f"{problem.text}; its runs fail before the first row", way_out)


def is_archive(model: type[Model], sweeps: Iterable[Sweep]) -> bool:
    """Return whether the model is an archive of one of these sweeps."""
    meta: Any = model._meta
    tables = [archive._meta for sweep in sweeps for archive in archives_of(sweep.declared_stages())]
    return (meta.schema, meta.table_name) in [(each.schema, each.table_name) for each in tables]
