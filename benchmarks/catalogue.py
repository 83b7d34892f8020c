"""All comparisons."""

from __future__ import annotations

from typing import Final

from benchmarks import (
    builds,
    entities,
    foreground,
    growth,
    imports,
    messages,
    parts,
    projects,
    sending,
    statuses,
    uploads,
)
from benchmarks.comparison import Comparison

_MODULES: Final = (statuses, imports, entities, builds, projects, uploads, messages, sending, growth, parts)

COMPARISONS: Final[dict[str, Comparison]] = {each.name: each for module in _MODULES for each in module.COMPARISONS}

#: Contestants by name.
TURNS: Final[dict[str, Comparison]] = COMPARISONS | {foreground.NAME: foreground.COMPARISON}
