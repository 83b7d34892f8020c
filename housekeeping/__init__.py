"""Keeps a PostgreSQL application clean: five workers on Dramatiq, the middleware under them, the means to see it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from housekeeping import testing as testing
    from housekeeping.foundation import events as events
    from housekeeping.foundation.leases import ExclusiveLease as ExclusiveLease
    from housekeeping.foundation.leases import fence as fence
    from housekeeping.foundation.throttle import throttle as throttle
    from housekeeping.installation import install as install
    from housekeeping.middleware.bulk import enqueue_many as enqueue_many
    from housekeeping.sweeps.declaration import Sweep as Sweep

__version__ = "0.1.0"

#: Public names and where they live; looked up when first used, so that importing the package costs and changes nothing.
_PUBLIC: Final = {
    "ExclusiveLease": "housekeeping.foundation.leases",
    "Sweep": "housekeeping.sweeps.declaration",
    "enqueue_many": "housekeeping.middleware.bulk",
    "fence": "housekeeping.foundation.leases",
    "install": "housekeeping.installation",
    "throttle": "housekeeping.foundation.throttle",
}
_MODULES: Final = {"events": "housekeeping.foundation.events", "testing": "housekeeping.testing"}
__all__ = [
    "ExclusiveLease",
    "Sweep",
    "__version__",
    "enqueue_many",
    "events",
    "fence",
    "install",
    "testing",
    "throttle",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
