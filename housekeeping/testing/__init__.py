"""What tests of one's own sweeps and actors need: fixtures, a manual clock, leases in memory, and two assertions.

pytest finds the fixtures by itself, see `housekeeping.testing.plugin`; the rest is imported::

    from housekeeping.testing import assert_idempotent, assert_survives_kill
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from housekeeping.testing.clock import ManualClock as ManualClock
    from housekeeping.testing.idempotency import assert_idempotent as assert_idempotent
    from housekeeping.testing.kills import assert_survives_kill as assert_survives_kill
    from housekeeping.testing.lease_store import MemoryLeaseStore as MemoryLeaseStore

#: Public names and where they live; looked up when first used, because pytest imports this package at every start.
_PUBLIC: Final = {
    "ManualClock": "housekeeping.testing.clock",
    "MemoryLeaseStore": "housekeeping.testing.lease_store",
    "assert_idempotent": "housekeeping.testing.idempotency",
    "assert_survives_kill": "housekeeping.testing.kills",
}
__all__ = ["ManualClock", "MemoryLeaseStore", "assert_idempotent", "assert_survives_kill"]


if not TYPE_CHECKING:  # else a misspelt name would be anything to a type checker

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
