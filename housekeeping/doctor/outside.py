"""What lies outside of PostgreSQL and Redis: each family of workers says what it needs."""

from __future__ import annotations

from collections.abc import Iterator

from housekeeping.foundation.settings import Settings
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.findings import Finding
from housekeeping.workers import families


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Object stores, the folder of the repositories, the git program."""
    for family in families(settings):
        users = [sweep.name for sweep in family.sweeps if sweep.name in sweeps]
        if users and family.examine is not None:
            yield from family.examine()
