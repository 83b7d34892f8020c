"""Shell completion of the names of workers."""

from __future__ import annotations

import click

from housekeeping.cli.context import load_settings
from housekeeping.workers import configured_sweeps


def complete_worker(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the configured workers that begin with the text; none if the settings are wrong."""
    try:
        names = list(configured_sweeps(load_settings()))
    except Exception:  # the shell would print it into the command that is being typed
        return []
    return [name for name in names if name.startswith(incomplete)]
