"""All comparisons."""

from __future__ import annotations

from typing import Final

from benchmarks import cascade, foreground, messages, refs, retention, tables, uploads
from benchmarks.comparison import Comparison

_MODULES: Final = (tables, refs, uploads, messages)

#: Comparisons that run unless others are named.
USUAL: Final = tuple(each.name for module in _MODULES for each in module.COMPARISONS)
COMPARISONS: Final[dict[str, Comparison]] = {
    each.name: each
    for each in (
        *(each for module in _MODULES for each in module.COMPARISONS),
        *tables.FURTHER,
        *retention.COMPARISONS,
        retention.GROWING_BATCHES,
        cascade.COMPARISON,
    )
}
#: Contestants by name.
TURNS: Final[dict[str, Comparison]] = COMPARISONS | {foreground.NAME: foreground.COMPARISON}
