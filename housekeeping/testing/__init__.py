"""Test support for users' sweeps and actors: pytest fixtures, a manual clock, in-memory leases and two assertions.

pytest loads the fixtures of `housekeeping.testing.plugin` by itself. The assertions are imported::

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

#: Public name -> module. Imported on first use, because pytest imports this package at every start.
_PUBLIC: Final = {
    "ManualClock": "housekeeping.testing.clock",
    "MemoryLeaseStore": "housekeeping.testing.lease_store",
    "assert_idempotent": "housekeeping.testing.idempotency",
    "assert_survives_kill": "housekeeping.testing.kills",
}
__all__ = ["ManualClock", "MemoryLeaseStore", "assert_idempotent", "assert_survives_kill"]


if not TYPE_CHECKING:  # otherwise a type checker would accept misspelled names

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
