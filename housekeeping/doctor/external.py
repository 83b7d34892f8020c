"""Check of resources outside PostgreSQL and Redis, which each family of workers examines itself."""

from __future__ import annotations

from collections.abc import Iterator

from housekeeping.core.sanitize import error_line
from housekeeping.core.settings import Settings
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.insight.diagnostics import Finding
from housekeeping.workers import families


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Yield findings about object stores, the folder of repositories and the git program."""
    for family in families(settings):
        users = [sweep.name for sweep in family.sweeps if sweep.name in sweeps]
        if users and family.examine is not None:
            try:
                yield from family.examine()
            except Exception as error:
                yield Finding("error", users[0], "outside", f"could not be examined: {error_line(error)}")
