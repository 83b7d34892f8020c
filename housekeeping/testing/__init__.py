"""Test support for users' sweeps and actors: pytest fixtures, a manual clock, in-memory leases and two assertions.

pytest loads the fixtures of `housekeeping.testing.plugin` by itself. The assertions are imported::

    from housekeeping.testing import assert_idempotent, assert_survives_kill
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from housekeeping.testing.assertions import assert_idempotent as assert_idempotent
    from housekeeping.testing.assertions import assert_survives_kill as assert_survives_kill
    from housekeeping.testing.stubs import ManualClock as ManualClock
    from housekeeping.testing.stubs import MemoryLeaseStore as MemoryLeaseStore

#: Public name -> module. Imported on first use, because pytest imports this package at every start.
_PUBLIC: Final = {
    "ManualClock": "housekeeping.testing.stubs",
    "MemoryLeaseStore": "housekeeping.testing.stubs",
    "assert_idempotent": "housekeeping.testing.assertions",
    "assert_survives_kill": "housekeeping.testing.assertions",
}
__all__ = ["ManualClock", "MemoryLeaseStore", "assert_idempotent", "assert_survives_kill"]


if not TYPE_CHECKING:  # otherwise a type checker would accept misspelled names

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
